"""Models with random weights: what is drawn, what is computed, and that pipelines take it for the real thing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flowrl.models.byte_tokenizers import TOKENIZERS, clip_tokenizer, qwen_tokenizer
from flowrl.models.loading import quiet
from flowrl.models.published import flux, flux2, qwen_image, sd3, wan, z_image
from flowrl.models.untrained import Part, Published, assemble, build, skeleton
from flowrl.models.wan import Wan

CPU = torch.device("cpu")
PIPELINES = {
    "diffusers.StableDiffusion3Pipeline": sd3.SIZES,
    "diffusers.FluxPipeline": flux.SIZES,
    "diffusers.Flux2KleinPipeline": flux2.SIZES,
    "diffusers.QwenImagePipeline": qwen_image.SIZES,
    "diffusers.ZImagePipeline": z_image.SIZES,
    "diffusers.WanPipeline": wan.SIZES,
}
TINY = [
    pytest.param(cls, published, id=f"{cls.split('.')[1]}-{size}")
    for cls, sizes in PIPELINES.items()
    for size, published in sizes.items()
    if size.startswith("tiny")
]


def built(part: Part, dtype: torch.dtype = torch.float32, seed: int = 0, name: str = "") -> nn.Module:
    return build(resolve_name(part.cls), part.config, dtype=dtype, device=CPU, seed=seed, name=name)


def rms(values: torch.Tensor) -> float:
    return float(values.float().square().mean().sqrt())


# ---------------------------------------------------------------------------------------------------- weights


def test_weights_depend_on_seed_and_name_alone() -> None:
    part = flux.TINY.parts["transformer"]
    longer = Part(part.cls, {**part.config, "num_single_layers": 3})
    first, again, seeded, named, other = (
        module.state_dict()
        for module in (built(part), built(part), built(part, seed=1), built(part, name="other"), built(longer))
    )
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    assert all(torch.equal(value, other[key]) for key, value in first.items())
    drawn = [key for key, value in first.items() if value.std() > 0]
    assert len(drawn) > 30
    assert not any(torch.equal(first[key], seeded[key]) or torch.equal(first[key], named[key]) for key in drawn)
    keys = [key for key in drawn if first[key].shape == (32, 32)]
    assert len({first[key].sum().item() for key in keys}) == len(keys)


def test_bfloat16_is_float32_rounded_and_nothing_is_trained_or_dropped_out() -> None:
    part = wan.TINY.parts["transformer"]
    exact, rounded = built(part), built(part, torch.bfloat16)
    for (name, parameter), (_, other) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        kept = not {"time_embedder", "scale_shift_table", "norm2"}.isdisjoint(name.split("."))
        assert other.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(parameter.to(other.dtype), other)
        assert not other.requires_grad
    assert not any(module.training for module in rounded.modules())


def test_kinds_of_parameters() -> None:
    module = built(wan.TINY.parts["vae"]).state_dict()
    assert torch.equal(module["decoder.norm_out.gamma"], torch.ones(8, 1, 1, 1))
    assert not module["decoder.conv_in.bias"].any()
    weight = module["decoder.conv_in.weight"]  # [32, 4, 3, 3, 3]
    assert weight.std().item() == pytest.approx(1 / math.sqrt(4 * 27), rel=0.05)
    embedding = built(wan.TINY.parts["text_encoder"]).get_input_embeddings().weight  # type: ignore[operator]
    assert embedding.std().item() == pytest.approx(0.02, rel=0.05)
    encoder = built(wan.TINY.parts["text_encoder"]).state_dict()  # d_model 32, d_kv 16
    attention = "encoder.block.0.layer.0.SelfAttention"
    assert encoder[f"{attention}.k.weight"].std().item() == pytest.approx(1 / math.sqrt(32), rel=0.05)
    assert encoder[f"{attention}.q.weight"].std().item() == pytest.approx(1 / math.sqrt(32 * 16), rel=0.05)
    statistics = built(flux2.TINY.parts["vae"]).get_submodule("bn")
    assert torch.equal(statistics.running_mean, built(flux2.TINY.parts["vae"]).get_submodule("bn").running_mean)
    assert statistics.running_mean.std() > 0.1 and statistics.running_var.std() > 0.1
    assert statistics.running_var.min() > 0


def test_tied_embeddings_stay_tied() -> None:
    encoder: Any = built(flux2.TINY.parts["text_encoder"])
    assert encoder.lm_head.weight is encoder.model.embed_tokens.weight
    t5: Any = built(flux.TINY.parts["text_encoder_2"])
    assert t5.encoder.embed_tokens.weight is t5.shared.weight


@pytest.mark.parametrize(
    "part",
    [
        sd3.TINY.parts["transformer"],
        sd3.TINY.parts["text_encoder"],
        wan.TINY.parts["transformer"],
        flux2.TINY.parts["text_encoder"],
        qwen_image.TINY.parts["text_encoder"],
    ],
    ids=lambda part: part.cls,
)
def test_tables_are_as_the_constructor_computes_them(part: Part) -> None:
    cls = resolve_name(part.cls)
    plain = cls(**part.config) if part.cls.startswith("diffusers.") else cls(cls.config_class(**part.config))
    expected = dict(plain.named_buffers())
    buffers = dict(built(part, torch.bfloat16).named_buffers())
    assert buffers.keys() == expected.keys() and buffers
    for name, buffer in buffers.items():
        saved = name in plain.state_dict()
        assert torch.equal(buffer, expected[name].to(torch.bfloat16) if saved else expected[name]), name


def test_tables_that_are_no_buffers() -> None:
    part = qwen_image.TINY.parts["transformer"]
    expected = resolve_name(part.cls)(**part.config).pos_embed
    positions: Any = built(part, torch.bfloat16).get_submodule("pos_embed")
    assert torch.equal(positions.pos_freqs, expected.pos_freqs)
    assert positions.pos_freqs.dtype == torch.complex64


# -------------------------------------------------------------------------------------------------- pipelines


@pytest.mark.parametrize(("pipeline", "published"), TINY)
def test_a_saved_folder_is_what_was_built(pipeline: str, published: Published, tmp_path: Path) -> None:
    with quiet():
        cls = resolve_name(pipeline)
        first = assemble(published, cls, dtype=torch.bfloat16, device=CPU, seed=3)
        first.save_pretrained(tmp_path)
        second = cls.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    for name in published.parts:
        saved, read = (getattr(whole, name).state_dict() for whole in (first, second))
        assert saved.keys() == read.keys()
        for key, value in saved.items():
            assert read[key].dtype == value.dtype, (name, key)
            assert torch.equal(read[key], value), (name, key)
    text = "A cat, 猫 & 12 dogs"
    for name in published.tokenizers:
        assert getattr(second, name)(text).input_ids == getattr(first, name)(text).input_ids
    assert {key: second.config[key] for key in published.options} == published.options
    assert dict(second.scheduler.config).items() >= published.scheduler.config.items()


@pytest.mark.parametrize(("pipeline", "published"), TINY)
def test_a_pipeline_draws_with_it(pipeline: str, published: Published) -> None:
    """With diffusers' own code, pictures that depend on the prompt; activations of order 1 everywhere."""
    with quiet():
        pipe = assemble(published, resolve_name(pipeline), dtype=torch.float32, device=CPU, seed=3)
    pipe.set_progress_bar_config(disable=True)
    levels: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any, outputs: Any) -> None:
            while not isinstance(outputs, torch.Tensor):
                outputs = outputs[0]
            levels[name] = rms(outputs)

        return note

    watched = {name: name for name in published.parts if name != "vae"} | {"vae": "vae.decoder"}
    for name, path in watched.items():
        part = getattr(pipe, path.split(".")[0])
        (part.decoder if name == "vae" else part).register_forward_hook(watch(name))
    frames = {"num_frames": 5} if pipeline.endswith("WanPipeline") else {}
    pictures = [
        pipe(
            prompt=prompt,
            height=64,
            width=64,
            num_inference_steps=3,
            max_sequence_length=64,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
            **frames,
        )[0]
        for prompt in ("a cat", "a dog")
    ]
    assert pictures[0].shape == (1, *((5,) if frames else ()), 64, 64, 3)
    assert np.abs(pictures[0] - pictures[1]).max() > 0.01
    assert levels.keys() == published.parts.keys()
    assert all(0.05 < level < 20 for level in levels.values()), levels


def test_parts_are_different_and_may_be_in_float32() -> None:
    pipe = assemble(
        wan.SIZES["tiny_a14b"],
        resolve_name("diffusers.WanPipeline"),
        dtype=torch.bfloat16,
        device=CPU,
        seed=0,
        float32_parts=("vae",),
    )
    assert {parameter.dtype for parameter in pipe.vae.parameters()} == {torch.float32}
    assert pipe.text_encoder.dtype == torch.bfloat16
    first, second = (expert.proj_out.weight for expert in (pipe.transformer, pipe.transformer_2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("part", "billions"),
    [
        (sd3.MEDIUM.parts["transformer"], 2.24),
        (sd3.LARGE.parts["transformer"], 8.06),
        (flux.DEV.parts["transformer"], 11.9),
        (flux.DEV.parts["text_encoder_2"], 4.76),
        (flux2.KLEIN_4B.parts["transformer"], 3.88),
        (flux2.KLEIN_4B.parts["text_encoder"], 4.02),
        (flux2.KLEIN_9B.parts["transformer"], 9.08),
        (flux2.KLEIN_9B.parts["text_encoder"], 8.19),
        (qwen_image.FULL.parts["transformer"], 20.43),
        (qwen_image.FULL.parts["text_encoder"], 8.29),
        (z_image.BASE.parts["transformer"], 6.15),
        (wan.WAN_1_3B.parts["transformer"], 1.42),
        (wan.WAN_1_3B.parts["text_encoder"], 5.68),
        (wan.WAN_14B.parts["transformer"], 14.29),
        (wan.TI2V_5B.parts["transformer"], 5.0),
        (wan.TI2V_5B.parts["vae"], 0.705),
        (wan.WAN_1_3B.parts["vae"], 0.127),
        (flux.DEV.parts["vae"], 0.084),
    ],
    ids=lambda value: value.cls if isinstance(value, Part) else str(value),
)
def test_published_sizes(part: Part, billions: float) -> None:
    config = dict(part.config)
    if "pos_embed_max_size" in config:
        config["pos_embed_max_size"] = 8  # a table, not parameters, and seconds of sines
    module = skeleton(resolve_name(part.cls), config)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in module.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)


# ------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_tell_texts_apart(kind: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]()
    texts = ["", "a", "b", "ab", "a b", "ba", "猫", "狗", "né", "ne", 'a sign that says "HI"', "a red cat", "a red dog"]
    ids = [tuple(tokenizer(text).input_ids) for text in texts]
    assert len(set(ids)) == len(texts)
    assert max(max(row) for row in ids if row) < len(tokenizer)
    lengths = [len(tokenizer("z" * n).input_ids) for n in (1, 10, 40)]
    assert lengths == [lengths[0], lengths[0] + 9, lengths[0] + 39]
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert [tuple(again(text).input_ids) for text in texts] == ids
    assert again.model_max_length == tokenizer.model_max_length
    assert again.decode(ids[-1], skip_special_tokens=True) == texts[-1]


def test_padding() -> None:
    clip, t5, qwen = (
        TOKENIZERS[kind]()("ab", padding="max_length", max_length=8, truncation=True) for kind in ("clip", "t5", "qwen")
    )
    end = len(clip_tokenizer()) - 1
    assert clip.input_ids[0] == end - 1 and clip.input_ids[3:] == [end] * 5
    assert t5.input_ids[2:] == [1, 0, 0, 0, 0, 0]
    assert t5.attention_mask == [1, 1, 1, 0, 0, 0, 0, 0]
    assert qwen.attention_mask == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "<|im_start|>user\nHi<|im_end|>\n"),
        ({"add_generation_prompt": True}, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (
            {"add_generation_prompt": True, "enable_thinking": True},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            {"add_generation_prompt": True, "enable_thinking": False},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
    ],
)
def test_chat_template(options: dict[str, bool], expected: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert qwen_tokenizer().apply_chat_template(messages, tokenize=False, **options) == expected


def test_qwen_images_template_is_cut_off_exactly() -> None:
    """The pipeline drops 34 tokens: in the published vocabulary all that stands before the prompt."""
    with quiet():
        pipe = assemble(
            qwen_image.TINY, resolve_name("diffusers.QwenImagePipeline"), dtype=torch.float32, device=CPU, seed=0
        )
    tokens = pipe.tokenizer(pipe.prompt_template_encode.format("zzz")).input_ids
    assert pipe.tokenizer.decode(tokens[pipe.prompt_template_encode_start_idx :]).startswith("zzz<|im_end|>")


def test_vocabularies_are_large_enough() -> None:
    for sizes in PIPELINES.values():
        for size in sizes.values():
            for name, kind in size.tokenizers.items():
                config = size.parts[name.replace("tokenizer", "text_encoder")].config
                vocabulary = config.get("text_config", config).get("vocab_size", 49408)
                assert len(TOKENIZERS[kind]()) <= vocabulary


def test_a_size_that_there_is_not_is_refused_whatever_is_made_of_it() -> None:
    """The family's miniature must not stand in for a typing error."""
    for init in ("random", "tiny"):
        with pytest.raises(ValueError, match=r"^size must be tiny or .* for Wan, got 'ti2v'\."):
            Wan(init=init, size="ti2v")
    assert Wan(init="tiny", size="ti2v_5b")._untrained() is Wan.sizes["tiny_ti2v_5b"]
    assert Wan(init="tiny", size="14b")._untrained() is Wan.sizes["tiny"]

"""Folders as they are published, and as they should not be: what is missing is said, never made up."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from flowrl.models.byte_tokenizers import clip_tokenizer, qwen_tokenizer
from flowrl.models.folders import check_tokenizer, check_vocabulary, read_network
from flowrl.models.loading import content_fingerprint, quiet
from flowrl.types import LoadError
from tests.support.families import FAMILIES, PROMPTS, folder, random_policy, saved

CPU = torch.device("cpu")
State = dict[str, Tensor]
Z_IMAGE = '"_class_name": "ZImageTransformer2DModel"'
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n"


def copied(name: str, target: Path) -> Path:
    return Path(shutil.copytree(folder(name), target))


def refused(name: str, path: Path, words: str) -> None:
    with pytest.raises(LoadError, match=rf"^model\.path=[^\n]*{re.escape(words)}[^\n]*$"):
        replace(saved(name), path=str(path)).load_encoders(CPU)


def change(file: Path, changes: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# ---------------------------------------------------------------------------------------------- names of tensors


def within(prefix: str) -> Callable[[State], State]:
    return lambda state: {f"{prefix}{name}": value for name, value in state.items()}


def renamed(*pairs: tuple[str, str]) -> Callable[[State], State]:
    def change_names(state: State) -> State:
        named = {}
        for name, value in state.items():
            old, new = next((pair for pair in pairs if name.startswith(pair[0])), ("", ""))
            named[new + name.removeprefix(old)] = value
        return named

    return change_names


def with_head(state: State) -> State:
    """As part of a language model: what is saved of a Qwen3ForCausalLM, published as the encoder of Z-Image."""
    return within("model.")(state) | {"lm_head.weight": state["embed_tokens.weight"].clone()}


PUBLISHED = {  # encoder: how else its tensors are called
    "z_image/text_encoder": with_head,
    "flux2/text_encoder": lambda state: state,
    "qwen_image/text_encoder": renamed(("visual.", "model.visual."), ("model.", "model.language_model.")),
    "flux/text_encoder": within("text_model."),
    "flux/text_encoder_2": renamed(("shared.", "encoder.embed_tokens.")),
    "wan/text_encoder": renamed(("shared.", "encoder.embed_tokens.")),
    "sd3/text_encoder_3": lambda state: state | {"encoder.embed_tokens.weight": state["shared.weight"].clone()},
}


@pytest.mark.parametrize("place", PUBLISHED)
def test_an_encoder_is_read_by_the_names_it_was_published_with(place: str, tmp_path: Path) -> None:
    """Also T5 and UMT5 with `tie_word_embeddings: false`, as FLUX.1 and Wan have it; and half of any is refused."""
    family, _, part = place.partition("/")
    source, target = folder(family) / part, tmp_path / part
    shutil.copytree(source, target)
    if "T5" in json.loads((source / "config.json").read_text())["architectures"][0]:
        change(target / "config.json", {"tie_word_embeddings": False})
    expected = getattr(random_policy(family).pipeline, part)
    state = PUBLISHED[place](load_file(source / "model.safetensors"))
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    with quiet():
        found = read_network(type(expected), target, torch.float32)
        assert content_fingerprint({"": found}, {}) == content_fingerprint({"": expected}, {})
        needed = next(name for name in sorted(state) if "norm" in name)
        save_file({n: v for n, v in state.items() if n != needed}, target / "model.safetensors", {"format": "pt"})
        with pytest.raises(LoadError, match=f"1 tensors of {part} are missing, among them .*norm"):
            read_network(type(expected), target, torch.float32)


# ---------------------------------------------------------------------------------------------- what is listed


@pytest.mark.parametrize("part", ["text_encoder_3", "tokenizer_3", "text_encoder", "scheduler"])
def test_what_is_listed_must_be_there(part: str, tmp_path: Path) -> None:
    """An interrupted download of the largest encoder is no model without it."""
    path = copied("sd3", tmp_path / "model")
    shutil.rmtree(path / part)
    refused("sd3", path, f"the folder {part} is missing, which model_index.json lists.")


def test_what_may_be_left_out_is_left_out_by_the_index(tmp_path: Path) -> None:
    path = copied("sd3", tmp_path / "model")
    index = path / "model_index.json"
    listed = json.loads(index.read_text())
    null = {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    for content in (listed | null, {name: entry for name, entry in listed.items() if name not in null}):
        index.write_text(json.dumps(content))
        policy = replace(saved("sd3"), path=str(path)).load(CPU)
        assert policy.pipeline.text_encoder_3 is None and policy.encode(PROMPTS[:1]).prompt.embeds.shape[1] == 77 + 16
        assert policy.max_tokens == 77, "then CLIP sees most of a text"
    change(index, {"text_encoder_3": ["transformers", "T5EncoderModel"]})
    refused("sd3", path, "model_index.json lists no tokenizer_3.")
    index.write_text(json.dumps(listed | {"vae": [None, None]}))
    refused("sd3", path, "model_index.json lists no vae.")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "model_index.json holds no settings"),
        ('"text"', "model_index.json holds no settings"),
        ("{}", "model_index.json holds no settings"),
        ('{"vae": ["diffusers", "AutoencoderKL"]}', "model_index.json names no class of a pipeline"),
        ("{", "model_index.json is not JSON: Expecting property name"),
        ('{"_class_name": "WanPipeline"}', "holds a WanPipeline, not a ZImagePipeline: set model=... to its family."),
        ('{"_class_name": "ZImagePipeline"}', "model_index.json lists no "),
    ],
)
def test_an_index_that_is_none(content: str, words: str, tmp_path: Path) -> None:
    path = copied("z_image", tmp_path / "model")
    (path / "model_index.json").write_text(content)
    refused("z_image", path, words)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("text_encoder/config.json", '"text"', "text_encoder/config.json holds no settings"),
        ("text_encoder/config.json", "{}", "text_encoder/config.json holds no settings"),
        ("text_encoder/config.json", '{"hidden_size": 32}', "text_encoder/config.json names no model_type"),
        ("text_encoder/config.json", '{"model_type": "qwen3", "hidden_size": "wide"}', "'hidden_size' expected int"),
        ("text_encoder/model.safetensors", LFS_POINTER, ": text_encoder: Error while deserializing header"),
        ("transformer/config.json", "[]", "transformer/config.json holds no settings"),
        ("transformer/config.json", f'{{{Z_IMAGE}, "dim": "wide"}}', "transformer: it holds what cannot be read: Type"),
        (
            "transformer/config.json",
            '{"dim": 32}',
            "transformer/config.json is of a None, not of a ZImageTransformer2D",
        ),
        ("vae/config.json", '{"_class_name": "VQModel"}', "vae/config.json is of a VQModel, not of a AutoencoderKL"),
        ("scheduler/scheduler_config.json", "[]", "scheduler_config.json holds no settings"),
        ("scheduler/scheduler_config.json", '{"shift": 3.0}', "scheduler_config.json is of a None, not of a FlowMatch"),
        ("tokenizer/tokenizer_config.json", "[]", "tokenizer_config.json holds no settings"),
        ("tokenizer/tokenizer_config.json", "garbage", "tokenizer/tokenizer_config.json is not JSON"),
        ("tokenizer/tokenizer.json", "[]", ": tokenizer: it holds what cannot be read: TypeError"),
        ("tokenizer/tokenizer.json", "{}", ": tokenizer: it holds what cannot be read: KeyError: 'added_tokens'"),
        ("tokenizer/tokenizer.json", "garbage", ": tokenizer: "),
    ],
)
def test_odd_contents_are_one_sentence(file: str, content: str, words: str, tmp_path: Path) -> None:
    """Which names the file, or the part at least."""
    path = copied("z_image", tmp_path / "model")
    (path / file).write_text(content)
    refused("z_image", path, words)


@pytest.mark.parametrize(
    ("part", "entry", "words"),
    [
        ("text_encoder", ["transformers", "NoSuchModel"], "transformers has no class NoSuchModel, which model_index"),
        ("transformer", ["diffusers", 3], "diffusers has no class 3, which model_index.json lists for transformer"),
        ("vae", ["diffusers", "utils"], "diffusers has no class utils, which model_index.json lists for vae"),
        ("scheduler", ["os", "system"], "scheduler is of os, not of diffusers or transformers"),
        ("tokenizer", ["os", "system"], "tokenizer is of os, not of diffusers or transformers"),
    ],
)
def test_a_class_that_there_is_not(part: str, entry: list[object], words: str, tmp_path: Path) -> None:
    path = copied("z_image", tmp_path / "model")
    change(path / "model_index.json", {part: entry})
    refused("z_image", path, words)


def test_an_encoder_of_another_size_is_named_by_its_tensors(tmp_path: Path) -> None:
    path = copied("z_image", tmp_path / "model")
    change(path / "text_encoder" / "config.json", {"intermediate_size": 48})
    refused("z_image", path, "tensors of text_encoder have other shapes than its config.json says, among them ")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_latents_are_scaled_by_must_be_there(name: str, tmp_path: Path) -> None:
    """It is used for the first time when a whole rollout has been drawn."""
    settings = json.loads((folder(name) / "vae" / "config.json").read_text())
    wrong = {"scaling_factor": None, "shift_factor": "x", "batch_norm_eps": None}
    if "scaling_factor" not in settings:
        wrong |= {"latents_mean": [0.5], "latents_std": None}
    used = wrong.keys() & settings.keys()
    assert used
    for key in used:
        path = copied(name, tmp_path / key)
        change(path / "vae" / "config.json", {key: wrong[key]})
        with pytest.raises(LoadError, match=rf"^model\.path=[^\n]*: vae: [^\n]*{key}="):
            replace(saved(name), path=str(path)).load(CPU)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    """And the sentence says that there are no others, not that tensors are missing."""
    for part, stem in (("text_encoder", "pytorch_model"), ("transformer", "diffusion_pytorch_model")):
        path = copied("z_image", tmp_path / part)
        (weights,) = (path / part).glob("*.safetensors")
        torch.save(load_file(weights), path / part / f"{stem}.bin")
        weights.unlink()
        with pytest.raises(LoadError, match=r"^model\.path=[^\n]*safetensors[^\n]*$"):
            replace(saved("z_image"), path=str(path)).load(CPU)


# ---------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("wan_")])
def test_a_tokenizer_without_its_vocabulary_is_refused(name: str, tmp_path: Path) -> None:
    """To which every prompt would be the same prompt."""
    for encoder in FAMILIES[name].model.encoders:
        part = encoder.replace("text_encoder", "tokenizer")
        path = copied(name, tmp_path / part)
        (path / part / "tokenizer.json").unlink()
        refused(name, path, f"{part} has no vocabulary: there must be tokenizer.json")


@pytest.mark.parametrize("name", ["sd3", "flux", "wan"])
def test_a_tokenizer_without_its_settings_is_refused(name: str, tmp_path: Path) -> None:
    """It would not know where to cut, or by what to pad: an exception at the first prompt."""
    path = copied(name, tmp_path / "whole")
    (path / "tokenizer" / "tokenizer_config.json").unlink()
    refused(name, path, "tokenizer has no tokenizer_config.json")
    path = copied(name, tmp_path / "padding")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 77}
    (path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    change(path / "tokenizer" / "tokenizer.json", {"padding": None, "truncation": None})
    change(path / "model_index.json", {"tokenizer": ["transformers", "PreTrainedTokenizerFast"]})
    refused(name, path, "tokenizer: Asking to pad")


@pytest.mark.parametrize("made", [clip_tokenizer, qwen_tokenizer])
def test_a_vocabulary_in_its_older_files(made: Callable[[], Any], tmp_path: Path) -> None:
    """Published folders have vocab.json and merges.txt; one of them without the other is another vocabulary."""
    with quiet():
        tokenizer = made()
        tokenizer.save_pretrained(tmp_path)
        model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [" ".join(pair) for pair in model["merges"]]
        (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
        again = type(tokenizer).from_pretrained(tmp_path)
        assert again(PROMPTS[1].text).input_ids == tokenizer(PROMPTS[1].text).input_ids
        check_vocabulary(type(tokenizer), tmp_path)
        (tmp_path / "merges.txt").unlink()
        with pytest.raises(LoadError, match=r"no vocabulary: there must be tokenizer\.json, or vocab\.json and merges"):
            check_vocabulary(type(tokenizer), tmp_path)


class Embeddings:
    """An encoder of so many tokens."""

    def __init__(self, size: int) -> None:
        self.table = torch.nn.Embedding(size, 1)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.table


def test_a_tokenizer_must_tell_words_apart_and_belong_to_its_encoder(tmp_path: Path) -> None:
    tokenizer = qwen_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    check_tokenizer(tokenizer, tmp_path, Embeddings(len(tokenizer)))
    with pytest.raises(LoadError, match=rf"has {len(tokenizer)} tokens, but its encoder knows 100"):
        check_tokenizer(tokenizer, tmp_path, Embeddings(100))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"], content["model"]["merges"] = {"z": 0}, []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("dog").ids == []
    with quiet(), pytest.raises(LoadError, match="has no vocabulary: all words are one to it"):
        check_tokenizer(type(tokenizer).from_pretrained(tmp_path), tmp_path, Embeddings(len(tokenizer)))


# ---------------------------------------------------------------------------------------------- encoders alone


@pytest.mark.parametrize("name", FAMILIES)
def test_encoders_alone_encode_as_the_whole_model_does(name: str) -> None:
    """Bit for bit, under the same key; from a folder or at random; what is no encoder takes no memory."""
    family = FAMILIES[name]
    for config in (family.model, saved(name), replace(saved(name), dtype="bfloat16")):
        policy, whole = config.load_encoders(CPU), config.load(CPU)
        assert policy._encoding() == whole._encoding()
        found, expected = policy.encode(family.prompts), whole.encode(family.prompts)
        for kind, tensor in expected.embeddings().items():
            assert found.embeddings()[kind].dtype == tensor.dtype and found.embeddings()[kind].equal(tensor)
        for part, network in policy._parts().items():
            places = {parameter.device.type for parameter in network.parameters()}
            assert places == ({"cpu"} if part in config.encoders else {"meta"}), part

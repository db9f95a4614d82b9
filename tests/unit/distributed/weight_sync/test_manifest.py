"""Layout of a version in buckets, and names that must not be published."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from flowrl.distributed.weight_sync.errors import PublishError
from flowrl.distributed.weight_sync.manifest import ALIGNMENT, Manifest, Spec, plan
from flowrl.distributed.weight_sync.sender import Sender

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
SPECS = st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=3), DTYPES), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(SPECS, st.integers(1, 40))
def test_every_byte_of_every_tensor_has_one_place(tensors: list[tuple[list[int], torch.dtype]], words: int) -> None:
    """Pieces follow one another without overlap or gap, in and across buckets, and keep to their bucket's size."""
    specs = {f"t{i}": Spec(tuple(shape), dtype) for i, (shape, dtype) in enumerate(tensors)}
    manifest = plan(specs, 1, "full", words * ALIGNMENT)
    covered, expected = [0] * len(specs), 0
    for bucket, pieces in enumerate(manifest.pieces()):
        position = 0
        for piece in pieces:
            assert piece.entry == expected or piece.entry == expected - 1
            assert piece.start == position and piece.skip == covered[piece.entry]
            position = piece.stop
            covered[piece.entry] += piece.stop - piece.start
            expected = piece.entry + 1
        assert position == manifest.bucket_size(bucket) <= manifest.bucket_bytes
    assert sum(map(manifest.bucket_size, range(manifest.num_buckets))) == manifest.total_bytes
    for entry, nbytes in zip(manifest.entries, covered, strict=True):
        assert entry.nbytes == math.prod(entry.shape) * entry.dtype.itemsize
        assert nbytes == -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
        assert entry.offset % ALIGNMENT == 0 and entry.offset < manifest.bucket_bytes


@pytest.fixture(scope="module")
def qwen_image() -> nn.Module:
    """The 20 B transformer, without its memory."""
    from diffusers import QwenImageTransformer2DModel

    with torch.device("meta"):
        return nn.Module.to(QwenImageTransformer2DModel(), torch.bfloat16)


@pytest.mark.parametrize(("bucket_mb", "num_buckets"), [(512, 80), (2048, 20)])
def test_a_model_of_20_billion_weights(qwen_image: nn.Module, bucket_mb: int, num_buckets: int) -> None:
    manifest = planned(qwen_image, "full", bucket_mb)
    assert manifest.total_bytes == pytest.approx(40.9e9, rel=2e-3)
    assert manifest.num_buckets == num_buckets


def test_its_adapter_of_rank_64(qwen_image: nn.Module) -> None:
    """480 attention projections: 960 matrices and 480 scalings, 1,440 tensors as others count them."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    settings = LoraConfig(r=64, lora_alpha=128, target_modules=targets)
    with torch.device("meta"):
        inject_adapter_in_model(settings, qwen_image, adapter_name="default", low_cpu_mem_usage=True)
    manifest = planned(qwen_image, "lora", 512)
    assert len(manifest.entries) + len(manifest.scalings) == 1440
    assert manifest.total_bytes == pytest.approx(377e6, rel=2e-3)
    assert manifest.num_buckets == 1
    assert set(manifest.scalings.values()) == {2.0}


def planned(module: nn.Module, mode: str, bucket_mb: int) -> Manifest:
    sender = Sender(
        module,
        mode,  # type: ignore[arg-type]
        wire_dtype=torch.bfloat16,
        bucket_bytes=bucket_mb * 1_000_000,
        device=torch.device("meta"),
    )
    return sender.plan(1)


MATRIX = Spec((2, 2), torch.float32)


@pytest.mark.parametrize(
    ("name", "trace"),
    [
        ("blocks.0._checkpoint_wrapped_module.to_q.weight", "_checkpoint_wrapped_module"),
        ("_orig_mod.blocks.0.to_q.weight", "_orig_mod"),
        ("blocks.0._fsdp_wrapped_module.to_q.weight", "_fsdp_wrapped_module"),
        ("base_model.model.blocks.0.to_q.weight", "base_model"),
        ("base_layer.weight", "base_layer"),
    ],
)
def test_traces_of_wrappers_are_refused(name: str, trace: str) -> None:
    with pytest.raises(PublishError, match=rf"{name}.*{trace}"):
        plan({"norm.weight": MATRIX, name: MATRIX}, 1, "full", 1024)


@pytest.mark.parametrize("name", ["q.lora_A.old.weight", "q.lora_magnitude_vector.weight", "q.lora_embedding_A"])
def test_other_adapters_are_refused(name: str) -> None:
    with pytest.raises(PublishError, match=name):
        plan({name: MATRIX}, 1, "lora", 1024)


@pytest.mark.parametrize("name", ["q.lora_A.weight", "q.lora_B.weight"])
def test_half_an_adapter_is_refused(name: str) -> None:
    with pytest.raises(PublishError, match=rf"{name} has no lora_[AB]"):
        plan({"k.lora_A.weight": MATRIX, "k.lora_B.weight": MATRIX, name: MATRIX}, 1, "lora", 1024)


def test_nothing_and_empty_tensors_are_refused() -> None:
    with pytest.raises(PublishError, match="nothing to publish"):
        plan({}, 1, "lora", 1024)
    with pytest.raises(PublishError, match="bias is empty"):
        plan({"bias": Spec((0,), torch.float32)}, 1, "full", 1024)
    with pytest.raises(ValueError, match="multiple of 16"):
        plan({"bias": MATRIX}, 1, "full", 1000)


def test_wrapped_modules_are_refused_by_their_real_names() -> None:
    """torch's own wrapper, which `distributed.checkpointing` does without, shows in the names."""
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    with pytest.raises(PublishError, match=r"0\._checkpoint_wrapped_module\.weight"):
        Sender(wrapped, "full", device=torch.device("cpu")).plan(1)

"""Digests see every change, and are what the definition says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.distributed.weight_sync import checksum
from flowrl.distributed.weight_sync.checksum import Checksum, Checksums, verify
from flowrl.distributed.weight_sync.errors import TransferError
from flowrl.distributed.weight_sync.manifest import Manifest, Spec, plan

CPU = torch.device("cpu")
SPECS = {"a": Spec((16,), torch.float32), "b": Spec((40,), torch.float32), "c": Spec((24,), torch.bfloat16)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors cross their borders."""
    monkeypatch.setattr(checksum, "CHUNK", 16)


def layout(bucket_bytes: int = 128) -> Manifest:
    return plan(SPECS, 1, "full", bucket_bytes)


def stream_of(seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, (layout().total_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def digests(data: Tensor, manifest: Manifest) -> Checksums:
    total, made = Checksums.none(manifest), Checksum(manifest, CPU)
    for bucket, pieces in enumerate(manifest.pieces()):
        window = data[bucket * manifest.bucket_bytes :][: manifest.bucket_size(bucket)]
        total += made.of(bucket, pieces, window)
    return total


@pytest.mark.parametrize("bucket_bytes", [48, 128, 4096])
def test_digests_are_weighted_sums_modulo_2_to_the_64(bucket_bytes: int) -> None:
    """The definition, in Python's own integers."""
    manifest, data = layout(bucket_bytes), stream_of()
    weights = [int(w) % 2**64 for w in checksum._weights(16, CPU)]
    assert all(w % 2 for w in weights) and len(set(weights)) == 16
    expected = [0] * 3
    words = data.view(torch.int32).tolist()
    for bucket, pieces in enumerate(manifest.pieces()):
        for piece in pieces:
            for i in range(piece.start // 4, piece.stop // 4):
                word = words[bucket * bucket_bytes // 4 + i]
                factor = checksum._odd(bucket << 32 | i // 16)
                expected[piece.entry] += word * weights[i % 16] * factor
    assert [int(d) % 2**64 for d in digests(data, manifest).digests] == [e % 2**64 for e in expected]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 270), st.integers(0, 7))
def test_one_flipped_bit_changes_the_digest_of_its_tensor_alone(byte: int, bit: int) -> None:
    manifest, data = layout(), stream_of()
    changed = data.clone()
    changed[byte] ^= 1 << bit
    differing = digests(data, manifest).digests != digests(changed, manifest).digests
    owner = 0 if byte < 64 else 1 if byte < 224 else 2
    assert differing.tolist() == [i == owner for i in range(3)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 55), st.integers(0, 55))
def test_swapped_words_are_seen(i: int, j: int) -> None:
    """Wherever they are: in one chunk, at the same place of two chunks, in two buckets."""
    manifest, data = layout(), stream_of()
    words = data.view(torch.int32).clone()
    words[i], words[j] = data.view(torch.int32)[j], data.view(torch.int32)[i]
    same = digests(words.view(torch.uint8), manifest).digests == digests(data, manifest).digests
    assert same.all() == (i == j)


def test_zeros_shifts_and_other_buckets_are_seen() -> None:
    manifest, data = layout(), stream_of()
    zeros = torch.zeros_like(data)
    assert not digests(zeros, manifest).digests.any()
    for other in (zeros, data.roll(16), data.roll(64), data.roll(128)):
        assert (digests(other, manifest).digests != digests(data, manifest).digests).all()


def test_verification_names_tensors_and_engines() -> None:
    manifest, data = layout(), stream_of()
    changed = data.clone()
    changed[100] ^= 1
    good, bad = digests(data, manifest), digests(changed, manifest)
    verify(manifest, [good, good], {"rollout-0": good})
    with pytest.raises(TransferError, match="rollout-1 received b not"):
        verify(manifest, [good], {"rollout-0": good, "rollout-1": bad})
    with pytest.raises(TransferError, match="ranks disagree about b"):
        verify(manifest, [good, bad], {"rollout-0": good})

"""Objects as bytes and back."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flowrl.distributed.records import Packed, pack
from flowrl.prompts import Prompt
from flowrl.types import Conditions, Group

NUMBERS = hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes() | hnp.complex_number_dtypes()
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn]


@dataclass(frozen=True)
class Embedded(Conditions):
    """Conditions as an adapter has them."""

    vectors: torch.Tensor
    names: tuple[str, ...]


class Reference:
    """Something that another serialiser must see."""


def size_of(packed: Packed) -> int:
    return sum(buffer.nbytes for buffer in packed.buffers)


@given(hnp.arrays(NUMBERS, hnp.array_shapes(min_dims=0, min_side=0)))
def test_arrays_of_every_kind(array: np.ndarray) -> None:
    found = pack(array).unpack()
    assert found.dtype == array.dtype and found.shape == array.shape
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("dtype", DTYPES)
@given(shape=st.lists(st.integers(0, 4), max_size=3), transposed=st.booleans())
def test_tensors_of_every_kind(dtype: torch.dtype, shape: list[int], transposed: bool) -> None:
    tensor = torch.randn(shape).mul(3).to(dtype)
    tensor = tensor.mT if transposed and tensor.dim() > 1 else tensor
    found = pack({"it": tensor}).unpack()["it"]
    assert found.dtype == dtype and found.shape == tensor.shape
    assert torch.equal(
        found.float() if dtype.itemsize == 1 else found, tensor.float() if dtype.itemsize == 1 else tensor
    )


def test_records_keep_their_types() -> None:
    group = Group(3, Prompt("p", "text", metadata={"a": 1}), 0, 4)
    sent = Embedded(torch.randn(2, 3).bfloat16(), ("a", "b"), guidance_scale=4.5)
    found, same = pack((sent, group)).unpack()
    assert type(found) is Embedded and found.names == sent.names and found.guidance_scale == 4.5
    assert torch.equal(found.vectors, sent.vectors) and same == group


def test_what_comes_out_is_ones_own() -> None:
    tensor, array = torch.ones(100), np.ones(100)
    packed = pack((tensor, array))
    first, second = packed.unpack(), packed.unpack()
    for one, other in zip(first, second, strict=True):
        one[:] = 2
        assert (other == 1).all()
    assert (tensor == 1).all() and (array == 1).all()


@pytest.mark.filterwarnings("error")  # torch warns of read-only arrays
def test_a_view_copies_nothing_and_keeps_the_memory() -> None:
    sent = pack({"tensor": torch.arange(1000.0), "array": np.arange(1000), "empty": torch.zeros(0, 3)})
    received = Packed(sent.header, tuple(np.frombuffer(buffer.tobytes(), np.uint8) for buffer in sent.buffers))
    found = received.view()
    places = [found["tensor"].data_ptr(), found["array"].ctypes.data]
    assert places == [buffer.ctypes.data for buffer in received.buffers[:2]]
    alive = weakref.ref(received.buffers[0])
    del received
    assert alive() is not None and torch.equal(found["tensor"], torch.arange(1000.0))
    with pytest.raises(ValueError, match="read-only"):
        found["array"][:] = 0
    assert found["empty"].shape == (0, 3)
    del found
    assert alive() is None


def test_gradients_stay_behind() -> None:
    found = pack(torch.ones(2, requires_grad=True)).unpack()
    assert not found.requires_grad and found.grad_fn is None


def test_large_things_lie_beside_the_header() -> None:
    packed = pack({"latents": torch.zeros(1000, 100), "images": np.zeros((1000, 100), np.uint8)})
    assert len(packed.header) < 1000
    assert packed.nbytes == len(packed.header) + 400_000 + 100_000


def test_one_object_in_two_places_is_sent_once() -> None:
    tensor = torch.zeros(1000)
    packed = pack([tensor, tensor])
    assert size_of(packed) == 4000
    found = packed.unpack()
    assert found[0] is found[1]


def test_a_copy_does_not_follow_the_object() -> None:
    array = np.ones(10)
    packed = pack(array).copy()
    array[:] = 0
    assert (packed.unpack() == 1).all()


def test_packing_leaves_nothing_behind() -> None:
    class Thing:
        def __reduce__(self) -> Any:
            return int, ()

    thing = Thing()
    gone = weakref.ref(thing)
    pack(thing)
    del thing
    assert gone() is None, "kept until the next garbage collection"


def test_what_is_put_aside_is_the_very_same() -> None:
    reference = Reference()
    packed = pack({"deep": [reference, partial(print, reference)]}, aside=Reference)
    found = packed.unpack()["deep"]
    assert found[0] is reference and found[1].args[0] is reference
    assert packed.aside[0] is reference


def test_neither_torch_nor_a_tensor_is_needed() -> None:
    code = (
        "import sys\n"
        "from flowrl.distributed.launch import actors, process, servicer, wire\n"
        "from flowrl.distributed.records import pack\n"
        "from flowrl.rewards import remote\n"
        "assert pack([1]).unpack() == [1]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

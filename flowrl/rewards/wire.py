"""What travels between a reward server and its clients: pictures and prompts there, scores back.

    POST /v1/score      content-type: application/octet-stream      x-flowrl-protocol-version: 1

The body is one safetensors blob: `images` uint8 [B, H, W, 3], or `videos` uint8 [B, F, H, W, 3], or PNG files of one
size, `png` uint8 [bytes] one after the other and `png_ends` int64 [B], where each of them ends. Its metadata `prompts`
is a JSON list of B objects with the fields of `flowrl.prompts.Prompt`. The answer is JSON: `protocol_version` and
`scores`, or `error`, a sentence.

What a body claims is compared with what is allowed before anything is made of it: header, number, prompts, pictures.

Nothing is pickled. Free of torch, like everything that reward workers import.
"""

from __future__ import annotations

import io
import json
import math
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from flowrl import strict_json
from flowrl.prompts import MAX_DEPTH, Prompt, is_too_deep
from flowrl.rewards.scoring import FinalError

VERSION = "1"
VERSION_HEADER = "x-flowrl-protocol-version"
CONTENT_TYPE = "application/octet-stream"
PATH = "/v1/score"
FORMATS = ("safetensors", "png")
MAX_HEADER = 16_000_000  # bytes of a blob's, prompts and all: as objects, JSON needs many times more
PNG_LEVEL = 1  # of zlib: four times faster than Pillow's 6, and a tenth larger

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # its bits
DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "BF16": BFLOAT16,
}
FIELDS: Mapping[str, tuple[type, ...]] = {
    "id": (str,),
    "text": (str,),
    "target": (str, type(None)),
    "negative": (str,),
    "metadata": (dict,),
}
BROKEN_PNG = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)


class WireError(FinalError):
    """A message that does not keep the protocol; one sentence about it. Sending it again would not help."""


@dataclass(frozen=True)
class Pictures:
    """What is to be scored: a prompt for each."""

    images: np.ndarray  # uint8 [B, H, W, 3], of videos [B, F, H, W, 3]
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Packed:
    """A body of which everything is known and checked but the pixels in PNG files."""

    shape: tuple[int, ...]  # of the pictures
    prompts: tuple[Prompt, ...]
    data: np.ndarray  # the pictures, or PNG files one after the other
    ends: np.ndarray | None  # of each of the files

    @property
    def num_bytes(self) -> int:
        """Of the pictures."""
        return math.prod(self.shape)

    def unpacked(self) -> Pictures:
        """Raises WireError."""
        images = self.data if self.ends is None else _from_png(self.data, self.ends, self.shape)
        return Pictures(images, self.prompts)


# ---------------------------------------------------------------------------------------------- requests


def encode(images: np.ndarray, prompts: Sequence[Prompt], file_format: str = "safetensors") -> bytes:
    """The body of a request.

    Args:
        images: uint8 [B, H, W, 3], or of videos [B, F, H, W, 3].
        prompts: one for each.
        file_format: safetensors (as they are) | png (smaller and slower to write; no videos).

    Raises:
        WireError: for metadata of a prompt that JSON cannot hold, or videos as PNG.
    """
    try:
        metadata = {"prompts": json.dumps([asdict(prompt) for prompt in prompts], allow_nan=False)}
    except (RecursionError, TypeError, ValueError) as error:
        raise WireError(f"prompts cannot be written as JSON: {error}") from error
    if file_format == "safetensors":
        name = "images" if images.ndim == 4 else "videos"
        return save({name: np.ascontiguousarray(images)}, metadata)
    if images.ndim != 4:
        raise WireError(f"videos cannot be sent as {file_format}, only as safetensors")
    files = [_png(image) for image in images]
    ends = np.cumsum([len(file) for file in files], dtype=np.int64)
    return save({"png": np.frombuffer(b"".join(files), np.uint8), "png_ends": ends}, metadata)


def decode(body: bytes, max_bytes: int, max_samples: int) -> Pictures:
    """What a body holds: at most `max_samples`, and PNG files that unpack to at most `max_bytes`. Raises WireError."""
    return read(body, max_bytes, max_samples).unpacked()


def read(body: bytes, max_bytes: int, max_samples: int) -> Packed:
    """The same before any PNG file is unpacked."""
    tensors, metadata = read_blob(body)
    match sorted(tensors):
        case ["images"]:
            stacked = _checked("images", tensors["images"], 4)
        case ["videos"]:
            stacked = _checked("videos", tensors["videos"], 5)
        case ["png", "png_ends"]:
            stacked = _checked_ends(tensors["png_ends"], tensors["png"])
        case names:
            raise WireError(f"the body must hold images, or videos, or png and png_ends, got {names}")
    num = len(stacked)
    if num > max_samples:
        raise WireError(f"one request may have {max_samples} samples, got {num}")
    prompts = _prompts(metadata.get("prompts"))
    if len(prompts) != num:
        raise WireError(f"there must be one prompt for each picture, got {len(prompts)} for {num}")
    if "png" not in tensors:
        return Packed(stacked.shape, prompts, stacked, None)
    return Packed(_png_shape(tensors["png"], stacked, max_bytes), prompts, tensors["png"], stacked)


def read_blob(body: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and metadata of a safetensors blob, nothing of it converted: bfloat16, which numpy lacks, is `BFLOAT16`.

    Raises WireError.
    """
    length = int.from_bytes(body[:8], "little")
    if MAX_HEADER < length < len(body):
        raise WireError(f"the blob's header, with all prompts, may have {MAX_HEADER} bytes, got {length}")
    try:
        found = deserialize(body)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise WireError(f"the body is not a whole safetensors blob: {error}") from error
    header = json.loads(body[8 : 8 + length])  # as the library has just read it
    return {name: _array(name, tensor) for name, tensor in found}, header.get("__metadata__") or {}


def _array(name: str, tensor: Mapping[str, Any]) -> np.ndarray:
    dtype, data, shape = tensor["dtype"], tensor["data"], tensor["shape"]
    if dtype not in DTYPES:
        raise WireError(f"{name} has the dtype {dtype}, which is none of {', '.join(DTYPES)}")
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape)


def _checked(name: str, images: np.ndarray, ndim: int) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim != ndim or images.shape[-1] != 3 or images.size == 0:
        shape = "[B, H, W, 3]" if ndim == 4 else "[B, F, H, W, 3]"
        raise WireError(f"{name} must be uint8 {shape}, got {images.dtype} {list(images.shape)}")
    return images


def _prompts(text: str | None) -> tuple[Prompt, ...]:
    try:
        entries = strict_json.parse(text or "")
    except strict_json.JSONFault as fault:
        raise WireError(f"the metadata `prompts` must be a JSON list, but it {fault}") from fault
    if not isinstance(entries, list):
        raise WireError(f"the metadata `prompts` must be a JSON list, got {type(entries).__name__}")
    return tuple(_prompt(index, entry) for index, entry in enumerate(entries))


def _prompt(index: int, entry: Any) -> Prompt:
    if not isinstance(entry, dict) or not {"id", "text"} <= entry.keys() <= FIELDS.keys():
        raise WireError(f"prompt {index} must be an object with id and text, and may have target, negative, metadata")
    for name, value in entry.items():
        if not isinstance(value, FIELDS[name]):
            wanted = " or ".join(kind.__name__ for kind in FIELDS[name])
            raise WireError(f"{name} of prompt {index} must be {wanted}, got {type(value).__name__}")
    if is_too_deep(entry.get("metadata")):
        raise WireError(f"the metadata of prompt {index} is nested more than {MAX_DEPTH} deep")
    return Prompt(**entry)


# ---------------------------------------------------------------------------------------------- PNG


def _png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()


def _checked_ends(ends: np.ndarray, data: np.ndarray) -> np.ndarray:
    if data.dtype != np.uint8 or data.ndim != 1 or ends.dtype != np.int64 or ends.ndim != 1 or not ends.size:
        raise WireError(f"png and png_ends must be uint8 [bytes] and int64 [B], got {data.dtype} and {ends.dtype}")
    if ends[0] <= 0 or (ends[1:] <= ends[:-1]).any() or ends[-1] != len(data):
        raise WireError(f"png_ends must rise to the {len(data)} bytes of png, got {ends[:8].tolist()} ...")
    return ends


def _png_shape(data: np.ndarray, ends: np.ndarray, max_bytes: int) -> tuple[int, ...]:
    """[B, H, W, 3], if all have the size of the first, which is all that is looked at."""
    width, height = _opened(0, data[: ends[0]]).size
    num_bytes = len(ends) * width * height * 3
    if num_bytes > max_bytes:
        raise WireError(f"{len(ends)} PNG files of {width} x {height} unpack to {num_bytes} bytes, over {max_bytes}")
    return len(ends), height, width, 3


def _from_png(data: np.ndarray, ends: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 of this shape."""
    images = np.empty(shape, np.uint8)
    _, height, width, _ = shape
    for index, (start, end) in enumerate(pairwise([0, *ends])):
        picture = _opened(index, data[start:end])
        if picture.size != (width, height):
            raise WireError(f"the pictures of one request must have one size, got {picture.size} for png {index}")
        images[index] = _unpacked(index, picture)
    return images


def _opened(index: int, file: np.ndarray) -> Image.Image:
    """Its header is read, its pixels are not."""
    try:
        picture = Image.open(io.BytesIO(file.tobytes()), formats=["PNG"])
    except Image.DecompressionBombError as error:
        raise WireError(f"png {index} has far too many pixels") from error
    except BROKEN_PNG as error:
        raise WireError(f"png {index} is not a whole PNG file") from error
    if picture.mode != "RGB":
        raise WireError(f"png {index} must be RGB with 8 bits, got {picture.mode}")
    return picture


def _unpacked(index: int, picture: Image.Image) -> np.ndarray:
    try:
        return np.asarray(picture)
    except BROKEN_PNG as error:
        raise WireError(f"png {index} is not a whole PNG file") from error


# ---------------------------------------------------------------------------------------------- answers


def read_scores(answer: Mapping[str, Any], num: int, key: str = "scores") -> np.ndarray:
    """float64 [num] of a successful answer. Raises WireError for anything else than `num` finite numbers.

    Args:
        answer: the JSON object.
        num: how many there must be.
        key: what they are called.
    """
    if answer.get("protocol_version") != VERSION:
        raise WireError(f'"protocol_version" must be "{VERSION}", got {_short(answer.get("protocol_version"))}')
    scores = answer.get(key)
    if not isinstance(scores, list) or len(scores) != num:
        raise WireError(f"{key} must be a list of {num}, got {_short(scores)}")
    for index, score in enumerate(scores):
        if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= sys.float_info.max:
            raise WireError(f"{key}[{index}] must be a finite number, got {_short(score)}")
    return np.array(scores, dtype=np.float64)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

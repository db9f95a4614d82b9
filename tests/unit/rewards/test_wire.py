"""The body of a request to a reward server: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import io
import json
import struct
import weakref
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save

from flowrl.prompts import MAX_DEPTH, Prompt
from flowrl.rewards.wire import Pictures, WireError, decode, encode, read, read_scores

LIMIT = 10**6  # bytes
MOST = 4  # samples
PROMPTS = [
    Prompt(
        "p0", 'a sign: "FLOW"', target="FLOW", negative="blurry", metadata={"tags": ["a", 1, None], "n": {"m": 2.5}}
    ),
    Prompt("p1", "漢字 and 🙂"),
]
STATED = json.dumps([{"id": "p", "text": "cat"}])


def pictures(num: int = 2, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num, *(shape or (6, 5)), 3), dtype=np.uint8)


def body(prompts: str | None = STATED, **tensors: np.ndarray) -> bytes:
    return save(tensors, None if prompts is None else {"prompts": prompts})


def png(mode: str = "RGB", size: tuple[int, int] = (5, 6)) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, format="PNG")
    return buffer.getvalue()


def packed(*files: bytes, prompts: str | None = None) -> bytes:
    ends = np.cumsum([len(file) for file in files], dtype=np.int64)
    stated = json.dumps([{"id": "p", "text": "cat"}] * len(files)) if prompts is None else prompts
    return body(stated, png=np.frombuffer(b"".join(files), np.uint8), png_ends=ends)


def same(found: Pictures, images: np.ndarray) -> bool:
    return found.images.dtype == np.uint8 and np.array_equal(found.images, images)


@pytest.mark.parametrize("file_format", ["safetensors", "png"])
def test_pictures_and_prompts_come_out_as_they_went_in(file_format: str) -> None:
    found = decode(encode(pictures(), PROMPTS, file_format), LIMIT, MOST)
    assert same(found, pictures()) and list(found.prompts) == PROMPTS


def test_videos_and_views_come_out_as_they_went_in() -> None:
    videos = pictures(2, 4, 8, 5)[:, ::2, ::-1]
    assert same(decode(encode(videos, PROMPTS), LIMIT, MOST), videos)


def test_videos_are_not_sent_as_png() -> None:
    with pytest.raises(WireError, match="videos cannot be sent as png"):
        encode(pictures(2, 4, 6, 5), PROMPTS, "png")


def test_prompts_that_could_not_be_passed_on_are_refused() -> None:
    """To the scorer's process."""
    deep: list[Any] = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    sent = encode(pictures(), [Prompt("p", "a cat", metadata={"n": [[]]}), Prompt("q", "a cat", metadata={"n": deep})])
    with pytest.raises(WireError, match="the metadata of prompt 1 is nested more than 100 deep"):
        decode(sent, LIMIT, MOST)
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(WireError, match="prompts cannot be written as JSON: "):
        encode(pictures(1), [Prompt("p", "a cat", metadata={"n": deep})])


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_metadata_that_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(WireError, match="cannot be written as JSON"):
        encode(pictures(1), [Prompt("p", "cat", metadata={"x": value})])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a whole safetensors blob"),
        (b"<html><body>502 Bad Gateway</body></html>", "not a whole safetensors blob"),
        (body(), "must hold images, or videos, or png and png_ends"),
        (body(images=pictures(1), videos=pictures(1, 2, 6, 5)), "must hold images, or videos"),
        (body(picture=pictures(1)), r"got \['picture'\]"),
        (body(images=pictures(1).astype(np.float32)), r"uint8 \[B, H, W, 3\], got float32"),
        (body(images=pictures(1)[..., :1]), r"got uint8 \[1, 6, 5, 1\]"),
        (body(images=pictures(1)[0]), r"got uint8 \[6, 5, 3\]"),
        (body(images=pictures(0)), r"got uint8 \[0, 6, 5, 3\]"),
        (body(videos=pictures(1)), r"videos must be uint8 \[B, F, H, W, 3\]"),
        (body(None, images=pictures(1)), "`prompts` must be a JSON list"),
        (body("[", images=pictures(1)), "`prompts` must be a JSON list"),
        (body("[" * 100_000, images=pictures(1)), "`prompts` must be a JSON list"),
        (body("{}", images=pictures(1)), "got dict"),
        (body(r'[{"id": "\ud800", "text": "cat"}]', images=pictures(1)), r"but it holds U\+D800, which is not text"),
        (body('[{"id": "p", "text": "a", "text": "b"}]', images=pictures(1)), "but it has 'text' twice"),
        (body('[{"id": "p", "text": "a", "metadata": {"x": NaN}}]', images=pictures(1)), "but it holds NaN"),
        (body(images=pictures(2)), "one prompt for each picture, got 1 for 2"),
        (body('["cat"]', images=pictures(1)), "prompt 0 must be an object with id and text"),
        (body('[{"id": "p"}]', images=pictures(1)), "prompt 0 must be an object with id and text"),
        (body('[{"id": "p", "text": "cat", "seed": 1}]', images=pictures(1)), "prompt 0 must be an object"),
        (body('[{"id": 7, "text": "cat"}]', images=pictures(1)), "id of prompt 0 must be str, got int"),
        (
            body('[{"id": "p", "text": "cat", "target": 5}]', images=pictures(1)),
            "target of prompt 0 must be str or None",
        ),
        (
            body('[{"id": "p", "text": "cat", "negative": null}]', images=pictures(1)),
            "negative of prompt 0 must be str",
        ),
        (packed(b"GIF89a"), "png 0 is not a whole PNG file"),
        (packed(png(), png()[:-30]), "png 1 is not a whole PNG file"),
        (packed(png("RGBA")), "must be RGB with 8 bits, got RGBA"),
        (packed(png(), png(size=(5, 7))), "must have one size"),
        (body(png=np.zeros(4, np.uint8)), r"got \['png'\]"),
        (body(png=np.zeros(4, np.uint8), png_ends=np.array([3])), "png_ends must rise to the 4 bytes"),
        (body(png=np.zeros(4, np.uint8), png_ends=np.array([4, 2, 4])), "png_ends must rise"),
        (body(png=np.zeros(4, np.uint8), png_ends=np.array([4.0])), "uint8 .bytes. and int64 .B."),
    ],
    ids=lambda value: value if isinstance(value, str) else "body",
)
def test_what_is_wrong_with_a_body_is_said(content: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode(content, LIMIT, MOST)


@pytest.mark.parametrize(
    ("side", "message"),
    [(9000, "of 9000 x 9000 unpack to 243000000 bytes, over 1000000"), (60_000, "png 0 has far too many pixels")],
)
def test_a_small_png_that_would_unpack_to_much_is_never_unpacked(side: int, message: str) -> None:
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", b"not even pixels")]
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    with pytest.raises(WireError, match=message):
        decode(packed(bomb), LIMIT, MOST)


@pytest.mark.parametrize("file_format", ["safetensors", "png"])
def test_more_samples_than_are_allowed_are_not_looked_at(file_format: str) -> None:
    four = [Prompt("p", "cat")] * 4
    assert len(decode(encode(pictures(4), four, file_format), LIMIT, 4).images) == 4
    with pytest.raises(WireError, match="one request may have 3 samples, got 4"):
        decode(encode(pictures(4), four, file_format), LIMIT, 3)


def test_pictures_are_opened_only_when_there_is_a_prompt_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", None)  # calling it is an error
    with pytest.raises(WireError, match="one prompt for each picture, got 0 for 3"):
        decode(packed(png(), png(), png(), prompts="[]"), LIMIT, MOST)


def test_pictures_are_opened_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[weakref.ref[Image.Image]] = []
    original = Image.open

    def observed(*arguments: Any, **options: Any) -> Image.Image:
        assert sum(there() is not None for there in opened) <= 1  # the one before goes when this one has come
        picture = original(*arguments, **options)
        opened.append(weakref.ref(picture))
        return picture

    monkeypatch.setattr(Image, "open", observed)
    assert len(decode(packed(*[png()] * 20), LIMIT, 20).images) == 20


def test_a_header_that_would_take_much_to_read_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    content = body(json.dumps([{"id": "p", "text": "long" * 500}]), images=pictures(1))
    assert decode(content, LIMIT, MOST).prompts[0].text == "long" * 500
    monkeypatch.setattr("flowrl.rewards.wire.MAX_HEADER", 1000)
    with pytest.raises(WireError, match="the blob's header, with all prompts, may have 1000 bytes, got 2"):
        decode(content, LIMIT, MOST)


def test_many_pngs_count_together() -> None:
    files = [png(size=(100, 100))] * 4
    assert decode(packed(*files), 120_000, MOST).images.shape == (4, 100, 100, 3)
    with pytest.raises(WireError, match="4 PNG files of 100 x 100 unpack to 120000 bytes, over 119999"):
        decode(packed(*files), 119_999, MOST)


def test_what_files_unpack_to_is_known_before_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    files = packed(*[png(size=(100, 100))] * 4)
    monkeypatch.setattr("flowrl.rewards.wire._unpacked", None)  # calling it is an error
    assert read(files, 120_000, MOST).num_bytes == 120_000
    assert read(encode(pictures(), PROMPTS), LIMIT, MOST).num_bytes == 2 * 6 * 5 * 3


WHOLE = [encode(pictures(), PROMPTS, file_format) for file_format in ("safetensors", "png")]


@settings(deadline=None)
@given(st.sampled_from(WHOLE), st.data())
def test_no_part_of_a_body_is_taken_for_a_whole_one(whole: bytes, data: st.DataObject) -> None:
    with pytest.raises(WireError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))], LIMIT, MOST)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(WHOLE), st.data())
def test_a_damaged_body_is_read_or_refused(whole: bytes, data: st.DataObject) -> None:
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(damaged), LIMIT, MOST)
    except WireError:
        return
    assert len(found.images) == len(found.prompts) and found.images.dtype == np.uint8


# ---------------------------------------------------------------------------------------------- answers


def test_scores_of_an_answer() -> None:
    found = read_scores({"protocol_version": "1", "scores": [0.1, -2, 1e-300]}, 3)
    assert found.dtype == np.float64 and found.tolist() == [0.1, -2.0, 1e-300]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"scores": [1.0]}, '"protocol_version" must be "1", got None'),
        ({"protocol_version": 1, "scores": [1.0]}, "got 1"),
        ({"protocol_version": "2", "scores": [1.0]}, "got '2'"),
        ({"protocol_version": "1"}, "must be a list of 1, got None"),
        ({"protocol_version": "1", "scores": 1.0}, "must be a list of 1"),
        ({"protocol_version": "1", "scores": []}, "must be a list of 1"),
        ({"protocol_version": "1", "scores": [1.0, 2.0]}, "must be a list of 1"),
        ({"protocol_version": "1", "scores": [float("nan")]}, r"scores\[0\] must be a finite number, got nan"),
        ({"protocol_version": "1", "scores": [float("-inf")]}, "got -inf"),
        ({"protocol_version": "1", "scores": [10**400]}, "must be a finite number"),
        ({"protocol_version": "1", "scores": [True]}, "got True"),
        ({"protocol_version": "1", "scores": ["0.5"]}, "got '0.5'"),
        ({"protocol_version": "1", "scores": [None]}, "got None"),
        ({"protocol_version": "1", "scores": [[0.5]]}, r"got \[0.5\]"),
    ],
)
def test_whatever_is_not_a_finite_number_for_each_is_refused(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        read_scores(answer, 1)

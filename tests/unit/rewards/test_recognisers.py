"""Both recognisers on the same drawn pictures, with the real models.

`paddleocr` does not fit into every environment; in one that has it and not flowrl's other dependencies, run
`pytest --noconftest tests/unit/rewards/test_recognisers.py`.
"""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from flowrl.rewards import recognisers
from flowrl.rewards.recognisers import PPOCR, Line, PaddleOCR, RapidOCR, Recogniser

WORDS = ["FLOW", "OPEN", "TIGER", "Moon", "stop", "Bread", "Hello", "Zebra", "sun"]
NEEDS_PADDLE = pytest.mark.skipif(
    importlib.util.find_spec("paddleocr") is None, reason='paddleocr is not installed: pip install -e ".[paddle]"'
)
ENGINES = [pytest.param(RapidOCR, id="rapidocr"), pytest.param(PaddleOCR, id="paddleocr", marks=NEEDS_PADDLE)]


def sign(lines: list[str], height: int, width: int, size: int) -> np.ndarray:
    """Dark letters on a light ground, one line under the other."""
    picture = Image.new("RGB", (width, height), (235, 225, 200))
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(size=size)
    for i, line in enumerate(lines):
        pen.text((width / 2, height * (i + 0.5) / len(lines)), line, (20, 30, 90), font, anchor="mm")
    return np.asarray(picture)


def texts(lines: list[list[Line]]) -> list[str]:
    return ["".join(line.text for line in page) for page in lines]


@pytest.fixture(scope="module", params=ENGINES)
def word_reader(request: pytest.FixtureRequest) -> PPOCR:
    reader: PPOCR = request.param(detect=False)
    reader.load()
    return reader


@pytest.fixture(scope="module", params=ENGINES)
def page_reader(request: pytest.FixtureRequest) -> PPOCR:
    reader: PPOCR = request.param(detect=True, max_side=256)
    reader.load()
    return reader


@pytest.fixture(scope="module")
def crops() -> np.ndarray:
    return np.stack([sign([word], 32, 80, 22) for word in WORDS])


def test_reads_word_crops(word_reader: PPOCR, crops: np.ndarray) -> None:
    lines = word_reader.read(crops)
    assert texts(lines) == WORDS
    assert all(0.9 < line.confidence <= 1 for (line,) in lines)


def test_a_crop_reads_the_same_in_any_company(word_reader: PPOCR, crops: np.ndarray) -> None:
    together = word_reader.read(crops)
    for crop, (expected,) in zip(crops, together, strict=True):
        ((alone,),) = word_reader.read(crop[None])
        assert alone.text == expected.text
        assert alone.confidence == pytest.approx(expected.confidence, abs=1e-5)


def test_a_blank_crop_has_no_confidence(word_reader: PPOCR) -> None:
    assert word_reader.read(np.full((2, 32, 80, 3), 200, np.uint8)) == [[Line("", 0.0)]] * 2


def test_finds_the_lines_of_whole_pictures_in_order(page_reader: PPOCR) -> None:
    pictures = np.stack(
        [sign(["Hello", "World 42"], 256, 256, 40), np.full((256, 256, 3), 128, np.uint8), sign(["ONE"], 256, 256, 60)]
    )
    lines = page_reader.read(pictures)
    assert [[line.text for line in page] for page in lines] == [["Hello", "World 42"], [], ["ONE"]]
    assert all(0.9 < line.confidence <= 1 for page in lines for line in page)


def test_large_pictures_are_reduced_for_detection_only(page_reader: PPOCR) -> None:
    assert texts(page_reader.read(sign(["Bread", "and roses"], 512, 512, 60)[None])) == ["Breadand roses"]


@NEEDS_PADDLE
def test_both_agree_on_hard_crops() -> None:
    """The same files on the same numbers: also what is misread is misread alike."""
    rng = np.random.default_rng(0)
    clean = np.stack([sign([word], 32, 80, 18) for word in WORDS * 3])
    noisy = np.clip(clean + rng.normal(0, 60, clean.shape), 0, 255).astype(np.uint8)
    readings = []
    for engine in (RapidOCR, PaddleOCR):
        reader = engine(detect=False)
        reader.load()
        readings.append(texts(reader.read(noisy)))
    assert readings[0] == readings[1]
    assert readings[0] != WORDS * 3


def test_reads_accents() -> None:
    pytest.importorskip("matplotlib", reason="its fonts have accented letters, Pillow's has none")
    import matplotlib

    font = ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), 20)
    reader = RapidOCR(detect=False)
    reader.load()
    for word in ("café", "über"):
        picture = Image.new("RGB", (80, 32), "white")
        ImageDraw.Draw(picture).text((40, 16), word, "black", font, anchor="mm")
        assert texts(reader.read(np.asarray(picture)[None])) == [word]


def test_red_and_blue_can_be_exchanged(crops: np.ndarray) -> None:
    """`bgr` is what a reader without it makes of the mirrored channels."""
    plain, mirrored = RapidOCR(detect=False), RapidOCR(detect=False, bgr=True)
    plain.load()
    mirrored.load()
    assert mirrored.read(crops) == plain.read(np.ascontiguousarray(crops[..., ::-1]))
    assert mirrored.read(crops) != plain.read(crops)


def test_is_cheap_to_pickle_and_quiet(capfd: pytest.CaptureFixture[str], crops: np.ndarray) -> None:
    reader = RapidOCR()
    assert isinstance(reader, Recogniser)
    assert len(pickle.dumps(reader)) < 1000
    reader.load()
    reader.read(crops[:1])
    reader.read(np.zeros((1, 64, 64, 3), np.uint8))
    assert capfd.readouterr() == ("", "")


def test_a_missing_model_is_an_error_and_no_download() -> None:
    with pytest.raises(FileNotFoundError, match=r"has no PP-OCRv9\.onnx: install rapidocr"):
        recognisers.bundled("PP-OCRv9.onnx")


@NEEDS_PADDLE
def test_a_model_folder_of_the_user(tmp_path: Path, crops: np.ndarray) -> None:
    folder = recognisers._recognition_folder(tmp_path, min_width=160)
    reader = PaddleOCR(detect=False, recognition_dir=str(folder))
    reader.load()
    assert texts(reader.read(crops)) == WORDS


@NEEDS_PADDLE
def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"inference\.yml"):
        PaddleOCR(detect=False, recognition_dir=str(tmp_path)).load()


@pytest.mark.parametrize("option", ["max_side", "min_width", "batch_size", "num_threads"])
def test_impossible_settings(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least"):
        RapidOCR(**{option: 0})

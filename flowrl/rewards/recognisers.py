"""Recognisers: pictures in, lines of text out. Both read with PP-OCRv6's small models and need no download.

The `rapidocr` wheel carries the models as ONNX files. `RapidOCR` runs them with that package; `PaddleOCR` runs the same
files, or a folder of yours, with PaddleOCR 3's own pipeline.
"""

from __future__ import annotations

import abc
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from flowrl.config import Config, Problem

DETECTION_MODEL, RECOGNITION_MODEL = "PP-OCRv6_det_small.onnx", "PP-OCRv6_rec_small.onnx"


class Line(NamedTuple):
    """One line of text, and how sure the recogniser is of it, in [0, 1]."""

    text: str
    confidence: float


@runtime_checkable
class Recogniser(Protocol):
    """Reads text. Cheap to construct and to pickle until `load` is called."""

    def load(self) -> None:
        """Read the models; called once, where they are used."""
        ...

    def read(self, images: np.ndarray) -> list[list[Line]]:
        """The lines of each picture, top to bottom and left to right, for uint8 images [B, H, W, 3] (RGB)."""
        ...


@dataclass(kw_only=True, eq=False)
class PPOCR(abc.ABC):
    """What both ways to run PP-OCR have in common.

    Args:
        detect: find the lines of a whole picture first; False takes each picture for the crop of one line, which is
            several times faster.
        max_side: a picture whose longer side exceeds this is reduced to it for the search for lines; none is enlarged.
            Smaller is faster and misses small letters.
        min_width: crops are padded on the right to at least this width at the models' height of 48; narrower, short
            words are misread.
        batch_size: crops read at once.
        bgr: give the models the channel order that they were trained with. Flow-GRPO gives them RGB.
        num_threads: of onnxruntime.
    """

    detect: bool = True
    max_side: int = 960
    min_width: int = 160
    batch_size: int = 8
    bgr: bool = False
    num_threads: int = 1
    _engine: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        for name, low in (("max_side", 32), ("min_width", 48), ("batch_size", 1), ("num_threads", 1)):
            if (value := vars(self)[name]) < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")

    def read(self, images: np.ndarray) -> list[list[Line]]:
        """The lines of each picture."""
        pixels = list(np.ascontiguousarray(images[..., ::-1]) if self.bgr else images)
        return self._detected(pixels) if self.detect else [[line] for line in self._recognised(pixels)]

    @abc.abstractmethod
    def load(self) -> None:
        """Read the models."""

    @abc.abstractmethod
    def _recognised(self, crops: list[np.ndarray]) -> Iterable[Line]:
        """One line for each crop."""

    @abc.abstractmethod
    def _detected(self, pictures: list[np.ndarray]) -> list[list[Line]]:
        """The lines of each picture."""


@dataclass(kw_only=True, eq=False)
class RapidOCR(PPOCR):
    """PP-OCR with the `rapidocr` package: about 7 ms for a 32x80 crop on one core."""

    def load(self) -> None:
        """Start onnxruntime sessions on the wheel's models."""
        import rapidocr

        onnxruntime = "EngineConfig.onnxruntime"
        self._engine = rapidocr.RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.use_cls": False,
                "Global.text_score": 0.0,  # the reward decides what is too unsure
                "Det.model_path": str(bundled(DETECTION_MODEL)),
                "Det.limit_type": "max",
                "Det.limit_side_len": self.max_side,
                "Rec.model_path": str(bundled(RECOGNITION_MODEL)),
                "Rec.rec_img_shape": [3, 48, self.min_width],
                "Rec.rec_batch_num": self.batch_size,
                f"{onnxruntime}.intra_op_num_threads": self.num_threads,
                f"{onnxruntime}.inter_op_num_threads": 1,
                f"{onnxruntime}.enable_cpu_mem_arena": True,  # without it memory grows to twice as much
            }
        )
        blank = np.zeros((32, 32, 3), np.uint8)
        self._engine.recognize_txt([blank])  # rapidocr reads its models on first use: let that be now
        if self.detect:
            self._engine(blank)

    def _recognised(self, crops: list[np.ndarray]) -> Iterable[Line]:
        result = self._engine.recognize_txt(crops)
        return map(Line, result.txts, result.scores)

    def _detected(self, pictures: list[np.ndarray]) -> list[list[Line]]:
        results = (self._engine(picture) for picture in pictures)
        return [list(map(Line, result.txts or (), result.scores or ())) for result in results]


@dataclass(kw_only=True, eq=False)
class PaddleOCR(PPOCR):
    """PP-OCR with the `paddleocr` package (extra `paddle`): the pipeline that published numbers were made with, slower.

    Args:
        detection_dir: a PaddleOCR model folder for detection (with `inference.yml`); None takes the wheel's model.
        recognition_dir: the same for recognition. `min_width` is then the folder's own.
        engine: what runs the models: "onnxruntime" (the folders must have `inference.onnx`), or "paddle" (PaddlePaddle
            must be installed).
    """

    detection_dir: str | None = None
    recognition_dir: str | None = None
    engine: str = "onnxruntime"

    def problems(self, run: Config) -> list[Problem]:
        """The package may be missing."""
        if importlib.util.find_spec("paddleocr") is not None:
            return []
        return [Problem("reward", "uses paddleocr, which is not installed.", 'Run pip install -e ".[paddle]".')]

    def load(self) -> None:
        """Construct PaddleOCR's pipeline. Raises FileNotFoundError for a folder without `inference.yml`."""
        # Models are always given as folders, so there is nothing to look for on the network.
        os.environ.setdefault("PADDLE_PDX_DISABLE_MODEL_SOURCE_CHECK", "True")
        import paddleocr

        logging.getLogger("paddlex").setLevel(logging.WARNING)
        settings: dict[str, Any] = {"device": "cpu", "engine": self.engine, "cpu_threads": self.num_threads}
        if self.engine == "onnxruntime":
            settings["engine_config"] = {"intra_op_num_threads": self.num_threads, "inter_op_num_threads": 1}
        with tempfile.TemporaryDirectory(prefix="flowrl-ocr-") as temporary:
            recognition = Path(self.recognition_dir or _recognition_folder(Path(temporary), self.min_width))
            if not self.detect:
                self._engine = paddleocr.TextRecognition(
                    model_name=_model_name(recognition), model_dir=str(recognition), **settings
                )
                return
            detection = Path(self.detection_dir or _detection_folder(Path(temporary)))
            self._engine = paddleocr.PaddleOCR(
                text_detection_model_name=_model_name(detection),
                text_detection_model_dir=str(detection),
                text_det_limit_type="max",
                text_det_limit_side_len=self.max_side,
                text_recognition_model_name=_model_name(recognition),
                text_recognition_model_dir=str(recognition),
                text_recognition_batch_size=self.batch_size,
                use_doc_orientation_classify=False,
                use_doc_unwarping=False,
                use_textline_orientation=False,
                **settings,
            )

    def _recognised(self, crops: list[np.ndarray]) -> Iterable[Line]:
        results = self._engine.predict(crops, batch_size=self.batch_size)
        return [Line(result["rec_text"], result["rec_score"]) for result in results]

    def _detected(self, pictures: list[np.ndarray]) -> list[list[Line]]:
        results = self._engine.predict(pictures)
        return [list(map(Line, result["rec_texts"], result["rec_scores"])) for result in results]


# ---------------------------------------------------------------------------------------------- the wheel's models


def bundled(name: str) -> Path:
    """A model that the rapidocr wheel carries. Raises FileNotFoundError rather than let rapidocr download it."""
    path = Path(str(resources.files("rapidocr"))) / "models" / name
    if not path.is_file():
        raise FileNotFoundError(f"the installed rapidocr has no {name}: install rapidocr>=3.10,<4")
    return path


def _recognition_folder(parent: Path, min_width: int) -> Path:
    """The wheel's recognition model as a PaddleOCR model folder."""
    from onnxruntime import InferenceSession

    path = bundled(RECOGNITION_MODEL)
    characters = InferenceSession(path).get_modelmeta().custom_metadata_map["character"].splitlines()
    return _model_folder(
        parent / "PP-OCRv6_small_rec",
        path,
        transforms=[{"RecResizeImg": {"image_shape": [3, 48, min_width]}}],
        postprocess={"name": "CTCLabelDecode", "character_dict": characters},
    )


def _detection_folder(parent: Path) -> Path:
    """The wheel's detection model as a PaddleOCR model folder, with rapidocr's settings."""
    half = [0.5, 0.5, 0.5]
    return _model_folder(
        parent / "PP-OCRv6_small_det",
        bundled(DETECTION_MODEL),
        transforms=[
            {"DetResizeForTest": {}},
            {"NormalizeImage": {"mean": half, "std": half, "scale": 1 / 255, "order": "hwc"}},
            {"ToCHWImage": None},
        ],
        postprocess={
            "name": "DBPostProcess",
            "thresh": 0.3,
            "box_thresh": 0.5,
            "unclip_ratio": 1.6,
            "use_dilation": True,
        },
    )


def _model_folder(folder: Path, model: Path, transforms: list[dict[str, Any]], postprocess: dict[str, Any]) -> Path:
    import yaml

    folder.mkdir()
    shutil.copyfile(model, folder / "inference.onnx")
    decode = {"DecodeImage": {"channel_first": False, "img_mode": "BGR"}}  # arrays as they come
    content = {
        "Global": {"model_name": folder.name},
        "PreProcess": {"transform_ops": [decode, *transforms]},
        "PostProcess": postprocess,
    }
    (folder / "inference.yml").write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    return folder


def _model_name(folder: Path) -> str:
    import yaml

    name: str = yaml.safe_load((folder / "inference.yml").read_text(encoding="utf-8"))["Global"]["model_name"]
    return name

"""The shipped reward groups list every knob and build."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest
from omegaconf import OmegaConf

from flowrl import load_config
from flowrl.build import build
from flowrl.config import Config, ConfigError, Data
from flowrl.rewards.combine import Component
from flowrl.rewards.frames import EveryKth, UniformFrames
from flowrl.rewards.ocr import OCR, VideoOCR
from flowrl.rewards.recognisers import PaddleOCR

FOLDER = Path(__file__).parents[3] / "configs" / "reward"


WHOLE = [path for path in sorted(FOLDER.glob("*.yaml")) if "defaults" not in OmegaConf.load(path)]


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    """Every mapping with a `_target_`."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node
        for child in node.values():
            yield from nodes(child)


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_builds_and_lists_every_field_with_its_default(path: Path) -> None:
    cfg = OmegaConf.create(path.read_text(encoding="utf-8").replace("???", "given"))  # what only a user can give
    assert list(cfg) == ["components"]  # so that several can be composed: reward=[ocr,jpeg_compressibility]
    for name, node in cfg.components.items():
        build(node, f"reward.components.{name}", Component)
        for described in nodes(OmegaConf.to_container(node)):
            known = {field.name: field for field in fields(locate(described.pop("_target_"))) if field.init}
            assert described.keys() == known.keys()
            for key, value in described.items():
                if key != "perfect":  # the component's own
                    assert isinstance(value, dict) or known[key].default in (value, MISSING)


def test_only_what_has_a_full_score_names_one() -> None:
    components = [OmegaConf.load(path).components for path in WHOLE]
    found = {name: node.perfect for component in components for name, node in component.items()}
    assert {name for name, perfect in found.items() if perfect is not None} <= {"ocr", "vlm_ocr"}
    assert found["ocr"] == 1.0
    with pytest.raises(ConfigError, match="perfect: must be a finite number"):
        ocr("components.ocr.perfect=.inf")


def ocr(*overrides: str) -> Component:
    cfg = OmegaConf.merge(OmegaConf.load(FOLDER / "ocr.yaml"), OmegaConf.from_dotlist(list(overrides)))
    return build(cfg.components.ocr, "reward.components.ocr", Component)


def test_the_recogniser_is_one_override_away() -> None:
    component = ocr("components.ocr.scorer.recogniser._target_=flowrl.rewards.recognisers.PaddleOCR")
    assert isinstance(component.scorer, OCR) and isinstance(component.scorer.recogniser, PaddleOCR)


def test_frames_of_videos_are_one_override_away() -> None:
    def component(*overrides: str) -> Component:
        return build(load_config(list(overrides)).reward.components.ocr, "reward.components.ocr", Component)

    published = component("~recipe", "reward=ocr_video")
    assert isinstance(published.scorer, VideoOCR) and not published.scorer.substring
    assert (published.frames, published.perfect) == (EveryKth(k=4), 1.0)
    frames = "{_target_: flowrl.rewards.frames.UniformFrames, num: 3}"
    assert component("~recipe", "reward=ocr", f"reward.components.ocr.frames={frames}").frames == UniformFrames(num=3)


def test_mistakes_are_refused_by_path() -> None:
    with pytest.raises(ConfigError, match=r"reward.components.ocr.scorer.recogniser.batch: is not a field of RapidOCR"):
        ocr("components.ocr.scorer.recogniser.batch=8")
    with pytest.raises(ConfigError, match=r"reward.components.ocr.scorer: normalise must be none or NFC or NFKC"):
        ocr("components.ocr.scorer.normalise=NFD")


def test_ocr_needs_targets() -> None:
    (problem,) = ocr().problems(Config(data=Data(target="none")))
    assert problem.path == "data.target" and "data.target=quoted" in problem.hint
    assert ocr().problems(Config(data=Data(target="quoted"))) == []


def test_a_missing_package_is_known_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddleocr", None)
    component = ocr("components.ocr.scorer.recogniser._target_=flowrl.rewards.recognisers.PaddleOCR")
    (problem,) = component.problems(Config(data=Data(target="quoted")))
    assert "paddleocr" in problem.message and ".[paddle]" in problem.hint

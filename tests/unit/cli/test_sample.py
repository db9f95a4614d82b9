"""The folder of samples; what is drawn is tested with real runs, in tests/integration/test_export.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowrl.cli import sample
from flowrl.config import Sampler
from flowrl.tracking.pictures import gallery
from flowrl.tracking.video import stills, video_suffix
from tests.unit.rewards.support import sampled_group


@pytest.mark.parametrize("num_frames", [None, 3])
def test_a_file_for_each_sample_and_all_of_them_in_a_grid(tmp_path: Path, num_frames: int | None) -> None:
    shape = (2, *(() if num_frames is None else (num_frames,)), 16, 24, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    groups = [replace(sampled_group(ordinal), images=images) for ordinal in range(2)]
    sample._write(tmp_path, groups, Sampler(frames=num_frames or 1, fps=8.0), "a test", seed=0)
    record = json.loads((tmp_path / "samples.json").read_text())
    suffix = ".png" if num_frames is None else video_suffix()
    files = [told["file"] for told in record["samples"]]
    assert files == [f"{name}{suffix}" for name in ("00000_0", "00000_1", "00001_0", "00001_1")]
    assert all((tmp_path / file).stat().st_size > 0 for file in files)
    assert (record["frames"], record["fps"]) == (num_frames or 1, 8.0)
    grid = gallery(np.concatenate([stills(images)] * 2), ["FLOW"] * 4)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "grid.png")), np.asarray(grid))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frames": 0}, "frames: must be at least 1, got 0."),
        ({"fps": 0.0}, "fps: must be from 0.1 to 1000, got 0.0."),
        ({"fps": float("inf")}, "fps: must be from 0.1 to 1000, got inf."),
        ({"guidance_scale": float("inf")}, "guidance_scale: must be at least 0, got inf."),
    ],
)
def test_impossible_values(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(sample.ConfigError) as caught:
        sample.check(sample.Sample(out="x", prompt="A", model="tiny_sd3", **arguments))
    assert str(caught.value) == message


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert sample.TOOL.command(["prompt=A", *arguments]) == 2
    return capsys.readouterr().err


def test_a_model_refuses_here_what_it_refuses_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the tool's own words, and before anything is read."""
    said = refusal(capsys, "model=some/flux", "family=flux", "guidance_scale=3", f"out={tmp_path / 'out'}")
    assert "  guidance_scale: must be 1 for FLUX.1" in said and "sampler." not in said
    said = refusal(capsys, "model=z_image", f"out={tmp_path / 'out'}")
    assert "model: z_image is a family: it has no weights of its own. Write model=FOLDER_OR_ID family=z_image." in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("spelling", ["config_dir={}", "--config-dir={}", "--config-dir {}"])
def test_a_family_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], spelling: str) -> None:
    option = tmp_path / "options/model/mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: flowrl.models.sd3.SD3\npath: null\n")
    folder = spelling.format(tmp_path / "options").split()
    said = refusal(capsys, *folder, "family=mine", f"model={tmp_path / 'nowhere'}", f"out={tmp_path / 'out'}")
    assert f"model.path={tmp_path / 'nowhere'}" in said and "there is no such folder" in said

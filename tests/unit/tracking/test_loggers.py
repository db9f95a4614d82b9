"""Each logger writes what can be read back; the tracker loses nothing when one of them fails."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowrl.build import build
from flowrl.config import ConfigError
from flowrl.tracking.console import print_summary
from flowrl.tracking.loggers.base import Logger, RunInfo, Session
from flowrl.tracking.loggers.console import ConsoleLogger, ConsoleSession
from flowrl.tracking.loggers.jsonl import JSONLLogger, read_metrics
from flowrl.tracking.loggers.tensorboard import TensorBoardLogger
from flowrl.tracking.loggers.wandb import WandbLogger
from flowrl.tracking.summary import Summary
from flowrl.tracking.tracker import Tracker
from flowrl.tracking.video import stills, video_suffix
from tests.unit.test_files import kill_while_writing
from tests.unit.tracking.conftest import flat_video

CONFIGS = Path(__file__).parents[3] / "configs" / "logger"
VIDEOS = np.stack([flat_video(shade, shade + 50, shade + 100) for shade in (10, 20, 30)])
PICTURES = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 32, 80, 3), np.uint8)


def info(run_dir: Path, resumed_from: int | None = None) -> RunInfo:
    return RunInfo(name="tiny", run_dir=run_dir, total_steps=20, config_yaml="seed: 0\n", resumed_from=resumed_from)


def log_steps(logger: Logger, run: RunInfo, steps: Sequence[int], offset: float = 0.0) -> None:
    with Tracker([logger]) as tracker:
        tracker.start(run)
        for step in steps:
            tracker.log(step, {"reward/mean": step + offset})


# ---------------------------------------------------------------------------------------------- JSON lines


def test_jsonl_round_trip_is_exact_and_strict_json(tmp_path: Path) -> None:
    metrics = {"a": 0.1 + 0.2, "b": 1e-300, "nan": math.nan, "up": math.inf, "down": -math.inf}
    with Tracker() as tracker:
        tracker.start(info(tmp_path))
        tracker.log(0, metrics)
        tracker.log(4, {"a": 1.0})
    (first, read), second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first, second) == (0, (4, {"a": 1.0}))
    assert math.isnan(read.pop("nan"))
    assert read == {name: value for name, value in metrics.items() if name != "nan"}
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    log_steps(JSONLLogger(), info(tmp_path), range(8))
    log_steps(JSONLLogger(), info(tmp_path, resumed_from=4), range(5, 10), offset=0.5)
    expected = [(step, {"reward/mean": step + 0.5 * (step > 4)}) for step in range(10)]
    assert read_metrics(tmp_path / "metrics.jsonl") == expected


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_series_that_is_gone_is_reported_unless_it_was_another_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, elsewhere: bool
) -> None:
    log_steps(JSONLLogger(), replace(info(tmp_path, resumed_from=4), elsewhere=elsewhere), [5])
    assert [record.message.endswith("begins anew after step 4") for record in caplog.records] == [True] * (
        not elsewhere
    )


def test_a_fresh_run_forgets_everything(tmp_path: Path) -> None:
    log_steps(JSONLLogger(), info(tmp_path), range(3))
    log_steps(JSONLLogger(), info(tmp_path), range(1))
    assert read_metrics(tmp_path / "metrics.jsonl") == [(0, {"reward/mean": 0.0})]


def test_a_line_cut_short_is_dropped_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "a": 1}\n{"step": 1, "a"')
    assert read_metrics(path) == [(0, {"a": 1.0})]
    log_steps(JSONLLogger(), info(tmp_path, resumed_from=0), [1])
    assert [step for step, _ in read_metrics(path)] == [0, 1]
    path.write_text('{"step": 0}\n{"ste": 1}\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        read_metrics(path)


LOGGING = """
import sys, itertools
from pathlib import Path
from flowrl.tracking.loggers.base import RunInfo
from flowrl.tracking.tracker import Tracker
tracker = Tracker()
tracker.start(RunInfo(name="tiny", run_dir=Path(sys.argv[1]), total_steps=9, config_yaml=""))
print("ready", flush=True)
for step in itertools.count():
    tracker.log(step, {f"metric/{i}": step + i for i in range(500)})
"""


def test_a_killed_run_leaves_whole_lines_and_can_go_on(tmp_path: Path) -> None:
    kill_while_writing(LOGGING, tmp_path, 0.2)
    records = read_metrics(tmp_path / "metrics.jsonl")
    steps = [step for step, _ in records]
    assert steps == list(range(len(steps))) and len(steps) > 10
    assert all(metrics == {f"metric/{i}": step + i for i in range(500)} for step, metrics in records)
    log_steps(JSONLLogger(), info(tmp_path, resumed_from=7), range(8, 12))
    assert [step for step, _ in read_metrics(tmp_path / "metrics.jsonl")] == list(range(12))


# ---------------------------------------------------------------------------------------------- tracker


class Breaks(Exception):
    pass


@dataclass(frozen=True)
class Recording:
    """A logger that keeps what it is given, and breaks where it is told to."""

    events: list[str]
    breaks: str = ""

    def start(self, run: RunInfo) -> Session:
        return self._did("start") or self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._did(f"log {step}")

    def log_images(self, step: int, name: str, images: np.ndarray, captions: Sequence[str]) -> None:
        self._did(f"images {name}")

    def close(self) -> None:
        self._did("close")

    def _did(self, event: str) -> None:
        self.events.append(event)
        if event == self.breaks:
            raise Breaks(event)


def test_a_failing_logger_is_an_error_and_costs_no_record(tmp_path: Path) -> None:
    other = Recording([])
    with pytest.raises(Breaks), Tracker([Recording([], breaks="log 1"), other]) as tracker:
        tracker.start(info(tmp_path))
        tracker.log(0, {})
        tracker.log(1, {"a": 2.0})
    assert read_metrics(tmp_path / "metrics.jsonl")[-1] == (1, {"a": 2.0})
    assert other.events == ["start", "log 0", "close"]


def test_loggers_are_closed_when_another_cannot_start(tmp_path: Path) -> None:
    first = Recording([])
    with pytest.raises(Breaks), Tracker([first, Recording([], breaks="start")]) as tracker:
        tracker.start(info(tmp_path))
    assert first.events == ["start", "close"]


def test_a_logger_that_cannot_be_closed_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Recording([])
    with Tracker([first, Recording([], breaks="close")]) as tracker:
        tracker.start(info(tmp_path))
    assert first.events == ["start", "close"]
    assert caplog.messages == ["Recording could not be closed: Breaks: close"]


def test_there_is_one_step_axis(tmp_path: Path) -> None:
    with Tracker() as tracker:
        tracker.start(info(tmp_path, resumed_from=3))
        tracker.log(4, {})
        for step in (3, 4):
            with pytest.raises(ValueError, match=f"step {step} was logged after step 4"):
                tracker.log(step, {})
    assert [step for step, _ in read_metrics(tmp_path / "metrics.jsonl")] == [4]


def test_pictures_are_checked_once_for_all_loggers(tmp_path: Path) -> None:
    recording = Recording([])
    with Tracker([recording]) as tracker:
        tracker.start(info(tmp_path))
        tracker.log_images(0, "eval", PICTURES, ["a", "b", "c"])
        with pytest.raises(ValueError, match=r"must be uint8 \[B, H, W, 3\].*, got float32"):
            tracker.log_images(0, "eval", PICTURES.astype(np.float32), ["a", "b", "c"])
        with pytest.raises(ValueError, match="3 images need as many captions, got 1"):
            tracker.log_images(0, "eval", PICTURES, ["a"])
    assert recording.events == ["start", "images eval", "close"]


@dataclass(frozen=True)
class Paper(Recording):
    """Says how much it is shown."""

    def log_images(self, step: int, name: str, images: np.ndarray, captions: Sequence[str]) -> None:
        self._did(f"images {list(images.shape)}")


@dataclass(frozen=True)
class Screen(Paper):
    """And can show videos."""

    def log_videos(self, step: int, name: str, videos: np.ndarray, captions: Sequence[str]) -> None:
        self._did(f"videos {list(videos.shape)}")


def test_videos_go_to_loggers_that_show_them_and_stills_to_the_others(tmp_path: Path) -> None:
    screen, paper = Screen([]), Paper([])
    with Tracker([screen, paper]) as tracker:
        tracker.start(info(tmp_path))
        tracker.log_images(0, "eval", VIDEOS, ["a", "b", "c"])
        tracker.log_images(1, "eval", PICTURES, ["a", "b", "c"])
    assert screen.events[1:3] == ["videos [3, 3, 32, 80, 3]", "images [3, 32, 80, 3]"]
    assert paper.events[1:3] == [f"images {list(stills(VIDEOS).shape)}", "images [3, 32, 80, 3]"]


# ---------------------------------------------------------------------------------------------- TensorBoard


def test_tensorboard_reads_back_without_duplicates(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    log_steps(logger, info(tmp_path), range(6))
    with Tracker([logger]) as tracker:
        tracker.start(info(tmp_path, resumed_from=3))
        tracker.log_images(4, "eval", PICTURES, ["FLOW", "MOON", "TREE"])
        tracker.log(4, {"reward/mean": 4.5})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert scalars == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5)]
    (sheet,) = events.Images("eval")
    assert sheet.step == 4 and sheet.width > 3 * 80 * 3 and sheet.encoded_image_string.startswith(b"\x89PNG")


# ---------------------------------------------------------------------------------------------- Weights & Biases


def test_wandb_logs_offline_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with Tracker([WandbLogger(tags=["test"])]) as tracker:
        tracker.start(info(tmp_path))
        tracker.log_images(0, "eval", PICTURES, ["FLOW", "MOON", "TREE"])
        tracker.log_images(0, "films", VIDEOS, ["RAIN", "SNOW", "WIND"])
        tracker.log(0, {"reward/mean": 0.25})
        tracker.log(1, {"reward/mean": 0.75})
    import wandb

    wandb.teardown()  # its service writes the file; only its end says that all of it is there
    assert "WANDB_API_KEY is not set, logging offline" in " ".join(capsys.readouterr().out.split())
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = path.read_bytes()  # protobuf, uncompressed
    assert all(value in written for value in (b"reward/mean", b"0.25", b"0.75", b"FLOW", b"SNOW"))
    assert len(list(path.parent.glob("files/media/images/eval*.png"))) == 3
    assert len(list(path.parent.glob(f"files/media/videos/films*{video_suffix()}"))) == 3


def test_wandb_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    online = WandbLogger(mode="online")
    with pytest.raises(ConfigError, match=r"logger.components.wandb.mode: online needs WANDB_API_KEY"):
        log_steps(online, info(tmp_path), [0])
    assert WandbLogger(mode="disabled").resolved_mode() == "disabled"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert [WandbLogger(mode=mode).resolved_mode() for mode in ("auto", "online", "offline")] == [
        "online",
        "online",
        "offline",
    ]
    with pytest.raises(ValueError, match="mode must be one of auto, online, offline, disabled, got 'on'"):
        WandbLogger(mode="on")


# ---------------------------------------------------------------------------------------------- console


def shown(terminal: bool, resumed_from: int | None = None, encoding: str = "utf-8", name: str = "tiny") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, force_terminal=terminal, width=90, color_system=None, _environ={})
    session = ConsoleSession(ConsoleLogger(), replace(info(Path(), resumed_from), name=name), console)
    for step in range(0 if resumed_from is None else resumed_from + 1, 21):
        evaluated = {"eval/heldout/ocr_mean": 0.3 + step / 40} if step % 10 == 0 else {}
        trained = {"reward/mean": step / 20, "perf/rollout_samples_per_s": 19.44} if step else {}
        session.log(step, trained | evaluated)
    session.close()
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(encoding)


def test_console_is_plain_where_there_is_no_terminal() -> None:
    text = shown(terminal=False)
    lines = text.splitlines()
    assert "\x1b" not in text and len(lines) == 21
    assert lines[0] == "step  0/20  held-out 0.300"
    assert lines[1] == "step  1/20  reward 0.050   held-out 0.300   images/s 19.4   ETA 0:00"
    assert lines[20].startswith("step 20/20  reward 1.000   held-out 0.800")


def test_console_is_live_in_a_terminal() -> None:
    text = shown(terminal=True)
    for part in ("tiny", "20/20", "reward 1.000 ▁", "█", "held-out 0.800", "images/s 19.4", "ETA"):
        assert part in text
    assert "step 20/20  held-out 0.800  from 0.300" in text
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_names_are_no_markup() -> None:
    assert "x[/foo]" in shown(terminal=True, name="x[/foo]")
    stream = io.StringIO()
    summary = Summary(before={"eval/[/a]": 0.0}, after={"eval/[/a]": 1.0}, steps=1, seconds=1.0)
    print_summary(Console(file=stream), summary, Path())
    assert "[ a]" in stream.getvalue()


TO_NOBODY = """
import sys
from pathlib import Path
from flowrl.tracking.loggers.base import RunInfo
from flowrl.tracking.loggers.console import ConsoleLogger
sys.stdin.read()
session = ConsoleLogger().start(RunInfo(name="tiny", run_dir=Path(), total_steps=3, config_yaml=""))
for step in range(3):
    session.log(step, {"reward/mean": 1.0})
session.close()
print("to nobody")
print("the end", file=sys.stderr)
"""


def test_a_run_goes_on_when_nobody_reads_its_output() -> None:
    command, pipe = [sys.executable, "-c", TO_NOBODY], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b"the end\n"
    assert process.returncode == 0


def test_console_goes_on_from_a_resumed_step_and_draws_no_blocks_in_ascii() -> None:
    text = shown(terminal=True, resumed_from=11, encoding="ascii")
    assert "11/20" in text and "20/20" in text


# ---------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_yaml_builds_a_logger_and_lists_all_its_fields(path: Path) -> None:
    components = OmegaConf.load(path).components
    assert list(components) == [path.stem]
    logger = build(components[path.stem], f"logger.components.{path.stem}", Logger)
    keys = set(components[path.stem]) - {"_target_"}
    assert keys == {f.name for f in fields(logger)}  # type: ignore[arg-type]
    assert logger == type(logger)()  # the YAML says the defaults


def test_loggers_compose() -> None:
    merged = OmegaConf.merge(*(OmegaConf.load(CONFIGS / f"{name}.yaml") for name in ("console", "tensorboard")))
    assert list(merged.components) == ["console", "tensorboard"]

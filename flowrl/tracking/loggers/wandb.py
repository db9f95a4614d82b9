"""Weights & Biases, online or offline."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from omegaconf import OmegaConf
from rich.text import Text

from flowrl.config import Config, ConfigError, Problem
from flowrl.tracking.console import Terminal
from flowrl.tracking.loggers.base import RunInfo
from flowrl.tracking.video import encoded, video_suffix

if TYPE_CHECKING:
    from wandb import Run

KEY = "WANDB_API_KEY"
MODES = ("auto", "online", "offline", "disabled")
ID_FILE = "wandb_run_id"
NO_KEY = Problem("logger.components.wandb.mode", f"online needs {KEY} in the environment.", "Set it, or set mode=auto.")


@dataclass(frozen=True, kw_only=True)
class WandbLogger:
    """A Weights & Biases run. Its key is read from the environment variable WANDB_API_KEY and from nowhere else.

    `mode` auto is online where there is a key, else offline, in the run folder: `wandb sync` uploads it later. A run
    that goes on keeps its id, and of a step that comes twice Weights & Biases keeps the first record.
    """

    project: str = "flowrl"
    entity: str | None = None  # user or team; null = the key's default
    mode: str = "auto"  # auto | online | offline | disabled
    group: str | None = None  # runs to be shown together
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")

    def problems(self, run: Config) -> list[Problem]:
        """Asked to be online, and no key."""
        return [NO_KEY] if self.mode == "online" and not has_key() else []

    def start(self, run: RunInfo) -> WandbSession:
        """Raises ConfigError for online without a key."""
        if self.mode == "auto" and not has_key():
            notice = f"wandb: {KEY} is not set, logging offline to {run.run_dir / 'wandb'}"
            Terminal().print(Text(notice, "dim"))
        return WandbSession(self, run)

    def resolved_mode(self) -> Literal["online", "offline", "disabled"]:
        """What `mode` comes to in this environment. Raises ConfigError for online without a key."""
        match self.mode:
            case "auto":
                return "online" if has_key() else "offline"
            case "online":
                if not has_key():
                    raise ConfigError(NO_KEY)
                return "online"
            case "offline":
                return "offline"
            case _:
                return "disabled"


def has_key() -> bool:
    return bool(os.environ.get(KEY))


class WandbSession:
    """An open Weights & Biases run."""

    def __init__(self, settings: WandbLogger, run: RunInfo) -> None:
        mode = settings.resolved_mode()
        self._fps = run.fps
        import wandb  # takes a second

        self._run: Run = wandb.init(
            dir=run.run_dir,
            id=_run_id(run),
            name=run.name,
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            mode=mode,
            resume="allow",
            config=cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(run.config_yaml))),
            # no copy of the output: it would record every redrawn bar
            settings=wandb.Settings(quiet=True, silent=mode != "online", console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_images(self, step: int, name: str, images: np.ndarray, captions: Sequence[str]) -> None:
        import wandb

        pictures = [wandb.Image(image, caption=caption) for image, caption in zip(images, captions, strict=True)]
        self._run.log({name: pictures}, step=step)

    def log_videos(self, step: int, name: str, videos: np.ndarray, captions: Sequence[str]) -> None:
        import wandb

        suffix = video_suffix()
        kind = cast('Literal["mp4", "gif"]', suffix.removeprefix("."))
        files = (io.BytesIO(encoded(video, self._fps, suffix)) for video in videos)
        shown = [wandb.Video(file, caption, format=kind) for file, caption in zip(files, captions, strict=True)]
        self._run.log({name: shown}, step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(run: RunInfo) -> str:
    """The id in the run folder, which makes a resumed run go on in the same place; a fresh run gets a new one."""
    path = run.run_dir / ID_FILE
    if run.resumed_from is None or not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()

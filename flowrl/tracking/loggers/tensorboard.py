"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowrl.tracking.loggers.base import RunInfo
from flowrl.tracking.pictures import gallery


@dataclass(frozen=True, kw_only=True)
class TensorBoardLogger:
    """Scalars and contact sheets under `<run folder>/<folder>`; look at them with `tensorboard --logdir runs`.

    A run that goes on from a step tells TensorBoard to purge what lies after it: no series has a step twice.
    """

    folder: str = "tensorboard"

    def start(self, run: RunInfo) -> TensorBoardSession:
        return TensorBoardSession(run.run_dir / self.folder, run.first_step)


class TensorBoardSession:
    """An open event file."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_images(self, step: int, name: str, images: np.ndarray, captions: Sequence[str]) -> None:
        self._writer.add_image(name, np.asarray(gallery(images, captions)), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()

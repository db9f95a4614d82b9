"""What a measurement was made with."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import flowrl


def provenance(command: str, *packages: str) -> dict[str, Any]:
    """The command, the day, the machine, and the versions of everything that matters."""
    import torch

    gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "no GPU"
    return {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {gpu}",
        "versions": {
            "python": platform.python_version(),
            "flowrl": flowrl.__version__,
            "torch": torch.__version__,
            **{name: version(name) for name in packages},
        },
    }

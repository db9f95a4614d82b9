"""Every error of a configuration that can be known before work starts, all of them at once.

Nothing is written, no model is read, no process is started and CUDA is not initialised; torch is the heaviest import.
"""

from flowrl.preflight.checks import encoding, preflight
from flowrl.preflight.trainer import Trainer

__all__ = ["encoding", "preflight", "Trainer"]

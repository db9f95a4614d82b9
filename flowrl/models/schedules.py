"""The noise schedule that a folder's `scheduler/scheduler_config.json` describes."""

from __future__ import annotations

from typing import Any

from flowrl.flow.schedule import DynamicShift, Schedule, StaticShift, WanUniPC
from flowrl.types import LoadError

OWN_SCHEDULE = "set sampler.schedule to a schedule of flowrl"
GRID: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "invert_sigmas": False,
}
EULER = GRID | {"stochastic_sampling": False}
UNIPC = GRID | {
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
    "final_sigmas_type": "zero",
    "use_dynamic_shifting": False,
    "shift_terminal": None,
}
UNIPC_STEPS: dict[str, Any] = {
    "solver_order": 2,
    "solver_type": "bh2",
    "predict_x0": True,
    "lower_order_final": True,
    "disable_corrector": [],
    "thresholding": False,
    "solver_p": None,
}
"""What `flow.solvers.UniPC` does."""


def euler_schedule(scheduler: Any, *, grid: str) -> Schedule:
    """Of a `FlowMatchEulerDiscreteScheduler`.

    Args:
        scheduler: the pipeline's.
        grid: "diffusers" if the pipeline leaves it to the scheduler (SD3), "linspace" if it passes 1, ..., 1/N (most
            others), "linspace_float32" if it computes them in float32 (Z-Image).

    Raises:
        LoadError: the scheduler does what no schedule of `flow.schedule` does.
    """
    kind, config = "FlowMatchEulerDiscreteScheduler", scheduler.config
    _check(scheduler, kind, EULER)
    if grid == "diffusers":
        _check(scheduler, kind, {"use_dynamic_shifting": False})
    if not config["use_dynamic_shifting"]:
        _check(scheduler, kind, {"shift_terminal": None})
        return StaticShift(shift=float(config["shift"]), grid=grid)
    _check(scheduler, kind, {"time_shift_type": "exponential"})
    terminal = config["shift_terminal"]
    return DynamicShift(
        base_shift=float(config["base_shift"]),
        max_shift=float(config["max_shift"]),
        base_seq_len=int(config["base_image_seq_len"]),
        max_seq_len=int(config["max_image_seq_len"]),
        terminal=float(terminal) if terminal else None,
        grid=grid,
    )


def unipc_schedule(scheduler: Any) -> Schedule:
    """Of a `UniPCMultistepScheduler` on flow matching's sigmas (Wan).

    Raises LoadError for another scheduler, and for settings that no schedule of `flow.schedule` has.
    """
    _check(scheduler, "UniPCMultistepScheduler", UNIPC)
    return WanUniPC(flow_shift=float(scheduler.config["flow_shift"]))


def check_unipc(scheduler: Any) -> None:
    """Raise LoadError unless a `UniPCMultistepScheduler` takes the steps of `flow.solvers.UniPC`."""
    _check(scheduler, "UniPCMultistepScheduler", UNIPC_STEPS, "set sampler/solver=euler")


def _check(scheduler: Any, kind: str, expected: dict[str, Any], instead: str = OWN_SCHEDULE) -> None:
    """Raise LoadError unless it is of that class, with these settings; null counts as false."""
    found, config = type(scheduler).__name__, scheduler.config
    if found != kind:
        raise LoadError(f"scheduler_config.json describes a {found}, not a {kind}: {instead}.")
    other = [name for name, value in expected.items() if (config.get(name, value) or None) != (value or None)]
    if other:
        settings = ", ".join(f"{name}={config[name]!r}" for name in other)
        raise LoadError(f"scheduler_config.json of a {kind} has {settings}, which flowrl does not do: {instead}.")

"""The noise schedule that a folder's `scheduler/scheduler_config.json` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.flow.schedule import DynamicShift, Schedule, StaticShift, WanUniPC
from flowrl.types import LoadError

OWN_SCHEDULE = "set sampler.schedule to a schedule of flowrl"
UNIPC = {
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
    "final_sigmas_type": "zero",
    "num_train_timesteps": 1000,
}
OTHER_GRIDS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas")


def euler_schedule(config: Mapping[str, Any], *, own_grid: bool) -> Schedule:
    """Of a `FlowMatchEulerDiscreteScheduler`.

    Args:
        config: the scheduler's.
        own_grid: does the pipeline leave the grid to the scheduler (SD3), or pass 1, ..., 1/N (FLUX and most others)?

    Raises:
        LoadError: the scheduler does what no schedule of `flow.schedule` does.
    """
    unknown = [name for name in OTHER_GRIDS if config.get(name)]
    if config.get("use_dynamic_shifting"):
        if config.get("time_shift_type", "exponential") != "exponential":
            unknown.append("time_shift_type")
        if own_grid:
            unknown.append("use_dynamic_shifting")
    elif config.get("shift_terminal"):
        unknown.append("shift_terminal")
    if unknown:
        raise LoadError(
            f"scheduler_config.json sets {', '.join(unknown)}: set sampler.schedule to a schedule of flowrl."
        )
    if not config.get("use_dynamic_shifting"):
        return StaticShift(shift=float(config["shift"]), grid="diffusers" if own_grid else "linspace")
    return DynamicShift(
        base_shift=float(config["base_shift"]),
        max_shift=float(config["max_shift"]),
        base_seq_len=int(config["base_image_seq_len"]),
        max_seq_len=int(config["max_image_seq_len"]),
        terminal=config.get("shift_terminal"),
    )


def unipc_schedule(scheduler: Any) -> Schedule:
    """Of a `UniPCMultistepScheduler` on flow matching's sigmas (Wan).

    Raises LoadError for another scheduler, and for settings that no schedule of `flow.schedule` has.
    """
    kind, config = type(scheduler).__name__, scheduler.config
    if kind != "UniPCMultistepScheduler":
        raise LoadError(f"scheduler_config.json describes a {kind}, not a UniPCMultistepScheduler: {OWN_SCHEDULE}.")
    other = [name for name in (*OTHER_GRIDS, "use_dynamic_shifting", "shift_terminal") if config.get(name)]
    other += [name for name, value in UNIPC.items() if config[name] != value]
    if other:
        raise LoadError(f"scheduler_config.json has another {', '.join(other)} than Wan's: {OWN_SCHEDULE}.")
    return WanUniPC(flow_shift=float(config["flow_shift"]))

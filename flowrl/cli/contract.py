"""What has to stay as it was when a run goes on: everything that decides which numbers it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flowrl.config import Config
from flowrl.data.prompts import fingerprint

# What may change: where, how fast and for how long a run is computed, what is kept of it, and what is said about it.
FREE = (
    "actor.fsdp", "actor.gradient_checkpointing", "actor.max_skipped_updates", "actor.micro_batch_size",
    "actor.num_ranks", "actor.timeout_s", "artifacts", "buffer", "checkpoint", "device", "launcher", "logger",
    "model.cache_dir", "model.cache_mb", "model.path", "model.revision", "name", "recipe", "resume", "rollout", "runs",
    "sampler.fps", "trainer.drop_incomplete_groups", "trainer.eval.every", "trainer.layout",
    "trainer.max_failed_rollouts_in_a_row", "trainer.max_incomplete_group_refill_rounds", "trainer.total_steps",
    "weight_sync",
    *(f"{section}.{name}" for section in ("reward", "trainer.eval.rewards")
      for name in ("load_timeout_s", "num_gpus_per_worker", "num_workers", "report_stuck_s", "retries", "runtime",
                   "timeout_s")),
)  # fmt: skip
# And what may not, although it stands below one of those: who draws, in which order, and roundings.
HELD = (
    "actor.fsdp.param_dtype", "actor.fsdp.reduce_dtype", "buffer.order", "rollout.engine", "weight_sync.mode",
    "weight_sync.wire_dtype",
)  # fmt: skip

# Of rewards on servers: where they are, and how long they are waited for.
FREE_OF_SERVERS = {"busy_timeout_s", "concurrency", "retries", "start_timeout_s", "timeout_s", "token_env", "url"}

Contract = Mapping[str, Any]
CONTENT = "content of "  # before the name of a setting that is a file


def contract(run: Config, cfg: DictConfig) -> dict[str, Any]:
    """Of a run that is to be made: plain values for JSON.

    Files of prompts count by their content, and may move; so does the model, whose fingerprint the trainer adds.
    """
    settings = {path: value for path, value in _leaves(OmegaConf.to_container(cfg, resolve=True)) if not _is_free(path)}
    if settings.get("model.init") == "pretrained":
        settings.pop("model.size", None)  # the folder says how large it is
    if run.actor.optimizer.schedule != "constant" and run.actor.optimizer.decay_steps is None:
        settings["trainer.total_steps"] = run.trainer.total_steps  # the rate comes down over the whole run
    files = {"data.train": run.data.train}
    files |= {f"trainer.eval.sets.{name}": path for name, path in run.trainer.eval.sets.items()}
    by_place = {path: value for path, value in settings.items() if path not in files}
    return by_place | {f"{CONTENT}{name}": fingerprint(path) for name, path in files.items()}


def differences(before: Contract, now: Contract) -> str:
    """A table, one line per setting that differs; empty if none does.

    A single key that only one of the two has does not differ: versions of flowrl add and drop keys.
    """
    names = sorted(
        name
        for name in before.keys() | now.keys()
        if before.get(name) != now.get(name) and not _is_new(name, before) and not _is_new(name, now)
    )
    rows = [("setting", "there", "now")] + [(name, _shown(before, name), _shown(now, name)) for name in names]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) if names else ""


def _shown(values: Contract, name: str) -> str:
    value = values.get(name, "-")
    text = "null" if value is None else str(value)
    return text[:12] if name.startswith(CONTENT) else text


def _is_free(path: str) -> bool:
    *above, name = path.split(".")
    of_server = above[-1:] == ["scorer"] and name in FREE_OF_SERVERS
    return of_server or (_below(path, FREE) and not _below(path, HELD))


def _below(path: str, sections: Sequence[str]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def _is_new(name: str, other: Contract) -> bool:
    """Whether `other` lacks this one key of something that it has: another version of flowrl knows, or knew, it."""
    parent = name.rpartition(".")[0]
    return name not in other and not name.startswith(CONTENT) and any(key.rpartition(".")[0] == parent for key in other)


def _leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict) or not tree:
        return [(path, tree)]
    return [leaf for name, child in tree.items() for leaf in _leaves(child, f"{path}.{name}" if path else str(name))]

"""Pictures and trajectories in the run folder, with a manifest that says where each comes from.

artifacts/rollouts/000012/000345/      rollout 12, the group with ordinal 345
    manifest.json                      prompt, samples, rewards, policy version, sampling
    0.png 1.png ...                    one picture per slot; of a text-to-video model 0.mp4, or 0.gif
    trajectory.safetensors             if asked for
artifacts/evaluations/000010/heldout/000007/ ...
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from flowrl.files import atomic_folder, remove_folder
from flowrl.tracking.video import file_name, save
from flowrl.types import Drawn, Rows, Sampling, ScoredGroup


@dataclass(frozen=True, kw_only=True)
class ArtifactStore:
    """Writes groups under `run_dir/artifacts`, from one process, one group at a time: memory stays bounded.

    A rollout or an evaluation appears whole or not at all. Of rollouts the newest `keep` stay (0: none are written), of
    evaluations all do. `trajectories` adds latents, log-probabilities and conditions.
    Videos play at `fps` frames per second.
    """

    run_dir: Path
    keep: int = 2
    trajectories: bool = False
    fps: float = 16.0

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise ValueError(f"keep must be 0 or more rollouts, got {self.keep}")

    def write_rollout(self, rollout_id: int, groups: Iterable[ScoredGroup]) -> None:
        """Write one rollout, then remove older ones, and newer ones that a resumed run has gone back behind."""
        if self.keep == 0:
            return
        rollouts = self.run_dir / "artifacts" / "rollouts"
        self._write(rollouts / f"{rollout_id:06d}", groups)
        written = sorted(int(path.name) for path in rollouts.iterdir() if path.name.isdigit())
        kept = [number for number in written if number <= rollout_id][-self.keep :]
        for path in rollouts.iterdir():
            if not (path.name.isdigit() and int(path.name) in kept):
                remove_folder(path)

    def write_evaluation(self, step: int, name: str, groups: Iterable[ScoredGroup]) -> None:
        """Write the evaluation of the prompt set `name` at `step`; one already there is replaced."""
        self._write(self.run_dir / "artifacts" / "evaluations" / f"{step:06d}" / name, groups)

    def _write(self, path: Path, groups: Iterable[ScoredGroup]) -> None:
        with atomic_folder(path) as folder:
            for scored in groups:
                group = folder / f"{scored.sampled.group.ordinal:06d}"
                group.mkdir()
                write_group(group, scored, trajectories=self.trajectories, fps=self.fps)


def write_group(folder: Path, scored: ScoredGroup, *, trajectories: bool, fps: float) -> None:
    """The files of one group, into an existing empty folder."""
    sampled = scored.sampled
    if sampled.images is not None:
        for slot, picture in enumerate(sampled.images):
            save(picture, folder / file_name(str(slot), picture), fps)
    if trajectories:
        drawn: Drawn = sampled.drawn.fetch()
        tensors = _tensors(drawn.trajectory, "") | _tensors(drawn.conditions, "conditions.")
        save_file(tensors, folder / "trajectory.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest(scored), indent=2, ensure_ascii=False) + "\n")


def manifest(scored: ScoredGroup) -> dict[str, Any]:
    """What `manifest.json` says of a group: plain values only."""
    sampled, group, prompt = scored.sampled, scored.sampled.group, scored.sampled.group.prompt
    samples = [
        {
            "id": group.sample_id(slot),
            "slot": slot,
            "picture": None if sampled.images is None else file_name(str(slot), sampled.images[slot]),
            "rewards": {component: float(values[slot]) for component, values in scored.rewards.items()},
            "policy_version": sampled.sampling.policy_version,
            "trained_steps": list(sampled.sampling.step_index),
        }
        for slot in range(group.num_samples)
    ]
    return {
        "ordinal": group.ordinal,
        "occurrence": group.occurrence,
        "prompt": {"id": prompt.id, "text": prompt.text, "target": prompt.target, "negative": prompt.negative},
        "sampling": sampling(sampled.sampling),
        "samples": samples,
    }


def sampling(drawn: Sampling) -> dict[str, Any]:
    """How the group was sampled, and a fingerprint of it: another one means another sampler."""
    settings = {
        "stochastic_steps": list(drawn.step_index),
        "drawn_by": drawn.drawn_by,
        "sigmas": list(drawn.sigmas),
        "guidance_scale": drawn.guidance_scale,
        "latent_shape": list(drawn.latent_shape),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return {"fingerprint": digest[:16], **settings}


def _tensors(rows: Rows, prefix: str) -> dict[str, Tensor]:
    """Every tensor by its dotted name, as safetensors wants them: contiguous, each with memory of its own."""
    tensors: dict[str, Tensor] = {}
    for f in fields(rows):
        value = getattr(rows, f.name)
        if isinstance(value, Tensor):
            tensors[prefix + f.name] = value.detach().clone().contiguous()
        elif isinstance(value, Rows):
            tensors |= _tensors(value, f"{prefix}{f.name}.")
    return tensors

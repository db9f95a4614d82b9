"""What is written is what was sampled; old rollouts go, evaluations stay, and a kill leaves only whole folders."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.flow.solvers import DPM2, Euler, Solver
from flowrl.prompts import Prompt
from flowrl.tracking.artifacts import ArtifactStore, manifest, sampling
from flowrl.types import Conditions, Drawn, Group, SampledGroup, Sampling, ScoredGroup, Trajectory
from tests.unit.test_files import kill_while_writing
from tests.unit.tracking.conftest import flat_video

K, S = 3, 2


@dataclass(frozen=True)
class Embeds(Conditions):
    embeds: Tensor


def scored(ordinal: int = 34, seed: int = 0, images: bool = True) -> ScoredGroup:
    """A group of three samples with two stored steps each."""
    generator = torch.Generator().manual_seed(seed)
    group = Group(ordinal=ordinal, prompt=Prompt("p7", 'A sign "FLØW"', "FLØW"), occurrence=1, num_samples=K)
    latents = torch.randn(K, S + 1, 4, 8, 20, generator=generator)
    trajectory = Trajectory(
        latents=latents[:, :-1],  # views of one storage, as slices of a rollout are
        next_latents=latents[:, 1:],
        step_index=torch.tensor([[1, 2]] * K),
        log_probs=torch.randn(K, S, generator=generator, dtype=torch.float64),
        final_latents=latents[:, -1],
        sample_ids=tuple(group.sample_id(slot) for slot in range(K)),
        group_ids=torch.full((K,), ordinal),
        slots=torch.arange(K),
        policy_version=torch.full((K,), 5),
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.0]),
        dynamics=FlowSDE(noise_level=0.7),
        solver=Euler(),
    )
    pictures = np.random.default_rng(seed).integers(0, 256, (K, 32, 80, 3), dtype=np.uint8)
    conditions = Embeds(embeds=torch.randn(1, 12, 8, generator=generator), guidance_scale=4.5)
    sampled = SampledGroup.of(group, pictures if images else None, Drawn(trajectory, conditions))
    return ScoredGroup(sampled, {"ocr": np.array([0.0, 0.25, 1.0])})


def rollouts(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "artifacts" / "rollouts").iterdir())


def test_a_rollout_reads_back(tmp_path: Path) -> None:
    groups = [scored(34, seed=0), scored(35, seed=1)]
    ArtifactStore(run_dir=tmp_path, trajectories=True).write_rollout(12, groups)
    for group in groups:
        folder = tmp_path / "artifacts" / "rollouts" / "000012" / f"{group.sampled.group.ordinal:06d}"
        told = json.loads((folder / "manifest.json").read_text())
        assert told == manifest(group)
        pictures = [np.asarray(Image.open(folder / sample["picture"])) for sample in told["samples"]]
        assert np.array_equal(pictures, group.sampled.images)
        tensors = load_file(folder / "trajectory.safetensors")
        drawn: Drawn = group.sampled.drawn.fetch()
        trajectory = drawn.trajectory
        for name in ("latents", "next_latents", "log_probs", "final_latents", "sigmas", "policy_version"):
            assert torch.equal(tensors[name], getattr(trajectory, name))
            assert tensors[name].dtype == getattr(trajectory, name).dtype
        assert torch.equal(tensors["conditions.embeds"], drawn.conditions.embeds)


def test_videos_are_kept_as_films(tmp_path: Path, film_suffix: str) -> None:
    group = scored()
    videos = np.stack([flat_video(10 + shade, 200, 90) for shade in range(K)])
    group = replace(group, sampled=replace(group.sampled, images=videos))
    ArtifactStore(run_dir=tmp_path, fps=8.0).write_evaluation(0, "heldout", [group])
    (folder,) = (tmp_path / "artifacts/evaluations/000000/heldout").iterdir()
    told = [sample["picture"] for sample in json.loads((folder / "manifest.json").read_text())["samples"]]
    assert told == [f"{slot}{film_suffix}" for slot in range(K)]
    assert sorted(path.name for path in folder.iterdir()) == [*told, "manifest.json"]
    assert all((folder / name).stat().st_size > 100 for name in told)


def test_the_manifest_says_where_a_sample_comes_from() -> None:
    told = manifest(scored())
    assert told["prompt"] == {"id": "p7", "text": 'A sign "FLØW"', "target": "FLØW", "negative": ""}
    assert told["samples"][1] == {
        "id": "p7:1:1",
        "slot": 1,
        "picture": "1.png",
        "rewards": {"ocr": 0.25},
        "policy_version": 5,
        "trained_steps": [1, 2],
    }
    assert told["sampling"]["drawn_by"].startswith("FlowSDE(noise_level=0.7")
    assert told["sampling"]["latent_shape"] == [4, 8, 20]


def test_the_fingerprint_changes_with_the_sampler_and_with_nothing_else() -> None:
    drawn = scored(1, seed=0).sampled.drawn.fetch()
    others = [
        replace(drawn, trajectory=replace(drawn.trajectory, dynamics=FlowSDE(noise_level=0.8))),
        replace(drawn, trajectory=replace(drawn.trajectory, sigmas=torch.tensor([1.0, 0.7, 0.5, 0.0]))),
        replace(drawn, conditions=replace(drawn.conditions, guidance_scale=1.0)),
    ]
    others += [
        replace(drawn, trajectory=replace(drawn.trajectory, step_index=torch.tensor([[0, 1]] * K))),
        deterministic(drawn, Euler()),
        deterministic(drawn, DPM2()),
    ]
    prints = {sampling(Sampling.of(other))["fingerprint"] for other in [drawn, *others]}
    assert len(prints) == 7
    assert sampling(scored(2, seed=9).sampled.sampling) == sampling(Sampling.of(drawn))


def deterministic(drawn: Drawn, solver: Solver) -> Drawn:
    """The same group as a rollout without stochastic steps leaves it."""
    none = torch.empty(K, 0, dtype=torch.int64)
    return replace(drawn, trajectory=replace(drawn.trajectory, step_index=none, solver=solver))


def test_only_the_newest_rollouts_stay(tmp_path: Path) -> None:
    store = ArtifactStore(run_dir=tmp_path, keep=2)
    for rollout in (1, 5, 9):
        store.write_rollout(rollout, [scored()])
    assert rollouts(tmp_path) == ["000005", "000009"]
    store.write_rollout(6, [scored()])  # the run was resumed from before rollout 9
    assert rollouts(tmp_path) == ["000005", "000006"]
    store.write_rollout(6, [scored(99)])  # written again
    assert rollouts(tmp_path) == ["000005", "000006"]
    assert [path.name for path in (tmp_path / "artifacts" / "rollouts" / "000006").iterdir()] == ["000099"]


def test_evaluations_stay_and_are_replaced_by_name(tmp_path: Path) -> None:
    store = ArtifactStore(run_dir=tmp_path, keep=1)
    for step, name in ((0, "heldout"), (10, "heldout"), (10, "other"), (10, "heldout")):
        store.write_evaluation(step, name, [scored()])
        store.write_rollout(step, [scored()])
    evaluations = tmp_path / "artifacts" / "evaluations"
    found = sorted(str(path.relative_to(evaluations)) for path in evaluations.glob("*/*"))
    assert found == ["000000/heldout", "000010/heldout", "000010/other"]


def test_without_pictures_or_without_rollouts(tmp_path: Path) -> None:
    ArtifactStore(run_dir=tmp_path, keep=0).write_rollout(1, [scored()])
    assert not list(tmp_path.iterdir())
    ArtifactStore(run_dir=tmp_path).write_rollout(1, [scored(images=False)])
    (group,) = (tmp_path / "artifacts" / "rollouts" / "000001").iterdir()
    assert [path.name for path in group.iterdir()] == ["manifest.json"]
    assert json.loads((group / "manifest.json").read_text())["samples"][0]["picture"] is None
    with pytest.raises(ValueError, match="keep must be 0 or more rollouts, got -1"):
        ArtifactStore(run_dir=tmp_path, keep=-1)


def test_groups_are_taken_one_at_a_time(tmp_path: Path) -> None:
    """Each group is on disk before the next is asked for: a generator need not hold them all."""
    partial = tmp_path / "artifacts" / "rollouts" / ".000003.partial"

    def stream():  # type: ignore[no-untyped-def]
        for ordinal in range(4):
            assert len(list(partial.glob("*/manifest.json"))) == ordinal
            yield scored(ordinal)

    ArtifactStore(run_dir=tmp_path).write_rollout(3, stream())
    assert rollouts(tmp_path) == ["000003"]


WRITER = """
import sys, itertools
from pathlib import Path
from flowrl.tracking.artifacts import ArtifactStore
from tests.unit.tracking.test_artifacts import scored
store = ArtifactStore(run_dir=Path(sys.argv[1]), keep=2, trajectories=True)
groups = [scored(ordinal) for ordinal in range(4)]
store.write_rollout(0, groups)
print("ready", flush=True)
for rollout in itertools.count(1):
    store.write_rollout(rollout, groups)
"""


def test_a_killed_run_leaves_whole_rollouts_only(tmp_path: Path) -> None:
    kill_while_writing(WRITER, tmp_path, seconds=0.213)
    seen = [name for name in rollouts(tmp_path) if not name.startswith(".")]
    assert seen
    for name in seen:
        folder = tmp_path / "artifacts" / "rollouts" / name
        assert sorted(path.name for path in folder.iterdir()) == [f"{ordinal:06d}" for ordinal in range(4)]
        for group in folder.iterdir():
            assert json.loads((group / "manifest.json").read_text())["samples"]
            assert len(load_file(group / "trajectory.safetensors")["latents"]) == K
            for slot in range(K):
                Image.open(group / f"{slot}.png").load()
    ArtifactStore(run_dir=tmp_path).write_rollout(10**6, [scored()])
    assert rollouts(tmp_path)[-1] == "1000000" and not [n for n in rollouts(tmp_path) if n.startswith(".")]

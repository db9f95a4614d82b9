"""The records that travel between stages, and the protocols that the stages keep.

Shape letters, used in every docstring of the package:

    B  samples                          C H W F  latent channels, height, width, frames
    K  samples of one group (prompt)    L D      text tokens, their width
    N  denoising steps                  S        stored (trained) steps of a sample
    T  training rows: (sample, step) or (sample, time) pairs

Data flows one way: Group -> SampledGroup -> ScoredGroup -> Samples -> TrainBatch -> Loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.config import Config, Sampler
from flowrl.errors import ExplainedError
from flowrl.flow.advantage import Advantages
from flowrl.flow.decay import Decay
from flowrl.flow.dynamics.base import Dynamics
from flowrl.flow.noise import Noise
from flowrl.flow.schedule import Schedule
from flowrl.flow.solvers import Solver
from flowrl.prompts import Prompt
from flowrl.rows import SHARED as SHARED
from flowrl.rows import Rows as Rows

# ---------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Group:
    """One prompt to be drawn `num_samples` times: the unit of normalisation, of buffering and of accounting.

    `ordinal` is never reused within a run and survives a resume; it keys the noise. `occurrence` counts the groups of
    the same prompt in what is drawn of a file: the same prompt twice is two groups with different noise.
    """

    ordinal: int
    prompt: Prompt
    occurrence: int
    num_samples: int

    def sample_id(self, slot: int) -> str:
        """`prompt id : occurrence : slot`, of no other sample that is drawn of the same file."""
        return f"{self.prompt.id}:{self.occurrence}:{slot}"


# ---------------------------------------------------------------------------------------------- rollout


@dataclass(frozen=True)
class Conditions(Rows):
    """What a policy conditions on, one row per prompt; each adapter defines its own fields.

    `guidance_scale` is v_u + g (v_c - v_u), 1 = off. It travels with the embeddings, so that a replay cannot use
    another guidance than the rollout did.
    """

    guidance_scale: float = field(default=1.0, kw_only=True, metadata=SHARED)

    def embeddings(self) -> Mapping[str, Tensor]:
        """What a reward that looks at latents may want to know of the prompts, one row each, by diffusers' names.

        `prompt_embeds`, `pooled_prompt_embeds`, `prompt_embeds_mask`; empty if the policy has no such thing.
        """
        return {}


@dataclass(frozen=True)
class Trajectory(Rows):
    """S stored transitions of B samples, with the sigmas and the dynamics that they were sampled with.

    Latents are float32 whatever the policy computes in: storing them in bfloat16 moves the first ratios by 1-4 %.
    """

    latents: Tensor  # [B, S, ...] float32, x at sigmas[step_index]
    next_latents: Tensor  # [B, S, ...] float32, x at sigmas[step_index + 1]
    step_index: Tensor  # [B, S] int64
    log_probs: Tensor  # [B, S] float64, of the behaviour policy
    final_latents: Tensor  # [B, ...] float32, x_0
    sample_ids: tuple[str, ...]
    group_ids: Tensor  # [B] int64, ordinals of the groups
    slots: Tensor  # [B] int64, 0..K-1 within the group
    policy_version: Tensor  # [B] int64, of the weights that sampled
    sigmas: Tensor = field(kw_only=True, metadata=SHARED)  # [N + 1] float32, last 0
    dynamics: Dynamics = field(kw_only=True, metadata=SHARED)  # of the stored steps
    solver: Solver = field(kw_only=True, metadata=SHARED)  # of rollouts without stored steps


@dataclass(frozen=True)
class Drawn:
    """What a rollout of one group leaves for training: its K samples, and one row of conditions for all of them."""

    trajectory: Trajectory
    conditions: Conditions


@dataclass(frozen=True)
class Sampling:
    """How a group was drawn, in plain values: what its pictures can be told apart by."""

    policy_version: int
    step_index: tuple[int, ...]  # the stored steps
    sigmas: tuple[float, ...]
    drawn_by: str  # the dynamics of stored steps, the solver where there are none
    guidance_scale: float
    latent_shape: tuple[int, ...]

    @classmethod
    def of(cls, drawn: Drawn) -> Self:
        """All samples of a group are drawn alike."""
        trajectory = drawn.trajectory
        steps = tuple(trajectory.step_index[0].tolist())
        return cls(
            policy_version=int(trajectory.policy_version[0]),
            step_index=steps,
            sigmas=tuple(trajectory.sigmas.tolist()),
            drawn_by=repr(trajectory.dynamics if steps else trajectory.solver),
            guidance_scale=drawn.conditions.guidance_scale,
            latent_shape=tuple(trajectory.final_latents.shape[1:]),
        )


class Handle(Protocol):
    """Where something heavy lies. It travels between processes instead of the thing itself."""

    def fetch(self) -> Any:
        """The thing, to be read: its memory may be the store's, which others read, too. Whoever writes copies it first.

        Raises KeyError if it is there no longer.
        """
        ...


@dataclass(frozen=True)
class InMemory:
    """The handle of something that lies in this very process."""

    value: Any

    def fetch(self) -> Any:
        """The thing itself."""
        return self.value


@dataclass(frozen=True)
class SampledGroup:
    """A group after the rollout: pictures for the rewards, and a handle of the `Drawn` for the actor."""

    group: Group
    images: np.ndarray | None  # uint8 [K, H, W, 3], of videos [K, F, H, W, 3]; None when the rollout keeps latents only
    sampling: Sampling
    drawn: Handle

    @classmethod
    def of(cls, group: Group, images: np.ndarray | None, drawn: Drawn) -> Self:
        """With `drawn` in this process, as engines make it."""
        return cls(group, images, Sampling.of(drawn), InMemory(drawn))


@dataclass(frozen=True)
class ScoredGroup:
    """A group after its rewards: float64 [K] by component, every value finite."""

    sampled: SampledGroup
    rewards: Mapping[str, np.ndarray]


class Engine(Protocol):
    """Turns groups into pictures with one version of the weights (`rollout.engine`)."""

    @property
    def version(self) -> int:
        """Version of the weights that the next `generate` samples with."""
        ...

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        """Every sample of every group, in the order of `groups`, each group as soon as it is finished."""
        ...

    def publish(self, version: int) -> None:
        """The weights are now those of `version`; only between rollout batches. Raises ValueError if it goes back."""
        ...

    def sleep(self) -> None:
        """Give up device memory until `wake`."""
        ...

    def wake(self) -> None:
        """Be ready to generate again."""
        ...


@runtime_checkable
class EngineConfig(Protocol):
    """Which engine samples: a frozen dataclass, cheap to build and to pickle (`rollout.engine`)."""

    def open(self, run: Config, policy: Policy) -> Engine:
        """The engine of `run`. `policy` encodes, decodes and knows the shapes; its weights may be what samples."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """One reward component. Cheap to construct and to pickle; `load` does the heavy work, once, where it runs."""

    def load(self) -> None:
        """Read models into memory; called once in each worker before the first `score`."""
        ...

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B] for uint8 RGB images [B, H, W, 3] and their prompts. Raises on failure, never a stand-in.

        Of videos it is shown the frames that its component's `frames` chooses, one by one.
        """
        ...


# ---------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Samples(Rows):
    """Samples to train on, as algorithms see them. Conditions stay with the actor; `condition_rows` points at them."""

    trajectory: Trajectory
    advantages: Tensor  # [B] float64
    condition_rows: Tensor  # [B] int64


@dataclass(frozen=True)
class TrainBatch(Rows):
    """Training rows, sample-major; each algorithm adds what its loss reads. Frozen before the first update."""

    condition_rows: Tensor  # [T] int64
    group_ids: Tensor  # [T] int64
    advantages: Tensor  # [T] float64


@dataclass(frozen=True)
class Loss:
    """`terms` [T] are summed and divided by the rows of the whole update, over all micro-batches and ranks.

    `means` and `spreads` are detached [T] diagnostics by name; of a spread, mean, std, min and max are logged.
    """

    terms: Tensor
    means: Mapping[str, Tensor] = field(default_factory=dict)
    spreads: Mapping[str, Tensor] = field(default_factory=dict)


class Velocity(Protocol):
    """v(x, sigma | condition), guidance included; ~ noise - x_0."""

    def __call__(self, sample: Tensor, sigma: Tensor, condition_rows: Tensor) -> Tensor:
        """[T, ...] float32 for sample [T, ...], sigma [T] and condition_rows int64 [T]."""
        ...


@dataclass(frozen=True)
class Velocities:
    """What a cycle may evaluate without gradient: the policy before its first update, and the snapshots by name."""

    policy: Velocity
    snapshots: Mapping[str, Velocity] = field(default_factory=dict)


@dataclass(frozen=True)
class Needs:
    """What an algorithm wants from the stages before it.

    A snapshot is a second set of the trained weights, by a name of the algorithm's choice. With a decay it follows the
    policy after each cycle, theta_s <- d theta_s + (1 - d) theta, d at the number of optimiser updates so far. With
    None it is frozen: the model before training, which under LoRA is the base without its adapter.
    """

    rollout: Literal["sde", "ode"] = "sde"  # are stochastic transitions stored, or only x_0?
    snapshots: Mapping[str, Decay | None] = field(default_factory=dict)
    behaviour: str | None = None  # the snapshot that samples rollouts; None = the policy
    on_policy: bool = False  # must the weights at a cycle's start be those that drew its samples?


@runtime_checkable
class Algorithm(Protocol):
    """A pure loss. Its four methods are called in this order, by code that knows no algorithm by name."""

    @property
    def needs(self) -> Needs:
        """Read once, before work starts."""
        ...

    @property
    def num_updates_per_batch(self) -> int:
        """Disjoint, equal optimiser updates that one batch is split into."""
        ...

    @property
    def advantages(self) -> Advantages:
        """How the rewards of a batch become advantages."""
        ...

    @property
    def target_kl(self) -> float | None:
        """End a cycle early once an update's mean `approx_kl` exceeds this."""
        ...

    def select(self, advantages: Tensor, group_ids: Tensor) -> Tensor:
        """Once per cycle, before the split into updates: which samples of the batch to keep.

        int64 rows, each at most once, of advantages float64 [B] and group_ids int64 [B].
        """
        ...

    def freeze(self, samples: Samples, velocities: Velocities, noise: Noise) -> TrainBatch:
        """Once per cycle, without gradient, on the weights before its first update: whatever must not move."""
        ...

    def couple(self, update: TrainBatch, velocities: Velocities) -> TrainBatch:
        """Before each update, without gradient: terms that tie samples together."""
        ...

    def loss(self, micro: TrainBatch, velocity: Velocity) -> Loss:
        """With gradient, on one micro-batch, through the policy's velocity only."""
        ...


# ---------------------------------------------------------------------------------------------- policy


class Policy(Protocol):
    """A loaded model: text in, velocity inside, pictures out. One file per family in `models/`."""

    device: torch.device
    dtype: torch.dtype  # what the module computes in
    module: nn.Module  # the transformer that is trained; on the host until its owner has prepared and placed it
    lora_targets: Sequence[str]  # name suffixes of the linear layers that LoRA adapts by default
    blocks: Sequence[type[nn.Module]]  # every block class: what is wrapped, compiled and checkpointed one by one

    def schedule(self) -> Schedule:
        """The family's own noise schedule, from the folder's scheduler configuration."""
        ...

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Shape of one sample's latents. Raises ConfigError for sizes the family cannot draw."""
        ...

    def image_seq_len(self, height: int, width: int) -> int:
        """Number of image tokens, which resolution-dependent schedules shift by."""
        ...

    def encode(self, prompts: Sequence[Prompt], guidance_scale: float = 1.0) -> Conditions:
        """One row per prompt, on the policy's device. Each unique text is encoded once and cached."""
        ...

    def velocity(self, sample: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """The guided velocity [B, ...] of sample [B, ...], all float32, at sigma [B], for B rows of conditions."""
        ...

    def decode(self, latents: Tensor) -> np.ndarray:
        """uint8 pictures [B, H, W, 3], or videos [B, F, H, W, 3] (task t2v), from final latents [B, ...]."""
        ...

    def fingerprint(self) -> str:
        """Of the content of everything that was loaded: runs go on only with the model that they began with.

        Asked once, before anything is trained.
        """
        ...

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write the module with the weights `state` as the family's own library reads it; nothing if it is empty."""
        ...


@runtime_checkable
class OwnSolver(Protocol):
    """A `Policy` whose folder describes a solver that flowrl has, too."""

    def check_solver(self, solver: Solver) -> None:
        """Raise `LoadError` if `solver` goes by the name of the folder's, but takes other steps."""
        ...


@runtime_checkable
class PolicyConfig(Protocol):
    """Where a policy comes from: a frozen dataclass, cheap to build and to pickle (`model` in the configuration)."""

    @property
    def task(self) -> str:
        """What it draws: t2i (pictures from text) | t2v (videos)."""
        ...

    def load(self, device: torch.device) -> Policy:
        """Read the weights, for computing on `device`.

        Raises `LoadError` for a missing or partial folder: never random weights in silence.
        """
        ...


@runtime_checkable
class Exportable(Protocol):
    """A `PolicyConfig` whose model lies in a folder of diffusers: it can be exported as one, and checked against it."""

    def folder(self) -> Path:
        """Where it lies on this host, downloaded if need be. Raises `LoadError` if it cannot be had."""
        ...

    def in_float32(self) -> PolicyConfig:
        """The same model, all of it in float32."""
        ...

    def draw(
        self, folder: Path, adapter: Path | None, prompts: Sequence[Prompt], start: Tensor, sampler: Sampler
    ) -> Tensor:
        """x_0 [B, ...] that the library's own pipeline draws, without flowrl, from x_T `start` [B, ...], in float32.

        The pipeline is that of `folder`, with the exported adapter on it if there is one; it takes Euler's steps on the
        model's own schedule.
        """
        ...


class DivergedError(RuntimeError):
    """Training has come to nothing: numbers that are not finite, or no update at all."""


class LoadError(ExplainedError, RuntimeError):
    """A model could not be read; the message is one sentence for the user."""

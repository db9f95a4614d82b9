"""The numbers of one step: collected anywhere, reduced over ranks once, handed to the tracker as one flat dict."""

from __future__ import annotations

import math
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

GIGABYTE = 1e9  # bytes, as on the label of a GPU


@dataclass(frozen=True)
class Spread:
    """Count, sum, squared deviations, minimum and maximum of some numbers, all float64.

    Deviations are taken from the mean, not from zero: sum(x^2)/n - mean^2 leaves nothing of a ratio that lies 1e-9
    around 1. Two spreads merge without seeing the numbers again (Chan, Golub & LeVeque 1979).
    """

    count: int
    sum: float
    squares: float  # sum (x - mean)^2
    min: float
    max: float

    @classmethod
    def of(cls, values: Tensor | np.ndarray) -> Spread:
        """Of at least one value, any shape and dtype. A NaN among them shows in every statistic."""
        numbers = torch.as_tensor(values).detach().cpu().double()
        if numbers.numel() == 0:
            raise ValueError("a spread needs at least one value")
        squares = (numbers - numbers.mean()).square().sum()
        return cls(numbers.numel(), numbers.sum().item(), squares.item(), numbers.min().item(), numbers.max().item())

    @property
    def mean(self) -> float:
        return self.sum / self.count

    @property
    def std(self) -> float:
        """Population standard deviation (divisor n)."""
        return math.sqrt(self.squares / self.count)

    def merge(self, other: Spread) -> Spread:
        """The spread of both sets of numbers together."""
        count = self.count + other.count
        between = (self.mean - other.mean) ** 2 * self.count * other.count / count
        return Spread(
            count=count,
            sum=self.sum + other.sum,
            squares=self.squares + other.squares + between,
            min=float(np.minimum(self.min, other.min)),  # unlike min(), keeps a NaN
            max=float(np.maximum(self.max, other.max)),
        )

    def metrics(self, name: str) -> dict[str, float]:
        """`<name>_{mean,std,min,max}`."""
        shown = {"mean": self.mean, "std": self.std, "min": self.min, "max": self.max}
        return {f"{name}_{statistic}": value for statistic, value in shown.items()}


class Kind(Enum):
    """What is shown of the numbers collected under one name."""

    MEAN = "mean"
    SPREAD = "spread"
    COUNT = "count"
    LARGEST = "largest"


class Meter:
    """Collects a step's numbers by name; `collect` gives them, over all ranks, and begins anew.

    Adding costs no device synchronisation: tensors are kept, detached, until `collect`, so give it small ones (a number
    per training row). A name keeps to one kind, else ValueError. Threads may add at any time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[Kind, list[Tensor]]] = {}

    def mean(self, name: str, values: Tensor | float) -> None:
        """Show the mean over all values."""
        self._add(name, Kind.MEAN, values)

    def spread(self, name: str, values: Tensor | float) -> None:
        """Show `<name>_{mean,std,min,max}` over all values."""
        self._add(name, Kind.SPREAD, values)

    def count(self, name: str, amount: Tensor | float = 1) -> None:
        """Show the sum over calls and ranks."""
        self._add(name, Kind.COUNT, amount)

    def worst(self, name: str, value: Tensor | float) -> None:
        """Show the largest over calls and ranks."""
        self._add(name, Kind.LARGEST, value)

    def gauge(self, name: str, value: Tensor | float) -> None:
        """Show the last value (ranks should agree; the largest of theirs)."""
        with self._lock:
            self._pending.pop(name, None)
        self._add(name, Kind.LARGEST, value)

    def collect(self) -> dict[str, float]:
        """A flat dict in alphabetical order, the same on every rank; if there are several, all must call."""
        with self._lock:
            pending, self._pending = self._pending, {}
        spreads = {name: (kind, Spread.of(torch.cat(values))) for name, (kind, values) in pending.items()}
        metrics: dict[str, float] = {}
        for name, (kind, spread) in sorted(_over_ranks(spreads).items()):
            metrics |= _shown(name, kind, spread)
        return metrics

    def _add(self, name: str, kind: Kind, values: Tensor | float) -> None:
        numbers = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
        if numbers.numel() == 0:
            return
        with self._lock:
            known, collected = self._pending.setdefault(name, (kind, []))
            if known is not kind:
                raise ValueError(f"{name} was collected as a {known.value} and now comes as a {kind.value}")
            collected.append(numbers.detach().flatten())


Spreads = dict[str, tuple[Kind, Spread]]


def _over_ranks(spreads: Spreads) -> Spreads:
    """Merged in the order of the ranks, so that all get the same bits. A name may be missing on some ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return spreads
    gathered: list[Spreads] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, spreads)
    merged: Spreads = {}
    for part in gathered:
        for name, (kind, spread) in part.items():
            merged[name] = (kind, merged[name][1].merge(spread) if name in merged else spread)
    return merged


def _shown(name: str, kind: Kind, spread: Spread) -> dict[str, float]:
    match kind:
        case Kind.MEAN:
            return {name: spread.mean}
        case Kind.SPREAD:
            return spread.metrics(name)
        case Kind.COUNT:
            return {name: spread.sum}
        case Kind.LARGEST:
            return {name: spread.max}


class Timers:
    """Wall-clock seconds by phase. On a GPU a phase ends when its kernels do: none pays for another's work."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._on_cuda = device is not None and device.type == "cuda"
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time towards `perf/<name>_s`, also if it raises. Phases may repeat and nest."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._on_cuda:
                torch.cuda.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def collect(self) -> dict[str, float]:
        """`perf/<name>_s` of every phase since the last call."""
        metrics = {f"perf/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return metrics


def memory_metrics(device: torch.device) -> dict[str, float]:
    """`perf/mem_{allocated,reserved,peak}_gb` of this process, in 10^9 bytes; feed them to `Meter.worst`.

    On CUDA, what PyTorch's allocator holds, has reserved and held at most since the process began. On a CPU, resident
    memory (nothing is reserved beyond it) and its peak. Worker processes, such as reward workers, are not included.
    """
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        allocated = reserved = _resident_bytes(default=peak)
        peak = max(peak, allocated)  # the kernel counts them apart, and less often than they change
    sizes = {"allocated": allocated, "reserved": reserved, "peak": peak}
    return {f"perf/mem_{name}_gb": size / GIGABYTE for name, size in sizes.items()}


def _resident_bytes(default: int) -> int:
    """Only Linux tells the present size; elsewhere the peak stands in."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else default


def component_metrics(rewards: Mapping[str, np.ndarray], prefix: str = "reward") -> dict[str, float]:
    """`<prefix>/<component>_{mean,std,min,max}` of rewards [B] by component."""
    metrics: dict[str, float] = {}
    for component, values in rewards.items():
        metrics |= Spread.of(values).metrics(f"{prefix}/{component}")
    return metrics


def reward_metrics(
    rewards: Mapping[str, np.ndarray],
    advantages: Tensor | np.ndarray,
    group_ids: Tensor | np.ndarray,
    total: np.ndarray | None = None,
) -> dict[str, float]:
    """The `reward/*` metrics of a train batch, from arrays [B] in one order of samples.

    `total` is the combined reward; one component is its own total, several need it (ValueError). `group_std_mean` is
    the mean over groups of their standard deviation (divisor K), `zero_std_ratio` the share of groups whose samples
    are all worth the same: they teach nothing.
    """
    if total is None:
        if len(rewards) != 1:
            raise ValueError(f"total is needed for {len(rewards)} reward components ({', '.join(rewards)})")
        (total,) = rewards.values()
    ids = np.asarray(group_ids)
    groups = [total[ids == group] for group in np.unique(ids)]
    advantage = Spread.of(advantages)
    return {
        "reward/mean": float(np.mean(total)),
        **component_metrics(rewards),
        "reward/group_std_mean": float(np.mean([group.std() for group in groups])),
        "reward/zero_std_ratio": float(np.mean([group.min() == group.max() for group in groups])),
        "reward/advantage_mean": advantage.mean,
        "reward/advantage_std": advantage.std,
        "reward/num_groups": float(len(groups)),
    }

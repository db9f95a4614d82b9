"""Who gets which share of what, and whether there is enough of it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.config import Config, Problem
from flowrl.distributed.launch.base import Place
from flowrl.distributed.launch.failures import PlacementError

Bundle = dict[str, float]  # amounts by kind, as Ray names them
TOLERANCE = 1e-6  # three thirds of a GPU are one


def visible_gpus() -> list[str]:
    """As `CUDA_VISIBLE_DEVICES` names them; CUDA is not initialised."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def assign(places: Sequence[Place], gpus: Sequence[str]) -> dict[str, list[str]]:
    """The GPUs of each place by name: the first ones that have room. Raises PlacementError if they do not suffice."""
    room = dict.fromkeys(gpus, 1.0)
    assigned: dict[str, list[str]] = {}
    for place in places:
        if place.beside is not None:
            assigned[place.name] = assigned[place.beside]
            continue
        share = min(place.num_gpus, 1.0)
        number = max(1, round(place.num_gpus)) if share else 0
        fitting = [gpu for gpu in gpus if room[gpu] >= share - TOLERANCE][:number]
        if len(fitting) < number:
            raise PlacementError(
                f"{place.name} needs {place.num_gpus:g} GPU, and those of this machine ({len(gpus)}) are taken: the "
                f"workers ask for {total(places):g} in all"
            )
        for gpu in fitting:
            room[gpu] -= share
        assigned[place.name] = fitting
    return assigned


@dataclass(frozen=True)
class Seat:
    """What one worker takes of its bundle."""

    bundle: int
    num_cpus: float
    num_gpus: float


def arrange(places: Sequence[Place]) -> tuple[list[Bundle], dict[str, Seat]]:
    """Bundles, and the seat of each place by name. Raises PlacementError for several GPUs to be shared."""
    first = {place.name: place.name for place in places if place.beside is None}
    for place in places:
        if place.beside is not None:
            first[place.name] = first[place.beside]
    bundles: list[Bundle] = []
    seats: dict[str, Seat] = {}
    for place in (place for place in places if place.beside is None):
        members = [other for other in places if first[other.name] == place.name]
        gpus = place.num_gpus
        if len(members) > 1:
            if gpus > 1:
                raise PlacementError(f"{members[1].name} is to be beside {place.name}, which has more than one GPU")
            gpus = math.floor(gpus / len(members) * 1e4) / 1e4  # Ray counts ten-thousandths
        seats |= {member.name: Seat(len(bundles), member.num_cpus, gpus) for member in members}
        bundle = {"CPU": sum(member.num_cpus for member in members), "GPU": place.num_gpus}
        bundles.append({key: amount for key, amount in bundle.items() if amount})
    return bundles, seats


def total(places: Sequence[Place]) -> float:
    """GPUs that all places take together."""
    return sum(place.num_gpus for place in places if place.beside is None)


def share_of_cores(num_processes: int) -> int:
    """Threads for each of so many processes of this machine."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_processes))


def too_many_gpus(run: Config) -> list[Problem]:
    """If this machine has GPUs, but not as many as the run asks for; CUDA is not initialised."""
    gpus = visible_gpus()
    if run.device == "cpu" or not gpus:  # device=cuda without any is found elsewhere
        return []
    ranks, rollout = run.actor.num_ranks, run.rollout
    samplers = rollout.num_workers * rollout.num_gpus_per_worker if run.trainer.layout == "standalone" else 0
    if ranks + samplers <= len(gpus):
        return []
    asked = f"{ranks} ranks" + (f" and {samplers:g} GPUs for rollout workers" if samplers else "")
    message = f"asks for more GPUs than this machine has ({len(gpus)}): {asked}."
    hint = "Set actor.num_ranks and rollout.num_workers, or launcher=ray launcher.address=auto on a larger cluster."
    return [Problem("actor.num_ranks", message, hint)]

"""Engines for tests: one that is not flowrl's own, those that forget something, cannot draw something, or die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from flowrl.config import Config
from flowrl.rollout.native import Native
from flowrl.types import Drawn, Engine, Group, Policy, SampledGroup


@dataclass(frozen=True)
class Foreign:
    """`rollout.engine`: draws with the policy's module, but records, batches and sleeps in its own way."""

    log: str = ""  # a file that gets a line for each thing asked

    def open(self, run: Config, policy: Policy) -> ForeignEngine:
        return ForeignEngine(Native().open(run, policy), self.log)


@dataclass
class ForeignEngine:
    """One group at a time; refuses to draw in its sleep."""

    inner: Engine
    log: str
    awake: bool = True
    published: list[int] = field(default_factory=list)

    @property
    def version(self) -> int:
        return self.published[-1] if self.published else 0

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        assert self.awake, "asked to draw while asleep"
        for group in groups:
            self._say(f"generate {group.ordinal}")
            yield from self.inner.generate([group], rollout_id)

    def publish(self, version: int) -> None:
        self._say(f"publish {version}")
        self.published.append(version)
        self.inner.publish(version)

    def sleep(self) -> None:
        self._say("sleep")
        self.awake = False

    def wake(self) -> None:
        self._say("wake")
        self.awake = True

    def _say(self, line: str) -> None:
        if self.log:
            with open(self.log, "a") as file:
                file.write(line + "\n")


@dataclass(frozen=True)
class Forgetful:
    """Leaves out, or spoils, one field of the trajectory."""

    field: str = "next_latents"

    def open(self, run: Config, policy: Policy) -> ForgetfulEngine:
        return ForgetfulEngine(Native().open(run, policy), self.field)


class ForgetfulEngine(ForeignEngine):
    """What the native engine draws, incomplete."""

    def __init__(self, inner: Engine, missing: str) -> None:
        super().__init__(inner, "")
        self.missing = missing

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        for sampled in self.inner.generate(groups, rollout_id):
            yield self._spoilt(sampled)

    def _spoilt(self, sampled: SampledGroup) -> SampledGroup:
        drawn: Drawn = sampled.drawn.fetch()
        if self.missing == "images":
            assert sampled.images is not None
            return replace(sampled, images=sampled.images[:, :16])
        if self.missing == "version":
            return replace(sampled, sampling=replace(sampled.sampling, policy_version=99))
        if self.missing == "finite":
            spoilt = torch.full_like(drawn.trajectory.log_probs, float("nan"))
            return SampledGroup.of(
                sampled.group, sampled.images, replace(drawn, trajectory=replace(drawn.trajectory, log_probs=spoilt))
            )
        value = vars(drawn.trajectory)[self.missing]
        trajectory = replace(drawn.trajectory, **{self.missing: value[:, :0]})
        return SampledGroup.of(sampled.group, sampled.images, replace(drawn, trajectory=trajectory))


@dataclass(frozen=True)
class Mortal:
    """Kills its process once: at the second group it is to draw, or while a version is committed."""

    mark: str = ""  # a file that says that it has happened
    at: str = "generate"

    def open(self, run: Config, policy: Policy) -> MortalEngine:
        return MortalEngine(Native().open(run, policy), self)


class MortalEngine(ForeignEngine):
    """Dies as `kill -9` would have it."""

    def __init__(self, inner: Engine, settings: Mortal) -> None:
        super().__init__(inner, "")
        self.settings = settings

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        for number, sampled in enumerate(super().generate(groups, rollout_id)):
            if number == 1:
                self._die("generate")
            yield sampled

    def publish(self, version: int) -> None:
        if version > 0:
            self._die("publish")
        super().publish(version)

    def _die(self, at: str) -> None:
        if self.settings.at == at and not Path(self.settings.mark).exists():
            Path(self.settings.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Illiterate:
    """Cannot draw prompts with one of the words: an error, a group that is not complete, or the end of its process."""

    words: str = "MILK"
    way: str = "raise"

    def open(self, run: Config, policy: Policy) -> IlliterateEngine:
        return IlliterateEngine(Native().open(run, policy), self)


class IlliterateEngine(ForgetfulEngine):
    """Always the same ones."""

    def __init__(self, inner: Engine, settings: Illiterate) -> None:
        super().__init__(inner, "finite")
        self.settings = settings

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        for sampled in self.inner.generate(groups, rollout_id):
            if not any(word in sampled.group.prompt.text for word in self.settings.words.split()):
                yield sampled
            elif self.settings.way == "refuse":
                yield self._spoilt(sampled)
            elif self.settings.way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise LookupError(f"cannot write {sampled.group.prompt.text}")


@dataclass(frozen=True)
class Sleepy:
    """Falls asleep over its first group, once."""

    mark: str = ""  # a file that says that it has happened

    def open(self, run: Config, policy: Policy) -> SleepyEngine:
        return SleepyEngine(Native().open(run, policy), self.mark)


class SleepyEngine(ForeignEngine):
    """One of several processes at most."""

    def __init__(self, inner: Engine, mark: str) -> None:
        super().__init__(inner, "")
        self.mark = Path(mark)

    def generate(self, groups: Sequence[Group], rollout_id: int) -> Iterator[SampledGroup]:
        with suppress(FileExistsError):
            self.mark.touch(exist_ok=False)
            time.sleep(3600)
        yield from super().generate(groups, rollout_id)

"""Which prompts make the next batch: an endless, seeded stream of groups."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

from flowrl.flow.noise import Noise
from flowrl.prompts import Prompt
from flowrl.types import Group


class GroupSampler:
    """Every prompt once per epoch, each epoch in its own order; epochs follow each other without a gap.

    Group number n (its ordinal) is prompt n modulo the number of prompts of epoch n // that number, so that the whole
    state is one integer. A last batch that the epoch cannot fill runs on into the next one: no prompt is dropped or
    padded, and a batch that straddles two epochs may hold a prompt twice, as two groups with different noise. A group's
    occurrence follows from its ordinal too, and is never that of another group of the same prompt.

    Args:
        prompts: in the order of the file; an equal prompt twice is drawn twice as often.
        batch_size: groups of one `next_batch`.
        num_samples: K, samples of each group.
        seed: orders the epochs (`data.seed`).
    """

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, num_samples: int, seed: int) -> None:
        if not prompts:
            raise ValueError("prompts must not be empty")
        if batch_size < 1 or num_samples < 1:
            raise ValueError(f"batch_size and num_samples must be at least 1, got {batch_size} and {num_samples}")
        self.prompts = tuple(prompts)
        self.batch_size = batch_size
        self.num_samples = num_samples
        self.seed = seed
        self.next_ordinal = 0
        self._times: Counter[str] = Counter()  # that a prompt stands in the file
        self._copies = [_count(self._times, prompt) for prompt in self.prompts]
        self._epoch, self._order = -1, [0]

    def next_batch(self) -> list[Group]:
        """The next `batch_size` groups."""
        return self.take(self.batch_size)

    def take(self, count: int) -> list[Group]:
        """The next `count` groups: what replaces groups that failed."""
        ordinals = range(self.next_ordinal, self.next_ordinal + count)
        self.next_ordinal += count
        return [self._group(ordinal) for ordinal in ordinals]

    def state_dict(self) -> dict[str, int | str]:
        """Where the stream stands, and which stream it is."""
        return {"next_ordinal": self.next_ordinal, "seed": self.seed, "prompts": self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on from `state`. Raises ValueError if it belongs to other prompts or another seed."""
        mine = self.state_dict()
        for name, what in (("seed", "data.seed"), ("prompts", "the prompts of data.train")):
            if state[name] != mine[name]:
                raise ValueError(f"{what} changed since this state was saved, so the order of prompts would not go on")
        self.next_ordinal = int(state["next_ordinal"])

    def _group(self, ordinal: int) -> Group:
        epoch, place = divmod(ordinal, len(self.prompts))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = Noise.of(self.seed, "prompts").permutation(len(self.prompts), epoch).tolist()
        index = self._order[place]
        prompt = self.prompts[index]
        return Group(ordinal, prompt, epoch * self._times[prompt.id] + self._copies[index], self.num_samples)

    def _fingerprint(self) -> str:
        return hashlib.sha256("\n".join(prompt.id for prompt in self.prompts).encode()).hexdigest()


def fixed_groups(prompts: Sequence[Prompt], samples_per_prompt: int) -> list[Group]:
    """One group per prompt in the given order, always with the same ordinals: every evaluation has the same noise."""
    times: Counter[str] = Counter()
    return [Group(ordinal, prompt, _count(times, prompt), samples_per_prompt) for ordinal, prompt in enumerate(prompts)]


def _count(times: Counter[str], prompt: Prompt) -> int:
    """How often the prompt has been counted before."""
    times[prompt.id] += 1
    return times[prompt.id] - 1

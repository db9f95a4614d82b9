"""What text encoders make of prompts, and the memory of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowrl.rows import RAGGED, Rows
from flowrl.types import Conditions

if TYPE_CHECKING:
    from flowrl.models.embedding_files import EmbeddingFiles


@dataclass(frozen=True)
class Text(Rows):
    """Embeddings of B texts.

    Families that take texts of any length keep a mask and pad when rows are joined; the others have a fixed L.
    """

    embeds: Tensor = field(metadata=RAGGED)  # [B, L, D]
    pooled: Tensor | None = None  # [B, P]
    mask: Tensor | None = field(default=None, metadata=RAGGED)  # bool [B, L], the real tokens first; None = all real

    def trimmed(self) -> Text:
        """Without the padding that no row needs, and without a mask if none is left: attention is faster then.

        It waits for the device once.
        """
        if self.mask is None:
            return self
        shortest, longest = torch.stack(self.mask.sum(1).aminmax()).tolist()
        longest = max(1, longest)
        mask = None if shortest == longest else self.mask[:, :longest]
        return Text(self.embeds[:, :longest], self.pooled, mask)

    def unpadded(self) -> list[Tensor]:
        """The embeddings of each row [l, D], as long as its own text. It waits for the device once."""
        if self.mask is None:
            return list(self.embeds)
        return [row[:length] for row, length in zip(self.embeds, self.mask.sum(1).tolist(), strict=True)]


@dataclass(frozen=True)
class TextConditions(Conditions):
    """Embeddings of B prompts; the negative ones only when guidance is on."""

    prompt: Text
    negative: Text | None = None

    def embeddings(self) -> Mapping[str, Tensor]:
        """See `Conditions`."""
        text = self.prompt
        parts = {"prompt_embeds": text.embeds, "pooled_prompt_embeds": text.pooled, "prompt_embeds_mask": text.mask}
        return {name: part for name, part in parts.items() if part is not None}


@dataclass
class EmbeddingCache:
    """Embeddings by text on the host: in memory, the least recently used dropped first, and in `files` if there are."""

    max_bytes: int
    files: EmbeddingFiles | None = None
    num_bytes: int = 0
    _rows: OrderedDict[str, Text] = field(default_factory=OrderedDict, repr=False)

    def find(self, text: str) -> bool:
        """Is `text` known? If so its row is in memory, until `shrink` at least."""
        if text not in self._rows and self.files is not None:
            row = self.files.get(text)
            if row is not None:
                self._remember(text, row)
        return text in self._rows

    def get(self, text: str) -> Text:
        """The one row of a text that `find` or `put` has brought into memory, now the most recently used."""
        self._rows.move_to_end(text)
        return self._rows[text]

    def put(self, text: str, row: Text) -> None:
        """Keep `row`; nothing is dropped before `shrink`, so a batch larger than the cache still works."""
        self._remember(text, row)
        if self.files is not None:
            self.files.put(text, row)

    def _remember(self, text: str, row: Text) -> None:
        self._rows[text] = row
        self.num_bytes += _num_bytes(row)

    def shrink(self) -> None:
        """Drop what exceeds the size."""
        while self.num_bytes > self.max_bytes:
            _, row = self._rows.popitem(last=False)
            self.num_bytes -= _num_bytes(row)


def _num_bytes(row: Text) -> int:
    return sum(part.nbytes for part in (row.embeds, row.pooled, row.mask) if part is not None)

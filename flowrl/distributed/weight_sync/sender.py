"""The trainer's side of publications: what every rank of the actor holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from flowrl.distributed.weight_sync.checksum import Checksum, Checksums
from flowrl.distributed.weight_sync.errors import PublishError, some
from flowrl.distributed.weight_sync.manifest import Entry, Manifest, Mode, Piece, plan, view
from flowrl.distributed.weight_sync.source import Origin, clean_name, origins, scalings, specs
from flowrl.distributed.weight_sync.transports.base import Link, Outlet

Filling = Sequence[tuple[Piece, Tensor]]  # what goes into one bucket: pieces, and the whole tensors they are of


class Sender:
    """Packs a module's weights into buckets, in a fixed order, and lets a transport send them.

    The tensors are looked up anew for every publication, so they may be replaced or swapped in between. If they are
    sharded, all ranks must call `send` (or `stream`) for the same manifest: every bucket is gathered by all of them
    just before it is packed, and to the end even if sending fails on some rank, so that no other is left waiting.

    Args:
        module: what is trained, sharded or not.
        mode: what is published of it.
        wire_dtype: what floating-point tensors travel in; None leaves each its own.
        rounded: names of the tensors that `wire_dtype` is for, the others travelling in their own; None = all.
        bucket_bytes: memory for two of them is taken during a publication.
        device: where buckets are packed.
        rank: of the actor.
    """

    def __init__(
        self,
        module: nn.Module,
        mode: Mode,
        *,
        wire_dtype: torch.dtype | None = None,
        rounded: Collection[str] | None = None,
        bucket_bytes: int = 512_000_000,
        device: torch.device,
        rank: int = 0,
    ) -> None:
        self.module = module
        self.mode: Mode = mode
        self.wire_dtype = wire_dtype
        self.rounded = None if rounded is None else frozenset(map(clean_name, rounded))
        self.bucket_bytes = bucket_bytes
        self.device = device
        self.rank = rank

    def plan(self, version: int) -> Manifest:
        """What the present weights will be as `version`. Moves nothing; no collective. Raises PublishError."""
        found = specs(origins(self.module, self.mode), self.wire_dtype, self.rounded)
        scaling = scalings(self.module) if self.mode == "lora" else None
        return plan(found, version, self.mode, self.bucket_bytes, scaling)

    def send(self, manifest: Manifest, link: Link | None) -> Checksums | None:
        """Gather, pack and send all buckets. None from a rank that sends nothing, such as any without a link.

        Raises TransferError when an engine has failed or time is up.
        """
        filling = self._gather(manifest)
        try:
            return self._deliver(filling, manifest, link) if link is not None else None
        finally:
            for _ in filling:  # the other ranks are in its collectives
                pass

    def stream(self, manifest: Manifest, on_host: bool) -> Iterator[tuple[Checksums, Tensor]]:
        """Every bucket (uint8, in memory of its own) and its share of the checksums, for transports by handle.

        Args:
            on_host: in host memory, to be sent on; else on the device.
        """
        checksum = Checksum(manifest, self.device)
        filling = self._gather(manifest)
        try:
            for bucket, content in enumerate(filling):
                buffer = torch.empty(manifest.bucket_size(bucket), dtype=torch.uint8, device=self.device)
                pack(manifest, content, buffer)
                digests = checksum.of(bucket, [piece for piece, _ in content], buffer)
                yield digests, buffer.cpu() if on_host else buffer
        finally:
            for _ in filling:
                pass

    def _deliver(self, filling: Iterator[Filling], manifest: Manifest, link: Link) -> Checksums | None:
        outlet = link.outlet(self.rank, manifest, self.device)
        if outlet is None:
            return None
        reason: str | None = f"trainer rank {self.rank} was interrupted"
        try:
            sent = self._send_all(filling, manifest, outlet)
            reason = None
            return sent
        except Exception as error:
            reason = f"trainer rank {self.rank}: {type(error).__name__}: {error}"
            raise
        finally:
            outlet.close(reason)

    def _send_all(self, filling: Iterator[Filling], manifest: Manifest, outlet: Outlet) -> Checksums:
        checksum = Checksum(manifest, self.device)
        sent = Checksums.none(manifest)
        outlet.open()
        for bucket, content in enumerate(filling):
            buffer = outlet.buffer(bucket)
            pack(manifest, content, buffer)
            sent += checksum.of(bucket, [piece for piece, _ in content], buffer)
            outlet.send(bucket)
        outlet.finish()
        return sent

    @torch.no_grad()
    def _gather(self, manifest: Manifest) -> Iterator[Filling]:
        """What goes into each bucket, in turn. A tensor that reaches into the next ones is gathered once."""
        found = origins(self.module, self.mode)
        check_unchanged(found, manifest)
        last: dict[int, Tensor] = {}
        for pieces in manifest.pieces():
            values = {}
            for piece in pieces:
                entry = manifest.entries[piece.entry]
                known = last.get(piece.entry)
                values[piece.entry] = found[entry.name].value(entry.dtype) if known is None else known
            yield [(piece, values[piece.entry]) for piece in pieces]
            last = {pieces[-1].entry: values[pieces[-1].entry]}


def check_unchanged(found: dict[str, Origin], manifest: Manifest) -> None:
    """Raises PublishError if this rank's module is not what rank 0 has planned."""
    mine = specs(found, None)
    planned = {entry.name: entry for entry in manifest.entries}
    wrong = {name for name in mine.keys() & planned.keys() if mine[name].shape != planned[name].shape}
    wrong |= mine.keys() ^ planned.keys()
    if wrong:
        raise PublishError(f"a rank's module differs from what rank 0 has planned to publish: {some(wrong)}.")


@torch.no_grad()
def pack(manifest: Manifest, content: Filling, buffer: Tensor) -> None:
    """Copy (and cast) into the bucket, whole tensors by as few kernels as there can be; zero the padding."""
    views, values = [], []
    for piece, value in content:
        entry = manifest.entries[piece.entry]
        end = piece.start + entry.nbytes - piece.skip  # of the tensor's own bytes, were the bucket long enough
        if end < piece.stop:
            buffer[end : piece.stop].zero_()
        if piece.skip == 0 and end <= piece.stop:
            views.append(view(buffer, entry, piece.start))
            values.append(value)
        else:
            part = _bytes(value, entry)[piece.skip : piece.skip + piece.stop - piece.start]
            buffer[piece.start : piece.start + part.numel()].copy_(part)
    if views:
        torch._foreach_copy_(views, values)


def _bytes(value: Tensor, entry: Entry) -> Tensor:
    """uint8 [nbytes] as they travel."""
    return value.to(entry.dtype).contiguous().view(-1).view(torch.uint8)

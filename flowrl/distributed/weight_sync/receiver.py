"""An engine's side of publications: staged whole, verified, and only then copied into the module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowrl.distributed.weight_sync.checksum import Checksum, Checksums
from flowrl.distributed.weight_sync.errors import PublishError, some
from flowrl.distributed.weight_sync.manifest import Entry, Manifest, check_names, view
from flowrl.distributed.weight_sync.source import holds_lora, is_lora, named_tensors, scalings
from flowrl.distributed.weight_sync.transports.base import Inlet, Link


@dataclass(frozen=True)
class Room:
    """What `commit` works with on the device. It is there before anybody commits, since memory may not be."""

    joint: Tensor  # uint8, for the largest tensor that comes in several buckets
    landing: Tensor | None  # uint8 [size of a bucket], through which buckets go to the host and back

    @classmethod
    def take(cls, manifest: Manifest, device: torch.device, staging: str) -> Room:
        """Raises torch's OutOfMemoryError."""
        split = [entry.nbytes for entry in manifest.entries if entry.offset + entry.nbytes > manifest.bucket_bytes]
        joint = torch.empty(max(split, default=0), dtype=torch.uint8, device=device)
        if staging == "device":
            return cls(joint, None)
        return cls(joint, torch.empty(manifest.bucket_size(0), dtype=torch.uint8, device=device))

    def on_device(self, staged: Tensor) -> Tensor:
        """One bucket, until the next."""
        return staged if self.landing is None else self.landing[: len(staged)].copy_(staged, non_blocking=True)


class Receiver:
    """Holds a module's version, and replaces it as a whole or not at all.

    `expect`, `receive`, then `commit` or `drop`. Until `commit` the module is untouched.

    Args:
        module: what the engine samples with. If it holds LoRA, only adapters are accepted; else only whole models.
        device: of the module.
        staging: where a version waits for `commit`: "device", or "host" (pinned memory).
        version: what the module holds to begin with; None if that is no version to sample with.
    """

    def __init__(
        self, module: nn.Module, *, device: torch.device, staging: str = "device", version: int | None = None
    ) -> None:
        self.module = module
        self.device = device
        self.staging = staging
        self._version = version
        self._mixed = False  # a commit failed midway
        self._expected: Manifest | None = None
        self._staged: list[Tensor] = []
        self._room: Room | None = None

    @property
    def version(self) -> int:
        """Of the weights in the module. Raises PublishError if they are of none, or of two."""
        if self._mixed:
            raise PublishError(
                "copying a version into the engine's module failed midway, so its weights are of two versions: it "
                "cannot sample until a whole publication has succeeded."
            )
        if self._version is None:
            raise PublishError("the engine cannot sample yet: no weights have been published to it.")
        return self._version

    def expect(self, manifest: Manifest) -> None:
        """Compare names, shapes, dtypes and scalings with the module. Raises PublishError; changes nothing."""
        self.drop()
        check_fit(self.module, manifest)
        self._expected = manifest

    def receive(self, manifest: Manifest, link: Link, engine: int) -> Checksums:
        """Stage all buckets, and return the checksums of what has been staged.

        Raises TransferError when the trainer has failed or time is up.
        """
        if self._expected != manifest:
            raise PublishError(f"engine {engine} was not told to expect version {manifest.version}.")
        inlet = link.inlet(engine, manifest, self.device)
        reason: str | None = f"engine {engine} was interrupted"
        try:
            checksums = self._stage(inlet, manifest)
            reason = None
            return checksums
        except Exception as error:
            reason = f"engine {engine}: {type(error).__name__}: {error}"
            raise
        finally:
            if reason is not None:
                self.drop()
            inlet.close(reason)

    def commit(self) -> None:
        """Copy what has been staged into the module. The caller has verified it, here and on all other engines.

        It takes no memory of the device. What still goes wrong is the device's fault; the version is lost, then.
        """
        manifest, room = self._expected, self._room
        if manifest is None or room is None or len(self._staged) != manifest.num_buckets:
            raise PublishError("there is no whole version to commit.")
        tensors = named_tensors(self.module)
        self._mixed = True
        with torch.no_grad():
            for bucket in unpack(manifest, map(room.on_device, self._staged), room.joint):
                torch._foreach_copy_([tensors[entry.name] for entry, _ in bucket], [value for _, value in bucket])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a copy that failed must not be found out by the next forward
        self._version, self._mixed = manifest.version, False
        self.drop()

    def drop(self) -> None:
        """Forget what has been staged; the module stays as it is."""
        self._expected = self._room = None
        self._staged = []

    def _stage(self, inlet: Inlet, manifest: Manifest) -> Checksums:
        checksum = Checksum(manifest, self.device)
        received = Checksums.none(manifest)
        self._room = Room.take(manifest, self.device, self.staging)
        landing = self._room.landing
        inlet.open()
        for bucket, pieces in enumerate(manifest.pieces()):
            size = manifest.bucket_size(bucket)
            place = self._place(size)
            target = place if landing is None else landing[:size]
            inlet.receive(bucket, target)
            if landing is not None:
                place.copy_(target)
            received += checksum.of(bucket, pieces, place)
            self._staged.append(place)
        inlet.finish()
        return received

    def _place(self, size: int) -> Tensor:
        """Where one bucket waits."""
        if self.staging == "host":
            return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def check_fit(module: nn.Module, manifest: Manifest) -> None:
    """Raises PublishError unless `manifest` is exactly what `module` can take, tensor by tensor."""
    entries = {entry.name: entry for entry in manifest.entries}
    check_names(entries, manifest.mode)
    has_lora = holds_lora(module)
    if has_lora and manifest.mode != "lora":
        raise PublishError(
            f"the engine's module holds LoRA, and weights published in mode {manifest.mode!r} would be adapted a "
            'second time. Publish in mode "lora", or give the engine a module without.'
        )
    if manifest.mode == "lora" and not has_lora:
        raise PublishError('the engine\'s module holds no LoRA, so it cannot take mode "lora". Publish "merged".')
    mine = {name: t for name, t in named_tensors(module).items() if is_lora(name) == (manifest.mode == "lora")}
    matched = mine.keys() & entries.keys()
    if not matched:
        names = f"{some(entries)} against the engine's {some(mine)}"
        raise PublishError(f"none of the {len(entries)} published tensors is in the engine's module: {names}.")
    if missing := mine.keys() - entries.keys():
        raise PublishError(f"{len(missing)} tensors of the engine's module are not published: {some(missing)}.")
    if extra := entries.keys() - mine.keys():
        raise PublishError(f"{len(extra)} published tensors are not in the engine's module: {some(extra)}.")
    for name, entry in entries.items():
        _check_tensor(entry, mine[name])
    if manifest.mode == "lora":
        _check_scalings(manifest, scalings(module))


def _check_tensor(entry: Entry, mine: Tensor) -> None:
    if entry.shape != tuple(mine.shape):
        raise PublishError(f"{entry.name} has shape {entry.shape} here and {tuple(mine.shape)} in the engine.")
    if entry.dtype != mine.dtype and not (entry.dtype.is_floating_point and mine.dtype.is_floating_point):
        raise PublishError(f"{entry.name} is {entry.dtype} here and {mine.dtype} in the engine.")


def _check_scalings(manifest: Manifest, mine: dict[str, float]) -> None:
    for layer in sorted(mine.keys() | manifest.scalings.keys()):
        if mine.get(layer) != manifest.scalings.get(layer):
            raise PublishError(
                f"the adapter of {layer} is scaled by alpha / rank = {manifest.scalings.get(layer)} here and by "
                f"{mine.get(layer)} in the engine."
            )


def unpack(manifest: Manifest, buckets: Iterator[Tensor], joint: Tensor) -> Iterator[list[tuple[Entry, Tensor]]]:
    """The tensors that end in each bucket, as views that hold until the next is asked for.

    One that came in several pieces is put together in `joint`.
    """
    for pieces, data in zip(manifest.pieces(), buckets, strict=True):
        whole, begun = [], []
        for piece in pieces:
            entry = manifest.entries[piece.entry]
            own = data[piece.start : min(piece.stop, piece.start + entry.nbytes - piece.skip)]
            place = joint[piece.skip : piece.skip + own.numel()]
            if own.numel() == entry.nbytes:
                whole.append((entry, view(own, entry)))
            elif piece.skip + own.numel() == entry.nbytes:
                place.copy_(own)
                whole.append((entry, view(joint, entry)))
            else:
                begun.append((place, own))
        if whole:
            yield whole
        for place, own in begun:  # at most one, and not before: the one that has just ended was in `joint`, too
            place.copy_(own)

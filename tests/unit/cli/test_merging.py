"""Folding and linking, on files: against the formula by hand, and everything that is refused."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.cli.arguments import Failure, new_folder
from flowrl.cli.merging import INDEX, WEIGHTS, check, merge
from flowrl.config import LoRA

LAYER = "transformer_blocks.0.attn.to_q"
SETTINGS = LoRA(rank=2, alpha=6.0)


def transformer(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in sorted((folder / "transformer").glob("*.safetensors")) for k, v in load_file(file).items()}


def adapter(folder: Path, rank: int = 2) -> dict[str, Tensor]:
    rows, columns = transformer(folder)[f"{LAYER}.weight"].shape
    generator = torch.Generator().manual_seed(0)
    return {
        f"{LAYER}.lora_A.weight": torch.randn(rank, columns, generator=generator),
        f"{LAYER}.lora_B.weight": torch.randn(rows, rank, generator=generator),
    }


def merged(
    base: Path, out: Path, tensors: dict[str, Tensor], lora: LoRA | None = SETTINGS, dtype: str = "float32"
) -> Path:
    with new_folder(str(out)) as folder:
        merge(base, folder, tensors, lora, getattr(torch, dtype))
    return out


@pytest.fixture
def base(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "base"))


def test_an_adapter_is_folded_in_float32(tiny_folder: Path, tmp_path: Path) -> None:
    tensors = adapter(tiny_folder)
    before, after = transformer(tiny_folder), transformer(merged(tiny_folder, tmp_path / "out", tensors))
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == [f"{LAYER}.weight"]
    product = tensors[f"{LAYER}.lora_B.weight"].double() @ tensors[f"{LAYER}.lora_A.weight"].double()
    torch.testing.assert_close(
        after[f"{LAYER}.weight"].double(), before[f"{LAYER}.weight"].double() + 3 * product, atol=1e-5, rtol=0
    )


def test_bfloat16_rounds_once(tiny_folder: Path, tmp_path: Path) -> None:
    """What is stored is the rounded float32 sum, whatever the base is stored in."""
    exact = transformer(merged(tiny_folder, tmp_path / "exact", adapter(tiny_folder)))
    rounded = transformer(merged(tiny_folder, tmp_path / "rounded", adapter(tiny_folder), dtype="bfloat16"))
    assert all(torch.equal(rounded[name], value.bfloat16()) for name, value in exact.items())


def test_frozen_parts_are_the_same_files(base: Path, tmp_path: Path) -> None:
    """Hard links, also through symbolic ones as in the Hub's cache; pickles and other variants stay behind."""
    tensors, blob = adapter(base), tmp_path / "blob"
    (base / "vae" / WEIGHTS).rename(blob)
    (base / "vae" / WEIGHTS).symlink_to(blob)
    for name in ("vae/diffusion_pytorch_model.bin", "transformer/diffusion_pytorch_model.fp16.safetensors", "x.ckpt"):
        (base / name).write_bytes(b"cos\nsystem\n")
    (base / "LICENSE.md").write_text("terms")
    out = merged(base, tmp_path / "out", tensors)
    there = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    mine = {str(file.relative_to(base)) for file in base.rglob("*") if file.is_file()}
    assert mine - there == {
        "vae/diffusion_pytorch_model.bin",
        "transformer/diffusion_pytorch_model.fp16.safetensors",
        "x.ckpt",
    }
    assert there <= mine
    for name in there - {f"transformer/{WEIGHTS}"}:
        assert (out / name).samefile(base / name) and not (out / name).is_symlink(), name


def test_copies_where_links_cannot_be(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    out = merged(tiny_folder, tmp_path / "out", adapter(tiny_folder))
    name = f"vae/{WEIGHTS}"
    assert (out / name).read_bytes() == (tiny_folder / name).read_bytes()
    assert not (out / name).samefile(tiny_folder / name)


def test_a_base_of_several_files(base: Path, tmp_path: Path) -> None:
    tensors = transformer(base)
    shards = {f"part-{i}.safetensors": dict(list(tensors.items())[i::3]) for i in range(3)}
    (base / "transformer" / WEIGHTS).unlink()
    for name, shard in shards.items():
        save_file(shard, base / "transformer" / name)
    weight_map = {key: name for name, shard in shards.items() for key in shard}
    (base / "transformer" / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    trained = {name: value + 1 for name, value in tensors.items()}
    out = merged(base, tmp_path / "out", trained, lora=None, dtype="bfloat16")
    assert all(torch.equal(value, trained[name].bfloat16()) for name, value in transformer(out).items())
    index = json.loads((out / "transformer" / INDEX).read_text())
    assert index["weight_map"] == weight_map
    assert index["metadata"]["total_size"] == sum(2 * value.numel() for value in tensors.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{LAYER}.lora_A.weight": torch.zeros(3, 32)}, "two halves are not of rank 2"),
        ({f"{LAYER}.lora_B.weight": None}, "two halves are not of rank 2"),
        ({f"{LAYER}.lora_A.weight": None}, "1 trained tensors have no place in .*, among them .*lora_B"),
        ({"blocks.9.to_q.lora_A.weight": torch.zeros(2, 4)}, "among them blocks.9"),
        (
            {f"{LAYER}.lora_A.weight": torch.full((2, 32), float("nan"))},
            "lora_A.weight holds values that are not finite",
        ),
        ({"_fsdp_wrapped_module.x": torch.zeros(1)}, "_fsdp_wrapped_module belongs to what was wrapped around it"),
    ],
)
def test_adapters_that_do_not_fit(
    tiny_folder: Path, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    tensors = {name: value for name, value in {**adapter(tiny_folder), **change}.items() if value is not None}
    with pytest.raises(Failure, match=message):
        merged(tiny_folder, tmp_path / "out", tensors)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_do_not_fit(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"proj_out\.bias has the shape \[1\], but \[32\] in the base"):
        merged(tiny_folder, tmp_path / "out", {"proj_out.bias": torch.zeros(1)}, lora=None)
    with pytest.raises(Failure, match="is no name of the model's: module belongs"):
        check({"module.proj_out.bias": torch.zeros(1)})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda base: (base / "transformer" / WEIGHTS).rename(base / "transformer" / "model.bin"),
            "holds no diffusion_",
        ),
        (lambda base: (base / "model_index.json").unlink(), "must be a diffusers folder"),
        (lambda base: (base / "model_index.json").write_text("{"), "must be a diffusers folder"),
        (lambda base: shutil.rmtree(base / "vae"), "lacks its part vae"),
        (
            lambda base: (base / "transformer" / INDEX).write_text('{"weight_map": {"x": "../vae/x"}}'),
            "holds no ../vae/x",
        ),
        (lambda base: (base / "transformer" / WEIGHTS).write_bytes(b"cos\nsystem\n"), "cannot be read"),
        (
            lambda base: save_file({"x.lora_A.weight": torch.zeros(1)}, base / "transformer" / WEIGHTS),
            "the base holds an adapter itself, x.lora_A.weight",
        ),
    ],
    ids=["no weights", "no index", "broken index", "no vae", "a path", "a pickle", "an adapter"],
)
def test_bases_that_are_none(base: Path, tmp_path: Path, spoil: object, message: str) -> None:
    tensors = adapter(base)
    spoil(base)  # type: ignore[operator]
    with pytest.raises(Failure, match=message):
        merged(base, tmp_path / "out", tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_full_disk_is_one_sentence(tiny_folder: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(Failure, match=r"out=.* cannot be written"):
            merged(tiny_folder, tmp_path / "out", adapter(tiny_folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []

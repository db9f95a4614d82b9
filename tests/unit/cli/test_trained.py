"""Which weights of a run are taken, and what is said when there are none such."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

import flowrl
from flowrl.cli.trained import install, open_run, read_trained
from flowrl.config import Actor as ActorSettings
from flowrl.config import ConfigError, LoRA
from flowrl.distributed.checkpoint.folders import Folders
from flowrl.distributed.checkpoint.manifest import CheckpointError
from flowrl.distributed.checkpoint.tensors import TensorStore
from flowrl.types import LoadError
from tests.support import tiny

NAME = "blocks.0.to_q.lora_A.default.weight"


def checkpoint(run: Path, step: int, *kinds: str) -> Path:
    """Of one tensor per kind, filled with the step, and with half of it in the average."""
    folders = Folders(run / "checkpoints")
    temp = folders.begin(step)
    store = TensorStore(torch.device("cpu"), timeout_s=60)
    values = {f"{kind}.{NAME}": torch.full((2,), step / (2 if kind == "ema" else 1)) for kind in kinds}
    store.save(values, temp / "tensors", background=False)
    files = store.written(wait=True)
    assert files is not None
    return folders.commit(step, temp, {"contract.json": b'{"base": "abc"}'}, files, store.keys).path


def finish(run: Path, at: str | None = "2026-01-01") -> None:
    (run / "final").mkdir(exist_ok=True)
    save_file({f"transformer.{NAME.replace('.default', '')}": torch.full((2,), 9.0)}, adapter_file(run))
    (run / "run.json").write_text(json.dumps({"finished": at}))


def adapter_file(run: Path) -> Path:
    return run / "final" / "pytorch_lora_weights.safetensors"


def taken(run: Path, checkpoint: str | None = None, weights: str | None = None) -> float:
    (item,) = read_trained(run, checkpoint, weights).tensors.items()
    assert item[0] == NAME.replace(".default", "")
    return float(item[1][0])


def refusal(run: Path, checkpoint: str | None = None, weights: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read_trained(run, checkpoint, weights)
    return str(caught.value)


def test_a_run_that_goes_on_gives_its_latest_average(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10, "weights", "ema", "optimizer")
    checkpoint(tmp_path, 20, "weights", "ema", "optimizer")
    (tmp_path / "checkpoints" / "step_0000030").mkdir()  # never committed
    assert taken(tmp_path) == taken(tmp_path, "latest", "ema") == 10
    assert taken(tmp_path, weights="live") == 20
    assert taken(tmp_path, "step_0000010") == 5 and taken(tmp_path, "step_0000010", "live") == 10
    found = read_trained(tmp_path, None, None)
    assert found.source == f"{tmp_path}/checkpoints/step_0000020 (ema)" and found.base == "abc"


def test_a_finished_run_gives_its_end(tmp_path: Path) -> None:
    finish(tmp_path)
    assert taken(tmp_path) == taken(tmp_path, weights="final") == 9
    assert read_trained(tmp_path, None, None).base is None
    checkpoint(tmp_path, 20, "weights")
    assert taken(tmp_path) == 9 and taken(tmp_path, weights="live") == taken(tmp_path, "latest") == 20
    assert read_trained(tmp_path, None, None).base == "abc"


def test_a_run_that_was_begun_again_has_an_older_end_which_is_not_taken_for_its_own(tmp_path: Path) -> None:
    finish(tmp_path, at=None)
    checkpoint(tmp_path, 20, "weights")
    assert taken(tmp_path) == 20
    assert "is of an earlier end: the run has been begun again since." in refusal(tmp_path, weights="final")


def test_what_there_is_not(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"run: {tmp_path} holds no committed checkpoint."
    assert refusal(tmp_path, weights="final").startswith(f"weights: {tmp_path}/final holds no weights")
    checkpoint(tmp_path, 10, "weights")
    assert "keeps no average: the run had trainer.eval.use_ema=false. Set weights=live." in refusal(
        tmp_path, None, "ema"
    )
    assert refusal(tmp_path, "step_10") == f"checkpoint: {tmp_path} has no 'step_10'. There are: step_0000010."
    assert refusal(tmp_path, "../x").startswith("checkpoint: ")
    assert "cannot be final with a checkpoint" in refusal(tmp_path, "latest", "final")
    finish(tmp_path)
    adapter_file(tmp_path).write_bytes(b"cos\nsystem\n")
    assert refusal(tmp_path).startswith(f"weights: {tmp_path}/final cannot be read: ")


def test_a_checkpoint_with_a_flipped_bit_is_not_taken(tmp_path: Path) -> None:
    (file,) = (checkpoint(tmp_path, 10, "weights") / "tensors").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="corrupt"):
        read_trained(tmp_path, None, None)


# ---------------------------------------------------------------------------------------------- the run


def test_a_run_is_opened_from_its_configuration(tmp_path: Path) -> None:
    """Keys that are younger than the run have their defaults; its model may lie elsewhere now."""
    plain = OmegaConf.to_container(flowrl.load_config(["seed=7", "model.path=gone"]), resolve=True)
    assert isinstance(plain, dict)
    del plain["weight_sync"]
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(plain))
    run = open_run(tmp_path, "cpu")
    assert (run.seed, run.device, run.model.path, run.weight_sync.retries) == (7, "cpu", "gone", 1)
    assert open_run(tmp_path, "cpu", "here").model.path == "here"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "run: {} is no run's folder: config.yaml: No such file or directory."),
        ("seeed: 1", "{}/config.yaml: seeed: there is no such key. Did you mean seed?"),
        ("seed: many", "{}/config.yaml: seed: Value 'many'"),
        ("[1", "is not YAML"),
        ("- 1", "{}/config.yaml"),
    ],
)
def test_a_folder_without_a_run(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        open_run(tmp_path, "cpu")
    assert message.format(tmp_path) in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(flowrl.load_config(), resolve=True))
    with pytest.raises(ConfigError, match="device: is cuda, but torch sees no CUDA device"):
        open_run(tmp_path, "cuda")


def test_weights_of_another_model_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path, 10, "weights")
    settings = ActorSettings(mode="lora", lora=LoRA(rank=2))
    with pytest.raises(LoadError, match=r"step_0000010 \(live\): .* missing, extra or misshapen, among them blocks\.0"):
        install(tiny.load(tiny_folder), settings, read_trained(tmp_path, None, None))

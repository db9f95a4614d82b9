"""The command that encodes a run's prompts ahead, and runs that find their embeddings made."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl
from flowrl.cli.encode_prompts import TOOL
from flowrl.distributed.checkpoint.folders import Folders
from flowrl.distributed.checkpoint.tensors import read_tensors
from tests.support.killing import records
from tests.support.runs import WORDS, command


def encoded(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert TOOL.command(arguments) == 0
    return capsys.readouterr().out


def test_it_fills_the_folder_and_says_what_was_new(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The arguments are the run's; the negative prompt, empty for all, is a text of its own."""
    cache = tmp_path / "embeddings"
    arguments = command(tiny_folder, tmp_path, "run", f"model.cache_dir={cache}")
    count = len(WORDS)
    assert encoded(arguments, capsys) == f"{cache}: {count} texts, {count} of them new, encoded on the CPU.\n"
    guided = [*arguments, "sampler.guidance_scale=2"]
    assert encoded(guided, capsys) == f"{cache}: {count + 1} texts, 1 of them new, encoded on the CPU.\n"
    damaged = next(cache.rglob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    news = f"{count + 1} texts, 1 of them new (1 damaged), encoded on the CPU."
    assert encoded(guided, capsys) == f"{cache}: {news}\n"
    assert not (tmp_path / "runs").exists()


def test_prompts_that_are_cut_are_counted(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "long.txt"
    file.write_text(f"short\n{'long ' * 40}\n")
    arguments = command(
        tiny_folder, tmp_path, "run", f"model.cache_dir={tmp_path / 'embeddings'}", f"data.train={file}"
    )
    said = encoded([*arguments, "data.target=none", "trainer.eval.sets={}"], capsys).splitlines()
    assert said[1].startswith("1 of them are longer than the 12 tokens that are read of one, and are cut off")


def test_prompts_of_another_task_are_refused_as_for_a_run(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "videos.jsonl"
    file.write_text('{"prompt": "a cat", "metadata": {"task": "t2v"}}\n')
    arguments = command(
        tiny_folder, tmp_path, "run", f"model.cache_dir={tmp_path / 'embeddings'}", f"data.train={file}"
    )
    assert TOOL.command([*arguments, "data.target=none", "trainer.eval.sets={}"]) == 2
    assert "1 of 1 prompts are for t2v, but model.task is t2i" in capsys.readouterr().err


def test_everything_that_is_wrong_comes_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.txt"
    arguments = ["model=z_image", f"data.train={missing}", f"trainer.eval.sets.heldout={missing}", "device=cpu"]
    assert TOOL.command(arguments) == 2
    assert capsys.readouterr().err.splitlines() == [
        "encode_prompts: 4 problems.",
        "  model.path: must be set: a diffusers folder or a Hub id. Set model.path=..., or model.init=random for "
        "untrained weights.",
        f"  data.train: {missing}: No such file or directory",
        f"  trainer.eval.sets.heldout: {missing}: No such file or directory",
        "  model.cache_dir: must be set: the folder to fill. Set model.cache_dir=FOLDER.",
    ]
    assert TOOL.command(["model=z_imag"]) == 2
    assert "z_image" in capsys.readouterr().err, "a misspelt option is explained as for a run"
    assert TOOL.command(["-h"]) == 0
    assert "python -m flowrl.cli.encode_prompts recipe=NAME" in capsys.readouterr().out


def test_a_run_is_the_same_with_its_embeddings_on_the_disk(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit: one that never had a cache, and one that goes on with one that its first half has filled.

    The command encodes with the run's own kernels, so that all that the run has encoded is there for it.
    """
    settings = (
        "trainer.total_steps=2",
        "trainer.eval.every=1",
        "checkpoint.every=1",
        "actor.optimizer.schedule=constant",
    )
    without = flowrl.train(flowrl.load_config(command(tiny_folder, tmp_path, "without", *settings)))
    arguments = command(tiny_folder, tmp_path, "with", *settings, f"model.cache_dir={tmp_path / 'embeddings'}")
    half = flowrl.train(flowrl.load_config([*arguments, "trainer.total_steps=1"]))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "embeddings").rglob("*.safetensors")}
    assert len(files) == len(WORDS) and Folders(half / "checkpoints").steps() == [1]
    again = flowrl.train(flowrl.load_config(arguments))
    assert {path: path.stat().st_mtime_ns for path in files} == files, "nothing was encoded again"
    assert records(again) == records(without)
    capsys.readouterr()
    assert f"{len(WORDS)} texts, 0 of them new" in encoded(arguments, capsys)
    found, expected = (read_tensors(run / "checkpoints/step_0000002/tensors", "") for run in (again, without))
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)

"""Exports, samples and evaluations of real small runs, against plain diffusers, peft and the runs' own records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file

import flowrl
from flowrl.cli import evaluate, export, sample
from flowrl.cli.trained import open_run, read_trained
from flowrl.models.policy import PipelinePolicy
from flowrl.models.sd3 import SD3
from tests.support import tiny

WORDS = ["FLOW", "OPEN", "SALE", "MILK"]
MERGED = "transformer/diffusion_pytorch_model.safetensors"


def train(actor: str, model: Path, folder: Path) -> Path:
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f'A sign that says "{word}"\n' for word in WORDS))
    options = [
        "debug=short",
        f"model.path={model}",
        "model.max_sequence_length=0",
        f"data.train={prompts}",
        f"trainer.eval.sets.heldout={prompts}",
        f"runs={folder}",
        f"name={actor}",
        f"actor={actor}",
        "actor.lora.rank=4",
        "actor.optimizer.lr=1e-2",
        "actor.ema.decay=0.5",
        "trainer.eval.use_ema=true",
        "reward=jpeg_incompressibility",
        "reward.num_workers=0",
        "checkpoint.every=1",
        "logger=jsonl",
        "artifacts.every=0",
    ]
    return flowrl.train(flowrl.load_config(options))


@pytest.fixture(scope="module")
def lora(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run; do not write to it."""
    return train("lora", tiny_folder, tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def full(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("full", tiny_folder, tmp_path_factory.mktemp("full"))


def done(run: Path, out: Path, *arguments: str) -> Path:
    assert export.TOOL.command([f"run={run}", f"out={out}", *arguments]) == 0
    return out


def test_an_adapter_of_the_average(lora: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Verified in the tool with `load_lora_weights`; peft reads the same folder to the same velocity."""
    out = done(lora, tmp_path / "adapter", "form=adapter")
    record = json.loads((out / "export.json").read_text())
    assert record["largest_difference"]["to_trainer"] <= 1e-5 < 1e-2 < record["largest_difference"]["to_base"]
    assert record["weights"] == f"{lora}/final" and len(record["base"]) == 64
    theirs, mine = (
        StableDiffusion3Pipeline.from_pretrained(tiny_folder, text_encoder_3=None, tokenizer_3=None) for _ in range(2)
    )
    theirs.load_lora_weights(out)
    mine.transformer = PeftModel.from_pretrained(mine.transformer, out)
    inputs = {
        "hidden_states": torch.randn(2, 8, 8, 20),
        "timestep": torch.tensor([300.0, 900.0]),
        "encoder_hidden_states": torch.randn(2, 12, 32),
        "pooled_projections": torch.randn(2, 32),
        "return_dict": False,
    }
    with torch.no_grad():
        torch.testing.assert_close(mine.transformer(**inputs)[0], theirs.transformer(**inputs)[0], atol=1e-5, rtol=0)


def test_live_weights_average_and_earlier_ones_differ(lora: Path, tmp_path: Path) -> None:
    name = "pytorch_lora_weights.safetensors"
    chosen = {"live": ["weights=live"], "ema": ["weights=ema"], "end": [], "first": ["checkpoint=step_0000001"]}
    files = {
        key: load_file(done(lora, tmp_path / key, "form=adapter", "verify=false", *words) / name)
        for key, words in chosen.items()
    }
    b = next(key for key in files["live"] if "lora_B" in key)
    assert all(torch.equal(value, files["end"][key]) for key, value in files["ema"].items())
    assert not torch.equal(files["live"][b], files["ema"][b])
    assert not torch.equal(files["first"][b], files["ema"][b])
    trained = read_trained(lora, "latest", "live").tensors
    assert {key.removeprefix("transformer."): value.tolist() for key, value in files["live"].items()} == {
        key: value.tolist() for key, value in trained.items()
    }


def test_a_merged_adapter_is_a_whole_pipeline(lora: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """It draws, pixel by pixel, what the base with the adapter draws; the tool has compared it with the trainer."""
    out = done(lora, tmp_path / "merged", "form=merged")
    assert json.loads((out / "export.json").read_text())["largest_difference"]["to_trainer"] <= 1e-5
    assert (out / "vae/config.json").samefile(tiny_folder / "vae/config.json")
    assert load_file(out / MERGED).keys() == load_file(tiny_folder / MERGED).keys()
    base, whole = (
        StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
        for folder in (tiny_folder, out)
    )
    base.load_lora_weights(lora / "final")
    assert np.abs(pictures(base).astype(int) - pictures(whole)).max() <= 1


def pictures(pipeline: StableDiffusion3Pipeline) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    start = torch.randn(1, 8, 4, 10, generator=torch.Generator().manual_seed(0))
    (image,) = pipeline(
        prompt='A sign that says "FLOW"',
        height=16,
        width=40,
        num_inference_steps=3,
        guidance_scale=1.0,
        max_sequence_length=0,
        latents=start,
    ).images
    return np.asarray(image)


def test_a_fully_trained_run_merges_to_its_weights(full: Path, tmp_path: Path) -> None:
    out = done(full, tmp_path / "merged", "form=merged")
    record = json.loads((out / "export.json").read_text())
    assert record["largest_difference"]["to_trainer"] <= 1e-5 < record["largest_difference"]["to_base"]
    final, exported = load_file(full / "final" / MERGED), load_file(out / MERGED)
    assert final.keys() == exported.keys() and all(torch.equal(final[key], exported[key]) for key in final)


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_another_base_is_refused(lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    """One of another content, and none at all; without verification an adapter needs no base."""
    other = tiny.save_random_folder(tmp_path / "other", seed=1)
    arguments = [f"run={lora}", f"out={tmp_path / 'out'}", f"form={form}"]
    assert export.TOOL.command([*arguments, f"base={other}"]) == 2
    assert "model.path: the model there is not the one that the run has trained" in capsys.readouterr().err
    shutil.rmtree(other)
    assert export.TOOL.command([*arguments, f"base={other}"]) == 2
    assert f"model.path={other}: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    status = export.TOOL.command([*arguments, f"base={other}", "verify=false"])
    assert (status, (tmp_path / "out").exists()) == ((0, True) if form == "adapter" else (2, False))


def test_what_draws_otherwise_is_not_kept(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fold that is wrong by a hundredth of the adapter."""
    from flowrl.cli import merging

    right = merging.Merged
    monkeypatch.setattr(merging, "Merged", lambda base, a, b, scaling: right(base, a, b, 1.01 * scaling))
    assert export.TOOL.command([f"run={lora}", f"out={tmp_path / 'out'}", "form=merged"]) == 1
    assert "differ by" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_comparison_that_has_no_room(
    lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(SD3, "draw", draw)
    assert export.TOOL.command([f"run={lora}", f"out={tmp_path / 'out'}", "form=merged"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "no room for the comparison" in said and "verify=false" in said and not list(tmp_path.iterdir())


def test_forms_that_cannot_be(full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.TOOL.command([f"run={full}", f"out={tmp_path}", "form=adapter"]) == 2
    assert "form: cannot be adapter: the run has trained every weight" in capsys.readouterr().err
    assert export.TOOL.command([f"run={full}", f"out={tmp_path}", "form=merged"]) == 2
    assert "exists, and nothing is overwritten" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- sample, evaluate


def test_tools_compute_with_the_kernels_of_runs(lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `flowrl.device`, wherever a model is loaded; and the process is afterwards what it was."""
    seen, load = [], SD3.load

    def watched(model: SD3, device: torch.device) -> PipelinePolicy:
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.are_deterministic_algorithms_enabled()))
        return load(model, device)

    monkeypatch.setattr(SD3, "load", watched)
    torch.backends.cuda.enable_cudnn_sdp(True)  # as torch begins; an earlier test may have settled this process
    before = True, torch.are_deterministic_algorithms_enabled()
    done(lora, tmp_path / "adapter", "form=adapter")
    samples(tmp_path / "pictures", f"run={lora}", "prompt=A")
    assert seen == [(False, open_run(lora, "cpu").deterministic)] * 2
    assert (torch.backends.cuda.cudnn_sdp_enabled(), torch.are_deterministic_algorithms_enabled()) == before


def samples(out: Path, *arguments: str) -> np.ndarray:
    """uint8 [prompts, H, W, 3]: the first picture of each prompt."""
    assert sample.TOOL.command([f"out={out}", *arguments]) == 0
    assert (out / "grid.png").is_file()
    return np.stack([np.asarray(Image.open(file)) for file in sorted(out.glob("*_0.png"))])


def test_samples_are_those_of_the_evaluation(lora: Path, tmp_path: Path) -> None:
    """Same seed, same pictures: of the base before training, of the trained weights after it, and of their export."""
    prompts = f"prompts={lora.parent / 'prompts.txt'}"
    evaluations = {step: sorted((lora / f"artifacts/evaluations/{step:06d}").rglob("0.png")) for step in (0, 2)}
    before, after = (np.stack([np.asarray(Image.open(file)) for file in files]) for files in evaluations.values())
    assert (before != after).any()
    done(lora, tmp_path / "adapter", "form=adapter", "verify=false")
    drawn = samples(tmp_path / "2", f"run={lora}", "samples_per_prompt=2", prompts)
    assert (drawn == after).all()
    assert (samples(tmp_path / "3", f"run={lora}", f"adapter={tmp_path / 'adapter'}", prompts) == after).all()
    assert (samples(tmp_path / "4", f"run={lora}", "weights=base", prompts) == before).all()
    record = json.loads((tmp_path / "2" / "samples.json").read_text())
    assert record["source"] == f"{lora}/final" and len(record["samples"]) == 2 * len(WORDS)
    assert record["samples"][-1]["prompt"] == 'A sign that says "MILK"'


def test_samples_of_a_model_without_a_run(tiny_folder: Path, tmp_path: Path) -> None:
    sizes = ["height=16", "width=32", "num_steps=2", "prompt=A sign: [none]"]
    assert samples(tmp_path / "1", f"model={tiny_folder}", "family=tiny_sd3", *sizes).shape == (1, 16, 32, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=tiny_sd3", "height=30", "width=32", "prompt=A"], "  height: must be a multiple of"),
        (["model=tiny_sd3"], "  prompt: either it or prompts must be set."),
        (["prompt=A"], "  run: either it or model must be set."),
        (["prompt=A", "run=x", "model=y", "weights=ema"], "  model: is drawn instead of a run's weights."),
        (["prompt=A", "model=tiny_sd3", "num_steps=0"], "  num_steps: must be at least 1, got 0."),
        (["prompts=/no/such.txt", "model=tiny_sd3"], "  prompts: /no/such.txt: No such file or directory"),
        (["prompt=A", "model=tiny_sd3", "family=sd4"], "  out: "),
        (["prompt=A", "model=/no/such/folder"], "  model.path=/no/such/folder: there is no such folder"),
        (
            ["prompt=A", "model=tiny_sd3", "adapter=/no/such/folder"],
            "  adapter: /no/such/folder holds no adapter_config",
        ),
    ],
)
def test_samples_that_cannot_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path if message == "  out: " else tmp_path / "out"
    assert sample.TOOL.command([f"out={out}", *arguments]) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_an_evaluation_finds_what_the_run_found(full: Path, tmp_path: Path) -> None:
    """Means before and after are those of the run's summary, and of the same prompts."""
    out = tmp_path / "found.json"
    assert evaluate.TOOL.command([f"run={full}", f"out={out}"]) == 0
    record = json.loads(out.read_text())
    found = record["sets"]["heldout"]["jpeg_incompressibility"]
    summary = json.loads((full / "summary.json").read_text())
    before, after = (summary[key]["eval/heldout/jpeg_incompressibility_mean"] for key in ("before", "after"))
    assert found["base"]["mean"] == pytest.approx(before, abs=1e-6)
    assert found["trained"]["mean"] == pytest.approx(after, abs=1e-6)
    assert found["difference"]["low"] <= after - before <= found["difference"]["high"]
    assert found["num_prompts"] == len(WORDS) and record["trained"] == f"{full}/final"


def test_an_evaluation_with_other_numbers(lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    arguments = [f"run={lora}", f"out={out}"]
    assert evaluate.TOOL.command([*arguments, "sets=heldout,other", "samples_per_prompt=2"]) == 2
    assert "sets: the run has no held-out set other. There are: heldout." in capsys.readouterr().err
    assert evaluate.TOOL.command([*arguments, "checkpoint=step_0000001", "seed=1", "samples_per_prompt=2"]) == 0
    record = json.loads(out.read_text())
    assert (record["seed"], record["samples_per_prompt"]) == (1, 2)
    assert record["trained"] == f"{lora}/checkpoints/step_0000001 (ema)"
    assert "step_0000001 (ema)" in capsys.readouterr().out

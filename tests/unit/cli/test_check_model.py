"""The command that holds a family to its pipeline must see what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.cli import check_model

FAULTY = """
from dataclasses import dataclass
from flowrl.models.sd3 import SD3, SD3Policy

@dataclass(frozen=True)
class Faulty(SD3):
    fault: str = ""

    def policy(self, pipeline, device):
        policy = FaultyPolicy(self, pipeline, device)
        if self.fault == "blocks":
            policy.blocks = ()
        if self.fault == "targets":
            policy.lora_targets = ("attn.no_such_layer",)
        return policy

class FaultyPolicy(SD3Policy):
    calls = 0

    def forward(self, sample, sigma, text):
        if self.config.fault == "timestep":
            sigma = sigma * 0.999
        velocity = super().forward(sample, sigma, text)
        if self.config.fault == "company":
            velocity = velocity + 0.01 * velocity.mean()
        if self.config.fault == "memory":
            FaultyPolicy.calls += 1
            velocity = velocity + 1e-7 * FaultyPolicy.calls
        return velocity

    def guide(self, conditional, unconditional, scale, sigma):
        scale = scale + (self.config.fault == "guidance")
        return super().guide(conditional, unconditional, scale, sigma)
"""
PIPELINE = ("without guidance it draws", "with guidance 3 it draws")
COMPANY = ("without guidance a sample is the same", "with guidance 3 a sample is the same")


@pytest.mark.parametrize(
    ("fault", "sentences"),
    [
        ("", ()),
        ("timestep", PIPELINE),
        ("guidance", PIPELINE[1:]),
        ("company", (PIPELINE[0], COMPANY[0], PIPELINE[1], COMPANY[1])),
        ("memory", ("the forward that trains",)),
        ("blocks", ("repeated blocks",)),
        ("targets", ("repeated blocks",)),
    ],
)
def test_each_fault_is_seen_by_its_check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    sentences: tuple[str],
) -> None:
    (tmp_path / "faulty_family.py").write_text(FAULTY)
    option = tmp_path / "options/model/faulty.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(f"_target_: faulty_family.Faulty\npath: null\nmax_sequence_length: 16\nfault: '{fault}'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    status = check_model.TOOL.command(["family=faulty", f"config_dir={tmp_path / 'options'}", "tolerance=2e-5"])
    said = capsys.readouterr()
    lines = [line.split(maxsplit=2) for line in said.out.splitlines()]
    failed = [sentence for verdict, _, sentence in lines if verdict == "FAIL"]
    assert len(lines) == 6 and len(failed) == len(sentences)
    assert all(sentence.startswith(beginning) for sentence, beginning in zip(failed, sentences, strict=True))
    assert status == bool(sentences) and bool(said.err) == bool(sentences)


def test_what_a_family_refuses_is_said_in_the_tools_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_model.TOOL.command(["family=flux"]) == 2
    assert "  guidance_scale: must be 1 for FLUX.1" in capsys.readouterr().err
    assert check_model.TOOL.command(["family=sd3", "height=65"]) == 2
    assert "  height: must be a multiple of" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["num_steps=1", "height=0", "frames=-3", "guidance_scale=nan", "tolerance=nan"])
def test_values_that_cannot_be_meant(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_model.TOOL.command(["family=sd3", argument]) == 2
    assert f"  {argument.partition('=')[0]}: must be at least" in capsys.readouterr().err

"""`python -m data_process inspect`."""

from pathlib import Path

import pytest

from data_process.__main__ import command


def test_a_sound_file_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.txt"
    file.write_text('say "A"\nsay "BCD"\nsay "A"\n')
    assert command(["inspect", str(file), "--target", "quoted"]) == 0
    assert "3 prompts of 7 to 9 characters, 1 repeated, 3 with a target" in capsys.readouterr().out


def test_every_fault_is_printed_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.txt"
    file.write_text("no quotes\n" * 30)
    assert command(["inspect", str(file), "--target", "quoted"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{file}:{number}" for number in range(1, 31)]

"""key=value arguments: what is understood, what is refused and in which words; and folders that appear whole."""

from __future__ import annotations

import errno
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from flowrl.cli import check_model, encode_prompts, evaluate, export, sample, serve_latent_reward, serve_reward
from flowrl.cli.arguments import Failure, Tool, new_folder, option, parse
from flowrl.cli.compose import load_config
from flowrl.config import ConfigError, Problem
from flowrl.rewards.scoring import RewardError
from flowrl.types import LoadError


@dataclass
class Settings:
    run: str = option("the run's folder")
    form: str = option("of what is made", "whole", choices=("whole", "half"))
    count: int | None = option("how many", None)
    scale: float = option("of it all", 1.0)
    verify: bool = option("look twice", True)


def refusals(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(Settings, arguments)
    return [str(problem) for problem in caught.value.problems]


def test_values_have_their_types() -> None:
    settings = parse(Settings, ["run=runs/a", "form=half", "count=3", "scale=1e-3", "verify=false"])
    assert settings == Settings(run="runs/a", form="half", count=3, scale=1e-3, verify=False)
    assert parse(Settings, ["run=a", "count=null"]) == Settings(run="a")


@pytest.mark.parametrize("text", ['a sign: "x=1"', "[1, 2", "{a: b}", "007", "true", "", "a # b", "${run}"])
def test_a_text_is_what_was_typed(text: str) -> None:
    assert parse(Settings, [f"run={text}"]).run == text


def test_everything_that_is_wrong_comes_together() -> None:
    assert refusals("forms=half", "count=many", "scale=[", "verify", "form=third") == [
        "forms: there is no such key. Did you mean form? Keys: form, count, run, scale, verify.",
        "count: Value 'many' of type 'str' could not be converted to Integer.",
        "scale: cannot be read: '['.",
        "verify: has no value. Write verify=...",
        "run: must be set: the run's folder. Write run=...",
        "form: must be whole or half, got 'third'.",
    ]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (None, 0, ""),
        (ConfigError(Problem("run", "holds nothing.")), 2, "tool: 1 problem.\n  run: holds nothing.\n"),
        (LoadError("model.path=x: is not there."), 2, "tool: 1 problem.\n  model.path=x: is not there.\n"),
        (Failure("no room."), 1, "tool: no room.\n"),
        (
            RewardError("ocr", "prompt 'p'", "OSError"),
            1,
            "tool: reward component 'ocr' failed on prompt 'p': OSError\n",
        ),
        (KeyboardInterrupt(), 130, "\ntool: interrupted.\n"),
    ],
)
def test_exit_statuses(error: BaseException | None, status: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    def carry_out(settings: Settings) -> None:
        if error is not None:
            raise error

    assert Tool("tool", "About.", Settings, carry_out).command(["run=a"]) == status
    assert capsys.readouterr().err == text


def test_a_fault_of_the_code_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        Tool("tool", "About.", Settings, lambda settings: 1 // 0).command(["run=a"])


@pytest.mark.parametrize("tool", [export.TOOL, sample.TOOL, evaluate.TOOL], ids=lambda tool: tool.name)
def test_help_has_one_line_for_each_key(tool: Tool, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.command(["run=x", "-h"]) == 0
    usage, _, _, _, *lines = capsys.readouterr().out.splitlines()
    assert usage == f"usage: python -m flowrl.cli.{tool.name} key=value ..."
    assert [line.strip().split("=")[0] for line in lines] == list(tool.schema.__dataclass_fields__)
    assert all(len(line) <= 120 for line in lines)


def documented() -> list[list[str]]:
    """The words after `python -m flowrl.cli.` in the shell blocks of README and docs."""
    root, prefix = Path(__file__).parents[3], "python -m flowrl.cli."
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", " ")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    calls = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    return [shlex.split(call, comments=True) for call in calls]


@pytest.mark.parametrize("words", documented(), ids=" ".join)
def test_the_documented_commands_are_understood(words: list[str]) -> None:
    if words[0] == encode_prompts.TOOL.name:
        assert load_config(words[1:]).model.cache_dir
        return
    if words[0] == serve_reward.TOOL.name:
        serve_reward.TOOL.settings(words[1:])
        return
    if words[0] == serve_latent_reward.TOOL.name:  # its model is the reader's own
        with pytest.raises(ConfigError, match=r"^model._target_: cannot import 'my_package.MyModel'[^\n]*$"):
            serve_latent_reward.TOOL.settings(words[1:])
        return
    tools = {tool.name: tool for tool in (check_model.TOOL, export.TOOL, sample.TOOL, evaluate.TOOL)}
    settings = parse(tools[words[0]].schema, words[1:])
    if isinstance(settings, sample.Sample):
        sample.check(settings)


# ---------------------------------------------------------------------------------------------- folders


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    with new_folder(str(tmp_path / "a" / "out")) as folder:
        (folder / "file").touch()
        assert not (tmp_path / "a" / "out").exists()
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["out", "file"]


def test_after_an_error_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(str(tmp_path / "out")) as folder:
        (folder / "file").touch()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nothing_is_overwritten(tmp_path: Path, when: str) -> None:
    out = tmp_path / "out"
    if when == "before":
        out.symlink_to("nowhere")
    with pytest.raises(ConfigError, match="out exists, and nothing is overwritten"), new_folder(str(out)):
        assert when == "meanwhile"
        out.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reason = r"out=.*file/out cannot be written: Not a directory"
    with pytest.raises(Failure, match=reason), new_folder(str(tmp_path / "file" / "out")):
        pass
    with pytest.raises(Failure, match="No space left"), new_folder(str(tmp_path / "out")) as folder:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "x"))
    with pytest.raises(FileNotFoundError), new_folder(str(tmp_path / "out")):
        Path("/no/such/file").read_bytes()

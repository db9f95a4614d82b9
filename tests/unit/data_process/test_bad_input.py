"""Files as they come: what is sound is read whole, what is not is refused by line, and then nothing is written."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data_process.output import alone, new_data_files
from flowrl.data.prompts import fingerprint, load_prompts
from tests.unit.data_process.support import content, jsonl, read, refused, tool

SOUND = {
    "CRLF": ("p.txt", b'a "CAT"\r\na "DOG"\r\n'),
    "byte order mark": ("p.txt", b'\xef\xbb\xbfa "CAT"\na "DOG"\n'),
    "no final newline": ("p.txt", b'a "CAT"\na "DOG"'),
    "empty lines": ("p.txt", b'\n\n a "CAT" \n \t\na "DOG"\n\n'),
    "JSON with all of it": ("p.jsonl", b'\xef\xbb\xbf{"prompt": "a \\"CAT\\""}\r\n\r\n{"prompt": "a \\"DOG\\""}'),
}
BROKEN = {
    "Latin-1": ("p.txt", b'a "CAT"\na "L\xe9on"\n', "2: byte 0xe9 in column 5 is not UTF-8"),
    "one broken line": (
        "p.jsonl",
        b'{"prompt": "a \\"CAT\\""}\n{"prompt": \n{"prompt": "b \\"C\\""}\n',
        "2: is not JSON",
    ),
    "a null prompt": (
        "p.jsonl",
        b'{"prompt": "a \\"CAT\\""}\n{"prompt": null}\n',
        "2: 'prompt' must be a string, got null",
    ),
    "no quotes": ("p.txt", b'a "CAT"\na cat\n', "2: has no quoted text"),
    "one quote": ("p.txt", b'a "CAT"\na 5" nail\n', "2: has no quoted text"),
    "empty quotes": ("p.txt", b'a "CAT"\na ""\n', "2: quotes an empty text"),
    "empty curly quotes": ("p.txt", "a “CAT”\na “”\n".encode(), "2: quotes an empty text"),
    "ids twice": (
        "p.jsonl",
        b'{"prompt": "\\"A\\"", "id": 1}\n{"prompt": "\\"B\\"", "id": "1"}',
        "2: has the id '1' of line 1",
    ),
    "a carriage return": ("p.txt", b'a "CAT"\ra "DOG"', "1: 'prompt' holds U+000D"),
}


REMEDY = "nothing is written; --drop-faulty would leave such rows out"


@pytest.mark.parametrize(("name", "data"), SOUND.values(), ids=SOUND)
def test_sound_files(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    output = tmp_path / "out/a.jsonl"
    assert tool("prepare", "--input", tmp_path / name, "--output", output, "--source", "ocr") == 0
    assert [(row["prompt"], row["target"]) for row in read(output)] == [('a "CAT"', "CAT"), ('a "DOG"', "DOG")]
    assert tool("inspect", tmp_path / name, output, "--target", "quoted") == 0


@pytest.mark.parametrize(("name", "data", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes, message: str) -> None:
    source = tmp_path / name
    source.write_bytes(data)
    for given, more in (
        (("prepare", "--input", source, "--output", tmp_path / "o.jsonl", "--source", "ocr"), [REMEDY]),
        (("inspect", source, "--target", "quoted"), []),
    ):
        line, *others = refused(capsys, *given)
        assert line.startswith(f"{source}:{message}") and others == more, line
    assert content(tmp_path).keys() == {name}


def test_targets_of_every_kind_come_through(tmp_path: Path) -> None:
    targets = ["HI", "“", "你好世界", "👩‍🚀🎉", "Crème brûlée", "مرحبا", "  two  spaces ", "x" * 10_000]
    source = tmp_path / "p.txt"
    source.write_text("".join(f'a sign "{target}" and "another"\n' for target in targets), encoding="utf-8")
    for suffix in ("jsonl", "parquet"):
        made = tmp_path / f"a.{suffix}"
        assert tool("prepare", "--input", source, "--output", made, "--source", "ocr") == 0
        assert [prompt.target for prompt in load_prompts(str(made), "quoted")] == targets
        assert tool("curate", "--input", made, "--out-dir", tmp_path / suffix, "--eval-size", 2) == 0
        found = read(tmp_path / suffix / "train.jsonl") + read(tmp_path / suffix / "eval.jsonl")
        assert sorted(row["target"] for row in found) == sorted(targets)


def test_a_fault_in_the_last_row_leaves_older_files_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = jsonl(tmp_path / "good.jsonl", [{"prompt": f"prompt {n}"} for n in range(50)])
    bad = jsonl(tmp_path / "bad.jsonl", [*({"prompt": f"prompt {n}"} for n in range(50)), {"prompt": 3}])
    out = tmp_path / "out"
    for command, options, more in (
        ("prepare", ["--output", out / "a.jsonl"], [REMEDY]),
        ("curate", ["--out-dir", out, "--eval-size", 5], []),
    ):
        assert tool(command, "--input", good, *options) == 0
        before = content(out)
        assert refused(capsys, command, "--input", bad, *options) == [
            f"{bad}:51: 'prompt' must be a string, got a number",
            *more,
        ]
        assert content(out) == before


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_full_disk_leaves_older_files_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    few = jsonl(tmp_path / "few.jsonl", [{"prompt": "a cat"}])
    many = jsonl(tmp_path / "many.jsonl", [{"prompt": f"prompt {n * n}"} for n in range(20_000)])
    made = tmp_path / "out" / f"a.{suffix}"
    assert tool("prepare", "--input", few, "--output", made) == 0
    before = content(made.parent)
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        (line,) = refused(capsys, "prepare", "--input", many, "--output", made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert line == f"{made}: File too large"
    assert content(made.parent) == before


def test_what_a_kill_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".a.jsonl.partial").write_bytes(b'{"prompt": "half a')
    assert (
        tool("prepare", "--input", jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}]), "--output", tmp_path / "a.jsonl")
        == 0
    )
    assert content(tmp_path).keys() == {"in.jsonl", "a.jsonl", "metadata.json"}


def test_several_files_change_together_or_not_at_all(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.parquet"]
    with pytest.raises(KeyboardInterrupt), new_data_files(paths) as (first, _):
        first.write({"prompt": "a", "metadata": {}})
        raise KeyboardInterrupt
    assert content(tmp_path) == {}


def test_an_input_that_cannot_be_read_to_its_end_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.txt"
    source.symlink_to("/proc/self/mem")  # opens, and cannot be read
    for fingerprinted in (fingerprint, str):
        monkeypatch.setattr("data_process.inputs.fingerprint", fingerprinted)
        said = refused(capsys, "prepare", "--input", source, "--output", tmp_path / "out/a.jsonl")
        assert said == [f"{source}: Input/output error"]
    assert not (tmp_path / "out").exists()


def test_what_fails_while_files_are_written_is_named(tmp_path: Path) -> None:
    for name, blamed in (("other", "other"), (None, str(tmp_path / "a.jsonl"))):
        with pytest.raises(OSError, match="broken") as caught, new_data_files([tmp_path / "a.jsonl"]):
            raise OSError(5, "broken", name)
        assert caught.value.filename == blamed
    assert content(tmp_path) == {}


def test_two_commands_do_not_write_into_one_folder_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = jsonl(tmp_path / "in.jsonl", [{"prompt": f"prompt {n}"} for n in range(9)]), tmp_path / "out"
    commands = [
        ("prepare", "--input", source, "--output", out / "a.jsonl"),
        ("curate", "--input", source, "--out-dir", out, "--eval-size", 3),
    ]
    with alone(out):
        before = content(out)
        for command in commands:
            message = f"{out}: another command is writing into this folder; wait until it has ended"
            assert refused(capsys, *command) == [message]
        assert content(out) == before
        assert tool("prepare", "--input", source, "--output", tmp_path / "other/a.jsonl") == 0
    assert content(out) == {}
    assert [tool(*command) for command in commands] == [0, 0]
    assert content(out).keys() == {"a.jsonl", "train.jsonl", "eval.jsonl", "metadata.json"}


def test_commands_that_are_started_together(tmp_path: Path) -> None:
    """Each that says it is done is done, and is described."""
    source, out = jsonl(tmp_path / "in.jsonl", [{"prompt": f"prompt {n}"} for n in range(2000)]), tmp_path / "out"
    given = [sys.executable, "-m", "data_process", "prepare", "--input", str(source), "--output"]
    started = [
        subprocess.Popen([*given, str(out / f"{n}.jsonl")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for n in range(4)
    ]
    done = {f"{n}.jsonl" for n, process in enumerate(started) if process.wait() == 0}
    assert done and content(out).keys() == done | {"metadata.json"}
    assert json.loads((out / "metadata.json").read_text()).keys() == done


def test_what_is_refused_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = jsonl(tmp_path / "bad.jsonl", [{"prompt": 3}])
    assert len(refused(capsys, "prepare", "--input", bad, "--output", tmp_path / "new/deep/a.jsonl")) == 2
    (tmp_path / "a.jsonl").mkdir()
    good = jsonl(tmp_path / "good.jsonl", [{"prompt": "a"}])
    said = refused(capsys, "prepare", "--input", good, "--output", tmp_path / "a.jsonl")
    assert said == [f"{tmp_path / 'a.jsonl'}: is a folder"]
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "bad.jsonl", "good.jsonl"}


def test_nested_fields_that_become_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f'{{"prompt": "a", "x": {"[" * 900}{"]" * 900}}}')
    given = ("prepare", "--input", source, "--output", tmp_path / "o.jsonl", "--metadata-keys", "x")
    assert refused(capsys, *given)[0] == f"{source}:1: is nested more than 100 deep"


KILLED = """
import os, signal, sys
from pathlib import Path
from data_process.__main__ import command

renames, rename = iter(range(int(sys.argv[1]))), Path.replace

def until_killed(path, target):
    if next(renames, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, target)

Path.replace = until_killed
command(sys.argv[2:])
"""


@pytest.mark.parametrize("num_renamed", range(4))
def test_a_kill_between_two_renames_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_renamed: int
) -> None:
    out, clean = tmp_path / "out", tmp_path / "clean"
    files = [out / f"{name}.jsonl" for name in ("train", "eval", "eval4")]
    inspection = ("inspect", "--train", files[0], "--eval", *files[1:])
    old, new = (jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {n}"} for n in range(30)]) for name in "ab")

    def curation(source: Path, folder: Path) -> list[object]:
        return ["curate", "--input", source, "--out-dir", folder, "--eval-size", 8, "--eval-subset-sizes", 4]

    assert tool(*curation(old, out)) == tool(*curation(new, clean)) == 0
    before = content(out)
    arguments = map(str, [num_renamed, *curation(new, out)])
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    after = content(clean)
    for place, name in enumerate(("train.jsonl", "eval.jsonl", "eval4.jsonl", "metadata.json")):
        assert content(out)[name] == (after if place < num_renamed else before)[name]
    if num_renamed == 0:
        assert tool(*inspection) == 0
    else:
        found = {line.partition(" (")[0] for line in refused(capsys, *inspection) if line.startswith(str(out))}
        faulty = {f"{file}: is not the file that metadata.json describes" for file in files[:num_renamed]}
        assert {line for line in found if "is not the file" in line} == faulty
    assert tool(*curation(new, out)) == 0
    assert content(out) == after and tool(*inspection) == 0


def test_an_input_that_changes_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": f"p{n}"} for n in range(9)])

    def split(*_: object) -> tuple[set[int], dict[int, bytes]]:
        with source.open("a") as file:
            file.write(json.dumps({"prompt": "late"}) + "\n")
        return set(range(8)), {8: b""}

    monkeypatch.setattr("data_process.curate.Selection.split", split)
    assert refused(capsys, "curate", "--input", source, "--out-dir", tmp_path / "out", "--eval-size", 1) == [
        f"{source}: changed while it was being read"
    ]
    assert content(tmp_path / "out") == {}

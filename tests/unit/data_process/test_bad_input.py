"""Files as they come: what is sound is read whole, what is not is refused by line, and then nothing is written."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

from data_process.output import new_data_files
from flowrl.data.prompts import load_prompts
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
    for given in (
        ("prepare", "--input", source, "--output", tmp_path / "o.jsonl", "--source", "ocr"),
        ("inspect", source, "--target", "quoted"),
    ):
        (line,) = refused(capsys, *given)
        assert line.startswith(f"{source}:{message}"), line
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
    for command, options in (
        ("prepare", ["--output", out / "a.jsonl"]),
        ("curate", ["--out-dir", out, "--eval-size", 5]),
    ):
        assert tool(command, "--input", good, *options) == 0
        before = content(out)
        assert refused(capsys, command, "--input", bad, *options) == [
            f"{bad}:51: 'prompt' must be a string, got a number"
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
    assert line.startswith(str(made.parent)) and "File too large" in line
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

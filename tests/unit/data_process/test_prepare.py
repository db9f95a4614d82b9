"""`prepare`: published data sets become files of one schema."""

from __future__ import annotations

import csv
import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow.parquet import write_table

from flowrl.data.chat import QWEN_IMAGE_SYSTEM
from flowrl.data.prompts import load_prompts
from flowrl.files import sha256_of
from tests.unit.data_process.support import content, jsonl, read, refused, tool


def prepared(source: Path, *arguments: object) -> list[dict[str, Any]]:
    output = source.parent / "out" / "data.jsonl"
    assert tool("prepare", "--input", source, "--output", output, *arguments) == 0
    return read(output)


def text(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_lines_get_a_task_and_an_id(tmp_path: Path) -> None:
    cat, dog = prepared(text(tmp_path, "a cat", "", "a dog"))
    assert list(cat) == ["prompt", "metadata"] and list(cat["metadata"]) == ["task", "sample_id"]
    assert (cat["prompt"], cat["metadata"]["task"]) == ("a cat", "t2i")
    assert cat["metadata"]["sample_id"].startswith("prompts_")
    assert cat["metadata"]["sample_id"] != dog["metadata"]["sample_id"]


def test_ids_do_not_depend_on_the_place(tmp_path: Path) -> None:
    lines = [f"prompt {n % 7}" for n in range(20)]
    first = prepared(text(tmp_path, *lines), "--name", "mine")
    random.Random(0).shuffle(lines)
    second = prepared(text(tmp_path, *lines), "--name", "mine")

    def key(row: dict[str, Any]) -> str:
        return str(row["metadata"]["sample_id"])

    assert sorted(first, key=key) == sorted(second, key=key)
    assert len({key(row) for row in first}) == 20 and all(key(row).startswith("mine_") for row in first)
    assert sorted(key(row)[-2:] for row in first if row["prompt"] == "prompt 0")[:2] == ["_2", "_3"]


def test_ocr_prompts(tmp_path: Path) -> None:
    source = text(tmp_path, 'a sign "OPEN" and "SHUT"', "“你好” \U0001f389")
    rows = prepared(source, "--source", "ocr")
    assert [row["target"] for row in rows] == ["OPEN", "你好"]
    assert all("negative_prompt" not in row for row in rows)
    (first, _) = prepared(source, "--source", "qwen_image_ocr")
    assert first["negative_prompt"] == " " and first["metadata"]["system_prompt"] == QWEN_IMAGE_SYSTEM
    assert [p.target for p in load_prompts(str(tmp_path / "out/data.jsonl"), "quoted")] == ["OPEN", "你好"]


def test_geneval(tmp_path: Path) -> None:
    include = [{"class": "bench", "count": 1}]
    source = {"tag": "single_object", "include": include, "prompt": "a photo of a bench"}
    (row,) = prepared(jsonl(tmp_path / "g.jsonl", [source]), "--source", "geneval")
    assert row["metadata"].pop("sample_id").startswith("geneval_")
    assert row == {
        "prompt": "a photo of a bench",
        "metadata": {"task": "t2i", "tag": "single_object", "include": include},
    }


def test_pickapic_is_read_from_a_folder_without_its_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    for part, captions in enumerate((["a cat", "a dog"], ["a cat"])):
        pictures = [b"\xff\xd8\xff"] * len(captions)
        write_table(pa.table({"caption": captions, "jpg_0": pictures}), folder / f"train-{part}.parquet")
    rows = prepared(folder, "--source", "pickapic")
    assert [row["prompt"] for row in rows] == ["a cat", "a dog", "a cat"]
    assert rows[2]["metadata"]["sample_id"] == rows[0]["metadata"]["sample_id"] + "_2"


def test_a_column_of_any_name(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": "a cat", "likes": 3, "url": "u", "target": "cat", "prompt": 5}])
    (row,) = prepared(source, "--prompt-key", "text", "--metadata-keys", "likes", "--task", "t2v")
    assert (row["prompt"], row["target"]) == ("a cat", "cat")
    assert row["metadata"]["likes"] == 3 and row["metadata"]["task"] == "t2v"
    assert json.loads((tmp_path / "out/metadata.json").read_text())["data.jsonl"]["fields_left_out"] == [
        "prompt",
        "url",
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_what_is_left_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    source = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        write_table(pa.table({"prompt": ["a cat"], "style": ["neon"], "url": ["u"]}), source)
    elif suffix == "csv":
        source.write_text("prompt,style,url\na cat,neon,u\n")
    else:
        jsonl(source, [{"prompt": "a cat", "style": "neon", "url": "u"}])
    prepared(source)
    assert "left out: style, url (--metadata-keys keeps what it names)\n" in capsys.readouterr().out
    (row,) = prepared(source, "--metadata-keys", "style", "url")
    assert (row["metadata"]["style"], row["metadata"]["url"]) == ("neon", "u")
    assert "left out" not in capsys.readouterr().out
    given = ("--input", source, "--output", tmp_path / "o.jsonl", "--metadata-keys", "styel")
    assert refused(capsys, "prepare", *given) == [
        "--metadata-keys: no row has a field 'styel'; other fields are: style, url"
    ]
    assert not (tmp_path / "o.jsonl").exists()


def test_tables(tmp_path: Path) -> None:
    cells = [
        ["text", "target", "style", "metadata"],
        ['say "A", now', "A", "", '{"n": 1}'],
        ["two\nlines", "", "x", ""],
    ]
    for suffix, dialect in (("csv", "excel"), ("tsv", "excel-tab")):
        source = tmp_path / f"p.{suffix}"
        with source.open("w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, dialect).writerows([*cells, []])
        first, second = prepared(source, "--prompt-key", "text", "--metadata-keys", "style")
        assert (first["prompt"], first["target"], first["metadata"]["n"]) == ('say "A", now', "A", 1)
        assert (second["prompt"], second["metadata"]["style"]) == ("two\nlines", "x") and "target" not in second
        folder = tmp_path / suffix
        folder.mkdir()
        source.rename(folder / source.name)
        assert tool("prepare", "--input", folder, "--output", tmp_path / "o.jsonl", "--prompt-key", "text") == 0


@pytest.mark.parametrize(
    ("table", "messages"),
    [
        (b"prompt,n\na,1\nb\nc,3\n", [":3: has 1 cells, but the first line 2"]),
        (b'prompt\n"a\nb"\n"c"d\n', [":4: is not a row of a table: ',' expected after '\"'"]),
        (b'prompt\na\n"b\n', [":3: is not a row of a table: unexpected end of data"]),
        (b'prompt\n"a\nb\xe9"\nc\n', [":3: byte 0xe9 in column 2 is not UTF-8 (Latin-1?)"]),
        (b"prompt,n\n,1\n", [":2: has no 'prompt'; it has n"]),
        ("prompt\na\n".encode("utf-16"), [": is UTF-16; save it as UTF-8"]),
        (b"prompt,prompt\na,b\n", [": must name each column in its first line, and none twice; got prompt, prompt"]),
        (b"prompt,\na,b\n", [": must name each column in its first line, and none twice; got prompt, "]),
        (b"", [": holds no prompt"]),
        (b"prompt\n\n", [": holds no prompt"]),
    ],
)
def test_tables_with_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: bytes, messages: list[str]
) -> None:
    source = tmp_path / "p.csv"
    source.write_bytes(table)
    said = refused(capsys, "prepare", "--input", source, "--output", tmp_path / "o.jsonl")
    assert [line for line in said if line.startswith(str(source))] == [f"{source}{message}" for message in messages]
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ('prompt,n\na cat,1\n"an open quote,2\n' + "a dog,3\n" * 99 + 'a "cow",4\n', ":3"),  # to the end
        ('prompt,n\na cat,1\n"an open quote,2\n' + "a dog,3\n" * 99 + '"a cow",4\n', ":3"),  # to the next quote
        ('prompt,n\na cat,1\n"an open quote,2\na dog,3",4,5\n', ":3"),  # which ends a cell
        ('prompt,n\na cat,1\n"a"dog,"2\na cow,3\n', ":3"),  # what follows is not read as it was meant
        ("prompt,\xe9\nprompt,n\na cat,1\n", ""),
        ('"prompt"s,n\nprompt,n\na cat,1\n', ":1"),
        ('prompt,"n\na cat,1\na dog,2"\na cow,3\n', ""),
    ],
)
def test_a_table_that_may_have_been_misread_is_not_dropped_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, place: str
) -> None:
    source = tmp_path / "p.csv"
    source.write_bytes(table.encode("latin-1"))
    said = refused(capsys, "prepare", "--input", source, "--output", tmp_path / "o.jsonl", "--drop-faulty")
    assert said[0].startswith(f"{source}{place}: ")
    assert not (tmp_path / "o.jsonl").exists()


def test_lines_of_a_table_that_are_dropped_are_counted(tmp_path: Path) -> None:
    source = tmp_path / "p.csv"
    source.write_bytes(b'prompt,n\n"a\ncat",1\nb\nc\xe9,2\n"a ""dog""",3\n')
    rows = prepared(source, "--drop-faulty")
    assert [row["prompt"] for row in rows] == ["a\ncat", 'a "dog"']
    (about,) = json.loads((tmp_path / "out/metadata.json").read_text()).values()
    assert about["dropped"] == {"faulty": 2}


def test_sources_refuse_rows_without_what_they_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, name, message in (
        (text(tmp_path, "a bench"), "geneval", "has no 'tag' and no 'include', which --source geneval needs"),
        (text(tmp_path, "a bench"), "ocr", "has no quoted text, which --source ocr needs: a bench"),
    ):
        said = refused(capsys, "prepare", "--input", source, "--output", tmp_path / "o.jsonl", "--source", name)
        assert said[0] == f"{source}:1: {message}" and "--drop-faulty" in said[-1]


def test_rows_of_verl(tmp_path: Path) -> None:
    verl = {
        "prompt": [{"role": "user", "content": 'say "A"'}],
        "reward_model": {"ground_truth": "A"},
        "extra_info": {"index": 4},
    }
    (row,) = prepared(jsonl(tmp_path / "v.jsonl", [verl]))
    assert (row["prompt"], row["target"], row["metadata"]["index"]) == ('say "A"', "A", 4)


def test_a_source_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's example."""
    page = (Path(__file__).parents[3] / "docs/data.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n# (?:my_sources\.py)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_sources.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    source = jsonl(tmp_path / "s.jsonl", [{"caption": 'a sign "OPEN"', "style": "neon", "url": "u"}])
    (row,) = prepared(source, "--source", "my_sources.SIGNS")
    assert row["metadata"].pop("sample_id").startswith("SIGNS_")
    assert row == {"prompt": 'a sign "OPEN"', "target": "OPEN", "metadata": {"task": "t2i", "style": "neon"}}
    for wrong in ("sings", "my_sources.SINGS", "my_sources.Source", "no_such.SIGNS", "..SIGNS"):
        (line,) = refused(capsys, "prepare", "--input", source, "--output", tmp_path / "o.jsonl", "--source", wrong)
        assert line.startswith("--source must be prompts, ocr, ") and repr(wrong) in line


def test_ids_and_tasks_of_the_source_are_kept(tmp_path: Path) -> None:
    source = [{"prompt": "a", "id": 7}, {"prompt": "b", "metadata": {"sample_id": "x", "task": "t2v"}}]
    first, second = prepared(jsonl(tmp_path / "a.jsonl", source))
    assert first == {"prompt": "a", "metadata": {"task": "t2i", "sample_id": "7"}}
    assert second["metadata"] == {"task": "t2v", "sample_id": "x"}


def test_parquet_holds_what_jsonl_holds(tmp_path: Path) -> None:
    source = jsonl(
        tmp_path / "a.jsonl",
        [
            {"prompt": "a", "target": "t", "negative_prompt": "n", "metadata": {"deep": [{"x": None}], "é": 1.5}},
            {"prompt": "line\u2028 \U0001f389", "images": ["/a.png", "/b.png"], "metadata": {"task": "i2i"}},
        ],
    )
    rows = prepared(source)
    assert tool("prepare", "--input", source, "--output", tmp_path / "p.parquet") == 0
    assert prepared(tmp_path / "p.parquet") == rows
    assert rows[0]["metadata"]["deep"] == [{"x": None}] and rows[1]["prompt"] == "line\u2028 \U0001f389"


def test_paths_of_media_still_lead_to_them(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in/a.jsonl", [{"prompt": "<image> a", "images": ["pictures/a.png", "/abs.png"]}])
    output = tmp_path / "elsewhere/deep/a.jsonl"
    assert tool("prepare", "--input", source, "--output", output, "--task", "i2i") == 0
    (row,) = read(output)
    assert row["images"][1] == "/abs.png"
    assert (output.parent / row["images"][0]).resolve() == tmp_path / "in/pictures/a.png"


def test_metadata_say_what_a_file_is(tmp_path: Path) -> None:
    source = text(tmp_path, "a cat", "a dog")
    prepared(source)
    assert tool("prepare", "--input", source, "--output", tmp_path / "out/second.jsonl") == 0
    found = json.loads((tmp_path / "out/metadata.json").read_text())
    assert found.keys() == {"data.jsonl", "second.jsonl"}
    entry = found["data.jsonl"]
    assert (entry["command"], entry["source"], entry["rows"], entry["task"]) == ("prepare", "prompts", 2, "t2i")
    assert entry["inputs"] == {str(source): sha256_of(source)}
    assert entry["sha256"] == sha256_of(tmp_path / "out/data.jsonl")
    before = content(tmp_path / "out")
    prepared(source)
    assert content(tmp_path / "out") == before


def test_faulty_rows_are_dropped_if_asked_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = text(tmp_path, 'a "A"', "no quotes", 'a "B"', 'an empty ""')
    rows = prepared(source, "--source", "ocr", "--drop-faulty")
    assert [row["target"] for row in rows] == ["A", "B"]
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in said if line.startswith("dropped ")] == [
        f"dropped {source}:2",
        f"dropped {source}:4",
    ]
    assert json.loads((tmp_path / "out/metadata.json").read_text())["data.jsonl"]["dropped"] == {"faulty": 2}


def test_what_cannot_be_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = text(tmp_path, "a cat"), tmp_path / "out.jsonl"

    def told(*arguments: object) -> str:
        return " | ".join(refused(capsys, "prepare", *arguments))

    assert "is read, and would be written over" in told("--input", jsonl(output, [{"prompt": "a"}]), "--output", output)
    assert "must end in .jsonl or .parquet" in told("--input", source, "--output", tmp_path / "o.csv")
    assert "is named twice" in told("--input", source, source, "--output", tmp_path / "o.jsonl")
    (tmp_path / "link.txt").symlink_to(source)
    for same in (tmp_path / "link.txt", tmp_path / "gone/../prompts.txt", f"{tmp_path}/./prompts.txt"):
        assert f"{source} and {same}: is named twice" in told("--input", source, same, "--output", tmp_path / "o.jsonl")
    (tmp_path / "empty").mkdir()
    assert "is a folder without" in told("--input", tmp_path / "empty", "--output", tmp_path / "o.jsonl")
    assert "No such file" in told("--input", tmp_path / "none.txt", "--output", tmp_path / "o.jsonl")
    assert "it has prompt" in told("--input", source, "--output", tmp_path / "o.jsonl", "--prompt-key", "caption")
    hopeless = text(tmp_path, "no quotes")
    arguments = ("--input", hopeless, "--output", tmp_path / "o.jsonl", "--source", "ocr", "--drop-faulty")
    assert "no prompt is left" in told(*arguments)
    (tmp_path / "metadata.json").write_text('{"version": 1}')
    assert "not a metadata.json of these tools" in told("--input", source, "--output", tmp_path / "o.jsonl")
    assert not (tmp_path / "o.jsonl").exists() and not list(tmp_path.glob(".*"))

"""`curate`: without duplicates, filtered, and split in a way that depends on nothing but the rows."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl.data.prompts import load_prompts
from flowrl.data.schema import content_id
from flowrl.files import sha256
from tests.unit.data_process.support import content, jsonl, read, refused, tool


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"prompt {n}", "metadata": {"task": "t2i", "sample_id": f"s{n}"}} for n in range(count)]


def curated(folder: Path, found: list[dict[str, Any]], *arguments: object) -> dict[str, list[dict[str, Any]]]:
    """The rows of every file that is made of these."""
    source = jsonl(folder / "in.jsonl", found)
    assert tool("curate", "--input", source, "--out-dir", folder / "out", *arguments) == 0
    return {file.stem: read(file) for file in (folder / "out").glob("*.jsonl")}


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [row["metadata"]["sample_id"] for row in found]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(2, 40), seed=st.integers(0, 99), data=st.data())
def test_any_order_of_the_rows_gives_the_same_split(tmp_path: Path, count: int, seed: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, count - 1))
    subsets = sorted({data.draw(st.integers(1, size)), size})
    arguments = ("--eval-size", size, "--eval-subset-sizes", *subsets)
    found = rows(count)
    # A prompt twice, written differently: which of the two stays must not depend on the order either.
    found.append({"prompt": "PROMPT  0", "metadata": {"task": "t2i", "sample_id": "s0_2"}})
    first = curated(tmp_path, found, *arguments)
    random.Random(seed).shuffle(found)
    second = curated(tmp_path, found, *arguments)
    assert set(ids(first["train"])) == set(ids(second["train"])) and len(first["train"]) == count - size
    assert first["eval"] == second["eval"] and len(first["eval"]) == size
    assert all(first[f"eval{k}"] == first["eval"][:k] == second[f"eval{k}"] for k in subsets)
    assert {*ids(first["train"]), *ids(first["eval"])} == {f"s{n}" for n in range(count)}


def test_a_share_is_about_that_and_does_not_move_when_rows_are_added(tmp_path: Path) -> None:
    few, many = (curated(tmp_path, rows(count), "--eval-fraction", 0.2) for count in (1000, 1500))
    assert 150 < len(few["eval"]) < 250
    assert set(ids(few["eval"])) == {i for i in ids(many["eval"]) if int(i[1:]) < 1000}
    default = curated(tmp_path, rows(1000))
    assert 5 < len(default["eval"]) < 40 and set(ids(default["eval"])) < set(ids(few["eval"]))


def test_the_split_is_the_sha_256_of_the_id(tmp_path: Path) -> None:
    """`printf s0 | sha256sum` is ec18eac8..., that of s1 e8bc163c...: the lowest is for evaluation."""
    assert ids(curated(tmp_path, rows(2), "--eval-size", 1)["eval"]) == ["s1"]


def test_duplicates(tmp_path: Path) -> None:
    same = [{"prompt": p} for p in ("A cat", "a  cat", "a cat\u200b", 'a "B"', "a “B”")]
    media = [{"prompt": "<image> a cat", "images": [name], "metadata": {"task": "i2i"}} for name in ("x", "y", "x")]
    found = curated(tmp_path, same + media, "--eval-size", 0, "--no-check-media")
    assert len(found["train"]) == 4 and "eval" not in found
    assert all(row["metadata"]["sample_id"] for row in found["train"])
    about = json.loads((tmp_path / "out/metadata.json").read_text())["train.jsonl"]
    assert about["dropped"] == {"duplicate": 4} and about["rows"] == 4


def test_filters_are_counted(tmp_path: Path) -> None:
    prompts = ["one two three", "one two", "four words are enough", "x" * 50 + " and two more"]
    arguments = ("--min-prompt-words", 3, "--max-prompt-chars", 50, "--eval-size", 1)
    found = curated(tmp_path, [{"prompt": prompt} for prompt in prompts], *arguments)
    assert {row["prompt"] for row in found["train"] + found["eval"]} == {prompts[0], prompts[2]}
    about = json.loads((tmp_path / "out/metadata.json").read_text())["train.jsonl"]
    assert about["dropped"] == {"too_few_words": 1, "too_long": 1}


def test_rows_without_their_media_are_dropped_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(b"")
    found = [{"prompt": f"<image> {n}", "images": [n], "metadata": {"task": "i2i"}} for n in ("there.png", "gone.png")]
    assert len(curated(tmp_path, found, "--eval-size", 0)["train"]) == 1
    (row,) = curated(tmp_path, found, "--eval-size", 0)["train"]
    assert (tmp_path / "out" / row["images"][0]).resolve() == tmp_path / "there.png"
    assert len(curated(tmp_path, found, "--eval-size", 0, "--no-check-media")["train"]) == 2


def redder(name: str, **metadata: Any) -> dict[str, Any]:
    return {"prompt": "<image> redder", "images": [name], "metadata": {"task": "i2i", **metadata}}


def test_media_of_the_same_name_in_two_folders_are_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (jsonl(tmp_path / name / "d.jsonl", [redder("1.png", sample_id=name)]) for name in ("a", "b"))
    arguments = ("--input", first, second, "--out-dir", tmp_path / "out", "--no-check-media", "--eval-size", 1)
    assert tool("curate", *arguments) == 0
    found = [row for name in ("train", "eval") for row in read(tmp_path / f"out/{name}.jsonl")]
    assert sorted((row["metadata"]["sample_id"], *row["images"]) for row in found) == [
        ("a", "../a/1.png"),
        ("b", "../b/1.png"),
    ]
    for file in (first, second):  # without ids nothing but their place tells them apart
        jsonl(file, [redder("1.png"), redder("1.png")])
    said = f"has the prompt and the paths of {first}:1, which mean other files there: give both ids"
    assert refused(capsys, "curate", *arguments) == [f"{second}:1: {said}", f"{second}:2: {said}"]


def test_the_split_does_not_depend_on_where_it_is_written(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in/d.jsonl", [redder(f"{n}.png") for n in range(40)])
    folders = [tmp_path / "o", tmp_path / "deeper/o"]
    for folder in folders:
        given = ("--input", source, "--out-dir", folder, "--no-check-media", "--eval-size", 10)
        assert tool("curate", *given) == 0
    first, second = (ids(read(folder / "eval.jsonl")) for folder in folders)
    assert first == second
    expected = sorted(hashlib.sha256(content_id(redder(f"{n}.png")).encode()).digest() for n in range(40))[:10]
    assert [hashlib.sha256(identity.encode()).digest() for identity in first] == expected


def test_the_preset_of_pick_a_pic(tmp_path: Path) -> None:
    """2048 prompts of 6 words and more are kept for evaluation, the first 64 and 256 of them apart."""
    found = [{"prompt": f"five words and a number {n}"} for n in range(2100)] + [{"prompt": "a cat"}]
    source = jsonl(tmp_path / "in.jsonl", found)
    assert tool("curate", "--input", source, "--out-dir", tmp_path / "out", "--preset", "pickapic") == 0
    sizes = {file.name: len(load_prompts(str(file))) for file in (tmp_path / "out").glob("*.jsonl")}
    assert sizes == {
        "pickapic_train.jsonl": 52,
        "pickapic_eval.jsonl": 2048,
        "pickapic_eval64.jsonl": 64,
        "pickapic_eval256.jsonl": 256,
    }
    given = ("--preset", "pickapic", "--eval-size", 300, "--prefix", "p_")
    assert tool("curate", "--input", source, "--out-dir", tmp_path / "other", *given) == 0
    assert len(read(tmp_path / "other/p_train.jsonl")) == 1800


def test_several_files_and_parquet(tmp_path: Path) -> None:
    first, second = jsonl(tmp_path / "a.jsonl", rows(10)), tmp_path / "b.txt"
    second.write_text("prompt 3\nanother\n")
    arguments = ("--input", first, second, "--out-dir", tmp_path / "out", "--format", "parquet", "--eval-size", 4)
    assert tool("curate", *arguments) == 0
    prompts = [p.text for name in ("train", "eval") for p in load_prompts(str(tmp_path / f"out/{name}.parquet"))]
    assert sorted(prompts) == sorted([*(f"prompt {n}" for n in range(10)), "another"])


def test_running_it_again_changes_nothing(tmp_path: Path) -> None:
    curated(tmp_path, rows(50), "--eval-size", 5)
    before = content(tmp_path / "out")
    curated(tmp_path, rows(50), "--eval-size", 5)
    assert content(tmp_path / "out") == before


def test_rows_with_the_same_content_are_written_alike(tmp_path: Path) -> None:
    """Whichever of two that share an id is read first."""
    here = [{"prompt": f"prompt {n}", "metadata": {"b": [{"y": 1, "x": n}], "a": n}} for n in range(30)]
    there = [{"metadata": {"a": n, "b": [{"x": n, "y": 1}]}, "prompt": f"prompt {n}"} for n in range(30)]
    made = []
    for found in (here + there, there + here):
        curated(tmp_path, found, "--eval-size", 10)
        made.append({name: sha256(data) for name, data in content(tmp_path / "out").items() if name != "metadata.json"})
    assert made[0] == made[1]
    assert list(read(tmp_path / "out/eval.jsonl")[0]["metadata"]) == ["sample_id", "a", "b"]


def test_invisible_characters_do_not_take_a_prompt_to_both_sides(tmp_path: Path) -> None:
    found = [{"prompt": text} for n in range(40) for text in (f"prompt {n}", f"\u2066prompt\u200d {n}\u2069")]
    made = curated(tmp_path, found, "--eval-size", 10)
    assert len(made["train"]) == 30
    both = ("--train", tmp_path / "out/train.jsonl", "--eval", tmp_path / "in.jsonl")
    assert tool("inspect", *both) == 1


def test_what_is_dropped_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ['say "Jazz"', "one", 'say  "JAZZ"', 'SAY "JAZZ"', "a red cat"]
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": text, "id": n} for n, text in zip((10, 8, 3, 7, 5), words)])  # noqa: B905
    given = ("curate", "--input", source, "--out-dir", tmp_path / "out", "--eval-size", 0, "--min-prompt-words", 2)
    assert tool(*given, "--show-dropped") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [
        f"{source}:1: duplicate of {source}:3",
        f"{source}:2: too_few_words",
        f"{source}:4: duplicate of {source}:3",
    ]
    assert tool(*given) == 0
    assert "dropped 2 duplicate, 1 too_few_words (--show-dropped lists them)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--eval-size", "11"], "--eval-size is 11, but only 10 prompts are left"),
        (["--eval-size", "10"], "no prompt is left to train on: 10 in all, 10 for evaluation"),
        (["--eval-size", "-1"], "--eval-size must not be negative"),
        (["--eval-fraction", "0"], "--eval-fraction must be between 0 and 1"),
        (["--eval-fraction", "1e-9"], "none of 10 prompts falls into the evaluation set: set --eval-size"),
        (["--eval-size", "4", "--eval-subset-sizes", "5"], "the evaluation set has 4 prompts"),
        (["--eval-size", "4", "--eval-subset-sizes", "2", "2"], "must be different and at least 1"),
        (["--min-prompt-words", "9"], "no prompt is left: dropped 10 too_few_words"),
        (["--min-prompt-words", "-5"], "--min-prompt-words must not be negative, got -5"),
        (["--max-prompt-chars", "0"], "--max-prompt-chars must be at least 1, got 0"),
        (["--prefix", "a/b"], "not a folder"),
    ],
)
def test_splits_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    source = jsonl(tmp_path / "in.jsonl", rows(10))
    said = refused(capsys, "curate", "--input", source, "--out-dir", tmp_path / "out", *arguments)
    assert message in said[0]
    assert not (tmp_path / "out").exists()


def test_an_id_twice_names_both_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (jsonl(tmp_path / name, [{"prompt": name, "id": "x"}]) for name in ("a.jsonl", "b.jsonl"))
    said = refused(capsys, "curate", "--input", first, second, "--out-dir", tmp_path / "out")
    assert said == [f"{second}:1: has the id 'x' of {first}:1"]

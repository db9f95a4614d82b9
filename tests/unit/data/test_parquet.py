"""Parquet files: as flowrl writes them, as others do, and broken ones."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow.parquet import write_table

from flowrl.data.chat import QWEN_IMAGE_SYSTEM
from flowrl.data.prompts import Fault, PromptFileError, load_prompts
from flowrl.data.rows import BATCH, read_rows


def write(folder: Path, columns: dict[str, Any]) -> str:
    path = folder / "p.parquet"
    write_table(pa.table(columns), path)
    return str(path)


def faults(path: str, target: str = "none") -> list[tuple[int | None, str]]:
    with pytest.raises(PromptFileError) as caught:
        load_prompts(path, target)
    return [(fault.line, fault.message) for fault in caught.value.faults]


def test_columns_are_fields_and_nulls_are_absent(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {
            "prompt": ["a cat", "a dog"],
            "target": ["cat", None],
            "negative_prompt": [None, "cats"],
            "images": pa.array([[], None], pa.list_(pa.string())),
            "metadata": [
                {"task": "t2i", "sample_id": "x", "count": None},
                {"task": "t2i", "sample_id": "y", "count": 2},
            ],
        },
    )
    cat, dog = load_prompts(path)
    assert (cat.id, cat.target, cat.negative, cat.metadata) == ("x", "cat", "", {"task": "t2i", "sample_id": "x"})
    assert (dog.id, dog.target, dog.negative, dog.metadata["count"]) == ("y", None, "cats", 2)


def test_the_same_rows_have_the_same_ids_as_in_jsonl(tmp_path: Path) -> None:
    lines = [{"prompt": "a cat", "target": "cat"}, {"prompt": "a dog", "metadata": {"n": 1}}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    columns = {
        "prompt": [line["prompt"] for line in lines],
        "target": [line.get("target") for line in lines],
        "metadata": [None, json.dumps({"n": 1})],
    }
    assert load_prompts(write(tmp_path, columns)) == load_prompts(str(tmp_path / "p.jsonl"))


def test_rows_are_numbered_through_all_batches(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": [*["a cat"] * (BATCH + 1), None, "a dog"]})
    assert faults(path) == [(BATCH + 2, "'prompt' must be a string, got null")]


def test_what_is_no_text_or_no_json(tmp_path: Path) -> None:
    assert faults(write(tmp_path, {"prompt": [b"a cat"]})) == [
        (1, "'prompt' must be a string, got a value of type bytes")
    ]
    day = datetime.date(2026, 1, 1)
    (fault,) = faults(write(tmp_path, {"prompt": ["a"], "metadata": [{"day": day}]}))
    assert fault[0] == 1 and "which JSON cannot" in fault[1]
    keys = pa.array([[(b"k", 1)]], pa.map_(pa.binary(), pa.int64()))
    (fault,) = faults(write(tmp_path, {"prompt": ["a"], "metadata": keys}))
    assert fault == (1, "holds an object with the key b'k', which JSON cannot")
    (fault,) = faults(write(tmp_path, {"prompt": ["a", "b"], "metadata": [{"x": 1.0}, {"x": float("nan")}]}))
    assert fault == (2, "holds nan, which JSON cannot")


def test_bytes_that_are_no_utf_8_are_found(tmp_path: Path) -> None:
    latin = pa.array([b"fine", "Léon".encode("latin-1"), b"fine"]).view(pa.string())
    assert faults(write(tmp_path, {"prompt": latin})) == [(2, "holds bytes that are not UTF-8")]


def test_unknown_columns_are_faults_and_chosen_ones_are_read_alone(tmp_path: Path) -> None:
    path = write(tmp_path, {"caption": ["a cat"], "jpg_0": [b"\xff\xd8"]})
    (caption, picture, prompt) = faults(path)
    assert "has an unknown column 'caption'" in caption[1] and "has an unknown column 'jpg_0'" in picture[1]
    assert prompt == (None, "has no column 'prompt'; columns: caption, jpg_0")
    found: list[Fault] = []
    assert list(read_rows(path, found, ["caption", "prompt"])) == [(1, {"caption": "a cat"})] and not found
    assert not list(read_rows(path, found, ["text"]))
    assert found == [Fault("has no column 'text'; columns: caption, jpg_0")]


def test_a_column_that_no_row_may_have_is_one_fault_with_its_remedy(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": ["a cat"] * 30, "style": ["neon"] * 30})
    ((line, message),) = faults(path)
    assert line is None and "`python -m data_process prepare --metadata-keys style`" in message


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([None, [("x", 1), ("x", 2)]], pa.map_(pa.string(), pa.int64())), "holds a map with a key twice"),
        (pa.array([None, [10**7]], pa.list_(pa.date32())), "holds a value that Python cannot: date value out of range"),
    ],
)
def test_values_that_python_does_not_have(tmp_path: Path, column: pa.Array, message: str) -> None:
    ((line, found),) = faults(write(tmp_path, {"prompt": ["a cat", "a dog"], "metadata": column}))
    assert line == 2 and found.startswith(message)


def test_broken_files(tmp_path: Path) -> None:
    path = Path(write(tmp_path, {"prompt": [f"prompt {n}" for n in range(1000)]}))
    whole = path.read_bytes()
    for broken in (b"", b"a cat\na dog\n", whole[: len(whole) // 2], whole[:4] + bytes(len(whole) - 40) + whole[-36:]):
        path.write_bytes(broken)
        assert all("is not a whole parquet file" in message for _, message in faults(str(path)))
    table = pa.table([["a"], ["b"]], names=["prompt", "prompt"])
    write_table(table, path)
    assert faults(str(path)) == [(None, "has the column 'prompt' twice; columns: prompt, prompt")]
    assert faults(write(tmp_path, {"prompt": pa.array([], pa.string())})) == [(None, "holds no prompt")]


def test_verl_rows(tmp_path: Path) -> None:
    """The columns of verl-omni's OCR data for Qwen-Image."""
    system = {"role": "system", "content": QWEN_IMAGE_SYSTEM}
    path = write(
        tmp_path,
        {
            "data_source": ["flow_grpo/ocr"] * 2,
            "prompt": [[system, {"role": "user", "content": f'a sign "{word}"'}] for word in ("ONE", "TWO")],
            "negative_prompt": [[system, {"role": "user", "content": " "}]] * 2,
            "ability": ["image_generation"] * 2,
            "reward_model": [{"style": "model", "ground_truth": word} for word in ("ONE", "TWO")],
            "extra_info": [{"split": "train", "index": n, "raw_prompt": None} for n in range(2)],
        },
    )
    one, two = load_prompts(path, "field")
    assert (one.text, one.target, one.negative) == ('a sign "ONE"', "ONE", " ")
    assert two.metadata == {
        "data_source": "flow_grpo/ocr",
        "ability": "image_generation",
        "split": "train",
        "index": 1,
        "system_prompt": QWEN_IMAGE_SYSTEM,
    }
    assert one.id != two.id
    assert [prompt.target for prompt in load_prompts(path, "quoted")] == ["ONE", "TWO"]

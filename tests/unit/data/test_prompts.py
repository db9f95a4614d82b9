"""Prompt files: what is read, and every way in which a file can be wrong."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.prompts import PromptFileError, fingerprint, load_prompts
from flowrl.data.rows import SHOWN, Fault, Row
from flowrl.data.schema import checked_rows
from flowrl.prompts import MAX_DEPTH, is_too_deep


def write(folder: Path, data: str | bytes, name: str = "prompts.txt") -> str:
    file = folder / name
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(file)


def rows(folder: Path, *values: object) -> str:
    return write(folder, "\n".join(json.dumps(value) for value in values), "prompts.jsonl")


def faults(path: str, target: str = "none") -> list[tuple[int | None, str]]:
    with pytest.raises(PromptFileError) as caught:
        load_prompts(path, target)
    return [(fault.line, fault.message) for fault in caught.value.faults]


@pytest.mark.parametrize(
    "data",
    [
        b"a cat\na dog\n",
        b"a cat\na dog",
        b"a cat\r\na dog\r\n",
        b"\xef\xbb\xbfa cat\na dog\n",
        b"\n  \na cat\n\n\t\na dog\n\n",
    ],
    ids=["plain", "no final newline", "CRLF", "BOM", "blank lines"],
)
def test_text_files(tmp_path: Path, data: bytes) -> None:
    assert [prompt.text for prompt in load_prompts(write(tmp_path, data))] == ["a cat", "a dog"]


def test_jsonl_fields(tmp_path: Path) -> None:
    path = rows(
        tmp_path,
        {"prompt": "a cat", "negative_prompt": "dogs", "metadata": {"n": 1}, "target": "cat", "id": 7},
        {"prompt": "a dog", "target": None, "id": None},
    )
    cat, dog = load_prompts(path)
    assert (cat.id, cat.text, cat.negative, cat.target, cat.metadata) == ("7", "a cat", "dogs", "cat", {"n": 1})
    assert (dog.text, dog.negative, dog.target, dog.metadata) == ("a dog", "", None, {})


def test_a_sample_id_is_the_id(tmp_path: Path) -> None:
    path = rows(
        tmp_path, {"prompt": "a", "metadata": {"sample_id": "x"}}, {"prompt": "a", "metadata": {"sample_id": 3}}
    )
    assert [prompt.id for prompt in load_prompts(path)] == ["x", "3"]
    path = rows(tmp_path, {"prompt": "a", "id": "x"}, {"prompt": "b", "metadata": {"sample_id": "x"}})
    assert faults(path) == [(2, "has the id 'x' of line 1")]


def test_no_media_is_as_good_as_none(tmp_path: Path) -> None:
    found = load_prompts(rows(tmp_path, {"prompt": "a", "images": [], "videos": None}))
    assert found == load_prompts(rows(tmp_path, {"prompt": "a"}))


def test_ten_thousand_characters_are_a_prompt(tmp_path: Path) -> None:
    text = 'a sign "OK" ' + "x" * 10_000
    assert load_prompts(write(tmp_path, text), "quoted")[0].text == text
    (fault,) = faults(write(tmp_path, "x" * 10_000), "quoted")
    assert fault[0] == 1 and len(fault[1]) < 300


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    assert [prompt.text for prompt in load_prompts(write(tmp_path, "one\u2028line\x85only\n"))] == [
        "one\u2028line\x85only"
    ]


def test_quoted_targets(tmp_path: Path) -> None:
    path = write(tmp_path, 'a sign "HELLO" and "BYE"\ndie Aufschrift “GRÜẞE”\n')
    assert [prompt.target for prompt in load_prompts(path, "quoted")] == ["HELLO", "GRÜẞE"]


def test_quoted_targets_that_are_missing_or_empty_come_together(tmp_path: Path) -> None:
    path = write(tmp_path, 'a sign\na sign "OK"\na sign ""\na sign " "\n')
    found = faults(path, "quoted")
    assert [line for line, _ in found] == [1, 3, 4]
    assert "no quoted text" in found[0][1] and "empty text" in found[1][1] and "empty text" in found[2][1]


def test_a_declared_target_must_agree_with_the_quoted_one(tmp_path: Path) -> None:
    same, other = {"prompt": 'say "A"', "target": "A"}, {"prompt": 'say "A"', "target": "B"}
    assert load_prompts(rows(tmp_path, same), "quoted")[0].target == "A"
    assert faults(rows(tmp_path, same, other), "quoted")[0][0] == 2


def test_field_targets(tmp_path: Path) -> None:
    assert load_prompts(rows(tmp_path, {"prompt": "p", "target": "t"}), "field")[0].target == "t"
    assert faults(rows(tmp_path, {"prompt": "p"}), "field") == [(1, "has no 'target', which data.target=field needs")]
    assert "text file has no target" in faults(write(tmp_path, "p\n"), "field")[0][1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None}, "'prompt' must be a string, got null"),
        ({"prompt": "  "}, "'prompt' is empty"),
        ({"prompt": "p", "target": ""}, "'target' is empty"),
        ({"prompt": ["p"]}, "'prompt' must be a string, got a list"),
        ({"text": "p"}, "has no 'prompt'"),
        ({"prompt": "p", "promt": "q"}, "unknown field 'promt'"),
        ({"prompt": "p", "images": ["a.png"]}, "conditioned on images is not supported"),
        ({"prompt": "p", "metadata": 3}, "'metadata' must be an object, got a number"),
        ({"prompt": "p", "id": True}, "'id' must be a non-empty string or an integer, got a boolean"),
        ({"prompt": "p\u0000"}, "U+0000"),
        ({"prompt": "\ud800"}, "U+D800"),
        ({"prompt": "p", "id": "\udfff"}, "holds U+DFFF"),
        ({"prompt": "p", "metadata": {"deep": ["\udc00"]}}, "holds U+DC00"),
        ({"prompt": "p", "id": "a", "metadata": {"sample_id": "b"}}, "the id 'a' but the metadata.sample_id 'b'"),
        ({"prompt": "p", "metadata": {"sample_id": ""}}, "'metadata.sample_id' must be a non-empty string"),
        ({"prompt": "p", "metadata": {"task": ["t2i"]}}, "'metadata.task' must be a string, got a list"),
        ({"prompt": "p", "metadata": {"score": float("nan")}}, "holds NaN, which is not JSON"),
        ({"prompt": "p", "videos": "a.mp4"}, "'videos' must be a list of paths, got a string"),
        ({"prompt": "p", "metadata": "{"}, "'metadata' is not JSON"),
        (["p"], "must be a JSON object"),
        ("p", "must be a JSON object"),
    ],
)
def test_faulty_rows(tmp_path: Path, row: object, message: str) -> None:
    found = faults(rows(tmp_path, {"prompt": "fine"}, row))
    assert [line for line, text in found if message in text] == [2]


def test_broken_json_names_line_and_column(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}\n{"prompt": "b"\n{"prompt": "c", "prompt": "d"}\n', "p.jsonl")
    assert [line for line, _ in faults(path)] == [2, 3]
    assert "is not JSON" in faults(path)[0][1] and "column 15" in faults(path)[0][1]
    assert faults(path)[1][1] == "has 'prompt' twice"


def test_json_that_python_refuses_to_read(tmp_path: Path) -> None:
    nested = '{"prompt": "p", "metadata": {"deep": ' + "[" * 100_000 + "]" * 100_000 + "}}"
    path = write(tmp_path, f'{{"prompt": "p", "id": {"9" * 5000}}}\n{nested}\n', "p.jsonl")
    assert faults(path) == [(1, "holds an integer of more than 4300 digits"), (2, "is nested too deeply")]


def test_duplicate_ids_name_the_first_line(tmp_path: Path) -> None:
    path = rows(tmp_path, {"prompt": "a", "id": "x"}, {"prompt": "b", "id": 1}, {"prompt": "c", "id": "1"})
    assert faults(path) == [(3, "has the id '1' of line 2")]


def test_latin_1_and_utf_16(tmp_path: Path) -> None:
    assert faults(write(tmp_path, b"fine\nL\xe9on\nfine\n")) == [(2, "byte 0xe9 in column 2 is not UTF-8 (Latin-1?)")]
    assert faults(write(tmp_path, "a cat\n".encode("utf-16"))) == [(None, "is UTF-16; save it as UTF-8")]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    assert faults(str(tmp_path / "none.txt")) == [(None, "No such file or directory")]
    (tmp_path / "folder.txt").mkdir()
    assert faults(str(tmp_path / "folder.txt")) == [(None, "Is a directory")]
    assert "must end in .txt, .jsonl or .parquet" in faults(write(tmp_path, "p", "p.json"))[0][1]
    assert "`python -m data_process prepare` makes such a file of it" in faults(write(tmp_path, "p", "p.csv"))[0][1]
    assert faults("~nobody-of-that-name/p.txt") == [(None, "there is no home folder '~nobody-of-that-name'")]
    assert faults("p\0.txt") == [(None, "cannot be a path: embedded null byte")]
    assert faults(write(tmp_path, "\n\n")) == [(None, "holds no prompt")]
    assert faults("pkg://no_such_package/p.txt") == [(None, "there is no package 'no_such_package'")]
    assert faults("pkg://os/p.txt") == [(None, "there is no package 'os'")]
    assert faults("pkg://flowrl/assets/none.txt") == [(None, "No such file or directory")]
    with pytest.raises(ValueError, match="target must be one of"):
        load_prompts(write(tmp_path, "p"), "quote")


def test_the_message_is_bounded_and_the_report_is_not(tmp_path: Path) -> None:
    path = write(tmp_path, "".join(f"no target {n}\n" for n in range(50)))
    with pytest.raises(PromptFileError) as caught:
        load_prompts(path, "quoted")
    assert len(caught.value.report()) == 50
    lines = str(caught.value).splitlines()
    assert len(lines) == SHOWN + 2 and lines[0].startswith(f"{path}:1: ")
    assert lines[-2:] == ["... and 30 more", f"`python -m data_process inspect --all {path}` lists every one"]


def test_one_of_many_faults_that_say_the_same_stands_for_all(tmp_path: Path) -> None:
    path = write(tmp_path, "a\n" + "no target\n" * SHOWN + "another\n" * (SHOWN + 1))
    with pytest.raises(PromptFileError) as caught:
        load_prompts(path, "quoted")
    places = [line.split(": ")[0] for line in caught.value.report()]
    assert places == [f"{path}:{number}" for number in range(1, SHOWN + 3)]
    assert caught.value.report()[-1].endswith(f"another (and {SHOWN} times more; --all lists them)")
    assert len(caught.value.report(every=True)) == 2 * SHOWN + 2
    assert str(caught.value).endswith("lists every one")


def test_metadata_that_could_not_be_told_to_a_reward(tmp_path: Path) -> None:
    def of_depth(depth: int) -> str:
        return write(tmp_path, f'{{"prompt": "a", "metadata": {{"a": {"[" * depth}{"]" * depth}}}}}', "p.jsonl")

    assert not is_too_deep(load_prompts(of_depth(MAX_DEPTH - 2))[0].metadata)
    for depth in (MAX_DEPTH - 1, 300, 600, 900):
        assert faults(of_depth(depth)) == [(1, f"is nested more than {MAX_DEPTH} deep")]
    assert load_prompts(write(tmp_path, f'{{"prompt": "{"[" * 300}"}}', "p.jsonl"))


def test_shipped_prompts_are_read_from_the_package() -> None:
    train = load_prompts("pkg://flowrl/assets/tiny_words/train.txt", "quoted")
    heldout = load_prompts("pkg://flowrl/assets/tiny_words/heldout.txt", "quoted")
    assert not {prompt.target for prompt in train} & {prompt.target for prompt in heldout}


def test_ids_depend_on_content_alone(tmp_path: Path) -> None:
    first = {prompt.text: prompt.id for prompt in load_prompts(write(tmp_path, "a\nb\nc\n"))}
    second = {prompt.text: prompt.id for prompt in load_prompts(write(tmp_path, "c\n\nb\na\nd\n"))}
    assert first.items() <= second.items()
    repeated = [prompt.id for prompt in load_prompts(write(tmp_path, "a\na\nb\n"))]
    assert repeated[0] == repeated[1] != repeated[2]


def test_a_file_is_read_once_while_it_is_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, "a cat\n")
    stamp = Path(path).stat()
    first = load_prompts(path)
    assert load_prompts(path) is first
    assert load_prompts(write(tmp_path, "a dog\n"))[0].text == "a dog"  # of the same size ...
    Path(path).write_text("a cow\n")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # ... and the same time
    assert load_prompts(path)[0].text == "a cow"


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts are not kept as those of the bytes that were there before."""
    path = write(tmp_path, "a cat\n")

    def replaced(path: str, found: list[Fault]) -> Iterator[tuple[int, Row]]:
        write(tmp_path, "a dog\n")
        yield from checked_rows(path, found)

    with monkeypatch.context() as patched:
        patched.setattr("flowrl.data.prompts.checked_rows", replaced)
        assert faults(path) == [(None, "changed while it was being read")]
    write(tmp_path, "a cat\n")
    assert load_prompts(path)[0].text == "a cat"


def test_null_is_as_good_as_leaving_a_field_out(tmp_path: Path) -> None:
    found = load_prompts(rows(tmp_path, {"prompt": "a", "style": None, "metadata": None}))
    assert found == load_prompts(rows(tmp_path, {"prompt": "a"}))


def test_ids_of_content_are_for_ever(tmp_path: Path) -> None:
    """Checkpoints know the prompts of their run by these."""
    found = load_prompts(
        rows(tmp_path, {"prompt": "a c\u00e4t"}, {"target": "t", "prompt": "p", "metadata": {"b": 1, "a": 2}})
    )
    texts = ['{"prompt": "a c\\u00e4t"}', '{"metadata": {"a": 2, "b": 1}, "prompt": "p", "target": "t"}']
    assert [prompt.id for prompt in found] == [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]


def test_fingerprint_is_of_the_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, "a\n")
    before = fingerprint(path)
    assert before == fingerprint(path) and len(before) == 64
    write(tmp_path, "b\n")
    assert fingerprint(path) != before


LINES = st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(str.strip), min_size=1)


@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, final: bool) -> None:
    path = write(tmp_path_factory.mktemp("p"), end.join(lines) + (end if final else ""))
    assert [prompt.text for prompt in load_prompts(path)] == [line.strip() for line in lines]
    path = rows(tmp_path_factory.mktemp("p"), *({"prompt": line} for line in lines))
    assert [prompt.text for prompt in load_prompts(path)] == lines

"""`inspect`: every fault of a file, by line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_process.inspect import Summary
from data_process.media import image_faults, video_faults
from tests.unit.data_process.support import jsonl, refused, tool


def row(prompt: str, **metadata: Any) -> dict[str, Any]:
    return {"prompt": prompt, "metadata": {"task": "t2i", **metadata}}


def test_a_sound_file_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.txt"
    file.write_text('say "A"\nsay "BCD"\nsay "A"\n')
    assert tool("inspect", file, "--target", "quoted") == 0
    assert "3 prompts of 7 to 9 characters, 1 repeated, 3 with a target" in capsys.readouterr().out


def test_every_fault_is_printed_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.txt"
    file.write_text("no quotes\n" * 30)
    (line,) = refused(capsys, "inspect", file, "--target", "quoted")
    assert line.startswith(f"{file}:1: ") and line.endswith("(and 29 times more; --all lists them)")
    lines = refused(capsys, "inspect", file, "--target", "quoted", "--all")
    assert [line.split(": ")[0] for line in lines] == [f"{file}:{number}" for number in range(1, 31)]


def test_all_faults_of_all_files_come_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = jsonl(tmp_path / "a.jsonl", [row("a"), {"promt": "b"}, row("<image>", task="t3i")])
    lines = refused(capsys, "inspect", first, tmp_path / "none.txt", "--target", "quoted")
    assert [line.split(": ")[0] for line in lines] == [
        f"{first}:1",
        *[f"{first}:2"] * 2,
        *[f"{first}:3"] * 3,  # no quotes, no such task, no image
        f"{tmp_path}/none.txt",
    ]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (row("a", task="t3i"), "has an unknown task 't3i'"),
        (row("a", task="i2v"), "has no 'images', which the task 'i2v' needs"),
        (row("<image> a") | {"images": ["p.png"]}, "has 'images', which the task 't2i' does not take"),
        (row("<video> a"), "has <video> 1 times in its prompt but 0 videos"),
        (row("a", task="i2i") | {"images": ["p.png"]}, "has <image> 0 times in its prompt but 1 images"),
        (row("<image> a", task="i2i") | {"images": ["gone.png"]}, "gone.png: no such file"),
        (row("a", task="t2v"), "has the task 't2v', not 't2i'"),
        ({"prompt": "a"}, "has the task None, not 't2i'"),
    ],
)
def test_tasks_placeholders_and_media(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], found: dict[str, Any], message: str
) -> None:
    (tmp_path / "p.png").write_bytes(b"")
    file = jsonl(tmp_path / "a.jsonl", [row("fine"), found])
    assert any(line.startswith(f"{file}:2: {message}") for line in refused(capsys, "inspect", file, "--task", "t2i"))


def test_media_that_agree_with_their_rows_are_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "p.png")
    file = jsonl(tmp_path / "a.jsonl", [row("<image> redder", task="i2i") | {"images": ["p.png"]}])
    assert tool("inspect", file, "--decode-media") == 0
    assert "1 with media" in capsys.readouterr().out
    (tmp_path / "p.png").unlink()
    assert tool("inspect", file) == 1
    assert tool("inspect", file, "--no-check-media") == 0


def test_leaks_are_found_by_what_a_prompt_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = jsonl(tmp_path / "t.jsonl", [row("A  Cat", sample_id="1"), row("a dog", sample_id="2"), row("an owl")])
    held = jsonl(tmp_path / "e.jsonl", [row("a fox", sample_id="2"), row("a cat", sample_id="9")])
    also = jsonl(tmp_path / "e2.jsonl", [row("a fox", sample_id="2")])
    assert tool("inspect", train, held) == 0, "only files that are said to be for evaluation are held apart"
    lines = refused(capsys, "inspect", "--train", train, "--eval", held, also)
    assert [line for line in lines if line.startswith(str(train))] == [
        f"{train}:1: has the prompt of {held}:2, an evaluation file",
        f"{train}:2: has the id '2' of {held}:1, an evaluation file",
    ]


def test_media_of_the_same_name_in_two_folders_are_no_leak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = row("<image> redder", task="i2i") | {"images": ["p.png"]}
    train, held = (jsonl(tmp_path / name / "d.jsonl", [found]) for name in ("a", "b"))
    assert tool("inspect", "--train", train, "--eval", held, "--no-check-media") == 0
    also = jsonl(tmp_path / "b/e.jsonl", [found | {"images": ["../a/p.png"]}])
    lines = refused(capsys, "inspect", "--train", train, "--eval", also, "--no-check-media")
    assert f"{train}:1: has the prompt of {also}:1, an evaluation file" in lines


def test_what_curate_writes_has_no_leak(tmp_path: Path) -> None:
    found = [row(text) for n in range(60) for text in (f"prompt {n}", f"PROMPT {n}", f"prompt  {n}")]
    source = jsonl(tmp_path / "in.jsonl", found)
    assert tool("curate", "--input", source, "--out-dir", tmp_path, "--eval-size", 20) == 0
    given = ("--train", tmp_path / "train.jsonl", "--eval", tmp_path / "eval.jsonl", "--task", "t2i")
    assert tool("inspect", *given) == 0


def test_a_file_that_is_not_the_one_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, made = jsonl(tmp_path / "in.jsonl", [row("a")]), tmp_path / "out/a.jsonl"
    assert tool("prepare", "--input", source, "--output", made) == 0 and tool("inspect", made) == 0
    made.write_text(made.read_text().replace("a", "b", 1))
    assert any("is not the file that metadata.json describes" in line for line in refused(capsys, "inspect", made))


def test_nothing_to_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "inspect") == ["name the files to inspect"]
    assert tool("inspect", "pkg://flowrl/assets/tiny_words/train.txt", "--target", "quoted") == 0


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.png"
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for suffix in (".png", ".jpg", ".webp", ".gif"):
        path = tmp_path / f"p{suffix}"
        Image.fromarray(noise).save(path)
        assert image_faults(path) == []
        whole = path.read_bytes()
        for broken in (whole[: len(whole) // 2], b"", b"<html>", whole[:20]):
            path.write_bytes(broken)
            assert image_faults(path), (suffix, len(broken))
        path.write_bytes(whole)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert "too large a picture" in image_faults(path)[0]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    assert "too large a picture" in image_faults(path)[0]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, before it gives up
@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp", ".avif", ".tiff"])
def test_every_frame_is_decoded(tmp_path: Path, suffix: str) -> None:
    """Wherever a file is cut, but for the last bytes of a format that repeats there what is known."""
    noise = np.random.default_rng(0).integers(0, 256, (4, 24, 24, 3), dtype=np.uint8)
    path = tmp_path / f"p{suffix}"
    first, *others = map(Image.fromarray, noise)
    first.save(path, save_all=True, append_images=others)
    assert image_faults(path) == []
    whole = path.read_bytes()
    for length in [*range(0, len(whole) - 21, 23), *range(len(whole) // 4 - 30, len(whole) // 4 + 30)]:
        path.write_bytes(whole[:length])
        assert image_faults(path), length


def test_a_gif_that_ends_between_two_frames(tmp_path: Path) -> None:
    path = tmp_path / "p.gif"
    first, *others = (Image.new("L", (4, 4), color) for color in (0, 99, 200))
    first.save(path, save_all=True, append_images=others)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0\0")  # as some programs pad
    assert image_faults(path) == []
    path.write_bytes(whole[:-1])
    assert image_faults(path) == [f"{path}: is cut short between two frames"]


def test_formats_that_no_data_set_has_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would give PostScript to a program, whatever the file is called."""
    path = tmp_path / "p.png"
    Image.new("L", (4, 4)).save(path, "EPS")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("was run"))
    (fault,) = image_faults(path)
    assert "cannot be decoded: it does not begin as a picture of PNG" in fault


def test_videos(tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio.v3", reason="the extra `video`")
    frames = np.random.default_rng(0).integers(0, 256, (20, 64, 64, 3), dtype=np.uint8)
    for suffix in (".mp4", ".mkv"):
        path = tmp_path / f"v{suffix}"
        imageio.imwrite(path, frames, fps=10)
        assert video_faults(path) == []
        whole = path.read_bytes()
        for broken in (whole[: len(whole) // 2], b"", b"<html>"):
            path.write_bytes(broken)
            (fault,) = video_faults(path)
            assert len(fault.splitlines()) == 1 and "0x" not in fault and [fault] == video_faults(path), fault
    assert video_faults(Path("-nostdin"))


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("".join(f"no quotes {n}\n" for n in range(20_000)))
    given = [sys.executable, "-m", "data_process", "inspect", str(file), "--target", "quoted"]
    with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(f"{file}:1: ")
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == -signal.SIGPIPE


def test_the_command_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "data_process", "inspect", tmp_path / "none.txt"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, f"{tmp_path}/none.txt: No such file or directory\n")


def test_the_hash_is_of_what_was_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"prompt": "a cat"}])
    monkeypatch.setattr(Summary, "add", lambda *_: source.write_text('{"prompt": "a dog"}\n'))
    assert refused(capsys, "inspect", source) == [f"{source}: changed while it was being read"]

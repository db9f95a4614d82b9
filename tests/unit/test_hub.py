"""What is looked for on the Hub, and what is a folder that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.hub import no_hub_id
from flowrl.models.loading import local_folder
from flowrl.rewards.clip_score import CLIPScore
from flowrl.types import LoadError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a folder `models`."""
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", ["openai/clip-vit-large-patch14", "stabilityai/sd3.5-medium", "model/mine"])
def test_what_may_be_an_id(path: str) -> None:
    assert no_hub_id(path) is None


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("mine", "has the form owner/name"),
        ("a/b/c", "has the form owner/name"),
        ("./mine", "has the form owner/name"),
        ("~/mine", "has the form owner/name"),
        ("models/mein", "since there is a folder models here it is not taken for a Hub id"),
        ("weights/head.safetensors", "with that ending it is no Hub id"),
    ],
)
def test_what_is_meant_to_be_here(path: str, reason: str) -> None:
    assert reason in (no_hub_id(path) or "")


def test_a_typing_error_downloads_nothing() -> None:
    """Both readings are named, for models and for scorers."""
    words = "models/mein: there is no such folder.*, and since there is a folder models here .*hf download models/mein"
    with pytest.raises(LoadError, match=f"model.path={words}"):
        local_folder("models/mein", None, None)
    with pytest.raises(LoadError, match=words):
        CLIPScore(path="models/mein").load()

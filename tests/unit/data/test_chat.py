"""Rows of verl, turned into rows of flowrl."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from flowrl.data.chat import QWEN_IMAGE_SYSTEM, from_chat, is_chat
from flowrl.data.rows import LineFault


def says(text: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def test_the_system_prompt_is_that_of_the_pipeline() -> None:
    """Which puts it before every prompt itself: that is why the row's own may be left to metadata."""
    package = importlib.util.find_spec("diffusers")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "pipelines/qwenimage/pipeline_qwenimage.py"
    assert f"system\\n{QWEN_IMAGE_SYSTEM}<" in source.read_text(encoding="utf-8")


def test_what_is_a_chat() -> None:
    assert is_chat({"prompt": [says("a")]})
    assert not any(is_chat({"prompt": prompt}) for prompt in ("a", [], ["a"], [says("a"), "b"], None))


def test_the_least_that_a_row_has() -> None:
    assert from_chat({"prompt": [says("a cat")], "ability": None}) == {"prompt": "a cat"}


def test_ground_truths() -> None:
    def row(truth: Any) -> dict[str, Any]:
        return from_chat({"prompt": [says("a")], "reward_model": {"style": "rule", "ground_truth": truth}})

    assert row("CAT") == {"prompt": "a", "target": "CAT"}
    assert row("") == row(None) == {"prompt": "a"}
    assert row({"count": 2}) == {"prompt": "a", "metadata": {"ground_truth": {"count": 2}}}


def test_metadata_of_a_row_come_first() -> None:
    row = {"prompt": [says("a")], "metadata": {"split": "mine"}, "extra_info": {"split": "train", "index": 1}}
    assert from_chat(row)["metadata"] == {"split": "mine", "index": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [says("Be brief.", "system"), says("a")]}, "a system message that no model adds"),
        ({"prompt": [says("a"), says("b")]}, "one user message and at most one system message, got user, user"),
        ({"prompt": [says("a"), says("b", "assistant")]}, "got user, assistant"),
        ({"prompt": [{"text": "a"}]}, "got None"),
        ({"prompt": [says(QWEN_IMAGE_SYSTEM, "system")]}, "has no user message"),
        ({"prompt": [says([{"type": "text"}])]}, "a user message whose content is a list"),
        ({"prompt": [says("a")], "negative_prompt": [says("b", "tool")]}, "'negative_prompt' must have one user"),
        ({"prompt": [says("a")], "reward_model": "rule"}, "'reward_model' must be an object, got a string"),
        ({"prompt": [says("a")], "targets": "A"}, "unknown field 'targets' beside a chat prompt"),
    ],
)
def test_what_has_no_place_in_a_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(LineFault) as caught:
        from_chat(row)
    assert message in caught.value.messages[0]

"""Rows whose prompt is a list of chat messages, as verl's data sets have them, turned into rows of flowrl.

prompt         [{"role": "system", ...}, {"role": "user", "content": TEXT}]   the system message may be missing
negative_prompt  the same, or a string
reward_model   {"style": ..., "ground_truth": TEXT}     the text becomes `target`, anything else metadata
extra_info     an object                                its entries become metadata
data_source, ability                                    become metadata
"""

from __future__ import annotations

from typing import Any

from flowrl.data.rows import LineFault, Row, json_type

QWEN_IMAGE_SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:"
)
"""The system message of Qwen-Image's template. The model's adapter puts it before every prompt itself."""

_KEPT = ("images", "videos", "id")
_TO_METADATA = ("data_source", "ability")
CHAT_FIELDS = ("reward_model", "extra_info", *_TO_METADATA)
"""Fields that only such rows have."""

_FIELDS = {"prompt", "negative_prompt", "metadata", *_KEPT, *CHAT_FIELDS}


def is_chat(row: Row) -> bool:
    """Whether the prompt is a list of messages."""
    prompt = row.get("prompt")
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(message, dict) for message in prompt)


def from_chat(row: Row) -> Row:
    """The row with a plain prompt. Raises LineFault for what has no place in one."""
    unknown = sorted(name for name in row.keys() - _FIELDS if row[name] is not None)
    if unknown:
        raise LineFault(
            f"has an unknown field {unknown[0]!r} beside a chat prompt; fields: {', '.join(sorted(_FIELDS))}"
        )
    prompt, system = _messages("prompt", row["prompt"])
    metadata = _object(row, "metadata") | {name: row[name] for name in _TO_METADATA if row.get(name) is not None}
    for name, value in _object(row, "extra_info").items():
        metadata.setdefault(name, value)
    if system is not None:
        metadata["system_prompt"] = system
    plain: Row = {"prompt": prompt, **{name: row[name] for name in _KEPT if row.get(name) is not None}}
    if row.get("negative_prompt") is not None:
        plain["negative_prompt"] = _negative(row["negative_prompt"])
    truth = _object(row, "reward_model").get("ground_truth")
    if isinstance(truth, str):
        plain |= {"target": truth} if truth else {}
    elif truth is not None:
        metadata["ground_truth"] = truth
    return plain | ({"metadata": metadata} if metadata else {})


def _messages(field: str, messages: list[Any]) -> tuple[str, str | None]:
    """What the user says, and the system message."""
    said: dict[str, str] = {}
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in ("system", "user") or role in said:
            raise LineFault(
                f"{field!r} must have one user message and at most one system message, got {_roles(messages)}"
            )
        if not isinstance(content, str):
            raise LineFault(f"{field!r} has a {role} message whose content is {json_type(content)}, not a string")
        said[role] = content
    if "user" not in said:
        raise LineFault(f"{field!r} has no user message")
    system = said.get("system")
    if system is not None and system.strip() != QWEN_IMAGE_SYSTEM:
        raise LineFault(f"{field!r} has a system message that no model adds to a prompt: {system[:80]!r}; remove it")
    return said["user"], system


def _negative(value: Any) -> Any:
    chat = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    return _messages("negative_prompt", value)[0] if chat else value


def _roles(messages: list[Any]) -> str:
    return ", ".join(str(message.get("role")) for message in messages)


def _object(row: Row, name: str) -> Row:
    value = row.get(name)
    if value is not None and not isinstance(value, dict):
        raise LineFault(f"{name!r} must be an object, got {json_type(value)}")
    return value or {}

"""Where prompts come from: how the rows of published data sets become rows of flowrl."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module

from data_process.refused import Refused
from flowrl.data.chat import CHAT_FIELDS, QWEN_IMAGE_SYSTEM, is_chat
from flowrl.data.rows import LineFault, Row
from flowrl.data.schema import OPTIONAL, content_id, plain, target_of, written_id


@dataclass(frozen=True)
class Source:
    """A kind of file. One of your own is `prepare --source package.module.NAME`.

    Args:
        what: for `--help`.
        prompt_keys: the field with the prompt is the first of these that a row has. What flowrl knows by name
            (`target`, `negative_prompt`, ...) is kept, and so is all of a row whose prompt is a list of chat messages.
        metadata_keys: fields that become metadata.
        required: those of them that every row must have.
        target: "quoted" if every prompt must quote its target.
        negative_prompt, system_prompt: of every row, if the data set is used with them.
    """

    what: str
    prompt_keys: tuple[str, ...] = ("prompt",)
    metadata_keys: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    target: str = "none"
    negative_prompt: str | None = None
    system_prompt: str | None = None

    def columns(self) -> tuple[str, ...]:
        """All columns of a parquet file that may be of use."""
        return (*self.prompt_keys, *OPTIONAL, *CHAT_FIELDS, *self.metadata_keys)


SOURCES = {
    "prompts": Source(
        "any .txt (a prompt a line), .jsonl, .parquet, .csv or .tsv, chat prompts of verl too; see --prompt-key"
    ),
    "ocr": Source("Flow-GRPO's OCR prompts, .txt: the target is the first quoted text", target="quoted"),
    "qwen_image_ocr": Source(
        "the same for Qwen-Image: with its system prompt, and the negative prompt ' '",
        target="quoted",
        negative_prompt=" ",
        system_prompt=QWEN_IMAGE_SYSTEM,
    ),
    "pickscore_sfw": Source("Flow-GRPO's PickScore-SFW prompts, .txt"),
    "pickapic": Source("Pick-a-Pic, .parquet: its captions, as often as they occur", ("caption", "prompt")),
    "geneval": Source(
        "GenEval's prompts, .jsonl, with what is to be counted",
        metadata_keys=("tag", "include", "exclude"),
        required=("tag", "include"),
    ),
}


@dataclass
class Conversion:
    """Rows of a source, made rows of flowrl with a task and an id.

    The id is a hash of all that the row holds, never its place in the file: any order of the same rows gives the same
    ids. A row that occurs again gets `_2`, `_3` ... An id that the source has is kept.
    """

    source: Source
    source_name: str  # as the command has it
    name: str  # that ids begin with
    task: str  # of rows that name none
    kept: set[str] = field(default_factory=set)  # fields that have become metadata
    left_out: set[str] = field(default_factory=set)
    _times: dict[str, int] = field(default_factory=dict)

    def __call__(self, found: Row) -> Row:
        """Raises LineFault for a row that this source cannot have."""
        row = self._known(found)
        metadata = row.get("metadata", {})
        if not isinstance(metadata, dict) or not isinstance(row["prompt"], str):
            return row  # the schema says what is wrong with it
        if self.source.target == "quoted":
            row["target"] = target_of(row, "quoted", f"--source {self.source_name}")
        if self.source.negative_prompt is not None:
            row.setdefault("negative_prompt", self.source.negative_prompt)
        if self.source.system_prompt is not None:
            metadata = {"system_prompt": self.source.system_prompt, **metadata}
        own = {name: found[name] for name in self.source.metadata_keys if found.get(name) is not None}
        absent = [name for name in self.source.required if name not in own]
        if absent:
            raise LineFault(f"has no {' and no '.join(map(repr, absent))}, which --source {self.source_name} needs")
        self.kept |= own.keys()
        row["metadata"] = {"task": self.task, **own, **metadata}
        if written_id(row) is None:
            row["metadata"]["sample_id"] = self._new_id(row)
        return row

    def _known(self, found: Row) -> Row:
        key = next((key for key in self.source.prompt_keys if key in found), None)
        if key is None:
            raise LineFault(f"has no {' or '.join(map(repr, self.source.prompt_keys))}; it has {', '.join(found)}")
        renamed = {"prompt": found[key], **{name: found[name] for name in OPTIONAL if name in found}}
        if is_chat(renamed):
            renamed |= {name: found[name] for name in CHAT_FIELDS if name in found}
        used = {key, *self.source.metadata_keys, *(renamed.keys() - {"prompt"})}
        self.left_out |= found.keys() - used
        return plain(renamed)

    def _new_id(self, row: Row) -> str:
        identity = f"{self.name}_{content_id(row)}"
        times = self._times[identity] = self._times.get(identity, 0) + 1
        return identity if times == 1 else f"{identity}_{times}"


def named(name: str) -> Source:
    """A source of `SOURCES`, or one of the user's by its dotpath. Raises Refused if there is none."""
    if name in SOURCES:
        return SOURCES[name]
    wanted = f"must be {', '.join(SOURCES)}, or package.module.NAME of a Source of your own that Python finds"
    module, _, attribute = name.rpartition(".")
    try:
        found = vars(import_module(module))[attribute]
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise Refused([f"--source {wanted}, got {name!r} ({error})"]) from error
    if not isinstance(found, Source):
        raise Refused([f"--source {wanted}, got {name!r}, a {type(found).__name__}"])
    return found


def chosen(name: str, prompt_key: str | None, metadata_keys: tuple[str, ...]) -> Source:
    """The source of a name, with the command's own fields."""
    source = named(name)
    keys = source.prompt_keys if prompt_key is None else (prompt_key,)
    return replace(source, prompt_keys=keys, metadata_keys=(*source.metadata_keys, *metadata_keys))

"""Embeddings on the disk: bit for bit what was encoded, whatever happens to the files and whoever else writes them."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flowrl.config import Config
from flowrl.device import torch_settings
from flowrl.models import embedding_files
from flowrl.models.embedding_files import EmbeddingFiles
from flowrl.models.embeddings import EmbeddingCache, Text
from flowrl.models.loading import tokenizer_hashes
from flowrl.models.pipeline import PipelineModel
from flowrl.models.policy import PipelinePolicy
from flowrl.prompts import Prompt
from flowrl.types import LoadError
from tests.support.families import FAMILIES, PROMPTS, folder, random_policy, saved

CPU = torch.device("cpu")
BY_ANOTHER = "what other encoders made"


def files(path: Path, fingerprint: str = "these") -> EmbeddingFiles:
    return EmbeddingFiles(path, lambda: fingerprint)


def row(seed: int = 0) -> Text:
    drawn = torch.randn(1, 7, 5, generator=torch.Generator().manual_seed(seed))
    return Text(drawn.bfloat16(), drawn[:, 0], torch.arange(7)[None] < 4)


def same(found: Text | None, expected: Text) -> bool:
    """Bit for bit."""

    def bits(value: Tensor | None) -> object:
        return None if value is None else (value.dtype, value.shape, value.contiguous().view(torch.uint8).tolist())

    return found is not None and all(bits(vars(found)[name]) == bits(part) for name, part in vars(expected).items())


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "kept",
    [row(), Text(torch.randn(1, 3, 2)), Text(torch.zeros(1, 0, 4)), Text(torch.randn(1, 2, 3).transpose(1, 2))],
    ids=["all parts", "embeddings alone", "no tokens", "not contiguous"],
)
def test_what_is_read_is_what_was_written(tmp_path: Path, kept: Text) -> None:
    files(tmp_path / "new").put('a "text"\n日本', kept)
    found = files(tmp_path / "new")
    assert same(found.get('a "text"\n日本'), kept) and found.num_damaged == 0
    assert found.get("another") is None and files(tmp_path / "new", "others").get('a "text"\n日本') is None
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def cut(length: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[:length])


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)

    return damage


def of_another_text(path: Path) -> None:
    """Moved, as a careless hand may: whole, but not what its name says."""
    other = files(path.parents[1])
    other.put("another text", row(1))
    other.path("another text").replace(path)


def of_other_encoders(path: Path) -> None:
    other = files(path.parents[1], BY_ANOTHER)
    other.put("text", row(1))
    other.path("text").replace(path)


def of_other_tensors(path: Path) -> None:
    """Whole, and by the checksum that belongs to them."""
    tensors = {"logits": torch.ones(2)}
    labels = files(path.parents[1])._labels("text") | {"sha256": embedding_files._checksum(tensors)}
    save_file(tensors, path, labels)


def test_a_folder_in_a_files_place_is_one_sentence(tmp_path: Path) -> None:
    files(tmp_path).path("text").mkdir(parents=True)
    with pytest.raises(LoadError, match=r"^model\.cache_dir=\S+ \w+\.safetensors cannot be read: (?!None)."):
        files(tmp_path).get("text")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut(0), "no whole safetensors file"),
        (cut(5), "no whole safetensors file"),
        (cut(100), "no whole safetensors file"),
        (cut(-1), "no whole safetensors file"),
        (flip(-1), "another checksum"),
        (flip(-40), "another checksum"),
        (lambda path: path.write_bytes(b"<html>" * 100), "no whole safetensors file"),
        (of_another_text, "of other text"),
        (of_other_encoders, "of other encoders"),
        (of_other_tensors, "holds logits, which is no text's embeddings"),
    ],
    ids=["empty", "no header", "half", "short", "a bit", "another bit", "no tensors", "moved", "stale", "other"],
)
def test_what_is_damaged_is_reported_counted_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], words: str
) -> None:
    files(tmp_path).put("text", row())
    path = files(tmp_path).path("text")
    damage(path)
    found = files(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert found.get("text") is None and found.num_damaged == 1
    assert f"{path}: " in caplog.text and words in caplog.text
    found.put("text", row(2))
    assert same(found.get("text"), row(2)) and found.num_damaged == 1


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match=r"^model\.cache_dir=\S+/file/below cannot be written: [^\n]+\.$"):
        files(tmp_path / "file" / "below").put("text", row())
    config = replace(saved("z_image"), cache_dir=str(tmp_path / "file"))
    assert [problem.path for problem in config.problems(None)] == ["model.cache_dir"]  # type: ignore[arg-type]


def keep_on_writing(path: Path, count: int, failed: multiprocessing.Queue[int]) -> None:
    mine = files(path)
    for i in range(count):
        text = str(i % 5)
        mine.put(text, row(i % 5))
        if not same(mine.get(text), row(i % 5)):
            failed.put(i)
    failed.put(-mine.num_damaged)


def test_two_processes_at_once(tmp_path: Path) -> None:
    """They write the same texts over and over, and never read anything but the whole of one."""
    context = multiprocessing.get_context("fork")
    failed: multiprocessing.Queue[int] = context.Queue()
    both = [context.Process(target=keep_on_writing, args=(tmp_path, 150, failed)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=60)
    assert [process.exitcode for process in both] == [0, 0]
    assert [failed.get(timeout=5) for _ in both] == [0, 0]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 5, "and nothing is left over"


# ---------------------------------------------------------------------------------------------- policies


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> PipelineModel:
    """With a folder that holds what `PROMPTS` need at guidance 4."""
    config = replace(saved("z_image"), cache_dir=str(tmp_path_factory.mktemp("embeddings")))
    policy = config.load(CPU)
    assert all(policy.encode_ahead(policy.texts(PROMPTS, 4.0)))
    return config


@pytest.mark.parametrize("name", FAMILIES)
def test_every_familys_embeddings_come_back(name: str, tmp_path: Path) -> None:
    policy, prompts = copy.copy(random_policy(name)), FAMILIES[name].prompts
    expected = random_policy(name).encode(prompts, 4.0)
    for new in (True, False):
        policy.embeddings = EmbeddingCache(2**30, EmbeddingFiles(tmp_path, policy._encoding))
        assert all(policy.embeddings.find(text) is not new for text in policy.texts(prompts, 4.0))
        found = policy.encode(prompts, 4.0)
        assert same(found.prompt, expected.prompt)
        assert expected.negative is None or (found.negative and same(found.negative, expected.negative))


def never(text: str) -> Text:
    raise AssertionError(f"encoded again: {text!r}")


def test_a_filled_folder_gives_bit_for_bit_what_encoding_does(
    cached: PipelineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = cached.load(CPU)
    monkeypatch.setattr(policy, "embed", never)
    found, expected = policy.encode(PROMPTS, 4.0), random_policy("z_image").encode(PROMPTS, 4.0)
    assert expected.negative is not None
    assert same(found.prompt, expected.prompt) and same(found.negative, expected.negative)
    assert not any(policy.encode_ahead(policy.texts(PROMPTS, 4.0)))


def test_only_what_is_new_is_encoded(cached: PipelineModel, tmp_path: Path) -> None:
    """And kept, although there is no room in memory; the encoders leave the device again."""
    shutil.copytree(str(cached.cache_dir), tmp_path / "copy")
    policy = replace(cached, cache_dir=str(tmp_path / "copy"), cache_mb=0).load(CPU)
    texts = policy.texts([*PROMPTS, Prompt("new", "something new", negative="blurry"), PROMPTS[0]], 4.0)
    assert len(texts) == len(set(texts)) == 7
    assert [text for text, new in zip(texts, policy.encode_ahead(texts), strict=True) if new] == ["something new"]
    assert policy.embeddings.num_bytes == 0
    assert policy.texts(PROMPTS, 1.0) == [prompt.text for prompt in PROMPTS], "no guidance, no negative prompts"


def encoders(policy: PipelinePolicy) -> str:
    assert policy.files is not None
    return policy.files.fingerprint()


def test_the_fingerprint_is_of_all_that_makes_embeddings_and_of_nothing_else(
    cached: PipelineModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = encoders(cached.load(CPU))
    with torch_settings(Config()):
        with_settings = encoders(cached.load(CPU))
    moved = replace(cached, path=str(shutil.copytree(folder("z_image"), tmp_path / "moved")))
    for free in (moved, replace(cached, cache_mb=1, decode_batch_size=3, cache_dir=str(tmp_path))):
        assert encoders(free.load(CPU)) == mine
    for held in (replace(cached, max_sequence_length=64), replace(cached, dtype="bfloat16")):
        assert encoders(held.load(CPU)) != mine

    used = cached.load(CPU)
    assert used.num_tokens("a cat") > 0 and used.embed("a cat").embeds.numel() and encoders(used) == mine, "if used"
    with torch_settings(Config(deterministic=True)):
        assert encoders(cached.load(CPU)) not in (mine, with_settings), "other kernels"
    monkeypatch.setattr(embedding_files, "version", lambda name: "1" if name == "ftfy" else version(name))
    assert encoders(cached.load(CPU)) != mine, "a library that mends prompts"
    monkeypatch.undo()

    policy = moved.load(CPU)
    policy.pipeline.transformer.x_pad_token += 1
    assert encoders(policy) == mine, "what is trained makes no embeddings"
    policy.pipeline.tokenizer.chat_template += "."
    assert (template := encoders(policy)) != mine
    policy.pipeline.text_encoder.config.rms_norm_eps *= 2
    assert (settings := encoders(policy)) not in (mine, template)
    policy.pipeline.text_encoder.norm.weight += 1
    assert encoders(policy) not in (mine, template, settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_counts_that_a_family_names_and_no_other(name: str) -> None:
    """A sweep over guidance, or over how pictures are decoded, encodes nothing anew."""
    model = FAMILIES[name].model
    others = {
        "dtype": "bfloat16",
        "max_sequence_length": 63,
        "text_encoder_layers": (1, 2, 3),
        "embedded_guidance": 2.0,
        "guidance_scale_2": 2.0,
        "decode_batch_size": 7,
    }
    changed = {f.name: replace(model, **{f.name: others[f.name]}) for f in fields(model) if f.name in others}
    counted = {key for key, other in changed.items() if other.encoding() != model.encoding()}
    assert counted == {"dtype", "max_sequence_length", "text_encoder_layers"} & changed.keys()


@pytest.mark.parametrize("name", ["sd3", "z_image", "wan"])
def test_a_tokenizer_that_was_saved_after_a_call_is_the_same_one(name: str, tmp_path: Path) -> None:
    """Libraries keep a call's truncation and padding in it, and write them down."""
    for key, tokenizer in random_policy(name)._tokenizers().items():
        fresh = type(tokenizer).from_pretrained(folder(name) / key)
        expected = tokenizer_hashes(fresh)
        fresh(["a b c", "d"], padding="max_length", max_length=12, truncation=True)
        fresh.save_pretrained(tmp_path / key)
        assert (
            tokenizer_hashes(type(tokenizer).from_pretrained(tmp_path / key)) == expected == tokenizer_hashes(tokenizer)
        )

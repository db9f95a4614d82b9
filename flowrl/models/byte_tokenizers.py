"""Tokenizers made in memory, a token a byte: for models without weights, which have no words to know.

They behave as the published ones do for the pipelines that call them: the same special tokens, padding, truncation and
chat template. Different texts have different tokens (CLIP's, which folds case and space, apart) and longer texts more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false -%}
<think>

</think>

{% endif -%}
{%- endif -%}
"""
"""Qwen3's, for plain conversations: without thinking, the thought is there and empty."""

QWEN_IMAGE_WORDS = (
    *("system", "Describe", "user", "assistant", "Ġthe", "Ġimage", "Ġby", "Ġdetailing", "Ġcolor", "Ġshape", "Ġsize"),
    *("Ġtexture", "Ġquantity", "Ġtext", "Ġspatial", "Ġrelationships", "Ġof", "Ġobjects", "Ġand", "Ġbackground"),
)
"""One token each, as in the published vocabulary: `QwenImagePipeline` cuts the first 34 tokens off its own template."""


def clip_tokenizer() -> Any:
    """`CLIPTokenizer`: begin, bytes, end; the end is also the padding, and has the highest id, as in OpenAI's."""
    from transformers import CLIPTokenizer

    letters = _letters()
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(_numbered(pieces), [], model_max_length=77)


def t5_tokenizer() -> Any:
    """T5's and UMT5's form: bytes, end (1); padding is 0.

    Not a `T5Tokenizer`: that one's vocabulary has no bytes, so that all letters which it lacks would be one.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE(_numbered(["<pad>", "</s>", "<unk>", *_letters()]), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def qwen_tokenizer() -> Any:
    """`Qwen2Tokenizer` with Qwen3's chat template, and the words of Qwen-Image's."""
    from transformers import Qwen2Tokenizer

    merges = list(dict.fromkeys(merge for word in QWEN_IMAGE_WORDS for merge in _merges(word)))
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    pieces = dict.fromkeys([*_letters(), *(left + right for left, right in merges), *special])
    return Qwen2Tokenizer(
        _numbered(pieces),
        merges,
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=131072,
    )


TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "clip": clip_tokenizer,
    "t5": t5_tokenizer,
    "qwen": qwen_tokenizer,
}


def _letters() -> list[str]:
    """The 256 printable characters that stand for bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _numbered(pieces: Iterable[str]) -> dict[str, int]:
    return {piece: index for index, piece in enumerate(pieces)}


def _merges(word: str) -> list[tuple[str, str]]:
    """That make one piece of `word`, from its first letter on."""
    return [(word[:length], word[length]) for length in range(1, len(word))]

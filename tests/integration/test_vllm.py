"""The judge on a real vLLM server, with a tiny model of random weights.

For machines that have one, with or without a GPU: `pytest -m campaign tests/integration/test_vllm.py`.
FLOWRL_VLLM is its command, if that is in an environment of its own. What it answered once is in `recorded_vllm.json`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl import load_config
from flowrl.build import build
from flowrl.prompts import Prompt
from flowrl.rewards.combine import Component
from flowrl.rewards.transport import AnswerError
from flowrl.rewards.vlm_judge import VLMJudge

VLLM = shutil.which(os.environ.get("FLOWRL_VLLM", "vllm"))
pytestmark = [pytest.mark.campaign, pytest.mark.skipif(VLLM is None, reason="there is no vllm command")]

SPECIAL = ["<pad>", "<s>", "</s>", "<image>"]
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == "image" -%}<image>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}"""
IMAGES = np.random.default_rng(0).integers(0, 256, (8, 64, 64, 3), dtype=np.uint8)
PROMPTS = [Prompt(f"p{n}", f'a sign that says "{n}"', str(n)) for n in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA of two small layers that reads and writes bytes, "Yes" and "No"."""
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers import PreTrainedTokenizerFast as Fast

    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ye", "Yes", "No"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    bytewise = Tokenizer(BPE(vocabulary, [("Y", "e"), ("Ye", "s"), ("N", "o")]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<image>"]}
    tokenizer = Fast(tokenizer_object=bytewise, chat_template=TEMPLATE, **tokens)
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, **vision},
        text_config={"model_type": "llama", "vocab_size": len(pieces), "max_position_embeddings": 2048, **text},
        image_token_index=vocabulary["<image>"],
        image_seq_length=16,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # else all tokens are about as likely, whatever is shown
    path = tmp_path_factory.mktemp("llava")
    model.save_pretrained(path)
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    # vLLM knows the tower by the name that published checkpoints have, which transformers 5 no longer writes.
    weights = load_file(path / "model.safetensors")
    renamed = {key.replace("vision_tower.embed", "vision_tower.vision_model.embed"): weights[key] for key in weights}
    for part in ("encoder", "pre_layrnorm", "post_layernorm"):
        renamed = {
            key.replace(f"vision_tower.{part}", f"vision_tower.vision_model.{part}"): renamed[key] for key in renamed
        }
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that is about to start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [VLLM, "serve", folder, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", 1024, "--max-logprobs", 300]
    environment = os.environ | {"VLLM_API_KEY": "s3cret", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


@pytest.fixture
def judge(url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A loaded judge of the option's YAML, with overrides."""
    monkeypatch.setenv("VLLM_TOKEN", "s3cret")

    def make(option: str, *overrides: str) -> VLMJudge:
        settings = [f"url={url}", "model=tiny", "token_env=VLLM_TOKEN", "start_timeout_s=300", *overrides]
        prefix = f"reward.components.{option}"
        cfg = load_config(["~recipe", f"reward={option}", *(f"{prefix}.scorer.{setting}" for setting in settings)])
        scorer = build(cfg.reward.components[option], prefix, Component).scorer
        scorer.load()
        assert isinstance(scorer, VLMJudge)
        return scorer

    return make


def independent_odds(folder: Path, scorer: VLMJudge, image: np.ndarray, prompt: Prompt) -> float:
    """P(Yes) / (P(Yes) + P(No)) of the first token, by transformers."""
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, CLIPImageProcessorPil, LlavaForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    question = scorer.question.replace("{prompt}", prompt.text)
    ids = tokenizer("<image>" * 16 + question, return_tensors="pt", add_special_tokens=False).input_ids
    pixels = processor(Image.fromarray(image), return_tensors="pt").pixel_values
    with torch.no_grad():
        logits = model(input_ids=ids, pixel_values=pixels).logits[0, -1].double()
    yes, no = (logits[tokenizer.convert_tokens_to_ids(word)] for word in ("Yes", "No"))
    return float(torch.sigmoid(yes - no))


def test_yes_against_no_is_what_the_model_says(folder: Path, judge: Any) -> None:
    scorer = judge("vlm_yes_no", "extra_body={top_logprobs: 263}")
    scores = scorer.score(IMAGES, PROMPTS)
    expected = [independent_odds(folder, scorer, image, prompt) for image, prompt in zip(IMAGES, PROMPTS, strict=True)]
    odds, expected_odds = (np.log(share / (1 - share)) for share in (scores, np.array(expected)))
    assert np.ptp(odds) > 2  # the pictures matter
    np.testing.assert_allclose(
        odds, expected_odds, atol=0.15
    )  # vLLM rounds otherwise than transformers, layer by layer


def test_ratings_are_read(judge: Any) -> None:
    scorer = judge("vlm_judge", "extra_body={structured_outputs: {regex: 'Rating: [1-9]\\.'}}")
    scores = scorer.score(IMAGES, PROMPTS)
    ratings = scores * 9 + 1
    np.testing.assert_allclose(ratings, ratings.round())
    np.testing.assert_array_equal(scorer.score(IMAGES, PROMPTS), scores)
    with pytest.raises(AnswerError, match="picture 0 of prompt 'p0': max_tokens ended the answer within the rating"):
        judge("vlm_judge", "extra_body={structured_outputs: {regex: 'Rating: [1-9]0'}}", "parser.max_tokens=9").score(
            IMAGES[:1], PROMPTS[:1]
        )


def test_transcriptions_are_scored(judge: Any) -> None:
    scores = judge("vlm_ocr", "extra_body={structured_outputs: {choice: ['sign 3']}}").score(IMAGES, PROMPTS)
    np.testing.assert_array_equal(scores, [float(n == 3) for n in range(8)])


def test_the_servers_refusals_are_errors(judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AnswerError, match="serves tiny, but not the model 'other'"):
        judge("vlm_ocr", "model=other")
    with pytest.raises(AnswerError, match=r"answered 400: .*max_tokens"):
        judge("vlm_ocr", "parser.max_tokens=5000").score(IMAGES, PROMPTS)
    monkeypatch.setenv("VLLM_TOKEN", "wrong")
    with pytest.raises(AnswerError, match="/models answered 401"):
        judge("vlm_ocr")

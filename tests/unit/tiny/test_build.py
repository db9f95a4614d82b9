"""The shipped folder is an ordinary diffusers pipeline, and pre-training sees prompts as that pipeline encodes them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

import flowrl
from flowrl.tiny.build import MAX_TOKENS, Denoiser, Size, build_pipeline, build_tokenizer, build_vae, tokenize
from flowrl.tiny.words import heldout_words, prompt

FOLDER = Path(flowrl.__file__).parent / "assets" / "tiny_sd3"


@pytest.fixture(scope="module")
def shipped() -> StableDiffusion3Pipeline:
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        FOLDER, text_encoder_3=None, tokenizer_3=None, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_the_signs_word_is_spelled_even_if_it_is_a_word_of_the_template() -> None:
    tokenizer = build_tokenizer()
    ids = tokenize(tokenizer, ['A sign that says "SIGN"'])
    assert tokenizer.convert_ids_to_tokens(ids[0])[:9] == [
        "<|startoftext|>",
        "a sign that says",
        '"</w>',
        *("s", "i", "g", "n</w>"),
        '"</w>',
        "<|endoftext|>",
    ]
    assert ids.shape == (1, MAX_TOKENS)


@pytest.mark.parametrize("t5_tokens", [0, 5])
def test_training_embeds_prompts_as_the_pipeline_does(t5_tokens: int) -> None:
    size, tokenizer = Size(width=32, layers=1, heads=2, text_width=16), build_tokenizer()
    denoiser = Denoiser(size, tokenizer).eval()
    pipeline = build_pipeline(denoiser, build_vae(size), tokenizer)
    prompts = ['A sign that says "FLOW"', ""]
    with torch.no_grad():
        ours = denoiser.embed(tokenize(tokenizer, prompts), t5_tokens)
        theirs = pipeline.encode_prompt(
            prompts, None, None, max_sequence_length=t5_tokens, do_classifier_free_guidance=False
        )
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[2])


def test_shipped_weights_are_small_and_half_precision() -> None:
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 14e6


def test_shipped_model_draws_signs_that_ocr_reads(shipped: StableDiffusion3Pipeline) -> None:
    words = heldout_words()[::4]
    images = shipped(
        [prompt(word) for word in words],
        height=32,
        width=80,
        num_inference_steps=6,
        guidance_scale=1.0,
        max_sequence_length=0,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    assert images.shape == (len(words), 32, 80, 3)
    read = _read((images * 255).astype(np.uint8))
    correct = sum(word.lower() in text for word, text in zip(words, read, strict=True))
    assert 0.15 * len(words) < correct < 0.7 * len(words)


def _read(images: np.ndarray) -> list[str]:
    """What rapidocr's recogniser sees, without detection."""
    rapidocr = pytest.importorskip("rapidocr")
    engine = rapidocr.RapidOCR()
    texts = []
    for image in images:
        result = engine(np.ascontiguousarray(image[:, :, ::-1]), use_det=False, use_cls=False, use_rec=True)
        texts.append((result.txts[0] if result.txts else "").replace(" ", "").lower())
    return texts

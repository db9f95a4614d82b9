"""Stable Diffusion 3.5 (arXiv 2403.03206): "full" is Medium, "large" is Large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrl.models.published.shared import (
    CLIP_G,
    CLIP_L,
    CLIP_PROJECTED,
    IMAGE_VAE,
    T5_XXL,
    TINY_CLIP,
    TINY_IMAGE_VAE,
    TINY_T5,
    euler,
    image_vae,
)
from flowrl.models.untrained import Part, Published

TRANSFORMER = "diffusers.SD3Transformer2DModel"

MEDIUM_CONFIG = {  # 2.24 B
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
LARGE_CONFIG = {  # 8.06 B
    **MEDIUM_CONFIG,
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "dual_attention_layers": (),
}
TINY_CONFIG = {
    **MEDIUM_CONFIG,
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "joint_attention_dim": 64,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 32,
    "dual_attention_layers": (0,),
}

MEDIUM = Published(
    parts={
        "transformer": Part(TRANSFORMER, MEDIUM_CONFIG),
        "vae": image_vae(IMAGE_VAE, scaling_factor=1.5305, shift_factor=0.0609),
        "text_encoder": Part(CLIP_PROJECTED, CLIP_L),
        "text_encoder_2": Part(CLIP_PROJECTED, CLIP_G),
        "text_encoder_3": T5_XXL,
    },
    scheduler=euler(shift=3.0),
    tokenizers={"tokenizer": "clip", "tokenizer_2": "clip", "tokenizer_3": "t5"},
)
LARGE = replace(MEDIUM, parts={**MEDIUM.parts, "transformer": Part(TRANSFORMER, LARGE_CONFIG)})
TINY = replace(
    MEDIUM,
    parts={
        "transformer": Part(TRANSFORMER, TINY_CONFIG),
        "vae": image_vae(TINY_IMAGE_VAE, scaling_factor=1.5305, shift_factor=0.0609),
        "text_encoder": Part(CLIP_PROJECTED, TINY_CLIP),
        "text_encoder_2": Part(CLIP_PROJECTED, TINY_CLIP),
        "text_encoder_3": Part("transformers.T5EncoderModel", TINY_T5),
    },
)

SIZES: Mapping[str, Published] = {"tiny": TINY, "full": MEDIUM, "large": LARGE}

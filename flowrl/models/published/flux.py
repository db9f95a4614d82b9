"""FLUX.1: "full" is [dev], which is told its guidance; [schnell] is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrl.models.published.shared import (
    CLIP,
    CLIP_L,
    FLUX_SCALING,
    FLUX_SHIFT,
    IMAGE_VAE,
    T5_XXL,
    TINY_CLIP,
    TINY_IMAGE_VAE,
    TINY_T5,
    euler,
    image_vae,
)
from flowrl.models.untrained import Part, Published

TRANSFORMER = "diffusers.FluxTransformer2DModel"

DEV_CONFIG = {  # 11.90 B
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
SCHNELL_CONFIG = {**DEV_CONFIG, "guidance_embeds": False}  # 11.89 B
TINY_CONFIG = {
    **DEV_CONFIG,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}

DEV = Published(
    parts={
        "transformer": Part(TRANSFORMER, DEV_CONFIG),
        "vae": image_vae(IMAGE_VAE, **FLUX_SCALING),
        "text_encoder": Part(CLIP, CLIP_L),
        "text_encoder_2": T5_XXL,
    },
    scheduler=euler(**FLUX_SHIFT),
    tokenizers={"tokenizer": "clip", "tokenizer_2": "t5"},
)
SCHNELL = replace(
    DEV,
    parts={**DEV.parts, "transformer": Part(TRANSFORMER, SCHNELL_CONFIG)},
    scheduler=euler(**{**FLUX_SHIFT, "shift": 1.0, "use_dynamic_shifting": False}),
)
TINY = replace(
    DEV,
    parts={
        "transformer": Part(TRANSFORMER, TINY_CONFIG),
        "vae": image_vae(TINY_IMAGE_VAE, **FLUX_SCALING),
        "text_encoder": Part(CLIP, TINY_CLIP),
        "text_encoder_2": Part("transformers.T5EncoderModel", TINY_T5),
    },
)
TINY_SCHNELL = replace(
    SCHNELL,
    parts={**TINY.parts, "transformer": Part(TRANSFORMER, {**TINY_CONFIG, "guidance_embeds": False})},
)

SIZES: Mapping[str, Published] = {"tiny": TINY, "full": DEV, "schnell": SCHNELL, "tiny_schnell": TINY_SCHNELL}

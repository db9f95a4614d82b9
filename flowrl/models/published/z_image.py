"""Z-Image: "full" is the base model, "turbo" the one distilled to few steps; they differ by their schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrl.models.published.shared import (
    FLUX_SCALING,
    IMAGE_VAE,
    QWEN3_4B,
    TINY_IMAGE_VAE,
    TINY_QWEN3,
    euler,
    image_vae,
)
from flowrl.models.untrained import Part, Published

TRANSFORMER = "diffusers.ZImageTransformer2DModel"
ENCODER = "transformers.Qwen3Model"

CONFIG = {  # 6.15 B
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 16,
    "dim": 3840,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "n_kv_heads": 30,
    "qk_norm": True,
    "cap_feat_dim": 2560,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
}
TINY_CONFIG = {
    **CONFIG,
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 32,
    "axes_dims": [4, 6, 6],
}

BASE = Published(
    parts={
        "transformer": Part(TRANSFORMER, CONFIG),
        "vae": image_vae(IMAGE_VAE, **FLUX_SCALING),
        "text_encoder": Part(ENCODER, QWEN3_4B),
    },
    scheduler=euler(shift=6.0),
    tokenizers={"tokenizer": "qwen"},
)
TURBO = replace(BASE, scheduler=euler(shift=3.0))
TINY = replace(
    BASE,
    parts={
        "transformer": Part(TRANSFORMER, TINY_CONFIG),
        "vae": image_vae(TINY_IMAGE_VAE, **FLUX_SCALING),
        "text_encoder": Part(ENCODER, TINY_QWEN3),
    },
)

SIZES: Mapping[str, Published] = {"tiny": TINY, "full": BASE, "turbo": TURBO}

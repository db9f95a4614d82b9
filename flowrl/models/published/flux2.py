"""FLUX.2 [klein]: "full" is 4B, distilled to few steps without guidance; "base" is 4B before that; "9b" is larger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrl.models.published.shared import FLUX_SHIFT, QWEN3_4B, TINY_QWEN3, euler
from flowrl.models.untrained import Part, Published

TRANSFORMER = "diffusers.Flux2Transformer2DModel"
ENCODER = "transformers.Qwen3ForCausalLM"
VAE = "diffusers.AutoencoderKLFlux2"

CONFIG_4B = {  # 3.88 B
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,  # three of the encoder's layers side by side
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "guidance_embeds": False,
}
CONFIG_9B = {  # 9.08 B
    **CONFIG_4B,
    "num_layers": 8,
    "num_single_layers": 24,
    "num_attention_heads": 32,
    "joint_attention_dim": 12288,
}
TINY_CONFIG = {
    **CONFIG_4B,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}

QWEN3_8B = {  # 8.19 B, the embeddings not being tied
    **QWEN3_4B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
TINY_ENCODER = {  # the pipeline reads layers 9, 18 and 27
    **TINY_QWEN3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 28,
    "head_dim": 8,
}

VAE_CONFIG = {  # 84 M; eight pixels to a latent
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 32,
    "norm_num_groups": 32,
    "sample_size": 1024,
}
TINY_VAE_CONFIG = {
    **VAE_CONFIG,
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
}

KLEIN_4B = Published(
    parts={
        "transformer": Part(TRANSFORMER, CONFIG_4B),
        "vae": Part(VAE, VAE_CONFIG),
        "text_encoder": Part(ENCODER, QWEN3_4B),
    },
    scheduler=euler(**FLUX_SHIFT),
    tokenizers={"tokenizer": "qwen"},
    options={"is_distilled": True},
)
KLEIN_BASE_4B = replace(KLEIN_4B, options={"is_distilled": False})
KLEIN_9B = replace(
    KLEIN_4B,
    parts={
        "transformer": Part(TRANSFORMER, CONFIG_9B),
        "vae": Part(VAE, VAE_CONFIG),
        "text_encoder": Part(ENCODER, QWEN3_8B),
    },
)
TINY = replace(
    KLEIN_BASE_4B,
    parts={
        "transformer": Part(TRANSFORMER, TINY_CONFIG),
        "vae": Part(VAE, TINY_VAE_CONFIG),
        "text_encoder": Part(ENCODER, TINY_ENCODER),
    },
)
TINY_DISTILLED = replace(TINY, options={"is_distilled": True})

SIZES: Mapping[str, Published] = {
    "tiny": TINY,
    "full": KLEIN_4B,
    "base": KLEIN_BASE_4B,
    "9b": KLEIN_9B,
    "tiny_distilled": TINY_DISTILLED,
}

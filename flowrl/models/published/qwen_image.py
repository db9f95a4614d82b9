"""Qwen-Image (arXiv 2508.02324)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrl.models.published.shared import euler
from flowrl.models.published.wan import LATENTS_MEAN_16, LATENTS_STD_16
from flowrl.models.untrained import Part, Published

TRANSFORMER = "diffusers.QwenImageTransformer2DModel"
ENCODER = "transformers.Qwen2_5_VLForConditionalGeneration"
VAE = "diffusers.AutoencoderKLQwenImage"

CONFIG = {  # 20.43 B
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}
TINY_CONFIG = {
    **CONFIG,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}

QWEN2_5_VL_7B = {  # 8.29 B
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "tokens_per_second": 2,
    },
}
TINY_ENCODER = {
    "text_config": {
        "vocab_size": 368,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "vision_config": {  # never used: prompts are texts
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    },
}

VAE_CONFIG = {  # 127 M; eight pixels to a latent; it is Wan's, for one frame
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "latents_mean": LATENTS_MEAN_16,
    "latents_std": LATENTS_STD_16,
}
TINY_VAE_CONFIG = {
    **VAE_CONFIG,
    "base_dim": 8,
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": LATENTS_MEAN_16[:4],
    "latents_std": LATENTS_STD_16[:4],
}

FULL = Published(
    parts={
        "transformer": Part(TRANSFORMER, CONFIG),
        "vae": Part(VAE, VAE_CONFIG),
        "text_encoder": Part(ENCODER, QWEN2_5_VL_7B),
    },
    scheduler=euler(
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    ),
    tokenizers={"tokenizer": "qwen"},
)
TINY = replace(
    FULL,
    parts={
        "transformer": Part(TRANSFORMER, TINY_CONFIG),
        "vae": Part(VAE, TINY_VAE_CONFIG),
        "text_encoder": Part(ENCODER, TINY_ENCODER),
    },
)

SIZES: Mapping[str, Published] = {"tiny": TINY, "full": FULL}

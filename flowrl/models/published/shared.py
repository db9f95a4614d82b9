"""Parts that several families have: text encoders, the image autoencoder, the flow-matching scheduler."""

from __future__ import annotations

from typing import Any

from flowrl.models.untrained import Part

# ------------------------------------------------------------------------------------------------------ text encoders

CLIP = "transformers.CLIPTextModel"
CLIP_PROJECTED = "transformers.CLIPTextModelWithProjection"

CLIP_L = {  # 0.12 B
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
    "eos_token_id": 2,  # as published: the pooled token is the one with the highest id
}
CLIP_G = {  # 0.69 B
    **CLIP_L,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
}
TINY_CLIP = {
    **CLIP_L,
    "vocab_size": 514,
    "hidden_size": 32,
    "intermediate_size": 64,
    "projection_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": 512,
    "pad_token_id": 513,
}

T5_XXL = Part(  # 4.76 B
    "transformers.T5EncoderModel",
    {
        "vocab_size": 32128,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
    },
)
TINY_T5 = {
    "vocab_size": 260,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
}

QWEN3_4B = {  # 4.02 B, the embeddings being tied
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
TINY_QWEN3 = {
    **QWEN3_4B,
    "vocab_size": 368,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}

# ------------------------------------------------------------------------------------------------------- autoencoder

IMAGE_VAE = {  # 84 M; eight pixels to a latent
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
TINY_IMAGE_VAE = {
    **IMAGE_VAE,
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
}
FLUX_SCALING = {"scaling_factor": 0.3611, "shift_factor": 0.1159}


def image_vae(config: dict[str, Any], **scaling: float) -> Part:
    """`AutoencoderKL` of one of the sizes above, with the family's scaling of latents."""
    return Part("diffusers.AutoencoderKL", {**config, **scaling})


# --------------------------------------------------------------------------------------------------------- scheduler


def euler(**config: Any) -> Part:
    """`FlowMatchEulerDiscreteScheduler`."""
    return Part("diffusers.FlowMatchEulerDiscreteScheduler", config)


FLUX_SHIFT = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}

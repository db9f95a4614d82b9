"""Wan (arXiv 2503.20314): "full" is 2.1-T2V-1.3B, "14b" its larger sister; "ti2v_5b" and "a14b" are of 2.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrl.models.untrained import Part, Published

TRANSFORMER = "diffusers.WanTransformer3DModel"
ENCODER = "transformers.UMT5EncoderModel"
VAE = "diffusers.AutoencoderKLWan"

CONFIG_1_3B = {  # 1.42 B
    "patch_size": (1, 2, 2),
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 8960,
    "num_layers": 30,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
}
CONFIG_14B = {**CONFIG_1_3B, "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}  # 14.29 B
CONFIG_5B = {  # 5.00 B
    **CONFIG_1_3B,
    "num_attention_heads": 24,
    "in_channels": 48,
    "out_channels": 48,
    "ffn_dim": 14336,
}
TINY_CONFIG = {
    **CONFIG_1_3B,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 128,
}

UMT5_XXL = {  # 5.68 B
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
TINY_ENCODER = {
    **UMT5_XXL,
    "vocab_size": 260,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
}

# fmt: off
LATENTS_MEAN_16 = [
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
]
LATENTS_STD_16 = [
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
]
LATENTS_MEAN_48 = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
]
LATENTS_STD_48 = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
]
# fmt: on

VAE_2_1 = {  # 127 M; eight pixels and four frames to a latent
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "latents_mean": LATENTS_MEAN_16,
    "latents_std": LATENTS_STD_16,
}
RESIDUAL = {  # 2x2 pixels are taken together first: sixteen pixels to a latent
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
VAE_2_2 = {  # 0.70 B
    **VAE_2_1,
    **RESIDUAL,
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "latents_mean": LATENTS_MEAN_48,
    "latents_std": LATENTS_STD_48,
}
TINY_VAE = {
    **VAE_2_1,
    "base_dim": 8,
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": LATENTS_MEAN_16[:4],
    "latents_std": LATENTS_STD_16[:4],
}
TINY_VAE_2_2 = {**TINY_VAE, **RESIDUAL}


def unipc(flow_shift: float) -> Part:
    """`UniPCMultistepScheduler` on Wan's flow-matching grid."""
    return Part(
        "diffusers.UniPCMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": flow_shift},
    )


WAN_1_3B = Published(
    parts={
        "transformer": Part(TRANSFORMER, CONFIG_1_3B),
        "vae": Part(VAE, VAE_2_1),
        "text_encoder": Part(ENCODER, UMT5_XXL),
    },
    scheduler=unipc(3.0),
    tokenizers={"tokenizer": "t5"},
)
WAN_14B = replace(WAN_1_3B, parts={**WAN_1_3B.parts, "transformer": Part(TRANSFORMER, CONFIG_14B)})
TI2V_5B = replace(
    WAN_1_3B,
    parts={
        "transformer": Part(TRANSFORMER, CONFIG_5B),
        "vae": Part(VAE, VAE_2_2),
        "text_encoder": Part(ENCODER, UMT5_XXL),
    },
    scheduler=unipc(5.0),
    options={"expand_timesteps": True},
)
A14B = replace(
    WAN_14B,
    parts={**WAN_14B.parts, "transformer_2": Part(TRANSFORMER, CONFIG_14B)},  # for the lower noise levels
    options={"boundary_ratio": 0.875},
)
TINY = replace(
    WAN_1_3B,
    parts={
        "transformer": Part(TRANSFORMER, TINY_CONFIG),
        "vae": Part(VAE, TINY_VAE),
        "text_encoder": Part(ENCODER, TINY_ENCODER),
    },
)
TINY_TI2V = replace(TI2V_5B, parts={**TINY.parts, "vae": Part(VAE, TINY_VAE_2_2)})
TINY_A14B = replace(A14B, parts={**TINY.parts, "transformer_2": Part(TRANSFORMER, TINY_CONFIG)})

SIZES: Mapping[str, Published] = {
    "tiny": TINY,
    "tiny_ti2v_5b": TINY_TI2V,
    "tiny_a14b": TINY_A14B,
    "full": WAN_1_3B,
    "14b": WAN_14B,
    "ti2v_5b": TI2V_5B,
    "a14b": A14B,
}

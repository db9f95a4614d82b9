"""A model of Stable Diffusion 3.5 Medium's size with random weights: nothing to download, as slow as the real one.

The one description of it for all benchmarks.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel

from flowrl.tiny.build import Denoiser, Size, build_pipeline, build_tokenizer

SMALL = Size(width=64, layers=1, heads=1, text_width=32, text_layers=2, text_heads=2)  # the text encoders


def build_medium(
    num_layers: int = 24,
    num_heads: int = 24,
    text_width: int = 4096,
    pooled_width: int = 2048,
    num_positions: int = 384,
) -> SD3Transformer2DModel:
    """The published architecture of SD3.5 Medium (2.2 B parameters), or less of it.

    Args:
        num_layers: of the transformer; 13 of them, or all if there are fewer, have two attentions.
        num_heads: of 64 channels.
        text_width: of a text token.
        pooled_width: of a whole text.
        num_positions: along each side of the grid of positions.
    """
    return SD3Transformer2DModel(
        sample_size=128,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=num_layers,
        num_attention_heads=num_heads,
        attention_head_dim=64,
        joint_attention_dim=text_width,
        caption_projection_dim=64 * num_heads,
        pooled_projection_dim=pooled_width,
        pos_embed_max_size=num_positions,
        dual_attention_layers=tuple(range(min(13, num_layers))),
        qk_norm="rms_norm",
    )


def save_medium(folder: Path, device: torch.device, num_layers: int = 24, num_heads: int = 24) -> int:
    """Write an ordinary pipeline folder in bfloat16, with small text encoders; returns the transformer's parameters."""
    tokenizer = build_tokenizer()
    denoiser = Denoiser(SMALL, tokenizer)
    with device:
        torch.manual_seed(0)
        width = 2 * SMALL.text_width
        transformer = build_medium(num_layers, num_heads, text_width=width, pooled_width=width).to(torch.bfloat16)
        torch.nn.init.normal_(transformer.proj_out.weight, std=0.02)  # else it draws nothing but zeros
    denoiser.transformer = transformer
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 32, 64, 64),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    pipeline = build_pipeline(denoiser, vae, tokenizer).to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    return sum(parameter.numel() for parameter in transformer.parameters())


def overrides(model: Path, prompts: Path, pixels: int) -> list[str]:
    """The keys that a run of such a model needs. Pictures are worth how well they compress: every reward differs."""
    return [
        *("~recipe", "model=sd3", f"model.path={model}", "model.max_sequence_length=128", "model.dtype=bfloat16"),
        *("reward=jpeg_compressibility", f"data.train={prompts}", f"trainer.eval.sets.heldout={prompts}"),
        *(f"sampler.height={pixels}", f"sampler.width={pixels}", "logger=jsonl", "artifacts.every=0"),
    ]

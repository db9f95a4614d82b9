"""The architecture of `tiny_sd3`: every part of a `StableDiffusion3Pipeline`, in miniature.

A picture of 32x80 pixels is 8x20 latents and 40 image tokens; a prompt is 12 text tokens, because the tokenizer knows
the words of the template as one token and spells the sign's word letter by letter. Small sequences are what makes the
model cheap on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

TEMPLATE = "a sign that says"
MAX_TOKENS = 12
"""Begin, template, quote, up to seven letters, quote, end."""

DEFAULT_T5_TOKENS = 256
"""Zero vectors that diffusers appends in place of T5's output, unless its `max_sequence_length` says otherwise."""

LATENT_CHANNELS = 8


@dataclass(frozen=True, kw_only=True)
class Size:
    """Widths and depths. The defaults are the shipped model's."""

    width: int = 160
    layers: int = 6
    heads: int = 5
    text_width: int = 80
    text_layers: int = 2
    text_heads: int = 4
    vae_channels: tuple[int, ...] = (16, 32, 64)


def build_tokenizer() -> CLIPTokenizer:
    """CLIP's tokenizer without merges: one token a letter, and another one for that letter at the end of a word."""
    letters = sorted(ByteLevel.alphabet())
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    tokenizer = CLIPTokenizer({piece: index for index, piece in enumerate(pieces)}, [], model_max_length=MAX_TOKENS)
    tokenizer.add_tokens([AddedToken(TEMPLATE, single_word=True, normalized=True)])
    return tokenizer


def build_text_encoder(size: Size, tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """One of the two text encoders; they differ by their initial weights only."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=size.text_width,
            intermediate_size=2 * size.text_width,
            projection_dim=size.text_width,
            num_hidden_layers=size.text_layers,
            num_attention_heads=size.text_heads,
            max_position_embeddings=MAX_TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_vae(size: Size) -> AutoencoderKL:
    """Four pixels to a latent; `scaling_factor` and `shift_factor` are set once it is trained."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(size.vae_channels),
        up_block_types=("UpDecoderBlock2D",) * len(size.vae_channels),
        block_out_channels=size.vae_channels,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=80,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def build_transformer(size: Size) -> SD3Transformer2DModel:
    """SD3.5's block (joint attention, RMS-normed queries and keys) on 4x10 image tokens."""
    return SD3Transformer2DModel(
        sample_size=20,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=size.layers,
        num_attention_heads=size.heads,
        attention_head_dim=size.width // size.heads,
        joint_attention_dim=2 * size.text_width,
        caption_projection_dim=size.width,
        pooled_projection_dim=2 * size.text_width,
        pos_embed_max_size=10,
        qk_norm="rms_norm",
    )


class Denoiser(nn.Module):
    """Transformer and text encoders as one trainable module, wired as `StableDiffusion3Pipeline` wires them."""

    def __init__(self, size: Size, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.transformer = build_transformer(size)
        self.text_encoder = build_text_encoder(size, tokenizer)
        self.text_encoder_2 = build_text_encoder(size, tokenizer)

    def embed(self, token_ids: Tensor, t5_tokens: int = 0) -> tuple[Tensor, Tensor]:
        """Prompt embeddings `[B, 12 + t5_tokens, D]` and pooled ones `[B, D]`, as `encode_prompt` makes them."""
        outputs = [
            encoder(token_ids, output_hidden_states=True) for encoder in (self.text_encoder, self.text_encoder_2)
        ]
        embeddings = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        pooled = torch.cat([output.text_embeds for output in outputs], dim=-1)
        return nn.functional.pad(embeddings, (0, 0, 0, t5_tokens)), pooled

    def forward(self, latents: Tensor, sigma: Tensor, token_ids: Tensor, t5_tokens: int = 0) -> Tensor:
        """The velocity `[B, C, H, W]` at noise levels `sigma [B]`."""
        embeddings, pooled = self.embed(token_ids, t5_tokens)
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            encoder_hidden_states=embeddings,
            pooled_projections=pooled,
            timestep=1000 * sigma,
            return_dict=False,
        )[0]
        return velocity


def tokenize(tokenizer: CLIPTokenizer, prompts: Sequence[str]) -> Tensor:
    """Token ids `[B, 12]`, as the pipeline makes them."""
    ids: Tensor = tokenizer(
        list(prompts), padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


def build_pipeline(denoiser: Denoiser, vae: AutoencoderKL, tokenizer: CLIPTokenizer) -> StableDiffusion3Pipeline:
    """An ordinary pipeline, without T5."""
    return StableDiffusion3Pipeline(
        transformer=denoiser.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=denoiser.text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=denoiser.text_encoder_2,
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )

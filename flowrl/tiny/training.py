"""Pre-training of `tiny_sd3`: the autoencoder, then flow matching on plain signs, then on the whole mixture.

Plain signs come first because nothing is ever spelled when the mixture is learned from scratch; once words are legible,
widening the styles is quick. The saved weights lie on the straight line between the two: a fine knob for how many signs
are legible. A finished stage is kept in `stages/`, and the same command goes on from there.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTokenizer

from flowrl.tiny.build import (
    DEFAULT_T5_TOKENS,
    Denoiser,
    Size,
    build_pipeline,
    build_tokenizer,
    build_vae,
    tokenize,
)
from flowrl.tiny.render import Looks, render_parallel
from flowrl.tiny.words import pretraining_words, prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VaeStage:
    """The autoencoder. `kl_weight` sets how much detail a latent may carry: here pixel noise of about 3 grey levels."""

    steps: int = 3000
    batch_size: int = 512
    learning_rate: float = 2e-3
    kl_weight: float = 3e-4


@dataclass(frozen=True, kw_only=True)
class FlowStage:
    """Flow matching on one population of signs. The rate warms up, then falls linearly to `final_rate`."""

    name: str
    looks: Looks
    num_signs: int
    steps: int
    learning_rate: float
    final_rate: float
    batch_size: int = 768
    warmup: int = 100
    ema: float = 0.998
    prompt_dropout: float = 0.1
    t5_every: int = 8
    """Every so many steps a quarter batch sees the zero T5 tokens that the pipeline appends by default."""
    checkpoint_every: int = 2000


EASY = FlowStage(
    name="easy", looks=Looks(plain_share=1.0), num_signs=200_000, steps=6000, learning_rate=1.2e-3, final_rate=4e-4
)
WIDE = FlowStage(
    name="wide", looks=Looks(plain_share=0.25), num_signs=200_000, steps=1650, learning_rate=8e-4, final_rate=4e-5
)


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Everything that decides the weights, the device apart."""

    seed: int = 0
    size: Size = field(default_factory=Size)
    vae: VaeStage = field(default_factory=VaeStage)
    easy: FlowStage = EASY
    wide: FlowStage = WIDE
    easy_weight: float = 0.18
    """Weight of the easy stage's parameters in the saved average; the wide stage's have the rest."""


@dataclass(frozen=True)
class Signs:
    """A rendered population: pixels `[N, 3, 32, 80]` uint8 and token ids `[N, 12]`."""

    pixels: Tensor
    token_ids: Tensor


def pretrain(settings: Pretraining, output: Path, device: torch.device, workers: int) -> None:
    """Train every stage that `output/stages` does not hold yet and save the pipeline folder."""
    stages = output / "stages"
    stages.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()

    @cache
    def signs(stage: FlowStage) -> Signs:
        return render_signs(stage, tokenizer, settings.seed, workers)

    torch.manual_seed(settings.seed)
    vae = build_vae(settings.size).to(device)
    denoiser = Denoiser(settings.size, tokenizer).to(device)
    with stage_file(stages / "vae.safetensors", vae) as todo:
        if todo:
            train_vae(vae, [signs(settings.easy).pixels, signs(settings.wide).pixels], settings.vae)
    set_latent_scale(vae, signs(replace(settings.easy, num_signs=4096)).pixels)

    empty = tokenize(tokenizer, [""]).to(device)
    for index, stage in enumerate((settings.easy, settings.wide), start=1):
        with stage_file(stages / f"{stage.name}.safetensors", denoiser) as todo:
            if todo:
                torch.manual_seed(settings.seed + index)
                latents = encode(vae, signs(stage).pixels)
                train_flow(denoiser, latents, signs(stage).token_ids.to(device), empty, stage, stages)
    easy = load_file(stages / f"{settings.easy.name}.safetensors", device=str(device))
    with torch.no_grad():
        for name, tensor in denoiser.state_dict().items():
            tensor.lerp_(easy[name], settings.easy_weight)
    # The text encoders stay float32 on disk: transformers loads what it finds, diffusers makes everything else float32.
    denoiser.transformer.half()
    build_pipeline(denoiser.eval(), vae.half().eval(), tokenizer).save_pretrained(output)


@contextmanager
def stage_file(path: Path, module: nn.Module) -> Iterator[bool]:
    """Load `module` from `path` and yield False; if there is no such file, yield True and save it afterwards."""
    todo = not path.exists()
    if not todo:
        logger.info("%s is there already", path)
        module.load_state_dict(load_file(path))
    yield todo
    if todo:
        save(module, path)


def save(module: nn.Module, path: Path) -> None:
    """Write the state dict whole or not at all."""
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, partial)
    os.replace(partial, path)


def render_signs(stage: FlowStage, tokenizer: CLIPTokenizer, seed: int, workers: int) -> Signs:
    """The population of one stage."""
    started = time.monotonic()
    words = pretraining_words(stage.num_signs, seed)
    pixels = torch.from_numpy(render_parallel(words, stage.looks, seed, workers))
    token_ids = tokenize(tokenizer, [prompt(word) for word in words])
    logger.info("%s: %d signs rendered in %.0f s", stage.name, len(words), time.monotonic() - started)
    return Signs(pixels.permute(0, 3, 1, 2).contiguous(), token_ids)


def normalise(pixels: Tensor) -> Tensor:
    """Bytes to [-1, 1]."""
    return pixels.float() / 127.5 - 1


def train_vae(vae: AutoencoderKL, populations: Sequence[Tensor], stage: VaeStage) -> None:
    """Evidence lower bound with a fixed pixel variance, half of each batch from each population."""
    device = vae.device
    pixels = [population.to(device) for population in populations]
    optimizer = torch.optim.AdamW(vae.parameters(), lr=stage.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, stage.learning_rate, total_steps=stage.steps, pct_start=0.1
    )
    share = stage.batch_size // len(pixels)
    for step in range(1, stage.steps + 1):
        batch = normalise(
            torch.cat([population[torch.randint(len(population), (share,), device=device)] for population in pixels])
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            posterior = vae.encode(batch).latent_dist
            reconstruction = vae.decode(posterior.sample()).sample
        mse = F.mse_loss(reconstruction.float(), batch)
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        (mse + stage.kl_weight * kl).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 500 == 0 or step == stage.steps:
            logger.info("vae step %d mse %.5f kl %.3f", step, mse.item(), kl.item())


def set_latent_scale(vae: AutoencoderKL, pixels: Tensor) -> None:
    """Choose shift and scale so that the latents of these pictures have mean 0 and variance 1."""
    vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    latents = encode(vae, pixels)
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(scaling_factor=scale, shift_factor=shift)
    logger.info("vae shift %.4f scale %.4f", shift, scale)


@torch.no_grad()
def encode(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """Normalised latents `[N, 8, 8, 20]` on the autoencoder's device."""
    modes = [vae.encode(normalise(chunk.to(vae.device))).latent_dist.mode() for chunk in pixels.split(4096)]
    latents: Tensor = (torch.cat(modes) - vae.config.shift_factor) * vae.config.scaling_factor
    return latents


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Pixels `[N, 3, 32, 80]` uint8 of normalised latents."""
    images: Tensor = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    return ((images.clamp(-1, 1) + 1) * 127.5).round().byte()


def train_flow(
    denoiser: Denoiser, latents: Tensor, token_ids: Tensor, empty: Tensor, stage: FlowStage, folder: Path
) -> None:
    """Minimise |v - (noise - x0)|^2 at logit-normal noise levels; `denoiser` ends with the averaged weights."""
    device, on_cuda = latents.device, latents.is_cuda
    average = copy.deepcopy(denoiser).requires_grad_(False)
    weights: list[Tensor] = list(denoiser.parameters())
    averages: list[Tensor] = list(average.parameters())
    rate = torch.tensor(stage.learning_rate, device=device)
    optimizer = torch.optim.AdamW(
        weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True, capturable=on_cuda
    )

    def step(batch_size: int, t5_tokens: int) -> Tensor:
        rows = torch.randint(len(latents), (batch_size,), device=device)
        dropped = torch.rand(batch_size, 1, device=device) < stage.prompt_dropout
        tokens = torch.where(dropped, empty, token_ids[rows])
        with torch.autocast(device.type, torch.bfloat16, enabled=on_cuda, cache_enabled=False):
            loss = flow_matching_loss(denoiser, latents[rows], tokens, t5_tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - stage.ema)
        return loss.detach()

    rate.fill_(stage.learning_rate * rate_factor(stage, 0))
    short = captured(partial(step, stage.batch_size, 0), device)
    long = captured(partial(step, stage.batch_size // 4, DEFAULT_T5_TOKENS), device)
    started = time.monotonic()
    for index in range(1, stage.steps + 1):
        rate.fill_(stage.learning_rate * rate_factor(stage, index))
        loss = (long if index % stage.t5_every == 0 else short)()
        if index % 500 == 0 or index == stage.steps:
            speed = index / (time.monotonic() - started)
            logger.info("%s step %d loss %.4f (%.0f steps/s)", stage.name, index, loss.item(), speed)
        if index % stage.checkpoint_every == 0 and index < stage.steps:
            save(average, folder / f"{stage.name}_{index:05d}.safetensors")
    denoiser.load_state_dict(average.state_dict())


def captured(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """The step as a CUDA graph, after three ordinary runs; else a model this small waits for its kernel launches."""
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def flow_matching_loss(denoiser: Denoiser, clean: Tensor, token_ids: Tensor, t5_tokens: int) -> Tensor:
    """One Monte Carlo draw of the flow-matching objective."""
    noise = torch.randn_like(clean)
    sigma = torch.sigmoid(torch.randn(len(clean), device=clean.device))
    weight = sigma[:, None, None, None]
    velocity = denoiser((1 - weight) * clean + weight * noise, sigma, token_ids, t5_tokens)
    return F.mse_loss(velocity.float(), noise - clean)


def rate_factor(stage: FlowStage, step: int) -> float:
    """The learning rate of a step, relative to the stage's highest."""
    if step < stage.warmup:
        return (step + 1) / stage.warmup
    progress = (step - stage.warmup) / max(1, stage.steps - stage.warmup)
    return 1 - progress * (1 - stage.final_rate / stage.learning_rate)

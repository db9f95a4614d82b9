"""PickScore: which picture people pick for a prompt (arXiv 2305.01569)."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.rewards.clip_score import CLIPScore


@dataclass(kw_only=True, eq=False)
class PickScore(CLIPScore):
    """exp(logit_scale) cos(picture, prompt) / scale of a CLIP ViT-H/14 trained on picks; about 0.7 to 0.95.

    Args:
        scale: 26 as in Flow-GRPO, which brings scores to about 1; 1 gives PickScore's own (about 18 to 25).
    """

    path: str = "yuvalkirstain/PickScore_v1"
    processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    scale: float = 26.0
    resample: str = "bicubic"

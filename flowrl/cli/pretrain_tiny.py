"""Make `tiny_sd3` from nothing: render signs, train, save a diffusers folder.

    python -m flowrl.cli.pretrain_tiny --output runs/tiny_sd3 --device cuda

Needs the `[pretrain]` extra (fonts come with matplotlib). Minutes on one large GPU; lower the step counts to try it on
a CPU.
"""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import replace
from pathlib import Path

import torch

from flowrl.tiny.training import Pretraining, pretrain


def parser() -> argparse.ArgumentParser:
    """The command line; defaults are those of the shipped weights."""
    defaults = Pretraining()
    result = argparse.ArgumentParser(prog="python -m flowrl.cli.pretrain_tiny")
    add = result.add_argument
    add("--output", type=Path, required=True, help="pipeline folder; finished stages are kept in OUTPUT/stages")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes that render")
    add("--seed", type=int, default=defaults.seed)
    add("--batch-size", type=int, default=defaults.easy.batch_size)
    add("--vae-steps", type=int, default=defaults.vae.steps)
    for stage in (defaults.easy, defaults.wide):
        add(f"--{stage.name}-steps", type=int, default=stage.steps)
        add(f"--{stage.name}-signs", type=int, default=stage.num_signs, help="pictures rendered for this stage")
    add("--plain-share", type=float, default=defaults.wide.looks.plain_share, help="plain signs in the wide stage")
    add("--easy-weight", type=float, default=defaults.easy_weight, help="of the easy stage in the saved average")
    return result


def settings(arguments: argparse.Namespace) -> Pretraining:
    """The defaults with the command line's values."""
    defaults = Pretraining()
    vae = replace(defaults.vae, steps=arguments.vae_steps)
    easy = replace(defaults.easy, steps=arguments.easy_steps, num_signs=arguments.easy_signs)
    wide = replace(
        defaults.wide,
        steps=arguments.wide_steps,
        num_signs=arguments.wide_signs,
        looks=replace(defaults.wide.looks, plain_share=arguments.plain_share),
    )
    return Pretraining(
        seed=arguments.seed,
        vae=replace(vae, batch_size=min(vae.batch_size, arguments.batch_size)),
        easy=replace(easy, batch_size=arguments.batch_size),
        wide=replace(wide, batch_size=arguments.batch_size),
        easy_weight=arguments.easy_weight,
    )


def main() -> None:
    """Run."""
    arguments = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_float32_matmul_precision("high")
    pretrain(settings(arguments), arguments.output, torch.device(arguments.device), arguments.workers)


if __name__ == "__main__":
    main()

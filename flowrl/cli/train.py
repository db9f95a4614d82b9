"""`python -m flowrl`: from a configuration to a finished run folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from flowrl.cli.compose import load_config, load_sweep
from flowrl.cli.help import help_text
from flowrl.config import ConfigError, Problem


def train(cfg: DictConfig) -> Path:
    """Check `cfg`, train to the end and return the run folder. A run that is already finished is left as it is.

    Raises:
        ConfigError: before anything is written, with everything that is wrong.
    """
    from flowrl.cli import record
    from flowrl.preflight import preflight

    run = preflight(cfg)
    if record.is_finished(run, cfg):
        print(f"{run.run_dir} holds this run, finished. Start another with name=..., or remove the folder.")
        return run.run_dir
    record.begin(run, cfg)
    run.trainer.fit(run)
    record.finish(run)
    return run.run_dir


def main() -> None:
    """The console script: exits with 0, with 2 for a configuration error, with 130 when interrupted."""
    # Reward workers share the cores with torch, and OpenMP threads that spin while they wait for each other make both
    # many times slower. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(command(sys.argv[1:]))


def command(arguments: Sequence[str]) -> int:
    """Carry out a command line and return its exit status."""
    parsed = _parser().parse_intermixed_args(arguments)
    try:
        if parsed.help:
            print(help_text(parsed.config_dir))
        elif parsed.cfg:
            print(OmegaConf.to_yaml(load_config(parsed.overrides, parsed.config_dir), resolve=True), end="")
        elif parsed.multirun:
            _sweep(load_sweep(parsed.overrides, parsed.config_dir))
        else:
            _run(load_config(parsed.overrides, parsed.config_dir))
    except ConfigError as error:
        print(_complaint(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nflowrl: interrupted; what is written stays in the run folder.", file=sys.stderr)
        return 130
    return 0


def _sweep(points: list[DictConfig]) -> None:
    """One run after the other in this process, once every one of them has passed its checks."""
    from flowrl.preflight import preflight

    problems: list[Problem] = []
    for cfg in points:
        try:
            preflight(cfg)
        except ConfigError as error:
            problems.extend(Problem(f"{cfg.name}: {p.path}", p.message, p.hint) for p in error.problems)
    if problems:
        raise ConfigError(*problems)
    for number, cfg in enumerate(points, start=1):
        print(f"[{number}/{len(points)}] {cfg.name}")
        _run(cfg)


def _run(cfg: DictConfig) -> None:
    """Train, and say what it came to and where it lies."""
    from rich.console import Console

    from flowrl.tracking.console import print_summary
    from flowrl.tracking.summary import FILENAME, Summary
    from flowrl.types import LoadError

    try:
        folder = train(cfg)
    except LoadError as error:
        raise ConfigError(Problem("model", str(error))) from error
    if (folder / FILENAME).exists():
        print_summary(Console(), Summary.read(folder), folder)


def _complaint(error: ConfigError) -> str:
    count = len(error.problems)
    head = f"flowrl: {count} problem{'s' if count > 1 else ''} in the configuration; nothing was started."
    return "\n".join([head, *(f"  {problem}".replace("\n", "\n    ") for problem in error.problems)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flowrl", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("-h", "--help", action="store_true")
    return parser

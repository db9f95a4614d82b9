"""`python -m flowrl`: from a configuration to a finished run folder.

Errors that are a user's to mend become one sentence here and nowhere else; any other keeps its traceback.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from flowrl.cli.compose import load_config, load_sweep
from flowrl.cli.help import help_text
from flowrl.config import ConfigError, Problem
from flowrl.rewards.process import WORKER


class Failure(Exception):
    """The end of a command that went wrong: what to say, and the exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def train(cfg: DictConfig) -> Path:
    """Check `cfg`, train to the end and return the run folder. A run that is already finished is left as it is.

    Reward workers import the main script anew, so a script calls this under `if __name__ == "__main__":`.

    Raises:
        ConfigError: with everything that is wrong, before anything is written; or later, if only the loaded model can
            tell. The latter, and every other error of the run, has a note about what the run folder holds.
        LoadError, RewardError, DivergedError: the model or a reward failed, or the weights are no longer finite.
    """
    if multiprocessing.current_process().name == WORKER:
        raise RuntimeError(
            'the main script starts a run when it is imported: put that under `if __name__ == "__main__":`'
        )
    _settle_threads()
    from flowrl.cli import record
    from flowrl.preflight import preflight

    run = preflight(cfg)
    if record.is_finished(run, cfg):
        print(f"{run.run_dir} holds this run, finished. Start another with name=..., or remove the folder.")
        return run.run_dir
    record.begin(run, cfg)
    try:
        run.trainer.fit(run)
    except BaseException as error:
        error.add_note(record.remains(run))
        raise
    record.finish(run)
    return run.run_dir


def _settle_threads() -> None:
    """Reward workers share the cores with torch; threads that spin while they wait make both many times slower.

    OpenMP reads this once, when torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main() -> None:
    """The console script. Exits with 0; 1: the run failed; 2: its configuration is at fault; 130: interrupted."""
    sys.exit(command(sys.argv[1:]))


def command(arguments: Sequence[str]) -> int:
    """Carry out a command line and return its exit status."""
    _settle_threads()
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
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.status
    except KeyboardInterrupt as interrupt:
        print("\n" + _with_notes("flowrl: interrupted.", interrupt), file=sys.stderr)
        return 130
    return 0


def _sweep(points: list[DictConfig]) -> None:
    """One run after the other in this process, once every one of them has passed its checks."""
    from flowrl.cli import record
    from flowrl.preflight import preflight

    problems: list[Problem] = []
    for cfg in points:
        try:
            record.is_finished(preflight(cfg), cfg)
        except ConfigError as error:
            problems.extend(Problem(f"{cfg.name}: {p.path}", p.message, p.hint) for p in error.problems)
    if problems:
        raise ConfigError(*problems)
    for number, cfg in enumerate(points, start=1):
        print(f"[{number}/{len(points)}] {cfg.name}")
        _run(cfg)


def _run(cfg: DictConfig) -> None:
    """Train, and say what it came to and where it lies. Raises Failure if the model cannot be read or the run fails."""
    from rich.console import Console

    from flowrl.rewards.scoring import RewardError
    from flowrl.tracking.console import print_summary
    from flowrl.tracking.summary import FILENAME, Summary
    from flowrl.trainers.actor import DivergedError
    from flowrl.types import LoadError

    try:
        folder = train(cfg)
    except LoadError as error:
        raise Failure(_with_notes(f"flowrl: {error}", error), 2) from error
    except (RewardError, DivergedError) as error:
        raise Failure(_with_notes(f"flowrl: {error}", error), 1) from error
    if (folder / FILENAME).exists():
        print_summary(Console(), Summary.read(folder), folder)


def _complaint(error: ConfigError) -> str:
    """Without a note it was found before the run began."""
    count = len(error.problems)
    head = f"flowrl: {count} problem{'s' if count > 1 else ''} in the configuration"
    head += "." if _notes(error) else "; nothing was started."
    problems = (f"  {problem}".replace("\n", "\n    ") for problem in error.problems)
    return _with_notes("\n".join([head, *problems]), error)


def _with_notes(message: str, error: BaseException) -> str:
    """Notes say what the run folder holds, and what happened inside a reward worker."""
    return "\n".join([message, *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    return list(vars(error).get("__notes__", ()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flowrl", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("-h", "--help", action="store_true")
    return parser

"""`python -m flowrl`: from a configuration to a finished run folder.

Errors that are a user's to mend become one sentence here and nowhere else; any other keeps its traceback.
"""

from __future__ import annotations

import argparse
import errno
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from omegaconf import DictConfig, OmegaConf

from flowrl.cli.compose import load_config, load_sweep
from flowrl.cli.help import help_text
from flowrl.config import ConfigError, Problem
from flowrl.distributed.launch.process import WORKER
from flowrl.rewards.process import WORKER as REWARD_WORKER


class Failure(Exception):
    """The end of a command that went wrong: what to say, and the exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""


class Stopped(KeyboardInterrupt):
    """The first Ctrl-C: the run has been saved, and stops before its end."""


def train(cfg: DictConfig) -> Path:
    """Check `cfg`, train to the end and return the run folder.

    A run that was broken off goes on from its newest checkpoint (`resume`); one that is finished is left as it is.

    Worker processes import the main script anew, so a script calls this under `if __name__ == "__main__":`.

    Raises:
        ConfigError: with everything that is wrong, before anything is written; or later, if only the loaded model can
            tell. The latter, and every other error of the run, has a note about what the run folder holds.
        LoadError, RewardError, DivergedError: the model or a reward failed, or training has come to nothing.
        KeyboardInterrupt: the run was asked to stop, and was saved unless it was asked twice.
    """
    if multiprocessing.current_process().name.startswith((REWARD_WORKER, WORKER)):
        raise RuntimeError(
            'the main script starts a run when it is imported: put that under `if __name__ == "__main__":`'
        )
    _settle_threads()
    from flowrl.cli import record, resume
    from flowrl.cli.contract import contract
    from flowrl.preflight import preflight
    from flowrl.tracking.console import Terminal

    run = preflight(cfg)
    if resume.is_finished(run, cfg):
        notice = f"{run.run_dir} holds this run, finished. Start another with name=..., or remove the folder."
        if (model := record.model_path(run)) != cfg.model.get("path"):
            notice += f" Its model was that of {model}."
        Terminal().out(notice, highlight=False)
        return run.run_dir
    with record.exclusive(run):
        start = resume.starting_point(run, cfg)
        if start is not None:
            Terminal().out(f"{start.path}: the run goes on after step {start.step}.", highlight=False)
        record.begin(run, cfg, contract(run, cfg), start)
        pretrained = cfg.model.get("init", "pretrained") == "pretrained"
        model = cfg.model.get("path") if pretrained else f"a random {type(run.model).__name__}"
        Terminal().out(f"{run.run_dir}: loading {model or type(run.model).__name__}.", highlight=False)
        try:
            stopped_by = run.trainer.fit(run, start)
            if stopped_by is not None:
                raise Stopped if stopped_by == signal.SIGINT else Terminated
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
    """The console script.

    Exits with 0, also after a first Ctrl-C; 1: a run failed; 2: its configuration is at fault; 130: it was stopped at
    once; 143: it was terminated, in order or at once.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status = command(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough; nothing is left to be said, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


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
    except Stopped as stop:
        print(_with_notes("flowrl: stopped.", stop), file=sys.stderr)
    except Terminated as end:
        print(_with_notes("flowrl: terminated.", end), file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt as interrupt:
        print("\n" + _with_notes("flowrl: interrupted.", interrupt), file=sys.stderr)
        return 130
    return 0


def _sweep(points: list[DictConfig]) -> None:
    """One run after the other in this process, once every one of them has passed its checks.

    A run that fails in a way that we know of does not end the sweep; Failure tells at its end which did.
    """
    from flowrl.tracking.console import Terminal

    _check_points(points)
    failed = []
    for number, cfg in enumerate(points, start=1):
        Terminal().out(f"[{number}/{len(points)}] {cfg.name}", highlight=False)
        try:
            _run(cfg)
        except ConfigError as error:
            print(_complaint(error), file=sys.stderr)
        except Failure as failure:
            print(failure, file=sys.stderr)
        else:
            continue
        failed.append(str(cfg.name))
    if failed:
        raise Failure("\n  ".join([f"flowrl: {len(failed)} of {len(points)} runs failed:", *failed]), 1)


def _check_points(points: list[DictConfig]) -> None:
    """Raise ConfigError with the problems of all points."""
    from flowrl.cli import resume
    from flowrl.preflight import preflight

    problems: list[Problem] = []
    folders: dict[Path, DictConfig] = {}
    for cfg in points:
        try:
            run = preflight(cfg)
            with _folder_errors(cfg):
                resume.is_finished(run, cfg)
        except ConfigError as error:
            problems.extend(Problem(f"{cfg.name}: {p.path}", p.message, p.hint) for p in error.problems)
        else:
            if folders.setdefault(run.run_dir, cfg) != cfg:
                hint = "Leave name out: the swept values make one for each."
                problems.append(Problem("name", f"several runs of the sweep would share {run.run_dir}.", hint))
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


def _run(cfg: DictConfig) -> None:
    """Train, and say what it came to and where it lies. Raises Failure if the model cannot be read or the run fails."""
    from flowrl.buffer.accounting import BufferFull
    from flowrl.distributed.checkpoint.manifest import CheckpointError
    from flowrl.distributed.launch.failures import PlacementError, WorkerDied
    from flowrl.distributed.offload import OffloadError
    from flowrl.distributed.weight_sync.errors import PublishError
    from flowrl.rewards.scoring import RewardError
    from flowrl.rollout.checks import EngineError
    from flowrl.tracking.console import Terminal, print_summary
    from flowrl.tracking.summary import FILENAME, Summary
    from flowrl.types import DivergedError, LoadError

    failures = (
        RewardError, DivergedError, WorkerDied, PlacementError, PublishError, OffloadError, EngineError, BufferFull,
        CheckpointError,
    )  # fmt: skip
    try:
        with _folder_errors(cfg):
            folder = train(cfg)
    except LoadError as error:
        raise Failure(_with_notes(f"flowrl: {error}", error), 2) from error
    except failures as error:
        raise Failure(_with_notes(f"flowrl: {error}", error), 1) from error
    if (folder / FILENAME).exists():
        print_summary(Terminal(), Summary.read(folder), folder)


@contextmanager
def _folder_errors(cfg: DictConfig) -> Iterator[None]:
    """Raise Failure for a run folder that cannot be used: the disk is full or read-only, a file has its name."""
    try:
        yield
    except OSError as error:
        folder = Path(cfg.runs, cfg.name)
        if not _is_about(folder.absolute(), error):
            raise
        message = f"flowrl: the run folder {folder} cannot be used: {error.strerror}."
        raise Failure(_with_notes(message, error), 1) from error


def _is_about(folder: Path, error: OSError) -> bool:
    if not isinstance(error.filename, str):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)  # of writing into an open file: no name is known
    path = Path(error.filename).absolute()
    return path.is_relative_to(folder) or folder.is_relative_to(path)


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

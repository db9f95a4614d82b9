"""`python -m data_process inspect FILE`: is this a prompt file that flowrl can train on?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from flowrl.data.prompts import TARGETS, PromptFileError, fingerprint, load_prompts
from flowrl.prompts import Prompt


def main() -> None:
    """The command: exits with 1 if the file has faults."""
    sys.exit(command(sys.argv[1:]))


def command(arguments: Sequence[str]) -> int:
    """Carry out a command line and return its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        prompts = load_prompts(parsed.file, parsed.target)
    except PromptFileError as error:
        print("\n".join(error.report()))
        return 1
    print(f"{parsed.file}: {_summary(prompts)}\nsha256 {fingerprint(parsed.file)}")
    return 0


def _summary(prompts: Sequence[Prompt]) -> str:
    """How many prompts, how long, how many of them twice, how many with a target."""
    lengths = [len(prompt.text) for prompt in prompts]
    repeated = len(prompts) - len({prompt.id for prompt in prompts})
    targets = sum(prompt.target is not None for prompt in prompts)
    return (
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} characters, "
        f"{repeated} repeated, {targets} with a target"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data_process", description="Tools for prompt files.")
    commands = parser.add_subparsers(required=True)
    inspect = commands.add_parser("inspect", help="report every fault of a prompt file by line, or what it holds")
    inspect.add_argument("file", help=".txt (one prompt a line) or .jsonl; an ordinary path or pkg://PACKAGE/path")
    inspect.add_argument("--target", choices=TARGETS, default="none", help="what data.target will be (default: none)")
    return parser


if __name__ == "__main__":
    main()

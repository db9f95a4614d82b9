"""The command line of a short real run."""

from __future__ import annotations

from pathlib import Path

STEPS = 6
WORDS = ("FLOW", "OPEN", "SALE", "MILK", "TAXI")


def command(folder: Path, here: Path, name: str, *overrides: str) -> list[str]:
    """Six steps of two prompts, deterministic, in `here`/runs/`name`; later overrides win."""
    prompts = here / "prompts.txt"
    if not prompts.exists():
        prompts.write_text("".join(f'A sign that says "{word}"\n' for word in WORDS))
    return [
        *("debug=short", "device=cpu", "deterministic=true", f"model.path={folder}", "model.max_sequence_length=0"),
        *(f"data.train={prompts}", f"trainer.eval.sets.heldout={prompts}", "sampler.num_steps=4", "logger=jsonl"),
        *("reward=jpeg_incompressibility", "reward.num_workers=0", f"trainer.total_steps={STEPS}"),
        *("trainer.eval.every=3", "trainer.eval.use_ema=true", "checkpoint.every=2", "actor.optimizer.lr=1e-3"),
        *(f"runs={here / 'runs'}", f"name={name}", *overrides),
    ]

"""What may change when a run goes on, and what may not."""

from __future__ import annotations

import pytest

from flowrl.build import assemble
from flowrl.cli.compose import load_config
from flowrl.cli.contract import contract, differences


def changed(base: list[str], *overrides: str) -> list[str]:
    """The settings that differ."""
    (before, now) = (load_config([*base, *more]) for more in ((), overrides))
    table = differences(*(contract(assemble(cfg)[0], cfg) for cfg in (before, now)))
    return [line.split()[0] for line in table.splitlines()[1:]]


SCORER = "reward.components.http.scorer"


@pytest.mark.parametrize(
    ("override", "held"),
    [
        (f"{SCORER}.url=http://elsewhere:8000", False),
        (f"{SCORER}.timeout_s=77", False),
        (f"{SCORER}.busy_timeout_s=777", False),
        (f"{SCORER}.retries=8", False),
        (f"{SCORER}.concurrency=3", False),
        ("reward.timeout_s=77", False),
        ("reward.components.http.weight=2.0", True),
        ("reward.components.http.required=false", True),
    ],
)
def test_a_server_may_move_and_be_waited_for_longer(override: str, held: bool) -> None:
    assert changed(["reward=http"], override) == ([override.partition("=")[0]] if held else [])


def test_the_size_of_a_model_counts_where_it_is_made_up() -> None:
    model = ["model=wan", "model.path=./a"]
    assert changed(model, "model.size=ti2v_5b") == []
    assert changed([*model, "model.init=random"], "model.size=ti2v_5b") == ["model.size"]

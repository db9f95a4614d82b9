"""`build`: nodes with a `_target_` become checked objects, and every fault is said with its path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf

from flowrl.build import assemble, build, build_run
from flowrl.config import Config, ConfigError, Problem

HERE = __name__


@dataclass
class Section:
    sets: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Any] | None = None
    every: int = 10


@dataclass(frozen=True)
class Part:
    size: int
    rate: float = 0.5
    steps: Sequence[int] = ()
    name: str | None = None
    inner: Any = None
    section: Section = field(default_factory=Section)
    other: Section | None = None
    function: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}.")


@dataclass(frozen=True)
class Unfinished(ABC):
    @abstractmethod
    def work(self) -> None: ...


class Plain:
    pass


def node(name: str = "Part", **values: Any) -> dict[str, Any]:
    return {"_target_": f"{HERE}.{name}", **values}


def problems(tree: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(OmegaConf.create(tree), "x")
    return [str(problem) for problem in caught.value.problems]


def test_values_are_converted_and_children_built_first() -> None:
    part = build(node(size="3", rate=1, steps=[1, 2], inner=node(size=1), section={"every": 5}), "x", Part)
    assert part == Part(3, 1.0, [1, 2], inner=Part(1), section=Section(every=5))
    assert isinstance(part.rate, float)


def test_objects_inside_a_section_keep_the_section_checked() -> None:
    part = build(node(size=1, section={"parts": {"a": node(size=2)}}), "x", Part)
    assert part.section == Section(parts={"a": Part(2)})
    found = problems(node(size=1, section={"parts": {"a": node(size=2)}, "evry": 1}))
    assert found == ["x.section.evry: is not a field of Section. Fields: sets, parts, every."]


def test_a_section_may_be_optional() -> None:
    assert build(node(size=1, other={"every": "7"}), "x", Part).other == Section(every=7)
    assert build(node(size=1, other=None), "x", Part).other is None
    assert problems(node(size=1, other={"evry": 1, "every": "no"})) == [
        "x.other.evry: is not a field of Section. Fields: sets, parts, every.",
        "x.other.every: Value 'no' of type 'str' could not be converted to Integer.",
    ]
    assert problems(node(size=1, other=3))[0].startswith("x.other: ")


def test_lists_and_dicts_without_target_stay_what_they_are() -> None:
    assert build({"a": [node(size=1), 2], "b": {"c": None}}, "x") == {"a": [Part(1), 2], "b": {"c": None}}


def test_annotations_that_omegaconf_does_not_know_pass() -> None:
    assert build(node(size=1, function=None), "x") == Part(1)


def test_every_fault_comes_with_its_path() -> None:
    assert problems(node(siz=1, rate="abc", steps=["b"], inner=node(size=0), section={"every": "no"})) == [
        "x.inner: size must be at least 1, got 0.",
        "x.siz: is not a field of Part. Fields: size, rate, steps, name, inner, section, other, function.",
        "x.size: is required by Part.",
        "x.rate: Value 'abc' of type 'str' could not be converted to Float.",
        "x.steps: Value 'b' of type 'str' could not be converted to Integer.",
        "x.section.every: Value 'no' of type 'str' could not be converted to Integer.",
    ]


def test_a_fault_does_not_hide_the_checks_of_its_neighbours() -> None:
    tree = {"a": node(size="abc"), "b": node(size=-1), "c": [node(size="???"), node("Unknown")]}
    assert [line.split(":")[0] for line in problems(tree)] == ["x.a.size", "x.b", "x.c[0].size", "x.c[1]._target_"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no.such.module.Thing", "cannot import"),
        (f"{HERE}.NoSuchClass", "cannot import"),
        ("Part", "cannot import"),
        (f"{HERE}.Plain", "must be a concrete dataclass"),
        (f"{HERE}.node", "must be a concrete dataclass"),
        (f"{HERE}.Unfinished", "must be a concrete dataclass"),
    ],
)
def test_targets_that_cannot_be_built(target: str, message: str) -> None:
    (found,) = problems({"_target_": target})
    assert found.startswith("x._target_: ") and message in found


def test_the_expected_class_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"x: must be a Section, got Part\. Set x\._target_ to one\."):
        build(node(size=1), "x", Section)


def test_interpolations_that_lead_nowhere() -> None:
    (found,) = problems(node(size="${nothing}"))
    assert found.startswith("x.size: ") or found.startswith("size: ")


def whole(**values: Any) -> Any:
    """A root with every component `Part(1)`."""
    part = node(size=1)
    components = {"model": part, "algorithm": part, "trainer": part, "buffer": part, "launcher": part}
    sampler = {"dynamics": part, "steps": part, "solver": part}
    data = {"train": "t.txt", "train_batch_size": 4, "num_samples_per_prompt": 2}
    return OmegaConf.merge(
        OmegaConf.structured(Config),
        components,
        {"sampler": sampler, "data": data, "rollout": {"engine": part}},
        values,
    )


def test_a_run_is_typed_sections_and_built_components() -> None:
    run = build_run(whole(reward={"components": {"a": node(size=2)}}))
    assert isinstance(run, Config)
    assert (run.model, run.sampler.steps, run.reward.components) == (Part(1), Part(1), {"a": Part(2)})
    assert (run.data.train_batch_size, run.actor.optimizer.betas) == (4, [0.9, 0.999])
    assert str(run.run_dir) == "runs/run"


def test_what_must_be_set_says_so() -> None:
    with pytest.raises(ConfigError) as caught:
        build_run(OmegaConf.structured(Config))
    assert Problem("data.train", "must be set.", "Set data.train=...") in caught.value.problems
    assert {"model", "algorithm", "trainer", "buffer", "launcher", "rollout.engine"} <= {
        problem.path for problem in caught.value.problems
    }


def test_keys_that_slipped_past_the_schema_are_refused() -> None:
    cfg = whole()
    OmegaConf.set_struct(cfg, False)
    cfg = OmegaConf.create(OmegaConf.to_container(cfg))
    cfg.foo, cfg.data.bar = 1, 2
    _, found = assemble(cfg)
    assert {problem.path for problem in found} == {"foo", "data.bar"}


def test_assemble_stands_in_with_the_schemas_default_or_none_and_keeps_the_rest() -> None:
    cfg = whole()
    for path in ("data.seed", "data.train", "actor.optimizer.betas"):
        OmegaConf.update(cfg, path, "???")
    run, found = assemble(cfg)
    assert {problem.path for problem in found} == {"data.seed", "data.train", "actor.optimizer.betas"}
    assert (run.data.seed, run.data.train, run.actor.optimizer.betas) == (0, None, [0.9, 0.999])
    run, found = assemble(whole(model=node(size=0), sampler={"num_steps": 7, "steps": node("Unknown")}))
    assert [problem.path for problem in found] == ["model", "sampler.steps._target_"]
    assert (run.model, run.sampler.steps, run.sampler.num_steps, run.algorithm) == (None, None, 7, Part(1))

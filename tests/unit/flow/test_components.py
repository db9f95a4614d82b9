"""What every component of `flow` must be: a cheap, frozen, picklable value whose fields a configuration can type."""

import dataclasses
import importlib
import inspect
import pickle
import pkgutil

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import flowrl.flow
from flowrl.flow.advantage import Advantages
from flowrl.flow.decay import Decay
from flowrl.flow.dynamics import Dynamics
from flowrl.flow.schedule import Schedule
from flowrl.flow.solvers import Solver
from flowrl.flow.steps import Fixed, RandomChoice, Steps

REQUIRED = {RandomChoice: {"num_steps": 2, "pool": [5, 1, 3]}, Fixed: {"steps": [4, 2]}}


def components() -> list[type]:
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(flowrl.flow.__path__, "flowrl.flow.")]
    classes = {c for module in modules for _, c in inspect.getmembers(module, inspect.isclass)}
    kinds = (Advantages, Decay, Dynamics, Schedule, Solver, Steps)
    return sorted((c for c in classes if issubclass(c, kinds) and not inspect.isabstract(c)), key=lambda c: c.__name__)


@pytest.mark.parametrize("component", components())
def test_a_component_is_built_from_a_typed_configuration(component):
    schema = OmegaConf.structured(component)
    OmegaConf.set_readonly(schema, False)
    built = OmegaConf.to_object(OmegaConf.merge(schema, REQUIRED.get(component, {})))
    assert built == component(**REQUIRED.get(component, {}))
    assert pickle.loads(pickle.dumps(built)) == built and hash(built) == hash(built)
    for field in dataclasses.fields(component):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(built, field.name, None)
        with pytest.raises(OmegaConfBaseException):
            OmegaConf.merge(schema, {field.name: {"a": "mapping"}})
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.merge(schema, {"misspelt": 1})


def test_all_kinds_were_found():
    names = {component.__name__ for component in components()}
    assert {"FlowSDE", "WanUniPC", "Progressive", "UniPC", "LinearRamp", "Advantages"} <= names

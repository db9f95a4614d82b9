"""One denoising step as a distribution, one dynamics a file. The shipped ones are here under their short names."""

from flowrl.flow.dynamics.base import Dynamics, Transition
from flowrl.flow.dynamics.cps import CPS
from flowrl.flow.dynamics.dance_sde import DanceSDE
from flowrl.flow.dynamics.ddim import DDIM
from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.flow.dynamics.ode import ODE
from flowrl.flow.dynamics.wan_linear import WanLinear

__all__ = ["CPS", "DDIM", "ODE", "DanceSDE", "Dynamics", "FlowSDE", "Transition", "WanLinear"]

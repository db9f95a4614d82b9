"""`python -m flowrl.cli.serve_reward`: one reward component as a server, for runs with `reward=http`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.cli.arguments import Tool, option
from flowrl.cli.serving import Listen, listen, parse_some
from flowrl.config import ConfigError, Problem

if TYPE_CHECKING:
    from flowrl.rewards.combine import Component

EXAMPLES = """\
What is scored with, and all of its keys, are those of `python -m flowrl`:

  python -m flowrl.cli.serve_reward reward=ocr
  python -m flowrl.cli.serve_reward reward=ocr reward.components.ocr.scorer.substring=false port=8001"""


@dataclass
class ServeReward(Listen):
    """The arguments, beside those of the reward."""

    max_samples: int = option("pictures or videos in one request", 1024)
    config_dir: str | None = option("a folder of your own options, like reward/NAME.yaml", None)


@dataclass(frozen=True)
class Serving:
    """What to serve, and where."""

    component: Component
    listen: ServeReward


@dataclass(frozen=True)
class OfReward(Tool):
    """A tool that takes the arguments of a reward beside its own."""

    def settings(self, arguments: Sequence[str]) -> Serving:
        """The component, built. Raises ConfigError."""
        settings, others = parse_some(ServeReward, arguments, lambda key: key.split(".")[0] == "reward")
        if settings.max_samples < 1:
            raise ConfigError(Problem("max_samples", f"must be at least 1, got {settings.max_samples}."))
        return Serving(component(others, settings.config_dir), settings)

    def usage(self) -> str:
        """The page of `-h`."""
        return "\n".join([super().usage(), "", EXAMPLES])


def component(overrides: Sequence[str], config_dir: str | None) -> Component:
    """The one component that the overrides choose. Raises ConfigError."""
    from flowrl.build import build
    from flowrl.cli.compose import load_config
    from flowrl.rewards.combine import Component

    if not any(override.partition("=")[0] == "reward" for override in overrides):
        raise ConfigError(Problem("reward", "must be set: what to serve.", "Write reward=NAME."))
    nodes = load_config(["~recipe", *overrides], config_dir).reward.components
    if len(nodes) != 1:
        names = ", ".join(nodes) or "none"
        raise ConfigError(Problem("reward", f"must be one component, got {names}.", "Start a server for each."))
    ((name, node),) = nodes.items()
    found = build(node, f"reward.components.{name}", Component)
    if found.sees_latents:
        raise ConfigError(Problem("reward", f"{name} scores latents, and this server is sent pictures."))
    return found


def serve(settings: Serving) -> None:
    """Until the server is told to stop."""
    from flowrl.serving.pictures import Pictures

    listen(Pictures(settings.component, settings.listen.max_samples), settings.listen)


TOOL = OfReward("serve_reward", "Scores pictures and videos over HTTP, with any reward.", ServeReward, serve)

if __name__ == "__main__":
    TOOL.main()

"""`python -m flowrl.cli.serve_latent_reward`: a reward model of latents as a server, for `reward=latent_http`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from flowrl.cli.arguments import Tool, option
from flowrl.cli.serving import Listen, listen, parse_some

if TYPE_CHECKING:
    from flowrl.serving.latents import LatentModel

EXAMPLES = """\
The model is a dataclass with load() and score(latents, text, u, seeds), named by its dotpath, with its own keys:

  python -m flowrl.cli.serve_latent_reward model._target_=my_package.MyModel model.path=FOLDER"""


@dataclass
class ServeLatentReward(Listen):
    """The arguments, beside those of the model."""

    max_batch_size: int = option("samples that are scored together", 8)
    max_wait_ms: float = option("how long a request waits for others to join it", 10.0)


@dataclass(frozen=True)
class Serving:
    """What to serve, and where."""

    model: LatentModel
    listen: Listen


@dataclass(frozen=True)
class OfModel(Tool):
    """A tool that takes the keys of a model beside its own."""

    def settings(self, arguments: Sequence[str]) -> Serving:
        """The model, built. Raises ConfigError."""
        from flowrl.build import build
        from flowrl.serving.latents import LatentModel

        settings, others = parse_some(ServeLatentReward, arguments, lambda key: key.startswith("model."))
        node = OmegaConf.from_dotlist(["model={}", *others]).model
        return Serving(build(node, "model", LatentModel), settings)

    def usage(self) -> str:
        """The page of `-h`."""
        return "\n".join([super().usage(), "", EXAMPLES])


def serve(settings: Serving) -> None:
    """Until the server is told to stop."""
    from flowrl.serving.latents import Latents

    listen(Latents(settings.model), settings.listen)


TOOL = OfModel("serve_latent_reward", "Scores latents over HTTP.", ServeLatentReward, serve)

if __name__ == "__main__":
    TOOL.main()

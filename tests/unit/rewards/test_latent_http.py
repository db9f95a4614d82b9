"""The client of latent reward models, against servers that keep the protocol and servers that do not."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from flowrl.prompts import Prompt
from flowrl.rewards import transport
from flowrl.rewards.latent_http import LatentHTTP
from flowrl.rewards.latents import LatentScorer
from flowrl.rewards.scoring import FinalError
from flowrl.rewards.transport import UnreachableError
from tests.unit.rewards.servers import Asked, Reply, in_turn, reply, serving

LATENTS = np.random.default_rng(0).standard_normal((5, 4, 2, 3)).astype(np.float32)
TEXT = {
    "prompt_embeds": np.ones((1, 7, 5), np.float32),
    "pooled_prompt_embeds": np.ones((1, 3), np.float32),
    "something_else": np.ones((1, 1), np.float32),
}
PROMPTS = [Prompt("p0", "a cat")] * len(LATENTS)
READY = Reply()


def raw(*scores: Any, version: Any = "1") -> Reply:
    return reply({"protocol_version": version, "raw_scores": list(scores)})


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(transport, "sleep", slept.append)
    return slept


def loaded(url: str, **options: Any) -> LatentHTTP:
    scorer = LatentHTTP(url=url, **options)
    scorer.load()
    return scorer


def judge(asked: Asked) -> Reply:
    """The sum of the latents of the one sample."""
    return READY if asked.method == "GET" else raw(float(load(asked.body)["latents"].sum()))


def test_each_sample_is_scored_by_itself_and_rescaled() -> None:
    with serving(judge) as url:
        scores = loaded(url, scale=0.1, bias=1.0).score_latents(LATENTS, TEXT, PROMPTS)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, 0.1 * LATENTS.sum(axis=(1, 2, 3), dtype=np.float64) + 1, atol=1e-6)


def test_a_request_is_the_published_one() -> None:
    answer, asked = in_turn(READY, raw(1.0))
    with serving(answer) as url:
        loaded(url, u=0.25, seed=3).score_latents(LATENTS[:1], TEXT, PROMPTS[:1])
    health, request = asked
    assert (health.method, health.path) == ("GET", "/healthz")
    assert (request.method, request.path) == ("POST", "/v1/score")
    assert request.headers["content-type"] == "application/octet-stream"
    assert request.headers["x-drm-protocol-version"] == "1"
    tensors = load(request.body)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "latents": (1, 4, 2, 3),
        "prompt_embeds": (1, 7, 5),
        "pooled_prompt_embeds": (1, 3),
        "u": (1,),
        "seeds": (1,),
    }
    assert (tensors["u"], tensors["seeds"]) == (np.float32(0.25), 3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (raw(), r"sample 0: raw_scores must be a list of 1, got \[\]"),
        (raw(1.0, 2.0), "sample 0: raw_scores must be a list of 1"),
        (raw(float("nan")), r"sample 0: raw_scores\[0\] must be a finite number, got nan"),
        (raw("0.5"), "must be a finite number"),
        (raw(1.0, version="2"), '"protocol_version" must be "1", got \'2\''),
        (raw(1.0, version=1), "got 1"),
        (reply({"protocol_version": "1", "scores": [1.0]}), "raw_scores must be a list of 1, got None"),
        (Reply(200, b"<html>Welcome</html>"), "sample 0: .*which is not JSON"),
        (Reply(400, b'{"error": "wrong version"}'), "sample 0: .*answered 400.*wrong version"),
        (Reply(422, b'{"error": "too large"}'), "sample 0: .*answered 422.*too large"),
    ],
)
def test_answers_that_cannot_get_better_are_not_asked_for_again(bad: Reply, message: str) -> None:
    answer, asked = in_turn(READY, bad)
    with serving(answer) as url, pytest.raises(ValueError, match=message):
        loaded(url).score_latents(LATENTS[:1], TEXT, PROMPTS[:1])
    assert len(asked) == 2


@pytest.mark.parametrize("fault", [Reply(503), Reply(500), Reply(408), Reply(None)])
def test_faults_on_the_way_are(fault: Reply) -> None:
    answer, asked = in_turn(READY, fault, fault, raw(0.5))
    with serving(answer) as url:
        assert loaded(url).score_latents(LATENTS[:1], TEXT, PROMPTS[:1]).tolist() == [0.5]
    assert len(asked) == 4


def test_a_busy_server_is_waited_for() -> None:
    full = Reply(503, headers={"retry-after": "2"})
    answer, asked = in_turn(READY, full, Reply(429), full, full, raw(0.5))
    with serving(answer) as url:
        assert loaded(url, retries=0).score_latents(LATENTS[:1], TEXT, PROMPTS[:1]).tolist() == [0.5]
    assert len(asked) == 6


def test_a_server_that_stays_away_is_an_error() -> None:
    answer, asked = in_turn(READY, Reply(503))
    with serving(answer) as url, pytest.raises(UnreachableError, match=r"sample 0: .*answered 503"):
        loaded(url, retries=1).score_latents(LATENTS[:1], TEXT, PROMPTS[:1])
    assert len(asked) == 3


def test_loading_waits_for_the_server_but_not_for_ever(pauses: list[float]) -> None:
    answer, asked = in_turn(Reply(503), Reply(503), READY)
    with serving(answer) as url:
        loaded(url, start_timeout_s=60.0)
        assert len(asked) == 3 and len(pauses) == 2
    with pytest.raises(UnreachableError, match="was not ready within 0 s"):
        loaded(url, start_timeout_s=0.0)


def test_latents_that_are_not_finite_are_not_sent() -> None:
    latents = LATENTS.copy()
    latents[3, 0, 0, 0] = np.inf
    with serving(judge) as url, pytest.raises(ValueError, match="the latents of sample 3 are not finite"):
        loaded(url).score_latents(latents, TEXT, PROMPTS)


def test_a_model_without_prompt_embeds_is_refused() -> None:
    with serving(judge) as url, pytest.raises(FinalError, match="needs prompt_embeds"):
        loaded(url).score_latents(LATENTS, {}, PROMPTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"u": 1.5}, "u must be in"),
        ({"scale": 0.0}, "scale must be a finite number and not 0, got 0.0"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"bias": float("inf")}, "bias must be a finite number"),
        ({"url": "127.0.0.1"}, "url must be"),
        ({"seed": 2**63}, "seed must be a whole number, .* got 9223372036854775808"),
        ({"seed": 1.5}, r"seed must be a whole number, .* got 1\.5"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatentHTTP(**{"url": "http://127.0.0.1:8000", **options})


def test_it_is_a_latent_scorer_that_travels() -> None:
    scorer = LatentHTTP(url="http://127.0.0.1:8000")
    assert isinstance(scorer, LatentScorer) and pickle.loads(pickle.dumps(scorer)) == scorer

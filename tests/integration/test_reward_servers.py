"""Reward servers as processes of their own, asked by the clients that training runs use."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx2
import numpy as np
import psutil
import pytest

from flowrl.prompts import Prompt
from flowrl.rewards.http import HTTP
from flowrl.rewards.latent_http import LatentHTTP
from flowrl.rewards.transport import AnswerError, Server, UnreachableError
from flowrl.rewards.wire import CONTENT_TYPE, PATH, VERSION_HEADER, encode, read_scores
from tests.unit.distributed.launch.support import gone
from tests.unit.serving.served import HANGS, TinyLatentModel

OPTION = """\
components:
  obeys:
    _target_: flowrl.rewards.combine.Component
    scorer:
      _target_: tests.unit.rewards.scorers.Obeys
"""
IMAGES = np.zeros((1, 8, 8, 3), np.uint8)
HEADERS = {"content-type": CONTENT_TYPE, VERSION_HEADER: "1"}


@dataclass(frozen=True)
class Running:
    """A server that is ready."""

    url: str
    process: subprocess.Popen[str]


def begin(tool: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"flowrl.cli.{tool}", *arguments, "port=0"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def ready(process: subprocess.Popen[str]) -> Running:
    assert process.stderr is not None
    url = next(m[1] for line in process.stderr if (m := re.search(r"running on (\S+)", line)))
    with Server(url=url).connect() as connection:
        connection.wait("/healthz")
    return Running(url, process)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    """Of pictures, and of latents; both start at the same time."""
    folder = tmp_path_factory.mktemp("options")
    (folder / "reward").mkdir()
    (folder / "reward" / "obeys.yaml").write_text(OPTION)
    pictures = begin("serve_reward", "reward=obeys", f"config_dir={folder}", "queue_size=4", "max_batch_size=1")
    latents = begin("serve_latent_reward", "model._target_=tests.unit.serving.served.TinyLatentModel")
    try:
        yield ready(pictures), ready(latents)
    finally:
        for process in (pictures, latents):
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def test_latents_are_scored_together_and_as_the_model_scores_them(servers: tuple[Running, Running]) -> None:
    url = servers[1].url
    draw = np.random.default_rng(5)
    latents = draw.standard_normal((24, 4, 3, 5)).astype(np.float32)
    text = {"prompt_embeds": draw.standard_normal((1, 4, 6)).astype(np.float32)}
    scorer = LatentHTTP(url=url, u=0.25, seed=11, scale=0.1, bias=1.0)
    scorer.load()
    found = scorer.score_latents(latents, text, [Prompt("p", "a cat")] * 24)
    model = TinyLatentModel()
    model.load()
    repeated = {"prompt_embeds": np.repeat(text["prompt_embeds"], 24, axis=0)}
    raw = model.score(latents, repeated, np.full(24, 0.25, np.float32), [11] * 24)
    np.testing.assert_allclose(found, 0.1 * raw + 1, atol=1e-6)
    counts = {m[1]: float(m[2]) for m in re.finditer(r"flowrl_(\w+) ([\d.]+)", httpx2.get(f"{url}/metrics").text)}
    assert counts["samples_total"] == 24 and counts["batch_requests_count"] < 20
    with pytest.raises(ValueError, match=r"sample 0: .* answered 422: .*latents must have 4 channels, got 3"):
        scorer.score_latents(latents[:1, :3], text, [Prompt("p", "a cat")])


@pytest.mark.parametrize("file_format", ["safetensors", "png"])
def test_pictures_are_scored_as_the_prompt_of_each_says(servers: tuple[Running, Running], file_format: str) -> None:
    scorer = HTTP(url=servers[0].url, format=file_format, batch_size=1, concurrency=2, retries=1)
    scorer.load()
    images, prompts = np.repeat(IMAGES, 5, axis=0), [Prompt(f"p{slot}", "a cat") for slot in range(5)]
    assert scorer.score(images, prompts).tolist() == [1.0] * 5
    prompts[3] = Prompt("p3", "a cat", metadata={"then": "refuse"})
    with pytest.raises(AnswerError, match=r"answered 422: .*FinalError: no target"):
        scorer.score(images, prompts)
    prompts[3] = Prompt("p3", "a cat", metadata={"then": "raise"})
    with pytest.raises(UnreachableError, match=r"answered 500: .*ZeroDivisionError: "):
        scorer.score(images, prompts)


def test_a_flood_is_answered_to_the_last(servers: tuple[Running, Running]) -> None:
    body = encode(IMAGES, [Prompt("p", "a cat", metadata={"sleep": 0.1})])
    barrier = threading.Barrier(30)

    def ask(_: int) -> int:
        barrier.wait(10)
        answer = client.post(servers[0].url + PATH, content=body, headers=HEADERS, timeout=20)
        if answer.status_code == 200:
            read_scores(answer.json(), 1)
        else:
            assert int(answer.headers["retry-after"]) >= 1
        return answer.status_code

    with httpx2.Client() as client, ThreadPoolExecutor(30) as threads:
        statuses = Counter(threads.map(ask, range(30)))
    assert statuses.keys() == {200, 503} and statuses.total() == 30
    assert statuses[200] >= 5  # the queue and the batch


def test_a_server_that_is_told_to_stop_answers_what_it_has_taken(servers: tuple[Running, Running]) -> None:
    server = servers[0]
    body = encode(IMAGES, [Prompt("p", "a cat", metadata={"sleep": 0.3})])
    with httpx2.Client(base_url=server.url, timeout=20) as client, ThreadPoolExecutor(3) as threads:
        answers = threads.map(lambda _: client.post(PATH, content=body, headers=HEADERS), range(3))
        until(lambda: "flowrl_waiting_requests 2.0" in client.get("/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        assert [answer.json()["scores"] for answer in answers] == [[1.0]] * 3
    assert server.process.wait(20) == 0


def test_a_server_that_is_killed_is_an_error_and_leaves_nothing(servers: tuple[Running, Running]) -> None:
    server = servers[1]
    children = psutil.Process(server.process.pid).children()
    (scorer,) = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    client = LatentHTTP(url=server.url, seed=HANGS, retries=0)
    client.load()
    latents, text = np.zeros((1, 4, 2, 2), np.float32), {"prompt_embeds": np.zeros((1, 2, 2), np.float32)}
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(client.score_latents, latents, text, [Prompt("p", "a cat")])
        until(lambda: is_being_scored(httpx2.get(f"{server.url}/metrics").text))
        server.process.kill()
        with pytest.raises(UnreachableError, match="sample 0: POST"):
            asked.result(10)
    assert gone(scorer.pid)


def is_being_scored(metrics: str) -> bool:
    return "flowrl_waiting_requests 0.0" in metrics and "flowrl_held_bytes 0.0" not in metrics


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

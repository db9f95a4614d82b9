"""Runs whose reward server is killed. If it comes back, nothing is missing; if it does not, that is one sentence."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowrl.cli.train import command as flowrl
from flowrl.rewards.transport import Server
from tests.support.runs import STEPS, command

REWARD = "jpeg_incompressibility"
SCORER = "reward.components.http.scorer"


class Supervised:
    """A server of `REWARD`, always at the same port."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()
        with Server(url=self.url).connect() as connection:
            connection.wait("/healthz")

    def start(self) -> None:
        arguments = [f"reward={REWARD}", f"port={self.port}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flowrl.cli.serve_reward", *arguments], stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Supervised]:
    server = Supervised()
    yield server
    server.kill()


def records(run_dir: Path) -> list[dict[str, float]]:
    """What is logged so far."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(True) if line[-1] == "\n"] if path.exists() else []


@contextmanager
def after_step(step: int, run_dir: Path, then: Callable[[], None]) -> Iterator[None]:
    """`then` happens as soon as a run has made so many steps."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if any(record["step"] >= step for record in records(run_dir)):
                return then()
            time.sleep(0.01)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def served(folder: Path, here: Path, name: str, url: str, *overrides: str) -> list[str]:
    """The command of a run whose pictures are scored at `url`."""
    options = ("reward=http", "reward.num_workers=1", f"{SCORER}.url={url}")
    return command(folder, here, name, *options, *overrides)


def test_a_server_that_is_killed_and_comes_back(
    tiny_folder: Path, tmp_path: Path, server: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every group has its scores: those of the same run that needs no server."""

    def lose() -> None:
        server.kill()
        server.start()

    run_dir = tmp_path / "runs/lost"
    with after_step(2, run_dir, lose):
        assert flowrl(served(tiny_folder, tmp_path, "lost", server.url, f"{SCORER}.retries=8")) == 0
    told = capfd.readouterr().err
    assert f"POST {server.url}/v1/score: ConnectError" in told and "trying again in" in told
    assert flowrl(command(tiny_folder, tmp_path, "calm")) == 0
    lost, calm = records(run_dir), records(tmp_path / "runs/calm")
    assert [record["step"] for record in lost] == list(range(STEPS + 1))
    for found, expected in zip(lost, calm, strict=True):
        means = [{key: value for key, value in record.items() if key.endswith("mean")} for record in (found, expected)]
        assert {key.replace("http", REWARD): value for key, value in means[0].items()} == pytest.approx(means[1])


def test_a_server_that_is_killed_and_stays_away(
    tiny_folder: Path, tmp_path: Path, server: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "runs/lost"
    options = (f"{SCORER}.retries=0", "reward.retries=1", "trainer.eval.every=0")
    with after_step(2, run_dir, server.kill):
        assert flowrl(served(tiny_folder, tmp_path, "lost", server.url, *options)) == 1
    told = capfd.readouterr().err
    assert "Traceback" not in told
    *_, sentence, rest = told.splitlines()
    assert sentence.startswith("flowrl: reward component 'http' failed on prompt ")
    assert sentence.endswith(f": POST {server.url}/v1/score: ConnectError: [Errno 111] Connection refused")
    assert rest.startswith(f"{run_dir} holds ")

"""What the serving tools take on their command lines, and refuse before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from flowrl.cli import serve_latent_reward, serve_reward
from flowrl.rewards.jpeg import JPEGCompressibility
from tests.unit.serving.served import TinyLatentModel

MODEL = "model._target_=tests.unit.serving.served.TinyLatentModel"


def test_the_reward_and_the_server_are_set_with_one_line() -> None:
    settings = serve_reward.TOOL.settings(
        ["reward=jpeg_compressibility", "port=9", "reward.components.jpeg_compressibility.scorer.quality=80"]
    )
    assert settings.component.scorer == JPEGCompressibility(quality=80)
    assert (settings.listen.host, settings.listen.port) == ("127.0.0.1", 9)


def test_options_of_ones_own_can_be_served(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    scorer = "{_target_: flowrl.rewards.jpeg.JPEGIncompressibility}"
    text = f"components: {{mine: {{_target_: flowrl.rewards.combine.Component, scorer: {scorer}}}}}"
    (tmp_path / "reward" / "mine.yaml").write_text(text)
    settings = serve_reward.TOOL.settings(["reward=mine", f"config_dir={tmp_path}"])
    assert type(settings.component.scorer).__name__ == "JPEGIncompressibility"


def test_a_latent_model_is_built_with_its_own_keys() -> None:
    settings = serve_latent_reward.TOOL.settings([MODEL, "model.channels=16", "max_batch_size=2"])
    assert settings.model == TinyLatentModel(channels=16)
    assert (settings.listen.max_batch_size, settings.listen.max_wait_ms) == (2, 10.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "reward: must be set: what to serve. Write reward=NAME."),
        (["reward=[ocr,jpeg_compressibility]"], "reward: must be one component, got ocr, jpeg_compressibility."),
        (["reward=latent_http"], "reward: latent_http scores latents, and this server is sent pictures."),
        (["reward=ocr", "prot=3"], "prot: there is no such key. Did you mean port?"),
        (["reward=ocr", "max_samples=0"], "max_samples: must be at least 1, got 0."),
        (["reward=ocr", "data.seed=3"], "data.seed: there is no such key."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_only_one_reward_of_pictures_is_served(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve_reward.TOOL.command(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["host=0.0.0.0"], "host: 0.0.0.0 can be reached from other machines. Set token_env=NAME"),
        (["host=::"], "host: :: can be reached from other machines."),
        (["host=example.org"], "host: example.org can be reached from other machines."),
        (["token_env=NO_SUCH"], "token_env: the environment variable NO_SUCH is not set."),
        (
            ["queue_size=0", "max_body_mb=0"],
            "queue_size: must be at least 1, got 0.\n  max_body_mb: must be at least 1",
        ),
        (["timeout_s=0"], "timeout_s: must be greater than 0 and at most 604800, got 0.0."),
        (["load_timeout_s=1e10"], "load_timeout_s: must be greater than 0 and at most 604800, got 10000000000.0."),
        (["port=-1"], "port: must be at least 0 and at most 65535, got -1."),
        (["port=99999"], "port: must be at least 0 and at most 65535, got 99999."),
        (["host=a..b", "token_env=TOKEN"], "host: 'a..b' has no address: "),
        (["host=192.0.2.1", "token_env=TOKEN"], "host: 192.0.2.1 is no address of this machine: Cannot assign"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_would_not_be_safe_or_cannot_work_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    monkeypatch.setenv("TOKEN", "secret")
    assert serve_latent_reward.TOOL.command([MODEL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve_latent_reward.TOOL.command([MODEL, f"port={port}"]) == 2
    message = f"port: {port} at 127.0.0.1 cannot be had: Address already in use. port=0 takes any that is free."
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("token", ["s3cr3t\n", "s3cr3t\r\n", "two words", "gehe\u00efm", "s3cr3t\t"])
def test_a_token_that_nobody_could_bring_is_refused_and_not_shown(
    token: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", token)
    assert serve_latent_reward.TOOL.command([MODEL, "token_env=REWARD_TOKEN"]) == 2
    shown = capsys.readouterr().err
    assert "the environment variable REWARD_TOKEN may hold printable ASCII without spaces alone" in shown
    assert token.split()[0] not in shown


def test_a_latent_model_must_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_latent_reward.TOOL.command(["model._target_=flowrl.config.Sampler"]) == 2
    assert "model: must be a LatentModel, got Sampler." in capsys.readouterr().err


def test_a_scorer_that_cannot_be_loaded_ends_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    assert serve_latent_reward.TOOL.command(["model._target_=tests.unit.serving.served.CannotLoad", "port=0"]) == 1
    assert "the scorer cannot be loaded: FileNotFoundError: no model.onnx" in capfd.readouterr().err


def test_the_extra_is_named_if_it_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.cli.serving.LIBRARIES", ("fastapi", "no_such_library"))
    assert serve_latent_reward.TOOL.command([MODEL]) == 1
    assert 'no_such_library must be installed: pip install -e ".[server]".' in capsys.readouterr().err

"""What is said of a Hub id that cannot be had: one sentence, by what a server with the Hub's protocol answers.

And of a folder's revision; and that the libraries are silent while they load, and no longer.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import diffusers
import pytest
import transformers
from diffusers import StableDiffusion3Pipeline
from huggingface_hub import constants

from flowrl.config import Config
from flowrl.models.loading import local_folder, quiet
from flowrl.models.sd3 import SD3
from flowrl.types import LoadError

ANSWERS = {
    "gated": (403, "GatedRepo", "access is granted by its owners: accept its terms on its page and set HF_TOKEN"),
    "absent": (401, "RepoNotFound", "there is no such repository, or it is private: is HF_TOKEN set"),
    "renamed": (404, "RevisionNotFound", "it has no such revision"),
    "unreachable": (0, "", "it is not in the local cache, and the Hub cannot be reached"),
}
LOAD = """
import json, sys, torch
from flowrl.models.sd3 import SD3
from flowrl.types import LoadError
said = {}
for name in sys.argv[1:]:
    try:
        SD3(f"owner/{name}", revision="v1").load(torch.device("cpu"))
    except LoadError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


class Hub(BaseHTTPRequestHandler):
    """Every request for a repository is answered as its name says."""

    def answer(self) -> None:
        name = next(name for name in ANSWERS if f"owner/{name}" in self.path)
        status, code, _ = ANSWERS[name]
        if not status:
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = answer

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def said(names: list[str], tmp_path: Path, **environment: str) -> dict[str, str]:
    """What loading `owner/NAME` is refused with, by name, in a process with an empty cache."""
    variables = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    variables.pop("HF_TOKEN", None)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names], env=variables, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def test_each_refusal_of_the_hub_is_a_sentence_of_its_own(hub: str, tmp_path: Path) -> None:
    messages = said(list(ANSWERS), tmp_path, HF_ENDPOINT=hub)
    for name, (_, _, words) in ANSWERS.items():
        assert messages[name].startswith(f"model.path=owner/{name}: no folder, and as a Hub id it cannot be had: ")
        assert words in messages[name] and "\n" not in messages[name]


def test_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="it is not in the local cache, and HF_HUB_OFFLINE forbids a download"):
        local_folder("owner/no-such-model", None, StableDiffusion3Pipeline)


@pytest.mark.parametrize("path", ["nowhere", "a/b/c", "/no/such/folder", "~/no/such/folder", "./none"])
def test_what_is_no_hub_id_is_a_folder(path: str) -> None:
    with pytest.raises(LoadError, match="there is no such folder, and a Hub id has the form owner/name"):
        local_folder(path, None, None)


@pytest.mark.parametrize(("path", "package"), [("nope/x", "nope"), ("", ""), ("string/x", "string")])
def test_a_package_that_is_not_installed_is_one_sentence(path: str, package: str) -> None:
    with pytest.raises(LoadError, match=rf"^model\.path=pkg://{path}: there is no installed package '{package}'\.$"):
        local_folder(f"pkg://{path}", None, None)


@pytest.mark.parametrize("folder", ["", " "])
def test_a_cache_has_a_folder_of_its_own(folder: str) -> None:
    (problem,) = SD3("owner/name", cache_dir=folder).problems(Config())
    assert problem.path == "model.cache_dir" and "must be null or a folder" in problem.message


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    for path in (str(tmp_path), "pkg://flowrl/assets/tiny_sd3"):
        (problem,) = SD3(path, revision="v1").problems(Config())
        assert problem.path == "model.revision" and f"model.path={path} is a folder" in problem.message
    assert SD3("owner/name", revision="v1").problems(Config()) == SD3(str(tmp_path)).problems(Config()) == []


@pytest.mark.parametrize(("level", "bars"), [(logging.INFO, True), (logging.ERROR, False)])
def test_the_libraries_are_quiet_for_a_while(level: int, bars: bool) -> None:
    """Whatever they were before they are again, also after a failure."""
    libraries = (transformers.utils.logging, diffusers.utils.logging)
    before = [(library.get_verbosity(), library.is_progress_bar_enabled()) for library in libraries]
    try:
        for library in libraries:
            library.set_verbosity(level)
            (library.enable_progress_bar if bars else library.disable_progress_bar)()
        with pytest.raises(OSError), quiet():
            assert not any(library.is_progress_bar_enabled() for library in libraries)
            assert [library.get_verbosity() for library in libraries] == [logging.ERROR, logging.CRITICAL]
            raise OSError
        assert [(library.get_verbosity(), library.is_progress_bar_enabled()) for library in libraries] == [
            (level, bars)
        ] * 2
    finally:
        for library, (own, on) in zip(libraries, before, strict=True):
            library.set_verbosity(own)
            (library.enable_progress_bar if on else library.disable_progress_bar)()

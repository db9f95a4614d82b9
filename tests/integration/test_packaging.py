"""What is shipped: a wheel and an sdist hold configurations, recipes and assets, and work from another directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("flowrl", "data_process", "configs", "recipes", "tests")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md")

PROBE = """
import flowrl, sys
from flowrl.cli.compose import shipped
from flowrl.data.prompts import load_prompts
cfg = flowrl.load_config(["recipe=tiny_ocr", "model=tiny_sd3"])
print(flowrl.__file__, shipped("configs"), cfg.recipe, len(load_prompts(cfg.data.train, cfg.data.target)))
"""


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in: building leaves files behind."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def built(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), ".", cwd=sources)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content."""
    folder = tmp_path_factory.mktemp("wheel")
    (file,) = built.glob("*.whl")
    zipfile.ZipFile(file).extractall(folder)
    return folder


def shipped_files() -> set[str]:
    """Every file that a user needs, by its place in the wheel."""
    yamls = {
        f"flowrl/{file.relative_to(ROOT)}" for name in ("configs", "recipes") for file in (ROOT / name).rglob("*.yaml")
    }
    assets = {str(file.relative_to(ROOT)) for file in (ROOT / "flowrl/assets").rglob("*") if file.is_file()}
    return yamls | assets | {"flowrl/py.typed"}


def test_the_wheel_holds_everything_and_installs_nothing_else(wheel: Path) -> None:
    content = {str(file.relative_to(wheel)) for file in wheel.rglob("*") if file.is_file()}
    assert shipped_files() <= content
    tops = {name.split("/")[0] for name in content}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"flowrl", "data_process"}


def test_the_sdist_holds_everything(built: Path) -> None:
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        name.removeprefix("flowrl/") if name.startswith(("flowrl/configs/", "flowrl/recipes/")) else name
        for name in shipped_files()
    }
    assert wanted <= names and {"README.md", "LICENSE", "tests/test_layers.py"} <= names


@pytest.mark.parametrize("layout", ["wheel", "checkout"])
def test_it_works_from_another_directory(layout: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = request.getfixturevalue("wheel") if layout == "wheel" else ROOT
    code, configs, recipe, prompts = run(sys.executable, "-c", PROBE, cwd=tmp_path, path=path).split()
    assert Path(code).is_relative_to(path) and Path(configs).is_relative_to(path)
    assert recipe == "tiny_ocr" and int(prompts) > 1000
    assert "name: tiny_ocr" in run(sys.executable, "-m", "flowrl", "--cfg", "job", cwd=tmp_path, path=path)

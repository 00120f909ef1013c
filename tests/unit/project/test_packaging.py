"""What is installed: names, versions, and the files that are not Python."""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution, entry_points, requires, version
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import megatron_hexi
from megatron_hexi.cli.main import main
from megatron_hexi.plan import write_plan
from tests.support.records import PLAN, interval, start, write_record

REPOSITORY = Path(__file__).parents[3]
DIFFS = [path.name for path in (REPOSITORY / "patches").glob("*.diff")]

#: What `hexi doctor` calls an error where only the extra `plan` is installed.
TRAINING = {"torch", "megatron-core"}


def test_installed_version_is_the_package_s():
    assert version("megatron-hexi") == megatron_hexi.__version__


@pytest.mark.parametrize(
    ("missing", "module", "remedy"),
    [
        ("ortools", "megatron_hexi.cli.main", "megatron-hexi[plan]"),
        ("torch", "megatron_hexi.pretrain_gpt", "megatron-hexi[train]"),
        ("torch", "megatron_hexi.run", "megatron-hexi[train]"),
    ],
)
def test_a_missing_extra_is_one_line_that_names_it(missing, module, remedy, tmp_path):
    """Planning without torch, training without OR-Tools: what the other half needs is asked for by name."""
    blocked = f"import sys, runpy; sys.modules[{missing!r}] = None"
    program = f"{blocked}; runpy.run_module({module!r}, run_name='__main__')"
    cluster = REPOSITORY / "examples" / "clusters" / "mixed-16.yaml"
    arguments: dict[str, list[str | Path]] = {
        "megatron_hexi.cli.main": [
            "plan",
            cluster,
            "--model",
            "gpt-7b",
            "--seq-length",
            "32768",
            "-o",
            "p.yaml",
        ],
        "megatron_hexi.pretrain_gpt": [],
        "megatron_hexi.run": [__file__],
    }
    words = arguments[module]
    run = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=250, cwd=tmp_path
    )
    assert run.returncode == 2, run.stderr
    assert run.stderr == (
        f"hexi: error: this needs {missing}, which is not installed; pip install '{remedy}'\n"
    )


def test_pictures_without_matplotlib_are_refused_before_planning(tmp_path):
    blocked = "import sys, runpy; sys.modules['matplotlib'] = None"
    program = f"{blocked}; runpy.run_module('megatron_hexi.cli.main', run_name='__main__')"
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("name: pair\nnodes:\n- {name: n, gpu: H100-SXM-80GB, gpus: 2}\n")
    job = ["plan", "cluster.yaml", "--model", "gpt-3b", "--seq-length", "4096"]
    command = [sys.executable, "-c", program, *job, "-o", "plan.yaml"]
    drawn = subprocess.run(
        [*command, "--picture", "p.png"], capture_output=True, text=True, timeout=250, cwd=tmp_path
    )
    assert drawn.returncode == 2
    assert drawn.stderr == (
        "hexi: error: this needs matplotlib, which is not installed; pip install 'megatron-hexi[pictures]'\n"
    )
    assert list(tmp_path.iterdir()) == [cluster]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr


def test_hexi_is_the_command():
    (command,) = entry_points(group="console_scripts", name="hexi")
    assert command.load() is main


def test_the_changelog_knows_this_version():
    """Under its own heading once it is out, and as what is coming before."""
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    assert "\n## Unreleased\n" in text or f"\n## {megatron_hexi.__version__}" in text


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist, made once; the sdist unpacked."""
    folder = tmp_path_factory.mktemp("built")
    # A copy, so that no build folder of the repository is taken for a source, and none is left there.
    source = folder / "source"
    unwanted = shutil.ignore_patterns(
        ".venv", ".git", ".*_cache", ".hypothesis", "build", "dist", "runs", "*.egg-info", "__pycache__"
    )
    shutil.copytree(REPOSITORY, source, ignore=unwanted)
    # The wheel is made from the sdist, as for a release: what the sdist lacks is missing in both.
    # Without isolation, because a machine that runs checks need not reach a package index.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source]
    subprocess.run(build, check=True, timeout=200)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return SimpleNamespace(source=source, wheel=wheel, unpacked=unpacked)


def _files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    files = {name for name in _files(built.source) if name.startswith("megatron_hexi/")}
    assert files <= names
    assert "megatron_hexi/py.typed" in names
    assert DIFFS
    assert {f"megatron_hexi/patches/{diff}" for diff in DIFFS} <= names
    assert {name.partition("/")[0] for name in names} == {
        "megatron_hexi",
        f"megatron_hexi-{megatron_hexi.__version__}.dist-info",
    }


@pytest.mark.slow
def test_the_sdist_holds_the_repository(built):
    """What the tests and `make` need: all but what is git's or CI's own."""
    left_out = {name for name in _files(built.source) if name.startswith((".git", ".ci/"))}
    assert _files(built.source) - left_out <= _files(built.unpacked)


@pytest.mark.slow
def test_the_metadata_is_valid_in_both(built):
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        texts = [archive.read(name), (built.unpacked / "PKG-INFO").read_bytes()]
    for text in texts:
        metadata = Metadata.from_email(text, validate=True)  # every field and classifier as the standards ask
        assert str(metadata.version) == megatron_hexi.__version__
        assert metadata.license_expression == "Apache-2.0"
        assert metadata.license_files == ["LICENSE"]
        assert str(metadata.requires_python) == ">=3.12"
        assert "Typing :: Typed" in (metadata.classifiers or [])
        assert metadata.description_content_type == "text/markdown"
        assert (metadata.description or "").startswith("# megatron-hexi")


def _planner_needs() -> set[str]:
    """All distributions that the half that plans needs, those that they need included."""
    found: set[str] = set()
    wanted = ["megatron-hexi"]
    while wanted:
        name = wanted.pop()
        for requirement in map(Requirement, requires(name) or []):
            extras = ("plan", "pictures") if name == "megatron-hexi" else ("",)
            marker = requirement.marker
            applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
            if applies and requirement.name not in found:
                found.add(requirement.name)
                wanted.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory):
    """A virtual environment with the wheel and what the half that plans needs; neither torch nor Megatron.

    Its dependencies are links to those installed here, so that nothing is downloaded.
    """
    venv = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=250)
    (site,) = venv.glob("lib/python*/site-packages")
    for name in _planner_needs():
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(installed.locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", built.wheel], check=True, timeout=250)
    return venv / "bin"


def _hexi(clean, folder, *words):
    return subprocess.run(
        [clean / "hexi", *words],
        cwd=folder,
        env={"PATH": str(clean), "HOME": str(folder), "MPLCONFIGDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
def test_the_installed_command_plans_without_torch(built, clean, tmp_path):
    for module in ("torch", "megatron.core"):
        run = subprocess.run([clean / "python", "-c", f"import {module}"], capture_output=True, timeout=250)
        assert run.returncode == 1, f"{module} is there"
    assert _hexi(clean, tmp_path, "--version").stdout == f"megatron-hexi {megatron_hexi.__version__}\n"
    assert "H100-SXM-80GB" in _hexi(clean, tmp_path, "catalog").stdout
    cluster = built.unpacked / "examples" / "clusters" / "mixed-16.yaml"
    job = ("--model", "gpt-7b", "--seq-length", "32768", "--recompute-granularity", "full")
    planned = _hexi(
        clean, tmp_path, "plan", cluster, *job, "-o", "plan.yaml", "--picture", "plan.png", "--json"
    )
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["tokens_per_s"] > 0
    assert (tmp_path / "plan.png").stat().st_size > 0
    assert _hexi(clean, tmp_path, "validate", "plan.yaml").returncode == 0


@pytest.mark.slow
def test_the_installed_command_reports_a_run(clean, tmp_path):
    """Its template is no Python file."""
    write_plan(PLAN, tmp_path / "plan.yaml")
    write_record(tmp_path / "record.jsonl", start(), interval(1), interval(2))
    told = _hexi(clean, tmp_path, "report", "plan.yaml", "--record", "record.jsonl", "-o", "report.html")
    assert told.returncode == 0, told.stderr
    assert "</html>" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_the_installed_doctor_says_what_is_missing(clean, tmp_path):
    run = _hexi(clean, tmp_path, "doctor", "--local", "--json")
    document = json.loads(run.stdout)
    assert run.returncode == 2
    errors = {problem["what"] for problem in document["problems"] if problem["severity"] == "error"}
    assert errors == {f"{name} is not installed" for name in TRAINING}


@pytest.mark.slow
def test_the_installed_diffs_are_found(clean, tmp_path):
    """They lie elsewhere than in the repository."""
    listing = "from megatron_hexi.cli.checkout import known_diffs; print(*(d.name for d in known_diffs()))"
    run = subprocess.run(
        [clean / "python", "-c", listing], capture_output=True, text=True, timeout=250, cwd=tmp_path
    )
    assert run.stdout.split() == sorted(DIFFS)


@pytest.mark.slow
def test_tests_run_from_the_sdist(built):
    """A few of those that read files beside the package; its own package comes before the installed one."""
    some = [
        "tests/unit/cluster/test_file.py",
        "tests/unit/project/test_dockerfile.py",
        "tests/unit/cli/test_checkout_patch.py",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some],
        cwd=built.unpacked,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout

"""The container's files. Nothing is built here: that takes Docker and a large base."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import megatron_hexi
from tests.support.shell import call_hexi

REPOSITORY = Path(__file__).parents[3]
DOCKERFILE = REPOSITORY / "Dockerfile"
COMPOSE = REPOSITORY / "docker" / "compose.yaml"
DOCUMENT = REPOSITORY / "docs" / "docker.md"
TOOLS = Path(sys.executable).parent


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments, comments gone and lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [
        (name, rest.strip()) for name, _, rest in (line.partition(" ") for line in whole.splitlines()) if name
    ]


def of_kind(kind: str) -> list[str]:
    return [rest for name, rest in instructions() if name == kind]


def image_name() -> str:
    return f"megatron-hexi:{megatron_hexi.__version__}"


def test_the_linter_finds_nothing():
    run = subprocess.run(
        [TOOLS / "hadolint", DOCKERFILE], capture_output=True, text=True, timeout=250, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_the_linter_would_find_something(tmp_path):
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian\nUSER root\n")
    run = subprocess.run(
        [TOOLS / "hadolint", wrong], capture_output=True, text=True, timeout=250, check=False
    )
    assert run.returncode != 0
    assert "DL3006" in run.stdout


def test_the_base_is_pinned_and_the_same_everywhere():
    (base,) = of_kind("ARG")
    image = base.removeprefix("BASE=")
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3@sha256:[0-9a-f]{64}", image)
    assert [rest.partition(" ")[0] for rest in of_kind("FROM")] == ["${BASE}", "${BASE}"]
    (labels,) = of_kind("LABEL")
    named = dict(pair.split("=", 1) for pair in shlex.split(labels))
    assert named["org.opencontainers.image.base.name"] == image.partition("@")[0]
    assert named["org.opencontainers.image.version"] == megatron_hexi.__version__
    assert named["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert image.partition("@")[0] in DOCUMENT.read_text()


def test_it_does_not_run_as_root():
    order = [name for name, _ in instructions()]
    *_, user = of_kind("USER")
    assert user.isdecimal()
    assert int(user) > 0
    # Nothing that needs root comes after.
    assert "RUN" not in order[len(order) - order[::-1].index("USER") :]


def test_its_health_is_the_doctor_s(monkeypatch, capsys):
    (check,) = of_kind("HEALTHCHECK")
    shell, _, command = json.loads(check.partition("CMD ")[2])
    assert shell == "bash"
    words, _, failed = command.partition(" || ")
    assert failed == "exit 1"  # Docker reserves 2
    monkeypatch.setenv("COLUMNS", "200")
    name, *arguments = shlex.split(words)
    assert name == "hexi"
    assert call_hexi(monkeypatch, capsys, [*arguments, "--help"]).code == 0
    text = call_hexi(monkeypatch, capsys, [arguments[0], "--help"]).out
    assert all(word in text for word in arguments[1:])


def copied() -> list[str]:
    sources: list[str] = []
    for rest in of_kind("COPY"):
        sources += [word for word in shlex.split(rest)[:-1] if not word.startswith("--")]
    return sources


def test_what_is_copied_is_there_and_not_ignored():
    kept = {
        line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    assert copied()
    assert set(copied()) == kept
    assert [source for source in copied() if not (REPOSITORY / source).exists()] == []


def test_the_wheel_can_be_made_of_what_is_copied():
    """Everything that setup.py and MANIFEST.in cannot do without."""
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "patches", "megatron_hexi"} <= set(copied())


def test_what_it_adds_is_pinned_within_the_ranges_that_the_package_asks_for():
    lines = (REPOSITORY / "docker" / "constraints.txt").read_text().splitlines()
    pins = {pin.name: pin for pin in (Requirement(line) for line in lines if not line.startswith("#"))}
    asked = {
        requirement.name: requirement for requirement in map(Requirement, requires("megatron-hexi") or [])
    }
    assert {"megatron-core", "ortools"} <= pins.keys()
    for name, pin in pins.items():
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        if name in asked:
            assert asked[name].specifier.contains(Version(specifier.version)), name
    assert "torch" not in pins  # the base's stays


def test_the_base_s_torch_is_kept():
    (install,) = [rest for rest in of_kind("RUN") if "/wheels/*.whl" in rest]
    assert '"$(echo /wheels/*.whl)[plan,train,pictures,convert]"' in install
    assert "--constraint /etc/megatron-hexi/base.txt" in install
    pattern = re.search(r"'(\^\([^']+\))'", install)
    assert pattern is not None
    for name in (
        "torch==2.13.0a0+8145d630e8.nv26.06",
        "transformer_engine==2.16",
        "flash_attn==2.7",
        "apex==0.1",
    ):
        assert re.match(pattern[1], name), name
    assert re.match(pattern[1], "typer==0.1") is None


def test_the_compose_file_is_one():
    run = subprocess.run(
        [TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stdout


@pytest.fixture
def services():
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_both_kinds_of_node_run_one_image(services):
    assert {name: service["image"] for name, service in services.items()} == dict.fromkeys(
        ("h100", "a100"), image_name()
    )
    assert (COMPOSE.parent / services["h100"]["build"]["context"] / "Dockerfile").resolve() == DOCKERFILE


def test_nodes_differ_in_their_number_alone(services):
    ranks = {name: service["environment"].pop("PET_NODE_RANK") for name, service in services.items()}
    assert ranks == {"h100": "0", "a100": "1"}
    assert services["h100"] == services["a100"]
    assert services["h100"]["environment"]["PET_NNODES"] == str(len(services))


def test_the_variables_are_torchrun_s_options(services):
    from torch.distributed.run import get_args_parser

    options = {action.dest for action in get_args_parser()._actions}
    given = {name.removeprefix("PET_").lower() for name in services["h100"]["environment"]}
    assert given <= options


def test_the_page_builds_what_the_files_name():
    assert f"docker build --tag {image_name()} ." in DOCUMENT.read_text()
    assert f"docker build --tag {image_name()} ." in DOCKERFILE.read_text()

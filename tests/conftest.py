"""What all tests share."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.megatron.forked import Forks
from tests.support import durations

# xdist sets it for its workers; what commands print must not depend on that.
os.environ.pop("COLUMNS", None)

# A machine that is busy is no failure.
settings.register_profile(
    "unhurried", settings.get_profile(settings.get_current_profile_name()), deadline=None
)
settings.load_profile("unhurried")

#: The part of each property's examples that the default suite tries.
SHARE = 0.3


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer the options of `make quick` and `make durations`."""
    group = parser.getgroup("durations")
    group.addoption("--at-most", type=float, metavar="SECONDS", help="leave out unit tests that took longer")
    group.addoption("--record-durations", action="store_true", help="write what each test takes")


def pytest_configure(config: pytest.Config) -> None:
    """Try all examples of properties where slow tests may run; ``HEXI_EXAMPLES`` says how many otherwise."""
    share = SHARE if config.option.markexpr == "not slow" else 1.0
    os.environ.setdefault("HEXI_EXAMPLES", str(share))
    if config.option.record_durations:
        config.pluginmanager.register(durations.Recorder())


#: Names of all tests of the files that this run was given, those that it leaves out included.
COLLECTED = pytest.StashKey[frozenset[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note what there is, and skip tests marked ``gpu``, each by its name, where there is no CUDA device."""
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    if (at_most := config.option.at_most) is not None:
        took, changed = durations.read(), durations.changed_packages()
        slow = [item for item in items if not durations.is_quick(item.nodeid, at_most, took, changed)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if durations.is_quick(item.nodeid, at_most, took, changed)]
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch  # takes seconds, which runs without such tests need not spend

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=f"{item.name}: needs a CUDA device"))


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with Forks() as started:
        yield started

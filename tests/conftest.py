"""What all tests share."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.megatron.forked import Forks

# xdist sets it for its workers; what commands print must not depend on that.
os.environ.pop("COLUMNS", None)

# A machine that is busy is no failure.
settings.register_profile(
    "unhurried", settings.get_profile(settings.get_current_profile_name()), deadline=None
)
settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu``, each by its name, where there is no CUDA device."""
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

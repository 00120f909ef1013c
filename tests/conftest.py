"""What all tests share."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu``, each by its name, where there is no CUDA device."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch  # takes seconds, which runs without such tests need not spend

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=f"{item.name}: needs a CUDA device"))

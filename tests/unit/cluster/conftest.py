"""Fixtures of the tests of clusters."""

import pytest


@pytest.fixture
def write(tmp_path):
    def write_(text):
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return path

    return write_

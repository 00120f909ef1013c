"""A fixture of the tests that read config.json."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def write(tmp_path):
    """Writes a config.json and returns its folder."""

    def write_(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write_

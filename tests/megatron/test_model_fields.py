"""Recorded defaults of Megatron's model fields."""

from __future__ import annotations

import megatron.core

from megatron_hexi.megatron.model_fields import installed_defaults
from megatron_hexi.options.layer_features import model_defaults
from megatron_hexi.options.parser import VERSIONS, series


def test_defaults_are_those_of_the_installed_megatron():
    if series(megatron.core.__version__) == VERSIONS[-1]:
        assert dict(model_defaults()) == installed_defaults()

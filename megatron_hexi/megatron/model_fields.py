"""``python -m megatron_hexi.megatron.model_fields``: record the defaults of Megatron's model without flags.

A field of `TransformerConfig` that no argument sets has its default in every training that Megatron's script
starts. They are kept in megatron_hexi/options/data/model_defaults.json, so that a model stated by fields, as
in Megatron Bridge's YAML, is read without torch and Megatron.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from megatron.core.transformer import MLATransformerConfig

from megatron_hexi.megatron.parser_rows import installed_rows
from megatron_hexi.options.layer_features import DATA
from megatron_hexi.text_file import write_text_atomically


def installed_defaults() -> dict[str, Any]:
    """Return plain defaults, except ``None``, of Megatron's model fields that no argument sets, by name."""
    arguments = {row.dest for row in installed_rows()}
    found = {
        field.name: _default(field)
        for field in dataclasses.fields(MLATransformerConfig)
        if field.name not in arguments
    }
    return {
        name: value
        for name, value in sorted(found.items())
        if isinstance(value, (bool, int, float, str, list))
    }


def _default(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def record() -> None:
    """Write the installed version's defaults into the data."""
    write_text_atomically(DATA, json.dumps(installed_defaults(), indent=0) + "\n")


if __name__ == "__main__":
    record()

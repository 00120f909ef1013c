"""The pages of the plan file and of the cluster file: every field, from the types that files are read into.

Types, limits and defaults come from pydantic's JSON schema, meanings from the docstrings' ``Args:``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from megatron_hexi.cluster import device, entries
from megatron_hexi.cluster import model as cluster_model
from megatron_hexi.cluster.model import ClusterFile
from megatron_hexi.lab.scenario import Scenario, scenario_model
from megatron_hexi.plan import Plan, terms, workload
from megatron_hexi.plan import model as plan_model
from scripts.docs.markdown import GENERATED_FROM, code, definitions, one_line, paragraphs, slug

_PLAN = f"""\
# Fields of the plan file

{GENERATED_FROM.format(source="megatron_hexi/plan/model.py, workload.py and terms.py")}

`hexi plan` and `hexi proportion` write plans, and `hexi validate` checks one; [concepts](../concepts.md)
explains what they mean. Ranges are half open: `[0, 400]` is 0 to 399. Bold fields are required; unknown ones
are refused.
"""

_CLUSTER = f"""\
# Fields of the cluster file

{GENERATED_FROM.format(source="megatron_hexi/cluster/model.py, entries.py and device.py")}

[The cluster file](../cluster-file.md) explains it by examples. GB are 10^9 bytes, GiB 2^30; bandwidths are a
direction, latencies of one message; rates are TFLOP/s. Bold fields are required; unknown ones are refused.
"""

_SCENARIO = f"""\
# Fields of the scenario file

{GENERATED_FROM.format(source="megatron_hexi/lab/scenario/scenario_model.py")}

`hexi simulate --scenario` plays one ([scenarios](../scenarios.md)). Durations are `90s`, `30m`, `1h30m` or
`7d`; times are since the start. Bold fields are required; unknown ones are refused.
"""

#: Where the word for a type takes its plural.
_PLURAL = re.compile(r"^(list|name|pair|(?:positive )?(?:integer|number))")
_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)


def plan_fields_page() -> str:
    """The page, in Markdown."""
    return _PLAN + _sections(Plan, {**vars(terms), **vars(workload), **vars(plan_model)})


def scenario_fields_page() -> str:
    """The page, in Markdown."""
    return _SCENARIO + _sections(Scenario, vars(scenario_model))


def cluster_fields_page() -> str:
    """The page, in Markdown."""
    return _CLUSTER + _sections(ClusterFile, {**vars(device), **vars(entries), **vars(cluster_model)})


@dataclass(frozen=True)
class _Section:
    """A mapping of the file: where it stands, and its JSON schema."""

    heading: str
    name: str
    schema: Mapping[str, Any]


def _sections(kind: type[Any], types: Mapping[str, Any]) -> str:
    schema = TypeAdapter(kind).json_schema(mode="validation")
    found: dict[str, _Section] = {}
    _find(kind.__name__, schema, "", schema.get("$defs", {}), found)
    return "".join(_spell_section(section, types[section.name], found) for section in found.values())


def _find(
    name: str,
    schema: Mapping[str, Any],
    place: str,
    known: Mapping[str, Any],
    found: dict[str, _Section],
) -> None:
    """Each mapping once, where it stands first, from the top of the file down."""
    if name in found:
        return
    found[name] = _Section(place or "The file", name, schema)
    for field, value in schema["properties"].items():
        for inner, suffix in _references(value):
            _find(inner, known[inner], f"{place}.{field}{suffix}".lstrip("."), known, found)


def _references(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names of the mappings that a value holds, with what has to be written behind its place."""
    if "$ref" in schema:
        yield schema["$ref"].rpartition("/")[2], ""
    for choice in schema.get("anyOf", ()):
        yield from _references(choice)
    for inner, suffix in ((schema.get("items"), "[]"), (_values(schema), ".NAME")):
        if isinstance(inner, dict):
            for name, behind in _references(inner):
                yield name, suffix + behind


def _values(schema: Mapping[str, Any]) -> Any:
    """The schema of a mapping's values, where its keys are free."""
    patterns = schema.get("patternProperties")
    return next(iter(patterns.values())) if patterns else schema.get("additionalProperties")


def _spell_section(section: _Section, kind: type[Any], found: Mapping[str, _Section]) -> str:
    meaning, arguments = _docstring(kind)
    required = section.schema.get("required", ())
    rows: dict[tuple[str, str], list[str]] = {}
    for field, schema in section.schema["properties"].items():
        if field not in arguments:
            raise SystemExit(f"{kind.__module__}.{kind.__name__}: Args: does not say what {field} is; add it")
        if arguments[field].startswith("not in the file"):
            continue
        name = _linked(code(field), schema, found)
        name = f"**{name}**" if field in required else name
        rows.setdefault((_type(schema) + _default(schema), arguments[field]), []).append(name)
    fields = definitions(
        (", ".join(names) + (f" ({value})" if value else ""), what) for (value, what), names in rows.items()
    )
    heading = section.heading if section.heading == "The file" else code(section.heading)
    return f"\n## {heading}\n\n{meaning}\n\n{fields}"


def _docstring(kind: type[Any]) -> tuple[str, dict[str, str]]:
    """What a docstring in Google's style says of the whole, and of each argument."""
    before, _, arguments = (inspect.getdoc(kind) or "").partition("\nArgs:\n")
    return _spell(paragraphs(before)), {
        name: _spell(one_line(text)) for name, text in _ARGUMENT.findall(arguments)
    }


def _spell(text: str) -> str:
    """A docstring's text as Markdown of a file: there is no ``None`` in it."""
    return text.replace("``None``", "not given").replace("``", "`")


def _default(schema: Mapping[str, Any]) -> str:
    if schema.get("format") == "duration" and "default" in schema:
        return f", default {code(f'{schema["default"]:g}s')}"
    match schema.get("default"):
        case None | "" | [] | dict():
            return ""
        case str(word):
            return f", default {code(word)}"
        case value:
            return f", default {code(json.dumps(value))}"


def _linked(name: str, schema: Mapping[str, Any], found: Mapping[str, _Section]) -> str:
    """A field's name, with a link to the section of the mappings that it holds."""
    for inner, _ in _references(schema):
        return f"[{name}](#{slug(found[inner].heading)})"
    return name


def _type(schema: Mapping[str, Any]) -> str:
    """A value's type in words; of a mapping, to which the name links, none."""
    if "$ref" in schema:
        return ""
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"] if choice != {"type": "null"})
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if "enum" in schema:
        return ", ".join(code(value) for value in schema["enum"])
    match schema["type"]:
        case "array":
            return _list(schema)
        case "object":
            return f"by name: {_type(_values(schema))}".removesuffix(": ")
        case "integer":
            return "positive integer" if schema.get("minimum") == 1 else f"integer{_limits(schema)}"
        case "number":
            return "positive number" if schema.get("exclusiveMinimum") == 0 else f"number{_limits(schema)}"
        case "boolean":
            return "boolean"
        case "string":
            is_time = schema.get("format") == "duration"
            return "duration" if is_time else "name" if "pattern" in schema else "text"
        case other:
            raise SystemExit(f"no words for the type {other} in {schema}; add them to {__name__}")


def _list(schema: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        first, second = (_type(item) for item in schema["prefixItems"])
        return f"pair of {_PLURAL.sub(r'\1s', first, count=1)}" if first == second else f"[{first}, {second}]"
    return f"list of {_PLURAL.sub(r'\1s', _type(schema['items']), count=1)}".removesuffix(" of ")


def _limits(schema: Mapping[str, Any]) -> str:
    """Lower limits; upper ones only catch mistakes in units."""
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']:g}"
    return f" from {schema['minimum']:g}" if "minimum" in schema else ""

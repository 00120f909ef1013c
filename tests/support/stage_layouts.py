"""Plans whose stages differ, for the model of the training tests with four layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from megatron_hexi.plan import Plan, read_plan

#: Beside `MODEL`; under a plan with tensor parallelism one rank must have the same padded vocabulary.
FOUR_LAYERS = ("--num-layers", "4")

#: All that a stage can offload.
EVERYTHING = ["parameters", "optimizer", "activations"]

#: By name: of each replica how many micro-batches it takes, stages with layers, units, ministages and whether
#: they offload, and the order of ministages, if it is another than one after the other.
LAYOUTS: dict[str, list[tuple[Any, ...]]] = {
    # Depth 3 beside depth 1.
    "depths": [
        (1, [([0, 1], "{ranks: [0]}"), ([1, 2], "{ranks: [1]}"), ([2, 4], "{ranks: [2]}")]),
        (1, [([0, 4], "{ranks: [3]}")]),
    ],
    # A unit of two ranks before and behind one of one.
    "units": [
        (2, [([0, 2], "{ranks: [0, 1]}"), ([2, 3], "{ranks: [2]}"), ([3, 4], "{ranks: [3, 4]}")]),
    ],
    # Samples and state in unequal shares.
    "samples": [
        (2, [
            ([0, 1], "{ranks: [0], samples: 1, state: 3}, {ranks: [1], samples: 1}"),
            ([1, 4], "{ranks: [2]}"),
        ]),
    ],
    # A domain of two groups before one of another cut.
    "domains": [
        (2, [
            ([0, 3], """{groups: [
              {segments: [[0, 50], [77, 127]],
               members: [{ranks: [0], tokens: 83, heads: [0, 5]}, {ranks: [1], tokens: 17, heads: [5, 6]}]},
              {segments: [[50, 77]], members: [{ranks: [2], tokens: 27, heads: [0, 6]}]}]}"""),
            ([3, 4], """{groups: [
              {segments: [[0, 127]],
               members: [{ranks: [3], tokens: 0, heads: [0, 2]},
                         {ranks: [4], tokens: 127, heads: [2, 6]}]}]}"""),
        ]),
    ],
    # Layers in turns: 0 and 3 are in the first stage, 1 and 2 in the second.
    "ministages": [
        (2, [
            ([0, 2], "{ranks: [0], samples: 1, state: 2}, {ranks: [1], samples: 1}", 2),
            ([2, 4], "{ranks: [2]}", 2),
        ]),
    ],
    # The same, with all that can be in host memory there.
    "offload": [
        (2, [
            ([0, 2], "{ranks: [0], samples: 1, state: 2}, {ranks: [1], samples: 1}", 2, EVERYTHING),
            ([2, 4], "{ranks: [2]}", 2, EVERYTHING),
        ]),
    ],
    # Whole micro-batches of a stage that keeps shares in host memory.
    "dealt": [
        (2, [
            (
                [0, 2],
                "{ranks: [0], micro_batches: 1, state: 2}, {ranks: [1], micro_batches: 1}",
                2,
                EVERYTHING,
            ),
            ([2, 4], "{ranks: [2]}", 2),
        ]),
    ],
    # The same layers, in interleaved 1F1B, with a unit of two ranks.
    "interleaved": [
        (2, [([0, 2], "{ranks: [0]}", 2), ([2, 4], "{ranks: [1, 2]}", 2)], "interleaved"),
    ],
}  # fmt: skip


def stage_layout(name: str, folder: Path, micro_batch_size: int = 2, job: str = "") -> Plan:
    """One of the layouts as a plan.

    Args:
        name: of the layout.
        folder: for its file.
        micro_batch_size: samples of a micro-batch.
        job: more of the plan's job, as YAML.
    """
    replicas = [
        {
            "micro_batches": micro_batches,
            **({"order": order[0]} if order else {}),
            "stages": [
                {
                    "layers": layers,
                    "domains": yaml.safe_load(f"[{domains}]"),
                    **dict(zip(("ministages", "offload"), copy.deepcopy(more), strict=False)),
                }
                for layers, domains, *more in stages
            ],
        }
        for micro_batches, stages, *order in LAYOUTS[name]
    ]
    document = {
        "version": 2,
        "workload": {"seq_length": 127, "heads": 6, "kv_heads": 2, "head_dim": 16, "layers": 4},
        "job": {"micro_batch_size": micro_batch_size, **(yaml.safe_load(job) or {})},
        "replicas": replicas,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return read_plan(path)

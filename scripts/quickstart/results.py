"""What the demo found: the trainings compared, as a table, a picture and a JSON document."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from megatron_hexi.plan import Plan
from megatron_hexi.report.pictures import save_picture
from megatron_hexi.report.unit_summary import unit_summaries
from megatron_hexi.spelling import spell_range
from megatron_hexi.text_file import write_text_atomically
from scripts.quickstart.job import Job
from scripts.quickstart.losses import draw_losses, relative_differences

#: Losses are fp32 sums, made in another order by each layout; training then makes such differences grow.
LOSS_LIMIT = 1e-5

_COLUMNS = ("rank", "group", "tokens", "share", "heads", "kv heads", "positions", "CPU time", "of all")
_CAPTION = (
    "heads and positions: first-last; CPU time: what a rank computes in an iteration (the median),\n"
    "its own part of the work and what every rank does alike: the optimizer's step"
)


@dataclass(frozen=True)
class Results:
    """The trainings, side by side.

    Args:
        losses_alone: one an iteration, on one rank.
        losses_uneven: likewise, under the plan.
        losses_stages: of the first iterations, where stages differ.
        loss_difference: the largest relative difference of the two.
        grad_norm_difference: likewise, of the gradients' norms.
        stages_difference: likewise, of the losses where stages differ.
        cpu_seconds_alone: processor time of an iteration (the median).
        cpu_seconds: likewise, of each rank under the plan.
    """

    losses_alone: list[float]
    losses_uneven: list[float]
    losses_stages: list[float]
    loss_difference: float
    grad_norm_difference: float
    stages_difference: float
    cpu_seconds_alone: float
    cpu_seconds: list[float]

    @property
    def problems(self) -> list[str]:
        """Why the demo has failed; nothing if it has not."""
        first, last = self.losses_uneven[0], statistics.mean(self.losses_uneven[-3:])
        found = []
        differences = {"uneven": self.loss_difference, "stages": self.stages_difference}
        for name, difference in differences.items():
            if not difference < LOSS_LIMIT:
                found.append(f"the losses of {name!r} differ by {difference:.1e}, more than {LOSS_LIMIT:.0e}")
        if not last < first:
            found.append(f"the loss did not fall: it was {first:.3f} and is {last:.3f}")
        return found


def read_results(folder: Path, job: Job) -> Results:
    """Compare trainings that are done, by what they wrote."""
    alone, uneven, stages = job.alone, job.uneven, job.stages
    reference = _read_metrics(folder / alone.metrics_of(0))
    apart = [line["loss"] for line in _read_metrics(folder / stages.metrics_of(stages.ranks - 1))]
    ranks = [_read_metrics(folder / uneven.metrics_of(rank)) for rank in range(uneven.ranks)]
    losses = [line["loss"] for line in ranks[-1]]
    expected = [line["loss"] for line in reference]
    norms = relative_differences(
        [line["grad_norm"] for line in ranks[-1]], [line["grad_norm"] for line in reference]
    )
    return Results(
        losses_alone=expected,
        losses_uneven=losses,
        losses_stages=apart,
        loss_difference=max(relative_differences(losses, expected)),
        grad_norm_difference=max(norms),
        stages_difference=max(relative_differences(apart, expected[: len(apart)])),
        cpu_seconds_alone=_cpu_seconds(reference),
        cpu_seconds=[_cpu_seconds(lines) for lines in ranks],
    )


def save_results(results: Results, folder: Path, titles: tuple[str, str, str]) -> Path:
    """Write ``results.json`` and the picture.

    Args:
        results: what was found.
        folder: the run folder.
        titles: of the training on one rank, of that under the plan, and where stages differ.

    Returns:
        The picture.
    """
    document = {**asdict(results), "loss_limit": LOSS_LIMIT, "problems": results.problems}
    write_text_atomically(folder / "results.json", json.dumps(document, indent=2) + "\n")
    picture = folder / "loss.png"
    losses = dict(
        zip(titles, (results.losses_alone, results.losses_uneven, results.losses_stages), strict=True)
    )
    save_picture(draw_losses(losses, LOSS_LIMIT), picture)
    return picture


def results_table(plan: Plan, results: Results) -> Table:
    """What each rank held, and how much it had to compute for it."""
    workload = plan.workload
    table = Table(caption=_CAPTION, caption_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("group", "positions") else "right")
    total = sum(results.cpu_seconds)
    rows = unit_summaries(plan)
    for row, seconds in zip(rows, results.cpu_seconds, strict=True):
        table.add_row(
            str(row.rank),
            row.group_name,
            str(row.tokens),
            f"{row.share:.1%}",
            spell_range(row.heads),
            spell_range(row.kv_heads),
            ", ".join(map(spell_range, row.segments)),
            f"{seconds:.3f} s",
            f"{seconds / total:.1%}",
            end_section=row is rows[-1] or rows[row.rank + 1].group != row.group,
        )
    table.add_row(
        "alone",
        "no plan",
        str(workload.seq_length),
        "100.0%",
        spell_range((0, workload.heads)),
        spell_range((0, workload.kv_heads)),
        spell_range((0, workload.seq_length)),
        f"{results.cpu_seconds_alone:.3f} s",
        "",
    )
    return table


def _read_metrics(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _cpu_seconds(lines: list[dict[str, float]]) -> float:
    return statistics.median(line["cpu_seconds"] for line in lines)

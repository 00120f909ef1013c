"""A run for a terminal: the numbers of the page, in short."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from megatron_hexi.report.lines import Report
from megatron_hexi.report.run_summary import Run, RunSpeed
from megatron_hexi.spelling import spell_seconds

_CAPTION = "seconds of the mean iteration; waiting includes transfers that no work hides; GiB: the most"


def run_report(run: Run) -> Report:
    """Return the run in a line, and each rank in a row."""
    return Report(Text(_headline(run)), run_table(run), *(Text(f"note: {note}") for note in run.notes))


def run_table(run: Run) -> Table:
    """Return a table of each rank's time and memory, with predictions where there are any."""
    predicted = any(rank.predicted_gib is not None for rank in run.ranks)
    table = Table(caption=_CAPTION, caption_justify="left")
    for name in ("rank", "device", "busy", "waiting", "idle share", "GiB"):
        table.add_column(name, justify="left" if name == "device" else "right")
        if predicted and name in ("busy", "waiting", "GiB"):
            table.add_column("predicted", justify="right")
    for rank in run.ranks:
        pairs = (
            (spell_seconds(rank.busy_s), spell_seconds(rank.predicted_busy_s)),
            (spell_seconds(rank.waited_s), spell_seconds(rank.predicted_wait_s)),
            (f"{rank.peak_gib:.2f}", "–" if rank.predicted_gib is None else f"{rank.predicted_gib:.2f}"),
        )
        busy, waiting, memory = (pair if predicted else pair[:1] for pair in pairs)
        table.add_row(str(rank.rank), Text(rank.device), *busy, *waiting, f"{rank.idle_share:.1%}", *memory)
    return table


def _headline(run: Run) -> str:
    measured, predicted = run.measured, run.predicted
    words = [
        (f"{spell_seconds(measured.iteration_s)} s each", predicted and spell_seconds(predicted.iteration_s)),
        (f"{measured.tokens_per_s:,.0f} tokens/s", predicted and f"{predicted.tokens_per_s:,.0f}"),
        *_throughput_words(measured, predicted),
        (
            f"idle share {measured.idle_share:.1%}",
            f"{predicted.idle_share:.1%}" if predicted and predicted.idle_share is not None else None,
        ),
    ]
    spelt = [measured_text + (f" (predicted {beside})" if beside else "") for measured_text, beside in words]
    timed = "" if run.timed == len(run.iterations) else f", of which {run.timed} are timed"
    return f"{len(run.iterations)} iterations{timed}: {', '.join(spelt)}"


def _throughput_words(measured: RunSpeed, predicted: RunSpeed | None) -> Iterator[tuple[str, str | None]]:
    """Yield tokens/s and TFLOP/s per GPU, and MFU, as far as known: measured, and predicted or ``None``."""
    spells = {
        "tokens_per_s_per_gpu": "{:,.0f} tokens/s per GPU",
        "model_tflops_per_gpu": "{:,.3g} model TFLOP/s per GPU",
        "mfu": "MFU {:.1%}",
    }
    for name, spell in spells.items():
        value, beside = getattr(measured, name), predicted and getattr(predicted, name)
        if value is not None:
            yield spell.format(value), None if beside is None else spell.format(beside)

"""Tables, pictures and plain values of plans, predictions and runs, one kind of output a file."""

from megatron_hexi.report.comparison import comparison_report
from megatron_hexi.report.estimate import estimate_report
from megatron_hexi.report.planned import planned_report
from megatron_hexi.report.run_summary import describe_run, run_report

__all__ = ["comparison_report", "describe_run", "estimate_report", "planned_report", "run_report"]

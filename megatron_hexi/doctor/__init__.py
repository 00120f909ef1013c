"""What is installed on a machine, what is wrong with it, and the remedy: what ``hexi doctor`` prints.

`facts` is what was found, as plain data; `collect` finds it (from `software`, `machine`, `kernel_choice`
and `patch_state`); `rules` and `agreement` judge it without looking at the machine again; `gather` brings the
facts of all ranks together; `report` shows them. It works where torch, Megatron or anything else is missing,
because what is missing is what it is asked for: nothing of them is imported before it is looked at.
"""

from megatron_hexi.doctor.examination import Findings, examine, launched_job
from megatron_hexi.doctor.facts import Checkout, Facts
from megatron_hexi.doctor.problems import Problem
from megatron_hexi.doctor.report import doctor_dict, doctor_report

__all__ = [
    "Checkout",
    "Facts",
    "Findings",
    "Problem",
    "doctor_dict",
    "doctor_report",
    "examine",
    "launched_job",
]

"""``hexi doctor``: packages, GPUs, kernels, patches and network of a machine, problems and remedies.

`facts` has the data classes; `gather` fills them (from `software` and `machine`) and sends those of all ranks
to rank 0; `rules` finds problems in them without looking at the machine again; `findings` shows them. It
works where torch, Megatron or anything else is missing: nothing is imported before it is looked for.
"""

from megatron_hexi.doctor.facts import Checkout, Facts
from megatron_hexi.doctor.findings import Problem, doctor_dict, doctor_report
from megatron_hexi.doctor.gather import Examination, examine, launched_job

__all__ = [
    "Checkout",
    "Examination",
    "Facts",
    "Problem",
    "doctor_dict",
    "doctor_report",
    "examine",
    "launched_job",
]

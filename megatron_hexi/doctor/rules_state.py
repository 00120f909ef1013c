"""Rules about a GPU's driver and settings: old drivers, power limits, clocks, MIG, persistence."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from megatron_hexi.doctor.facts import Facts
from megatron_hexi.doctor.problems import Problem

#: The first driver branch for each compute capability newer than R525: release notes,
#: https://docs.nvidia.com/datacenter/tesla/ (B200 and RTX Blackwell: 570).
_DRIVER_OF_CAPABILITY = {(12, 0): 570, (10, 3): 575, (10, 0): 570}
#: Part of the default power below which a limit is a setting, not rounding.
_POWER_SHARE = 0.98


def _too_old_for_gpu(facts: Facts) -> Iterator[Problem]:
    if facts.driver.version is None:
        return
    for name, capability in dict.fromkeys((gpu.name, gpu.capability) for gpu in facts.gpus):
        least = _DRIVER_OF_CAPABILITY.get(capability)
        if least is not None and Version(facts.driver.version).major < least:
            yield Problem(
                "error",
                f"driver {facts.driver.version} is older than {name}",
                f"install driver {least} or newer on these nodes; others may keep theirs",
            )


def _power(facts: Facts) -> Iterator[Problem]:
    for name, limit, default in dict.fromkeys(
        (state.name, state.power_limit_w, state.default_power_w) for state in facts.gpu_states
    ):
        if limit is not None and default is not None and limit < _POWER_SHARE * default:
            yield Problem(
                "warning",
                f"{name} may draw {limit:g} W of {default:g} W: slower than the catalogue's curves",
                f"nvidia-smi -pl {default:g} as root, or measure it as it is with hexi probe",
            )


def _slowed(facts: Facts) -> Iterator[Problem]:
    for name, reasons in dict.fromkeys((state.name, state.slowed) for state in facts.gpu_states):
        if reasons:
            yield Problem(
                "warning",
                f"clocks of a {name} are held down now: {', '.join(reasons)}",
                "see nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; cooling and power supply",
            )


def _mig(facts: Facts) -> Iterator[Problem]:
    if any(" MIG " in gpu.name for gpu in facts.gpus):
        return  # the job runs on slices
    cut = [state.name for state in facts.gpu_states if state.mig]
    if cut:
        yield Problem(
            "warning",
            f"MIG is on at {len(cut)} of {len(facts.gpu_states)} GPUs ({cut[0]}): NCCL has no NVLink there",
            "nvidia-smi -mig 0 as root, on these nodes, with no job running",
        )


def _persistence(facts: Facts) -> Iterator[Problem]:
    if any(state.persistence is False for state in facts.gpu_states):
        yield Problem(
            "note",
            "persistence mode is off: the driver loads anew for each job and forgets clocks and power limits",
            "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1 as root",
        )


STATE_RULES = (_too_old_for_gpu, _power, _slowed, _mig, _persistence)

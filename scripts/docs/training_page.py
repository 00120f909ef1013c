"""The page of what training reads: our group of Megatron's command line, and environment variables."""

from __future__ import annotations

from argparse import Action, ArgumentParser

from megatron_hexi.megatron.arguments import add_hexi_arguments
from scripts.docs.markdown import GENERATED_FROM, code, definitions, one_line

_HEAD = f"""\
# Flags and variables of training

{GENERATED_FROM.format(source="megatron_hexi/megatron/arguments.py and scripts/docs/training_page.py")}

Without `--hexi-plan`, Megatron trains as it does without this package. Megatron's own flags:
[its options under a plan](../options.md).

## Flags

"""

_VARIABLES_HEAD = """
## Environment variables

torchrun sets those of the first four lines; else they are taken from SLURM's.

"""

#: Name, and what it is read for.
VARIABLES = (
    ("RANK, WORLD_SIZE", "number of the process, and of processes"),
    ("LOCAL_RANK", "which GPU of its node a rank takes"),
    ("LOCAL_WORLD_SIZE", "ranks on this node"),
    ("MASTER_ADDR, MASTER_PORT", "where rank 0 is reached"),
    ("HEXI_SECRET", "the secret of a `megatron_hexi.elastic` job, without --secret-file"),
    ("GROUP_RANK, GROUP_WORLD_SIZE", "number of the node, and of nodes, under `megatron_hexi.elastic`"),
    ("TORCHELASTIC_USE_AGENT_STORE", "whether torchrun or rank 0 hosts the job's store"),
    (
        "TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_ERROR_FILE, SLURM_STEP_ID",
        "who of a node's ranks says what is wrong, and where torchrun reads it",
    ),
    ("SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_GTIDS", "in place of the first four variables"),
    (
        "HEXI_HOSTS, SLURMD_NODENAME",
        "a file of `hexi place`, and this host in it: in place of `RANK` and `MASTER_ADDR`",
    ),
    ("SLURM_HET_JOB_ID, SLURM_JOB_ID", "in place of `MASTER_PORT`, which is made from it"),
    (
        "SLURM_JOB_NODELIST_HET_GROUP_0, SLURM_STEP_NODELIST, SLURM_NODELIST, SLURM_JOB_NODELIST",
        "in place of `MASTER_ADDR`: the first host of the first one set",
    ),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "set to 1, if not set, with tensor or context parallelism"),
    ("CC", "Triton's C compiler; else gcc or clang on the path"),
    ("GLOO_SOCKET_IFNAME, NCCL_*, CUDA_VISIBLE_DEVICES", "read by the libraries; `hexi doctor` judges them"),
    ("OMP_NUM_THREADS", "read by torch; give 1 on the CPU, where ranks share cores"),
)


def training_page() -> str:
    """The page, in Markdown."""
    flags = definitions(map(_row, _actions()))
    rows = [(", ".join(map(code, names.split(", "))), meaning) for names, meaning in VARIABLES]
    return _HEAD + flags + _VARIABLES_HEAD + definitions(rows)


def _actions() -> list[Action]:
    """What our group adds to Megatron's parser."""
    parser = ArgumentParser(add_help=False)
    add_hexi_arguments(parser)
    return parser._actions  # argparse has no public way to list them


def _row(action: Action) -> tuple[str, str]:
    value = "|".join(action.choices) if action.choices else action.metavar
    flag = action.option_strings[0]
    return code(f"{flag} {value}" if value else flag), one_line(action.help or "")

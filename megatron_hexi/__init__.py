"""megatron-hexi: long-context training on mixed GPU clusters, as a plugin for Megatron-LM.

The packages, from what is known to what is done (arrows of import run one way, `lint-imports` checks):

* `cluster`   what the machines are: cluster file, links, device catalogue. No torch.
* `plan`      what every rank does: tokens, attention heads, groups. No torch.
* `record`    the record of a run. No torch.
* `cost`      how long and how much memory a plan takes on a cluster. No torch.
* `planner`   finds the plan: groupings, exact balance, CP-SAT, baselines, a lower bound. No torch.
* `replan`    the planner beside a job that runs: speeds from times, the plan refitted. No torch.
* `scenario`  hours or days of a cluster that changes: the plan kept, re-planned, and the best. No torch.
* `simulator` replays a plan event by event. No torch.
* `runtime`   carries a plan out with torch.distributed.
* `platform`  where it runs: CUDA as it is; the CPU, so that the same training runs without a GPU.
* `megatron`  the only package that knows Megatron: arguments, patches, batch, rotary, attention layer.
* `doctor`    what is installed, what is wrong with it and the remedy, on one machine or all of a job.
* `slurm`     which hosts of a Slurm job run which ranks of a plan. No torch.
* `probe`     measures a real cluster under torchrun or srun, and writes the cluster file.
* `convert`   weights between Hugging Face's format and Megatron's checkpoints.
* `testbed`   a mixed cluster emulated on one machine. Torch only in what its ranks run.
* `report`    tables, pictures, and the page of a run.
* `cli`       the command `hexi`.
"""

__version__ = "0.1.0"

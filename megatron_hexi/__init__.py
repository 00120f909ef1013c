"""megatron-hexi: long-context training on mixed GPU clusters, as a plugin for Megatron-LM.

The packages (imports go in one direction, checked by `lint-imports`):

* `cluster`    cluster file, links, device catalogue. No torch.
* `plan`       plans: tokens, attention heads, groups, split tables. No torch.
* `options`    Megatron's options beside a plan. No torch.
* `mesh`       stages that differ, as tables. No torch.
* `record`     the record of a run. No torch.
* `cost`       time and memory of a plan on a cluster. No torch.
* `planner`    the search for a plan, baselines, and a lower bound. No torch.
* `runtime`    training by a plan with torch.distributed.
* `platform`   CUDA, or the CPU in its place.
* `megatron`   patches of Megatron: arguments, batch, rotary embeddings, attention layer.
* `replan`     re-planning of a running job by measured speeds.
* `elastic`    jobs that survive the loss of nodes.
* `doctor`     examination of machines and jobs, with remedies.
* `slurm`      hosts of a Slurm job for the ranks of a plan. No torch.
* `kubernetes` manifests of a job.
* `probe`      measurement of a real cluster, which writes the cluster file.
* `convert`    weights between Hugging Face's format and Megatron's checkpoints.
* `lab`        simulator, scenarios, and a testbed that emulates a mixed cluster on one machine.
* `report`     tables, pictures, and the page of a run.
* `cli`        the command `hexi`.
"""

__version__ = "0.1.0"

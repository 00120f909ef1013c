"""The job of the demo: the model, its plan, and Megatron's command line for both."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

from megatron_hexi.plan import (
    Domain,
    Group,
    JobTerms,
    Member,
    Plan,
    Replica,
    Stage,
    Workload,
    proportional_domain,
    proportional_plan,
)
from scripts.quickstart.corpus import VOCABULARY

#: What the trainings read and write besides their own files, relative to the run folder.
PLAN = "plan.yaml"
STAGES = "stages.yaml"
#: What the training under the plan writes down, for `hexi report`.
RECORD = "record.jsonl"
DATA = "data/text"
WEIGHTS = "weights"

#: Relative speeds of the ranks, group by group: what a mixed cluster would be, on the ranks of one machine.
SPEEDS = ((4.0, 3.0, 2.0), (2.0,))

#: A prime sequence length, which no number of ranks divides; and head shares that cut through a KV head.
WORKLOAD = Workload(seq_length=509, heads=8, kv_heads=2, head_dim=24, layers=4, hidden_size=192)

_BATCH = 8
#: Iterations of the training whose stages differ: it shows that it is the same training.
_SHORT = 12

_MODEL = {
    "--num-layers": WORKLOAD.layers,
    "--hidden-size": WORKLOAD.hidden_size,
    "--ffn-hidden-size": 512,
    "--num-attention-heads": WORKLOAD.heads,
    "--group-query-attention": None,
    "--num-query-groups": WORKLOAD.kv_heads,
    "--seq-length": WORKLOAD.seq_length,
    "--max-position-embeddings": WORKLOAD.seq_length,
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--swiglu": None,
    "--disable-bias-linear": None,
    # Megatron's own are for wide models. In one as narrow as this, gradients then jump, and a jump makes the
    # rounding that tells two layouts apart a hundred times larger.
    "--init-method-std": 0.05,
    "--embedding-init-method-std": 0.5,
    "--untie-embeddings-and-output-weights": None,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
}

_TRAINING = {
    "--micro-batch-size": _BATCH,
    "--global-batch-size": _BATCH,
    "--lr": 4e-3,
    "--min-lr": 4e-4,
    "--lr-decay-style": "cosine",
    "--lr-warmup-fraction": 0.1,
    "--eval-iters": 0,
    "--eval-interval": 1_000_000,
    "--log-interval": 1,
}

_DATA = {
    "--data-path": DATA,
    "--data-cache-path": "data/cache",
    "--tokenizer-type": "NullTokenizer",  # the data set holds tokens already
    "--vocab-size": VOCABULARY,
    "--make-vocab-size-divisible-by": 2,  # so that two ranks can share it
    "--split": "100,0,0",
    "--num-workers": 0,
}

#: Weights only: what a run starts from, in a format that any layout reads.
_CHECKPOINT = {
    "--ckpt-format": "torch_dist",
    "--no-save-optim": None,
    "--no-save-rng": None,
    "--no-load-optim": None,
    "--no-load-rng": None,
}


#: A flag with its value, or with None where it takes none.
Options = dict[str, object]


@dataclass(frozen=True)
class Launch:
    """A training to start, in a run folder.

    Args:
        name: of its files: ``NAME.log`` and ``NAME-rank-N.jsonl``.
        title: what people call it.
        ranks: processes.
        iterations: how many it trains.
        options: more of the command line.
    """

    name: str
    title: str
    ranks: int
    iterations: int
    options: Options

    @property
    def command(self) -> list[str]:
        """What is started, in the run folder."""
        options = {
            "--train-iters": self.iterations,
            "--hexi-platform": "cpu",
            "--hexi-metrics": self.metrics_of("{rank}"),
            **self.options,
        }
        words = [str(word) for option in options.items() for word in option if word is not None]
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        return [*torchrun, "--nproc-per-node", str(self.ranks), "-m", "megatron_hexi.pretrain_gpt", *words]

    def metrics_of(self, rank: int | str) -> str:
        """Name of the file that ``--hexi-metrics`` writes on a rank."""
        return f"{self.name}-rank-{rank}.jsonl"


@dataclass(frozen=True)
class Job:
    """The trainings of the demo.

    Args:
        initial: saves the weights from which the other two start.
        alone: Megatron as it is, on one rank.
        uneven: under the plan, on all its ranks.
        stages: under a plan whose stages differ; only the first iterations.
    """

    initial: Launch
    alone: Launch
    uneven: Launch
    stages: Launch


def demo_plan() -> Plan:
    """Tokens and heads in proportion to the speeds."""
    return proportional_plan(WORKLOAD, [SPEEDS])


def stages_plan() -> Plan:
    """Two replicas: a stage on two tensor-parallel ranks and one on one rank; and one stage on two ranks.

    The first takes three quarters of the batch, and shares of the optimizer's state differ.
    """
    layers, tokens, heads = WORKLOAD.layers, WORKLOAD.seq_length, WORKLOAD.heads
    assert layers is not None

    def whole(*ranks: int, state: int = 1) -> Domain:
        member = Member(ranks, tokens, (0, heads // len(ranks)), state)
        return Domain((Group(((0, tokens),), (member,)),))

    deep = Stage((whole(0, 1),), layers=(0, 1)), Stage((whole(2, state=2),), layers=(1, layers))
    domain = proportional_domain(WORKLOAD, [[2.0], [1.0]], 3)
    micro_batch = _BATCH // 4
    return Plan(
        # Units of two sizes: each says its own.
        dataclasses.replace(WORKLOAD, tensor_parallel=0),
        (
            Replica(deep, micro_batches=3),
            Replica((Stage((domain,), layers=(0, layers)),), micro_batches=1),
        ),
        job=JobTerms(micro_batch_size=micro_batch, global_batch_size=_BATCH),
    )


def demo_job(iterations: int) -> Job:
    """The demo's trainings; plan and data lie in the run folder."""
    options = {**_MODEL, **_TRAINING, **_DATA, **_CHECKPOINT}
    start = {**options, "--load": WEIGHTS, "--finetune": None}
    # Megatron saves after a step at the earliest; this one changes nothing.
    standstill = {"--lr": 0.0, "--min-lr": 0.0, "--save": WEIGHTS, "--save-interval": 1}
    ranks, short = sum(map(len, SPEEDS)), min(iterations, _SHORT)
    # The plan says these; the learning rate falls as in the others.
    stages = {
        key: value for key, value in start.items() if key not in ("--micro-batch-size", "--global-batch-size")
    }
    stages |= {"--hexi-plan": STAGES, "--train-iters": iterations, "--exit-interval": short}
    return Job(
        Launch("initial", "initial weights", 1, 1, {**options, **standstill}),
        Launch("alone", "one rank, no plan", 1, iterations, start),
        Launch(
            *("uneven", f"{ranks} ranks, uneven plan", ranks, iterations),
            {**start, "--hexi-plan": PLAN, "--hexi-record": RECORD},
        ),
        Launch("stages", "5 ranks, stages differ", 5, short, stages),
    )

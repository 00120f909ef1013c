"""A model, and the job that trains it, as a text file of Megatron's arguments states them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_hexi.errors import HexiError, NoFlagError, raise_all
from megatron_hexi.kinds.decoder import VOCAB_MULTIPLE
from megatron_hexi.models.job import Fusible, Job
from megatron_hexi.models.model import Model
from megatron_hexi.options.job_terms import CHUNK_FLAGS, has_running_mean
from megatron_hexi.options.kinds import PlanKind, Refused, is_packed, masks_documents
from megatron_hexi.options.layer_features import model_features, query_size, resolve
from megatron_hexi.options.parser import Parsed, parse_and_judge
from megatron_hexi.options.plan_job import kind_of
from megatron_hexi.options.refusals import find_refused, replace_options
from megatron_hexi.options.registry import ADDED, class_of
from megatron_hexi.plan import Plan
from megatron_hexi.plan.flags import FLAGS, argument_name
from megatron_hexi.plan.recompute import stated_recompute
from megatron_hexi.shell.words import Word, place_of

#: Megatron's defaults of arguments that no plan chooses; those of the batch have none.
_MEGATRON_DEFAULTS = {
    "precision": "fp32",
    "distributed_optimizer": False,
    "overlap_gradients": False,
    "sequence_parallel": False,
}
#: Free flags that choose what the cost model tells apart: kernels (`_unfused`) and types (`_state_bytes`).
_KERNELS = frozenset(
    (
        *("--transformer-impl", "--no-rope-fusion", "--no-bias-swiglu-fusion", "--disable-jit-fuser"),
        *("--moe-permute-fusion", "--moe-grouped-gemm"),
        *("--cross-entropy-loss-fusion", "--no-gradient-accumulation-fusion"),
        *("--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype", "--grad-reduce-in-bf16"),
    )
)
#: Bytes of the types of optimizer state, by the words of the command line and by torch's.
_TYPE_BYTES = {
    "fp32": 4,
    "float32": 4,
    "fp16": 2,
    "float16": 2,
    "bf16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "uint8": 1,
}
#: Sizes of vocabularies: of tokenizers that have one only, and of others where nothing says it.
_TOKENIZERS = {None: 50257, "GPT2BPETokenizer": 50257}
_VOCABULARY = 131072
#: Features of plans beside which options are refused.
_FEATURES: dict[str, PlanKind] = {"unequal_replicas": "unequal", "unequal_stages": "stages"}


@dataclass(frozen=True)
class ArgumentTerms:
    """Terms of the job in a file of Megatron's arguments.

    Args:
        fields: values of `Job`'s fields, by name.
        free: flags that no plan depends on; they stay in the lines that start the training.
        restricting: flags that exclude some plans, each with the features of plans that it excludes (fields
            of `megatron_hexi.cluster.PlannerRules`).
        context_parallel: ranks that share a sequence, which the plan replaces; ``None``: not given.
        expert_parallel: number of ranks of an expert domain, which a plan keeps; ``None``: not given.
        chunks: the flag that cuts stages into chunks, with its value, which the plan replaces; empty: none.
        defaults: names of `fields` that have Megatron's default because the file says nothing.
        packed: whether sequences are packed of documents, which attend within themselves.
    """

    fields: Mapping[str, Any]
    free: Sequence[str]
    restricting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    context_parallel: int | None = None
    expert_parallel: int | None = None
    chunks: str = ""
    defaults: frozenset[str] = frozenset()
    packed: bool = False


def read_arguments(
    words: Sequence[Word], path: Path, plan: Plan | None = None, known: Sequence[str] = ()
) -> Parsed:
    """Parse Megatron's arguments as Megatron takes them, older spellings resolved.

    Args:
        words: the words of a file of arguments.
        path: the file, for errors.
        plan: a plan that is to support its options; ``None``: any plan that the planner makes.
        known: messages of mistakes that were found before, which are told with all others.

    Raises:
        HexiError: arguments that Megatron does not have or refuses, that no plan supports or that a model
            lacks; each by name.
    """
    if not known and not any(word.text.startswith("--") for word in words):
        raise HexiError(f"{path}: no arguments in it; write Megatron's, for example --num-layers 32")
    parsed, found = parse_and_judge(words, str(path))
    faults, args = [*known, *found], parsed.args
    for flag, value in ADDED.items():
        if flag not in parsed.given:  # the printed lines say it
            setattr(args, argument_name(flag), int(value))
    kinds: list[PlanKind] = ["planned"] if plan is None else ["planned", kind_of(plan)]
    for kind in kinds:
        replace_options(args, kind)
    options = find_refused(_in_own_stages(args), "planned")
    if plan is not None:
        options += find_refused(args if plan.is_repeated else _in_own_stages(args), kind_of(plan))
    faults += _messages(options, words, path)
    try:
        resolve(args, str(path))
    except HexiError as problem:
        faults.append(str(problem))
    if args.vocab_size is None and not args.padded_vocab_size and _has_tokenizer(args):
        args.vocab_size = _TOKENIZERS.get(args.tokenizer_type, _VOCABULARY)
    if plan is None:
        faults += [f"{path}: {flag} is missing; add it" for flag in _missing(parsed)]
    raise_all(faults)
    return parsed


def vocabulary_note(words: Sequence[Word], path: Path) -> list[str]:
    """Return the note on a vocabulary whose size only the tokenizer says; none where the file says it."""
    args = parse_and_judge(words, str(path))[0].args
    if args.vocab_size is not None or args.padded_vocab_size or not _has_tokenizer(args):
        return []
    size = _TOKENIZERS.get(args.tokenizer_type, _VOCABULARY)
    return [
        f"the size of the vocabulary is the tokenizer's; planned with {size}, add --vocab-size for another"
    ]


def _has_tokenizer(args: Namespace) -> bool:
    """Return whether a job is stated, which has its vocabulary from a tokenizer."""
    return any((args.seq_length, args.tokenizer_type, args.tokenizer_model, args.vocab_file))


def replaced_options(words: Sequence[Word], path: Path) -> list[str]:
    """Return a line for each option of a file that a plan of the planner's carries out in its own way."""
    parsed, _ = parse_and_judge(words, str(path))
    return replace_options(parsed.args, "planned")


def _missing(parsed: Parsed) -> Iterator[str]:
    """Yield the flags that a model needs, or its other flags, and that are not there."""
    args, given = parsed
    for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if getattr(args, name) is None and not (name == "vocab_size" and args.padded_vocab_size):
            yield f"--{name.replace('_', '-')}"
    if args.group_query_attention and FLAGS["kv_heads"] not in given:
        yield f"{FLAGS['kv_heads']} (beside --group-query-attention)"
    if args.position_embedding_type == "learned_absolute" and args.max_position_embeddings is None:
        yield "--max-position-embeddings, or --position-embedding-type rope,"


def _messages(options: Iterable[Refused], words: Sequence[Word], path: Path) -> list[str]:
    """Return a message for each refused option, with the line of its first mention, if it is in the file."""
    places = {word.text.partition("=")[0]: word for word in reversed(words)}
    at = {flag: place_of(str(path), [word]) for flag, word in places.items()}
    return list(dict.fromkeys(f"{at.get(option.option, path)}: {option.message}" for option in options))


def _in_own_stages(args: Namespace) -> Namespace:
    """Return the arguments without Megatron's pipeline, as of a training in stages that state their layers.

    The planner takes such stages where a model needs them.
    """
    return Namespace(**vars(args) | {"pipeline_model_parallel_size": 1})


def model_from_arguments(words: Sequence[Word], path: Path, known: Sequence[str] = ()) -> Model:
    """Return the model of a file of Megatron's arguments.

    Defaults are Megatron's: an MLP of 4 x hidden (8/3 x hidden, down to a multiple of 64, with --swiglu),
    LayerNorm, biases, learned positions, tied embeddings.

    Raises:
        HexiError: see `read_arguments`.
    """
    return _model(read_arguments(words, path, known=known).args, path)


def terms_from_arguments(
    words: Sequence[Word], path: Path, known: Sequence[str] = (), lora_rank: int | None = None
) -> ArgumentTerms:
    """Return the job of a file of Megatron's arguments, as far as `Job` has fields for it.

    A file with --seq-length states a job: options that it leaves out have Megatron's defaults (fp32, no
    distributed optimizer), except sizes and recomputation, which a plan chooses. A file without it states a
    model, and options that it leaves out stay open.

    Args:
        lora_rank: rank of the adapters that alone are trained, which no argument of Megatron says.

    Raises:
        HexiError: see `read_arguments`.
    """
    args, given = read_arguments(words, path, known=known)
    hidden = args.overlap_grad_reduce and (args.overlap_param_gather or not args.use_distributed_optimizer)
    terms = {
        "seq_length": args.seq_length,
        "micro_batch_size": args.micro_batch_size,
        "global_batch_size": args.global_batch_size,
        "tensor_parallel": args.tensor_model_parallel_size if FLAGS["tensor_parallel"] in given else None,
        "pipeline_parallel": (
            args.pipeline_model_parallel_size if FLAGS["pipeline_parallel"] in given else None
        ),
        "recompute": stated_recompute(args),
        "precision": "fp8" if args.fp8 else "bf16" if args.bf16 else "fp16" if args.fp16 else None,
        "fp8_recipe": args.fp8_recipe if args.fp8 else None,
        "distributed_optimizer": args.use_distributed_optimizer or None,
        "overlap_gradients": hidden or None,
        "sequence_parallel": args.sequence_parallel or None,
        "lora_rank": lora_rank,
        # Several replicas refuse it (`options.job_terms`).
        "data_parallel": 1 if args.num_experts and has_running_mean(args) else None,
    }
    unfused = _unfused(args)
    terms["state_bytes"] = _state_bytes(args)
    terms["gradient_bytes"] = 2 if getattr(args, "grad_reduce_in_bf16", False) and args.bf16 else None
    terms["unfused"] = None if unfused == Job.unfused else unfused
    stated = {name: value for name, value in terms.items() if value is not None}
    defaults = _MEGATRON_DEFAULTS.keys() - stated if args.seq_length is not None else ()
    stated |= {name: _MEGATRON_DEFAULTS[name] for name in _MEGATRON_DEFAULTS if name in defaults}
    free = tuple(flag for flag in sorted(given) if class_of(flag) == "free" and flag not in _KERNELS)
    size = args.context_parallel_size if FLAGS["context_parallel"] in given else None
    experts = args.expert_model_parallel_size if FLAGS["expert_parallel"] in given else None
    chunks = [
        f"{flag} {getattr(args, flag.removeprefix('--').replace('-', '_'))}"
        for flag in CHUNK_FLAGS
        if flag in given
    ]
    restricting = _restricting(args, words, path)
    return ArgumentTerms(
        stated, free, restricting, size, experts, " ".join(chunks), frozenset(defaults), is_packed(args)
    )


def _state_bytes(args: Namespace) -> int | None:
    """Return the bytes of a weight's optimizer state by its types; ``None``: the precision says them."""
    if not getattr(args, "use_precision_aware_optimizer", False):
        return None
    names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    types = [str(getattr(args, name)).removeprefix("torch.") for name in names]
    return None if set(types) <= {"fp32", "float32"} else sum(map(_TYPE_BYTES.__getitem__, types))


def _unfused(args: Namespace) -> tuple[Fusible, ...]:
    """Return the operations that Megatron carries out in several kernels, in the order of `Fusible`.

    Norms and optimizer are fused if Transformer Engine or apex is installed. Two arguments show that one is:
    layers of Transformer Engine need the former, gradient accumulation fusion needs either.
    """
    lacks = args.transformer_impl != "transformer_engine" and not args.gradient_accumulation_fusion
    apart: dict[Fusible, bool] = {
        "norms": lacks,
        "rotary": not args.apply_rope_fusion,
        # A value to clamp at is applied before the fused kernel.
        "activation": args.activation_func_clamp_value is not None
        or (args.swiglu and (args.disable_jit_fuser or not args.bias_swiglu_fusion)),
        "permutation": not args.moe_permute_fusion,
        "experts": not args.moe_grouped_gemm,
        "loss": not args.cross_entropy_loss_fusion,
        "gradients": not args.gradient_accumulation_fusion,
        "optimizer": lacks,
    }
    return tuple(operation for operation, is_apart in apart.items() if is_apart)


def _restricting(args: Namespace, words: Sequence[Word], path: Path) -> dict[str, tuple[str, ...]]:
    """Return the options that some features of plans refuse, with these features."""
    found: dict[str, tuple[str, ...]] = {}
    args = _in_own_stages(args)
    if args.num_experts:  # a plan says where experts are in stages with layers only
        raise_all(_messages(find_refused(args, "stages"), words, path))
        if has_running_mean(args):  # `options.job_terms` refuses them
            found["--moe-router-load-balancing-type global_aux_loss"] = ("ministages",)
        return found
    for feature, kind in _FEATURES.items():
        for option in dict.fromkeys(refused.option for refused in find_refused(args, kind)):
            found[option] = (*found.get(option, ()), feature)
    if masks_documents(args) and not found:  # no stage may deal whole micro-batches
        found["--dataloader-inter-document-masking"] = ("unequal_stages",)
    return found


def _model(args: Namespace, path: Path) -> Model:
    learned = args.position_embedding_type == "learned_absolute"
    padded = args.padded_vocab_size
    return Model(
        name=str(path),
        layers=args.num_layers,
        hidden_size=args.hidden_size,
        heads=args.num_attention_heads,
        kv_heads=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_dim=query_size(args),
        ffn_hidden_size=args.ffn_hidden_size,
        vocab_size=padded or args.vocab_size,
        vocab_multiple=1 if padded else args.make_vocab_size_divisible_by,
        learned_positions=args.max_position_embeddings if learned else 0,
        source=str(path),
        **model_features(args, str(path)),
    )


def model_flags(model: Model, seq_length: int) -> list[str]:
    """Return Megatron's flags for a model: those that `model_from_arguments` reads, and fixed ones.

    Args:
        model: the model. Constants that its shapes leave open (--norm-epsilon, --rotary-base) are Megatron's.
        seq_length: number of positions that are allowed, if positions are not learned.

    Raises:
        NoFlagError: Megatron has no flags for such layers.
    """
    lacking = {
        "norms behind attention and MLP": model.post_norms,
        "attention in chunks": model.span.in_chunks,
    }
    for what, has in lacking.items():
        if has:
            raise NoFlagError(f"model {model.name}: Megatron has no flags for {what}; choose another model")
    sizes = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.ffn_hidden_size,
        "--num-attention-heads": model.heads,
        "--kv-channels": model.head_dim,
        "--vocab-size": model.vocab_size,
        "--max-position-embeddings": model.learned_positions or seq_length,
        "--position-embedding-type": "learned_absolute" if model.learned_positions else "rope",
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
    }
    flags = [word for flag, value in sizes.items() for word in (flag, str(value))]
    kinds = kind_flags(model)
    flags += [word for flag, value in kinds.items() for word in (flag, str(value)) if word]
    if model.kv_heads < model.heads:
        flags += ["--group-query-attention", "--num-query-groups", str(model.kv_heads)]
    if model.vocab_multiple != VOCAB_MULTIPLE:
        flags += ["--make-vocab-size-divisible-by", str(model.vocab_multiple)]
    if model.norm_params(1) == 1:
        flags += ["--normalization", "RMSNorm"]
    if model.sinks:
        flags += ["--softmax-type", "learnable"]
    said = {
        "--swiglu": model.gated,
        "--disable-bias-linear": not model.biases,
        "--add-qkv-bias": model.qkv_bias and not model.biases,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--qk-layernorm": model.qk_norm and "--qk-layernorm" not in kinds,
        "--attention-output-gate": model.output_gate,
    }
    return flags + [flag for flag, wanted in said.items() if wanted]


def kind_flags(model: Model) -> dict[str, int | str]:
    """Return the flags of the kinds of a model's layers and of multi-token prediction, with their values.

    Raises:
        NoFlagError: Megatron has no flag for a size of a kind.
    """
    found: dict[str, int | str] = {
        "--hybrid-layer-pattern": model.pattern,
        "--mtp-num-layers": model.mtp_layers,
    }
    found = {flag: value for flag, value in found.items() if value}
    for kind in (model.experts, model.window, model.latent, model.state, model.short_conv):
        if kind is not None:
            found |= kind.flags(model)
    return found

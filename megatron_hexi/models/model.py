"""The shapes of a decoder, whose layers may differ, as far as time and memory depend on them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds import STATES, Experts, Latent, State, Window, state_of
from megatron_hexi.kinds.layer_list import MOST_LAYERS
from megatron_hexi.kinds.sizes import LARGEST, built
from megatron_hexi.models.layer_weights import layer_matrices, layer_vectors
from megatron_hexi.yaml_schema import short

#: Megatron pads the vocabulary to a multiple of this times the tensor-parallel size
#: (its --make-vocab-size-divisible-by).
VOCAB_MULTIPLE = 128

_SIZES = (
    *("layers", "hidden_size", "heads", "kv_heads", "head_dim", "ffn_hidden_size", "vocab_size"),
    *("learned_positions", "vocab_multiple", "mtp_layers"),
)
_MAY_BE_NONE = ("learned_positions", "mtp_layers")
#: Letters of a pattern of layers, as in Megatron's hybrid_layer_allocation.py; those of a state: `STATES`.
ATTENTION, DENSE, EXPERTS = "*-E"


class _Kind(NamedTuple):
    """A kind of layer: its letter in a pattern, empty without a pattern, and the parts that it has."""

    letter: str
    has_experts: bool
    has_window: bool
    has_state: bool


@dataclass(frozen=True)
class Model:
    """A decoder.

    Its layers are of one kind, or of a few (`kinds`): with experts or a dense MLP, with a window or without,
    with a state in place of attention. In a hybrid a layer is either of the two alone, as `pattern` says.

    Args:
        name: name of the model, for messages.
        layers: number of transformer layers.
        hidden_size: width of the model.
        heads: number of query heads of a layer.
        kv_heads: number of KV heads of a layer; divides `heads`.
        head_dim: size of one head.
        ffn_hidden_size: width inside the MLP of layers without experts.
        gated: whether the MLP has a gate beside its first matrix (SwiGLU), so three matrices instead of two.
        vocab_size: number of tokens of the vocabulary, without padding.
        tied_embeddings: whether input and output embedding are the same weights.
        biases: whether linear layers have biases (GPT-2, GPT-3) or not (Llama).
        qk_norm: whether each head's queries and keys are normalised (Qwen3).
        learned_positions: number of positions with a learned embedding; 0 for rotary embeddings.
        qkv_bias: whether queries, keys and values have biases where other linear layers have none (Qwen2).
        norm_biases: whether norms have biases (LayerNorm) or not (RMSNorm); ``None``: if linear layers do.
        output_gate: whether attention's output is gated, by as many further columns as there are queries.
        sinks: whether each head has a learned offset in its softmax.
        vocab_multiple: Megatron pads the vocabulary to a multiple of this times the tensor-parallel size.
        source: file or address from which the shapes are taken.
        experts: routed experts in place of a dense MLP, in all layers or some; ``None``: there are none.
        window: window of attention, in all layers or some; ``None``: there is none.
        latent: latent columns in place of a key and a value for each KV head; `head_dim` then is the size of
            a head's query and key, rotary columns included.
        post_norms: whether attention and MLP have norms behind them too (Gemma).
        mtp_layers: blocks of multi-token prediction behind the last layer: --mtp-num-layers.
        state: heads with a state, which take the place of attention in all layers or some.
        pattern: a letter for each layer of a hybrid, whose layers each have one part only, as in Megatron's
            --hybrid-layer-pattern: M or G for heads with a state, * attention, - a dense MLP, E experts.

    Raises:
        HexiError: a size that is no whole number above 0, heads that KV heads do not divide, or kinds
            that are not given for each layer.
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    gated: bool
    vocab_size: int
    tied_embeddings: bool
    biases: bool = False
    qk_norm: bool = False
    learned_positions: int = 0
    qkv_bias: bool = False
    norm_biases: bool | None = None
    output_gate: bool = False
    sinks: bool = False
    vocab_multiple: int = VOCAB_MULTIPLE
    source: str = ""
    experts: Experts | None = None
    window: Window | None = None
    latent: Latent | None = None
    post_norms: bool = False
    mtp_layers: int = 0
    state: State | None = None
    pattern: str = ""

    def __post_init__(self) -> None:
        for field in _SIZES:
            value = getattr(self, field)
            least = 0 if field in _MAY_BE_NONE else 1
            most = MOST_LAYERS if field in ("layers", "mtp_layers") else LARGEST
            if type(value) is not int or not least <= value <= most:
                raise HexiError(
                    f"model {self.name}: {field} = {short(value)}; write a whole number from {least} to "
                    f"{most}"
                )
        if self.heads % self.kv_heads:
            raise HexiError(
                f"model {self.name}: kv_heads = {self.kv_heads} does not divide the {self.heads} heads; "
                "give a number that does"
            )
        self._check_kinds()

    def _check_kinds(self) -> None:
        kinds = (("experts", Experts), ("window", Window), ("latent", Latent))
        for field, kind in kinds:
            object.__setattr__(self, field, built(kind, getattr(self, field)))
        object.__setattr__(self, "state", state_of(self.state))
        for field, of_layers in (("experts", self.experts), ("window", self.window), ("state", self.state)):
            given = len(of_layers.layers) if of_layers is not None else 0
            if given not in (0, self.layers):
                raise HexiError(
                    f"model {self.name}: {field}: layers has {given} entries, the model has {self.layers} "
                    "layers; give one for each, or none"
                )
        if self.latent is not None and self.kv_heads != self.heads:
            raise HexiError(
                f"model {self.name}: kv_heads = {self.kv_heads}: in latent attention each of the "
                f"{self.heads} heads has a key; kv_heads must be {self.heads}"
            )
        if self.latent is not None and self.latent.rotary_dim >= self.head_dim:
            raise HexiError(
                f"model {self.name}: head_dim = {self.head_dim} with {self.latent.rotary_dim} rotary "
                "columns; give the size of a whole query, rotary columns included"
            )
        if self.state is not None and self.latent is not None:
            raise HexiError(f"model {self.name}: state beside latent attention is not known; leave it out")
        if self.pattern:
            self._check_pattern()

    def _check_pattern(self) -> None:
        """Refuse a pattern that does not say what each layer is, or parts that a pattern does not have."""
        state = None if self.state is None else self.state.letter
        allowed = {ATTENTION, DENSE, EXPERTS if self.experts else DENSE, state or ATTENTION}
        said = f"model {self.name}: pattern {short(self.pattern)}"
        if len(self.pattern) != self.layers:
            raise HexiError(
                f"{said} has {len(self.pattern)} letters, the model has {self.layers} layers; give one "
                "for each"
            )
        if not set(self.pattern) <= allowed:
            unknown = sorted(set(self.pattern) - allowed)[0]
            raise HexiError(
                f"{said}: {short(unknown)}: use {', '.join(sorted(allowed))}, or describe its part"
            )
        for part, letter in (("state", state), ("experts", EXPERTS)):
            if getattr(self, part) is not None and letter and letter not in self.pattern:
                raise HexiError(f"{said} has no {letter}; leave {part} out")
        of_layers = [part for part in (self.experts, self.state) if part is not None and part.layers]
        if self.window or self.latent or self.mtp_layers or self.post_norms or of_layers:
            raise HexiError(
                f"{said}: with windows, latent attention, multi-token prediction, norms behind parts or a "
                "list of layers it is not known; leave these out"
            )

    @cached_property
    def kinds(self) -> tuple[Model, ...]:
        """For each kind of layer a model of its layers only, in order of the kinds' first layers."""
        return tuple(
            self._of_kind(kind, layers=self._kind_of_layers.count(kind))
            for kind in dict.fromkeys(self._kind_of_layers)
        )

    @cached_property
    def layers_before(self) -> tuple[tuple[int, ...], ...]:
        """For each kind, the number of its layers before each layer, and in all: `layers` + 1 numbers."""
        return tuple(
            tuple(itertools.accumulate((other == kind for other in self._kind_of_layers), initial=0))
            for kind in dict.fromkeys(self._kind_of_layers)
        )

    @cached_property
    def kind_of_layers(self) -> tuple[int, ...]:
        """For each layer, the number of its kind in `kinds`."""
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(self._kind_of_layers))}
        return tuple(numbers[kind] for kind in self._kind_of_layers)

    @cached_property
    def has_state(self) -> tuple[bool, ...]:
        """Whether a state passes along the sequence, for each layer."""
        return tuple(kind.has_state for kind in self._kind_of_layers)

    @cached_property
    def layers_run(self) -> tuple[int, ...]:
        """Number of layers of each kind that a token passes, those of multi-token prediction among them."""
        counts = [kind.layers for kind in self.kinds]
        counts[self.kind_of_layers[-1]] += self.mtp_layers
        return tuple(counts)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all layers are of one kind."""
        return len(set(self._kind_of_layers)) == 1

    @cached_property
    def _kind_of_layers(self) -> list[_Kind]:
        """The kind of each layer."""
        if self.pattern:
            return [_Kind(letter, letter == EXPERTS, False, letter in STATES) for letter in self.pattern]
        parts = (
            (False,) * self.layers if of_layers is None else of_layers.layers or (True,) * self.layers
            for of_layers in (self.experts, self.window, self.state)
        )
        # A window is of attention, which layers with a state lack.
        return [
            _Kind("", has_experts, has_window and not has_state, has_state)
            for has_experts, has_window, has_state in zip(*parts, strict=True)
        ]

    def _of_kind(self, kind: _Kind, layers: int) -> Model:
        if layers == self.layers and not self.mtp_layers:
            return self
        return replace(
            self,
            layers=layers,
            experts=replace(self.experts, layers=()) if kind.has_experts and self.experts else None,
            window=replace(self.window, layers=()) if kind.has_window and self.window else None,
            state=replace(self.state, layers=()) if kind.has_state and self.state else None,
            pattern=kind.letter * layers,
            mtp_layers=0,
        )

    @property
    def has_attention(self) -> bool:
        """Whether the layers, which are of one kind, have attention."""
        return self.state is None and self.pattern[:1] in ("", ATTENTION)

    @property
    def has_mlp(self) -> bool:
        """Whether the layers, which are of one kind, have an MLP, dense or of experts."""
        return self.pattern[:1] in ("", DENSE, EXPERTS)

    @property
    def parts(self) -> int:
        """Number of parts of a layer, each with a norm before it and a residual addition behind it."""
        return 1 if self.pattern else 2

    @property
    def value_dim(self) -> int:
        """Size of one head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def kernel_dim(self) -> int:
        """Size to which kernels pad query, key and value of a head (runtime/attention_blocks.py)."""
        return max(self.head_dim, self.value_dim)

    def padded_vocab(self, tensor_parallel: int = 1) -> int:
        """Return the size of the vocabulary as Megatron pads it."""
        multiple = self.vocab_multiple * tensor_parallel
        return math.ceil(self.vocab_size / multiple) * multiple

    def matrix_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of one layer's matrices on one tensor-parallel rank, without routed experts.

        QKV: hidden x (heads + 2 kv) x D, an output gate as many as the queries; projection: heads x
        D x hidden; MLP: 2 (gated: 3) x hidden x ffn; with experts the shared ones, and the router, hidden x
        experts. Megatron gives every rank at least one KV head, and the whole router.

        Raises:
            ValueError: the layers are of several kinds; see `kinds`.
        """
        if not self.is_uniform:
            raise ValueError(f"the layers of {self.name} are of {len(self.kinds)} kinds; ask each of `kinds`")
        return layer_matrices(self, tensor_parallel)

    @property
    def expansion_params(self) -> int:
        """Number of weights of the matrix from latent columns to one head's key and value, C (N + V)."""
        latent = self.latent
        if latent is None:
            return 0
        return latent.kv_rank * (self.head_dim - latent.rotary_dim + latent.value_dim)

    @property
    def down_params(self) -> int:
        """Number of weights of a layer's matrices down to its latent columns; each rank has them whole.

        Megatron's MLASelfAttention runs them on the rank's own rows under sequence parallelism.
        """
        latent = self.latent
        if latent is None:
            return 0
        return self.hidden_size * (latent.kv_rank + latent.rotary_dim + (latent.query_rank or 0))

    def vector_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of one layer's norms and biases on one rank, without routed experts.

        Norms and the biases of row-parallel layers (projection, second of the MLP) are on every rank.
        """
        return layer_vectors(self, tensor_parallel)

    def expert_params(self, parts: int = 1) -> int:
        """Return the weights of one routed expert, or of one of `parts` slices of it; 0 without experts."""
        if self.experts is None:
            return 0
        width, first = self.experts.ffn_hidden_size, 2 if self.gated else 1
        biases = first * width // parts + self.hidden_size if self.biases else 0
        return self.expert_matrices // parts + biases

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP that every token goes through: the dense one, or that of shared experts."""
        if not self.has_mlp:
            return 0
        return self.ffn_hidden_size if self.experts is None else self.experts.shared_ffn_hidden_size

    @property
    def expert_matrices(self) -> int:
        """Number of weights of the matrices of one routed expert."""
        width = 0 if self.experts is None else self.experts.ffn_hidden_size
        return (3 if self.gated else 2) * self.hidden_size * width

    def norm_params(self, width: int) -> int:
        """Return the weights of a norm over `width` values: a scale, and a bias with LayerNorm."""
        has_bias = self.biases if self.norm_biases is None else self.norm_biases
        return width * (2 if has_bias else 1)

    def layer_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of one layer on one tensor-parallel rank, without those of routed experts."""
        return self.matrix_params(tensor_parallel) + self.vector_params(tensor_parallel)

    def vocab_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of one matrix over the padded vocabulary, input or output, on one rank."""
        return self.padded_vocab(tensor_parallel) // tensor_parallel * self.hidden_size

    @property
    def total_params(self) -> int:
        """Number of weights of the whole model, without multi-token prediction."""
        routed = sum(
            kind.layers * kind.experts.count * kind.expert_params() for kind in self.kinds if kind.experts
        )
        return self._params_without_experts + routed

    @property
    def active_params(self) -> int:
        """Number of weights that a token goes through, without its row of the input embedding."""
        routed = sum(
            kind.layers * kind.experts.active * kind.expert_params() for kind in self.kinds if kind.experts
        )
        embedding = self.vocab_params() + self.learned_positions * self.hidden_size
        tied = self.vocab_params() * self.tied_embeddings
        return self._params_without_experts - embedding + tied + routed

    @property
    def _params_without_experts(self) -> int:
        embeddings = self.vocab_params() * (1 if self.tied_embeddings else 2)
        positions = self.learned_positions * self.hidden_size
        layers = sum(kind.layers * kind.layer_params() for kind in self.kinds)
        return layers + embeddings + positions + self.norm_params(self.hidden_size)

    @property
    def mtp_params(self) -> int:
        """Number of weights of all blocks of multi-token prediction."""
        if not self.mtp_layers:
            return 0
        last = self._of_kind(self._kind_of_layers[-1], layers=1)
        routed = last.experts.count * last.expert_params() if last.experts else 0
        return self.mtp_layers * (last.layer_params() + routed + self.prediction_params())

    def prediction_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of a block of multi-token prediction beside its layer, on one rank.

        The projection of hidden state and embedding, 2h x h, and three norms.
        """
        return self.projection_params(tensor_parallel) + 3 * self.norm_params(self.hidden_size)

    def projection_params(self, tensor_parallel: int = 1) -> int:
        """Return the weights of the projection before a layer of multi-token prediction, on one rank."""
        return 2 * self.hidden_size**2 // tensor_parallel

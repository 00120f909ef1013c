"""A decoder by the kinds of its layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.attention import SoftmaxAttention
from megatron_hexi.kinds.experts import Experts
from megatron_hexi.kinds.latent import Latent
from megatron_hexi.kinds.layer_list import MOST_LAYERS
from megatron_hexi.kinds.mlp import Mlp
from megatron_hexi.kinds.part import LARGEST, LayerPart, built
from megatron_hexi.kinds.short_conv import ShortConv
from megatron_hexi.kinds.state import State
from megatron_hexi.kinds.states import STATES, state_of
from megatron_hexi.kinds.window import ALL_KEYS, Window
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
_ATTENTION, _MLP, _NOTHING = SoftmaxAttention(), Mlp(), LayerPart()
#: Fields that describe a kind of layer, with what builds it from its fields.
_BUILT: Mapping[str, Callable[[Any], Any]] = {
    "experts": partial(built, Experts),
    "window": partial(built, Window),
    "latent": partial(built, Latent),
    "state": state_of,
    "short_conv": partial(built, ShortConv),
}
#: Those of them that only some layers may have.
_LISTED = ("experts", "window", "state")


class LayerKind(NamedTuple):
    """A kind of layer: its letter in a pattern, empty without one, and the fields of `_BUILT` that it has.

    Layers that stay in bf16 where others are in fp8 are of another kind.
    """

    letter: str
    has: frozenset[str]
    in_bf16: bool = False


@dataclass(frozen=True)
class Decoder:
    """A decoder, whose layers are of one kind, or of a few (`kinds`).

    Layers have experts or a dense MLP, a window or none, a state or attention. In a hybrid a layer is either
    of the two parts alone, as `pattern` says.

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
        short_conv: short convolutions, which take the place of attention in some layers of a hybrid.
        pattern: a letter for each layer of a hybrid, whose layers each have one part only, as in Megatron's
            --hybrid-layer-pattern: M or G for heads with a state, C a short
            convolution, * attention, - a dense MLP, E experts.
        ends_in_bf16: numbers of the first and of the last layers that stay in bf16 in a job in fp8
            (--num-layers-at-start-in-bf16, --num-layers-at-end-in-bf16); blocks of multi-token prediction
            count as the last layer.

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
    short_conv: ShortConv | None = None
    ends_in_bf16: tuple[int, int] = (0, 0)

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
        for field, build in _BUILT.items():
            object.__setattr__(self, field, build(getattr(self, field)))
        object.__setattr__(self, "ends_in_bf16", tuple(self.ends_in_bf16))  # a list where it was JSON
        for field in _LISTED:
            of_layers = getattr(self, field)
            given = len(of_layers.layers) if of_layers is not None else 0
            if given not in (0, self.layers):
                raise HexiError(
                    f"model {self.name}: {field}: layers has {given} entries, but the model has "
                    f"{self.layers} layers; give one for each, or none"
                )
        if self.latent is not None:
            self.latent.check(self)
        if self.state is not None and self.latent is not None:
            raise HexiError(f"model {self.name}: state and latent exclude each other; leave one out")
        if self.pattern:
            self._check_pattern()
        elif self.short_conv is not None:
            raise HexiError(f"model {self.name}: short_conv without a pattern of layers; give both or none")

    def _check_pattern(self) -> None:
        """Refuse a pattern that does not say what each layer is, or parts that a pattern does not have."""
        state = None if self.state is None else self.state.letter
        conv = None if self.short_conv is None else self.short_conv.letter
        allowed = {
            ATTENTION,
            DENSE,
            EXPERTS if self.experts else DENSE,
            state or ATTENTION,
            conv or ATTENTION,
        }
        said = f"model {self.name}: pattern {short(self.pattern)}"
        if len(self.pattern) != self.layers:
            raise HexiError(
                f"{said} has {len(self.pattern)} letters, but the model has {self.layers} layers; give one "
                "for each"
            )
        if not set(self.pattern) <= allowed:
            unknown = sorted(set(self.pattern) - allowed)[0]
            raise HexiError(
                f"{said}: {short(unknown)}: use {', '.join(sorted(allowed))}, or describe its part"
            )
        for part, letter in (("state", state), ("short_conv", conv), ("experts", EXPERTS)):
            if getattr(self, part) is not None and letter and letter not in self.pattern:
                raise HexiError(f"{said} has no {letter}; leave {part} out")
        of_layers = [part for part in (self.experts, self.state) if part is not None and part.layers]
        if self.window or self.latent or self.mtp_layers or self.post_norms or of_layers:
            raise HexiError(
                f"{said}: does not work with window, latent, mtp_layers, post_norms, or layers of experts or "
                "state; leave these out"
            )

    @cached_property
    def kinds(self) -> tuple[Self, ...]:
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
    def layers_run(self) -> tuple[int, ...]:
        """Number of layers of each kind that a token passes, those of multi-token prediction among them."""
        counts = [kind.layers for kind in self.kinds]
        counts[self.kind_of_layers[-1]] += self.mtp_layers
        return tuple(counts)

    @cached_property
    def has_state(self) -> tuple[bool, ...]:
        """Whether a state passes along the sequence, for each layer."""
        return tuple("state" in kind.has for kind in self._kind_of_layers)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all layers are of one kind."""
        return len(set(self._kind_of_layers)) == 1

    @cached_property
    def _kind_of_layers(self) -> list[LayerKind]:
        """The kind of each layer."""
        first, last = self.ends_in_bf16
        ends = {*range(first), *range(self.layers - last, self.layers)}
        kinds = enumerate(self._kinds_by_part())
        return [kind._replace(in_bf16=layer in ends) for layer, kind in kinds]

    def _kinds_by_part(self) -> list[LayerKind]:
        """Return the kind of each layer as far as it is one of parts."""
        if self.pattern:
            of_letter: dict[str, frozenset[str]] = {
                **dict.fromkeys((ATTENTION, DENSE), frozenset()),
                EXPERTS: frozenset({"experts"}),
                ShortConv.letter: frozenset({"short_conv"}),
                **dict.fromkeys(STATES, frozenset({"state"})),
            }
            return [LayerKind(letter, of_letter[letter]) for letter in self.pattern]
        listed = {field: getattr(self, field) for field in _LISTED}
        found = []
        for layer in range(self.layers):
            has = {
                field for field, part in listed.items() if part and (not part.layers or part.layers[layer])
            }
            # A window is of attention, which layers with a state lack.
            found.append(LayerKind("", frozenset(has - {"window"} if "state" in has else has)))
        return found

    def _of_kind(self, kind: LayerKind, layers: int) -> Self:
        if layers == self.layers and not self.mtp_layers:
            return self
        parts = {field: getattr(self, field) if field in kind.has else None for field in _LISTED}
        alone: dict[str, Any] = {
            field: None if part is None else replace(part, layers=()) for field, part in parts.items()
        }
        alone["short_conv"] = self.short_conv if "short_conv" in kind.has else None
        alone["ends_in_bf16"] = (layers * kind.in_bf16, 0)
        return replace(self, layers=layers, pattern=kind.letter * layers, mtp_layers=0, **alone)

    @cached_property
    def without_predictions(self) -> Self:
        """The model without blocks of multi-token prediction."""
        return replace(self, mtp_layers=0) if self.mtp_layers else self

    @property
    def stays_in_bf16(self) -> bool:
        """Whether the layers, which are of one kind, stay in bf16 in a job in fp8."""
        return self._kind_of_layers[0].in_bf16

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage needs the input embedding too, if only for predictions of further tokens."""
        return self.tied_embeddings or self.mtp_layers > 0

    @property
    def expert_count(self) -> int | None:
        """Number of experts of a layer with experts, as plans state it; ``None`` without any."""
        return None if self.experts is None else self.experts.count

    @property
    def uncut(self) -> str:
        """Reason why a stage's layers are not cut into chunks; empty where they may be."""
        if self.pattern:
            return "a pattern's layers are not cut into chunks yet"
        return "chunks are not planned with multi-token prediction" if self.mtp_layers else ""

    @cached_property
    def spans_groups(self) -> bool:
        """Whether several groups of ranks may divide a sequence in all layers."""
        return all(kind.mixer.spans_groups for kind in self.kinds)

    @cached_property
    def attention(self) -> SoftmaxAttention:
        """The attention of the model, in proportion to whose heads plans cut all layers."""
        return self.latent or _ATTENTION

    @cached_property
    def span(self) -> Window:
        """The keys that a query of the layers, which are of one kind, sees."""
        return self.window or ALL_KEYS

    @cached_property
    def mixer(self) -> LayerPart:
        """The part of the layers, which are of one kind, that mixes tokens."""
        found = self.state or self.short_conv or self.attention
        return _NOTHING if self.pattern[:1] in (DENSE, EXPERTS) else found

    @cached_property
    def feed_forward(self) -> LayerPart:
        """The MLP or the experts of the layers, which are of one kind."""
        return self.experts or _MLP if self.pattern[:1] in ("", DENSE, EXPERTS) else _NOTHING

    @cached_property
    def parts(self) -> tuple[LayerPart, ...]:
        """The parts of a layer, each with a norm before it and a residual addition behind it."""
        return tuple(part for part in (self.mixer, self.feed_forward) if part is not _NOTHING)

    @property
    def routed(self) -> tuple[Experts, ...]:
        """The routed experts of the layers, which are of one kind."""
        return () if self.experts is None else (self.experts,)

    @property
    def scans(self) -> tuple[State, ...]:
        """The heads with a state of the layers, which are of one kind."""
        return () if self.state is None else (self.state,)

    @property
    def titles(self) -> tuple[str, str]:
        """Names of mixer and feed-forward part in tables; empty for a part that the layers do not have."""
        mixer = self.mixer.title if self.window is None else f"window of {self.window.size:,}"
        return mixer, self.feed_forward.title if self.experts is None else f"{self.experts.count} experts"

    def norm_params(self, width: int) -> int:
        """Return the number of weights of a norm over `width` values: a scale, with LayerNorm also a bias."""
        has_bias = self.biases if self.norm_biases is None else self.norm_biases
        return width * (2 if has_bias else 1)

    @property
    def value_dim(self) -> int:
        """Size of one head's value."""
        return self.attention.value_size(self)

    @property
    def kernel_dim(self) -> int:
        """Size to which kernels pad query, key and value of a head (runtime/attention_blocks.py)."""
        return max(self.head_dim, self.value_dim)

"""Names of a model's kinds of layers, for people."""

from __future__ import annotations

from megatron_hexi.models import Model


def kind_names(model: Model) -> tuple[str, ...]:
    """Return what tells each kind of layer from the others; one empty name where all are alike."""
    if model.is_uniform:
        return ("",)
    # In a hybrid a layer is one part, which is its name; else parts are named in which layers may differ.
    mixes = model.window is not None or model.state is not None or bool(model.pattern)
    has_mlps = model.experts is not None or bool(model.pattern)
    names = []
    for kind in model.kinds:
        words = [_mixing(kind)] * mixes
        words += [f"{kind.experts.count} experts" if kind.experts else "dense MLP"] * (
            has_mlps and kind.has_mlp
        )
        names.append(" and ".join(filter(None, words)))
    return tuple(names)


def _mixing(kind: Model) -> str:
    """Return the name of what passes between tokens in layers of one kind; empty: nothing does."""
    if kind.state is not None:
        return kind.state.title
    if not kind.has_attention:
        return ""
    return f"window of {kind.window.size:,}" if kind.window else "full attention"

"""Names of a model's kinds of layers, for people."""

from __future__ import annotations

from megatron_hexi.cost import Model


def kind_names(model: Model) -> tuple[str, ...]:
    """Return what tells each kind of layer from the others; one empty name where all are alike."""
    if model.is_uniform:
        return ("",)
    has_windows, has_experts = model.window is not None, model.experts is not None
    names = []
    for kind in model.kinds:
        words = [f"window of {kind.window.size:,}" if kind.window else "full attention"] * has_windows
        words += [f"{kind.experts.count} experts" if kind.experts else "dense MLP"] * has_experts
        names.append(" and ".join(words))
    return tuple(names)

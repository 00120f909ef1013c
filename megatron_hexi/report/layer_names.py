"""Names of a model's kinds of layers, for people."""

from __future__ import annotations

from megatron_hexi.models import Model

#: Names of the parts of a layer as all decoders have them.
_USUAL = ("full attention", "dense MLP")


def kind_names(model: Model) -> tuple[str, ...]:
    """Return what tells each kind of layer from the others; one empty name where all are alike."""
    if model.is_uniform:
        return ("",)
    # In a hybrid a layer is one part, which is its name; else parts are named in which layers may differ.
    columns = zip(*(kind.titles for kind in model.kinds), strict=True)
    named = [titles for titles, usual in zip(columns, _USUAL, strict=True) if set(titles) != {usual}]
    return tuple(" and ".join(filter(None, words)) for words in zip(*named, strict=True))

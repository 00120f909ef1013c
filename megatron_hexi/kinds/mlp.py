"""Dense MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_hexi.kinds.part import Columns, LayerPart, WeightMatrix

if TYPE_CHECKING:
    from megatron_hexi.kinds.decoder import Decoder


class Mlp(LayerPart):
    """An MLP that every token goes through."""

    title = "dense MLP"
    norm_apart = (False, True)

    def width_inside(self, model: Decoder) -> int:
        """Return the width inside the MLP that every token goes through."""
        return model.ffn_hidden_size

    def matrices(self, model: Decoder, width: int) -> tuple[WeightMatrix, ...]:
        """Return the first matrix, which includes the gate's, and the second matrix."""
        inside, hidden = self.width_inside(model) / width, model.hidden_size
        return WeightMatrix(hidden, (1 + model.gated) * inside), WeightMatrix(inside, hidden)

    def vectors(self, model: Decoder, width: int) -> int:
        """Return the number of weights in biases; every rank has the row-parallel matrix's whole bias."""
        inside = self.width_inside(model)
        first = (1 + model.gated) * inside // width
        return (first + model.hidden_size * bool(inside)) * model.biases

    def row_columns(self, model: Decoder, width: int, row_parts: int, sends_latent: bool) -> Columns:
        """Return the `Columns` of a row: the first output f (gated 2 f), and the activation f."""
        inside = self.width_inside(model) / width
        first = (1 + model.gated) * inside
        return Columns(activated=inside, inputs=inside, outputs=first, kept=first)

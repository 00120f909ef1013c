"""Kinds of layers: what each is made of, what its file of arguments says, and what its flags are.

A file holds one kind: a part of a layer (`LayerPart`), over which the cost model sums weights, products and
columns. A kind with a state says in its file what a scan computes, reads and keeps, so a further one is a
class of `State` and an entry of `STATES`.
"""

from megatron_hexi.kinds.delta_net import DeltaNet
from megatron_hexi.kinds.experts import Experts
from megatron_hexi.kinds.latent import Latent
from megatron_hexi.kinds.mamba import Mamba
from megatron_hexi.kinds.short_conv import ShortConv
from megatron_hexi.kinds.state import State
from megatron_hexi.kinds.states import STATES, state_of
from megatron_hexi.kinds.window import Window

__all__ = ["STATES", "DeltaNet", "Experts", "Latent", "Mamba", "ShortConv", "State", "Window", "state_of"]

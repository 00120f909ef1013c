"""The gated short convolution of LFM2 (transformers' Lfm2ShortConv), with tensor and sequence parallelism.

Three columns a channel come of the projection in, a gate of what is convolved, a gate of the result, and the
value:  out_proj(gate x convolution(gate of the value x value)). Tensor-parallel ranks share the channels, and
the ranks of a domain the rows, of which each receives the few before its own.

Shape letters: L rows with padding, B batch, C channels of a tensor-parallel rank, K taps.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron.packing import document_ends, packed_shard
from megatron_hexi.megatron.session import active_session
from megatron_hexi.plan.halo import Halo, halo
from megatron_hexi.runtime.short_convolution import HaloRows, short_convolution

#: Sections of the projection's columns, in order.
_SECTIONS = ("input_gate", "output_gate", "value")


def short_conv_spec(mamba: ModuleSpec) -> ModuleSpec:
    """Return the specification of a layer, of the norm and projections that Mamba layers have."""
    mixer = replace(mamba.submodules.mixer, module=ShortConvMixer)
    return ModuleSpec(module=ShortConvLayer, submodules=replace(mamba.submodules, mixer=mixer))


class ShortConvLayer(MambaLayer):
    """A norm, a short convolution and a residual addition, as in a Mamba layer.

    Takes the arguments that Megatron gives layers of attention too.
    """

    def __init__(
        self, config: Any, submodules: Any, layer_number: int = 1, add_layer_offset: bool = False, **more: Any
    ) -> None:
        del add_layer_offset
        if more.pop("is_mtp_layer", False):
            raise PlanError(
                "--hybrid-layer-pattern: layers C cannot predict further tokens; leave C out of the last part"
            )
        super().__init__(config, submodules, layer_number, **more)


class ShortConvMixer(MegatronModule):
    """The projections of a gated short convolution, and its taps.

    Takes the arguments of Megatron's MambaMixer.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        d_model: int,
        layer_number: int,
        pg_collection: Any,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        del layer_number, pp_layer_offset
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.channels, self.taps = d_model // self.tp_group.size(), config.linear_conv_kernel_dim
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            len(_SECTIONS) * d_model,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            name=None if name is None else f"{name}.in_proj",
            **common,
        )
        self.in_proj.weight.partition_sizes = [self.channels] * len(_SECTIONS)
        self.out_proj = build_module(
            submodules.out_proj,
            d_model,
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            name=None if name is None else f"{name}.out_proj",
            **common,
        )
        with get_cuda_rng_tracker().fork():
            empty = torch.empty(
                self.channels, self.taps, device=torch.cuda.current_device(), dtype=config.params_dtype
            )
            if config.perform_initialization:  # as torch.nn.Conv1d
                torch.nn.init.uniform_(empty, -1 / math.sqrt(self.taps), 1 / math.sqrt(self.taps))
        self.conv_weight = torch.nn.Parameter(empty)
        self.conv_weight.tensor_model_parallel, self.conv_weight.partition_dim = True, 0  # type: ignore[attr-defined]
        self._rows: tuple[Halo, HaloRows] | None = None

    def forward(
        self, hidden_states: Tensor, inference_context: Any = None, packed_seq_params: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of this rank's rows and its bias, which is ``None``."""
        assert inference_context is None, "megatron_hexi trains"
        projected, _ = self.in_proj(hidden_states)
        input_gate, output_gate, value = projected.chunk(len(_SECTIONS), dim=-1)
        rows = self._halo_rows(len(projected), packed_seq_params, projected.device)
        convolved = short_convolution(input_gate * value, self.conv_weight, rows)
        output, bias = self.out_proj(output_gate * convolved)
        return output, bias

    def _halo_rows(self, rows: int, packed: Any, device: torch.device) -> HaloRows:
        """Return the tables of this rank's halo, from the last call if they are the same."""
        session = active_session()
        ends = document_ends(packed)
        reach, group = self.taps - 1, None
        if session is not None:
            documents = packed_shard(session, ends).documents
            found, group = session.attention.schedules.halo(reach, documents), session.attention.domain_group
        elif parallel_state.get_context_parallel_world_size() > 1:
            raise PlanError(
                "layers C of --hybrid-layer-pattern share a sequence by a plan only; add --hexi-plan, or "
                "give --context-parallel-size 1"
            )
        else:
            places = [0, rows] if ends is None else ends.flatten().tolist()
            found = halo([[(0, rows)]], 0, list(itertools.pairwise(places)), reach)
        if self._rows is None or self._rows[0] is not found:
            self._rows = found, HaloRows(found, device, group)
        return self._rows[1]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the weights as checkpoints have them: each section of the projection by itself."""
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            tensor_parallel_layers_axis_map={"conv_weight": 0},
            sharded_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            found |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        key = f"{prefix}in_proj.weight"
        found[key] = _split_tensor_factory(found[key], [self.channels] * len(_SECTIONS), list(_SECTIONS), 0)
        return found

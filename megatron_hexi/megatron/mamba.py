"""Mamba-2 layers under a plan: uneven tokens become uneven heads, and heads become tokens.

Megatron exchanges equal shares over the context-parallel group, and then undoes its zigzag of two chunks a
rank. Under a plan a group's members hold the sequence in order, so what arrives is the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from torch import Tensor

from megatron_hexi.megatron.packing import document_ends
from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.megatron.state_shares import ColumnSection, StateShare, document_numbers, unused
from megatron_hexi.patching import Patch, patched
from megatron_hexi.plan.heads import even_groups


class PlannedMambaExchange(MambaContextParallel):
    """Megatron's exchange of a Mamba layer, by the shares of the active plan.

    Takes Megatron's arguments. The context-parallel group is not used: the plan says who shares a sequence.
    """

    def __init__(
        self,
        cp_group: Any,
        d_inner_local_tp: int,
        nheads_local_tp: int,
        ngroups_local_tp: int,
        d_state: int,
        conv1d_weight_cp1: Tensor,
        conv1d_bias_cp1: Tensor,
        conv1d_padding: int,
        dt_bias_cp1: Tensor,
        A_log_cp1: Tensor,
        D_cp1: Tensor,
        D_has_hdim: bool,
    ) -> None:
        self.heads, self.groups = nheads_local_tp, ngroups_local_tp
        self.head_dim = d_inner_local_tp // nheads_local_tp
        self.d_state, self.conv1d_padding = d_state, conv1d_padding
        self.conv1d_weight_cp1, self.conv1d_bias_cp1 = conv1d_weight_cp1, conv1d_bias_cp1
        self.dt_bias_cp1, self.A_log_cp1, self.D_cp1 = dt_bias_cp1, A_log_cp1, D_cp1
        self.D_has_hdim = D_has_hdim
        self.cp_size = len(self._share.session.attention.schedules().members)

    @property
    def nheads_local_tpcp(self) -> int:
        """Heads that this rank scans."""
        start, stop = self._share.own
        return stop - start

    @property
    def d_inner_local_tpcp(self) -> int:
        """Channels of these heads."""
        return self.nheads_local_tpcp * self.head_dim

    @property
    def ngroups_local_tpcp(self) -> int:
        """Groups that they are given to the kernel in; one may be repeated."""
        return len(self._even_groups)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The layer's weights of which a rank uses a part."""
        return self.conv1d_weight_cp1, self.conv1d_bias_cp1, self.dt_bias_cp1, self.A_log_cp1, self.D_cp1

    def pre_conv_ssm(self, input_: Tensor, packed_seq_params: Any = None) -> Tensor:
        """Return own heads' columns of the whole sequence, [S, B, own columns]: gate, input, B, C, step.

        `input_` is the projection of this rank's rows, [L, B, columns].
        """
        sections = [self._inner, self._inner, self._state, self._state, ColumnSection(1)]
        share = self._share
        arrived = share.exchange(sections, packed_seq_params).to_columns(input_)
        parts = arrived.split([stop - start for start, stop in share.ranges(sections)], -1)
        return self._with_even_groups(parts, (2, 3), -1, arrived)

    def post_conv_ssm(self, input_: Tensor, packed_seq_params: Any = None) -> Tensor:
        """Return all heads of this rank's rows, [L, B, channels], of own heads of all rows, [S, B, own]."""
        share = self._share
        exchange = share.exchange([self._inner], packed_seq_params)
        return exchange.to_rows(input_, share.rows(packed_seq_params))

    @property
    def _share(self) -> StateShare:
        return StateShare(_session(), self.heads, self.groups)

    @property
    def _inner(self) -> ColumnSection:
        return ColumnSection(self.head_dim)

    @property
    def _state(self) -> ColumnSection:
        return ColumnSection(self.d_state, is_shared=True)

    @property
    def _even_groups(self) -> tuple[int, ...]:
        share = self._share
        return even_groups(share.own, share.shared_by)

    def _with_even_groups(
        self, parts: Sequence[Tensor], shared: tuple[int, ...], axis: int, whole: Tensor
    ) -> Tensor:
        """Return parts of own heads as one tensor; in the shared ones groups are as the kernel takes them."""
        start, stop = self._share.own_groups
        even = self._even_groups
        if even == tuple(range(stop - start)):
            return whole
        chosen = torch.tensor(even, device=whole.device)
        repeated = [
            part.unflatten(axis, (stop - start, self.d_state))
            .index_select(axis - (axis < 0), chosen)
            .flatten(axis - (axis < 0), axis if axis < 0 else axis + 1)
            if number in shared
            else part
            for number, part in enumerate(parts)
        ]
        return torch.cat(repeated, axis)

    def _slice_conv_param(self, param: Tensor) -> Tensor:
        sections = [self._inner, self._state, self._state]
        share = self._share
        own = share.cut(param, sections)
        parts = own.split([stop - start for start, stop in share.ranges(sections)])
        return self._with_even_groups(parts, (1, 2), 0, own)

    def _slice_vector_param(self, param: Tensor, has_hdim: bool = False) -> Tensor:
        return self._share.cut(param, [self._inner if has_hdim else ColumnSection(1)])


def _session() -> Session:
    session = active_session()
    assert session is not None, "it is built only under a plan"
    return session


def _by_the_plan(original: type) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        return (original if active_session() is None else PlannedMambaExchange)(*args, **kwargs)

    return build


@patched(
    "megatron.core.ssm.mamba_mixer:MambaMixer._ssm_training",
    only=">=0.19",
    why="a rank may have no heads, and the state is 0 where a document of the whole sequence begins",
)
def _of_own_heads(
    original: Callable[..., Tensor], self: Any, zxBCdt: Tensor, packed_seq_params: Any = None
) -> Tensor:
    session = active_session()
    if session is None:
        return original(self, zxBCdt, packed_seq_params)
    if not self.cp.nheads_local_tpcp:  # kernels take no tensors without heads
        nothing = zxBCdt + unused(self.cp.weights).to(zxBCdt.dtype)
        output = self.cp.post_conv_ssm(nothing, packed_seq_params)
        return self.norm(output) if self.rmsnorm else output
    ends = document_ends(packed_seq_params)
    if ends is not None:
        numbers = document_numbers(ends, session.seq_length)
        packed_seq_params = dataclasses.replace(packed_seq_params, total_tokens=None, seq_idx=numbers)
    return original(self, zxBCdt, packed_seq_params)


MAMBA_PATCHES = (
    Patch(
        target="megatron.core.ssm.mamba_context_parallel:MambaContextParallel",
        only=">=0.19",  # before, hybrid models are refused beside a plan
        why="the plan says which heads of a Mamba layer a rank scans, and in which order positions arrive",
        build=_by_the_plan,
        parameters=(
            *("cp_group", "d_inner_local_tp", "nheads_local_tp", "ngroups_local_tp", "d_state"),
            *("conv1d_weight_cp1", "conv1d_bias_cp1", "conv1d_padding", "dt_bias_cp1", "A_log_cp1"),
            *("D_cp1", "D_has_hdim"),
        ),
    ),
    _of_own_heads,
)

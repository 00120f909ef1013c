"""A layer of Hugging Face's Llama under autocast, as it was profiled: its kernels' time, without the host.

Its kernels are torch's own, one for each operation, which read and write more than those that the cost model
counts. Bytes of a row, h hidden, f MLP width, 16 bits and fp32 where it says so (modeling_llama.py):

forward    norms: to fp32 6, power 8, mean 4, product 8, back 6, weight 4, 36 h each; residuals 12 h; rotary
           embedding of queries and keys 20 h each; SiLU 4 f, product 6 f
backward   norms: weight 12, back 6, product 8 and its sum 16, power 20, both gradients 12, cast 6, 80 h each;
           residuals 12 h; rotary 24 h each; gradients of inputs of queries, keys and values 12 h, of gate and
           up 6 h; products 12 f, SiLU 6 f
once       gradients of weights to fp32 and added up in backward: 6 and 12 bytes a weight
"""

from __future__ import annotations

import numpy as np

from megatron_hexi.cluster import Device
from megatron_hexi.cost.compute import device_speeds, own_block_times, rates
from megatron_hexi.cost.products import Elements, layer_products, product_seconds
from megatron_hexi.models import Job

#: Bytes of a row by h and by f, forward and backward.
_ROW_BYTES = ((124, 10), (238, 18))
#: Bytes of a weight, backward; its gradient in 16 bits is written before.
_WEIGHT_BYTES, _ELEMENTS = 18, Elements(factor=2, result=2, gradient=2)


def layer_seconds(job: Job, device: Device) -> tuple[float, float]:
    """Seconds of one layer, forward and backward.

    Args:
        job: of so many sequences in a micro-batch.
        device: where.
    """
    speeds, model = device_speeds(device, job), job.model
    rows, tokens = np.array([float(job.micro_batch_size * job.seq_length)]), np.array([float(job.seq_length)])
    products = product_seconds(
        rates(speeds.matmul, rows), speeds.memory, rows, layer_products(job), _ELEMENTS
    )
    heads = own_block_times(speeds, job, tokens, causal=True)
    found = []
    for way, (hidden, mlp) in enumerate(_ROW_BYTES):
        moved = rows[0] * (hidden * model.hidden_size + mlp * model.ffn_hidden_size)
        moved += way * _WEIGHT_BYTES * model.matrix_params()
        found.append(float(products[way][0] + model.heads * heads[way][0]) + moved / speeds.memory)
    return found[0], found[1]

"""Launches a job that outlives its nodes: ``python -m megatron_hexi.elastic``.

`agent`: PyTorch's elastic agent, one a node, which starts the node's ranks again. `ranks`: what a rank runs,
and the process that ranks are forked from. What ranks do at each start is `megatron_hexi.megatron.surviving`.
"""

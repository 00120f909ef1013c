"""A rank's part in a job that outlives its nodes. Start reading at `round`.

It does not import `megatron_hexi.megatron`, which calls it.
"""

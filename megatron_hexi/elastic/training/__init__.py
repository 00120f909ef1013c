"""A rank's part in a job that survives node failures. Start reading at `round`.

It does not import `megatron_hexi.megatron`, which calls it.
"""

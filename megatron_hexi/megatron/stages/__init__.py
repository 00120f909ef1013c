"""Stages that differ in layers, tensor-parallel size and domain, under Megatron's own training loop."""

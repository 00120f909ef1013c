"""Weights between Hugging Face's format and Megatron's torch_dist checkpoints, on one CPU process.

``config.json`` says what the model is, in both directions. The table of names and shapes is `weights`;
`hf_to_megatron` and `megatron_to_hf` read it.
"""

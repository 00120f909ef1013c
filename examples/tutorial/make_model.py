"""Make a small random Llama in Hugging Face's format: ``python make_model.py FOLDER``."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=257,  # a byte is a token, and one ends a document
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    initializer_range=0.05,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])

"""Compare two models on text, as transformers loads them: ``python compare.py FOLDER FOLDER``."""

import sys
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM

tokens = torch.tensor([list(topics["while"].encode()[:256])])
outputs = []
with torch.no_grad():
    for folder in sys.argv[1:]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        outputs.append(model(tokens, labels=tokens))
        print(f"{folder}: loss {outputs[-1].loss:.3f}")
first, second = outputs
print(f"largest difference of logits: {(first.logits - second.logits).abs().max():.1e}")

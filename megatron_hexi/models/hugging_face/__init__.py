"""Models as config.json of Hugging Face describes them: their shapes, and Megatron's flags for the rest."""

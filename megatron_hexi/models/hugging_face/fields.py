"""The fields of Hugging Face's config.json that mean the same in all model types.

transformers takes a field that a file leaves out from the defaults of the type, and ignores a field that it
does not know. Here every field of a file is used, harmless for a reason, supported with some values only, or
refused. `hugging_face_types` has the fields of each type. Sources: configuration_*.py and modeling_*.py of
transformers 4.37 to 5.24; a test compares fields and defaults with the latest of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Marks a field without a default, which the file must give.
NEEDED = ...


@dataclass(frozen=True)
class Only:
    """The supported values of a field, and the message about all others.

    Args:
        values: the supported values.
        what: the feature that any other value means, as the message names it.
        remedy: the change of the file that the message recommends.
    """

    values: tuple[Any, ...]
    what: str
    remedy: str


@dataclass(frozen=True)
class ModelType:
    """One ``model_type`` of transformers.

    Args:
        architecture: the class of its causal language model, as ``architectures`` names it.
        used: fields that weights, time, or Megatron's flags depend on, with transformers' defaults.
        only: fields of which some values only are supported, besides `ONLY`.
        aliases: fields by further names that transformers accepts or that files have.
        harmless: fields that change neither weights nor results of the model, besides `HARMLESS_FIELDS`.
        stored_as: ``quant_method`` of the published weights, which training takes dequantized; empty: none.
    """

    architecture: str
    used: Mapping[str, Any]
    only: Mapping[str, Only] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    stored_as: str = ""


@dataclass(frozen=True)
class Wrapper:
    """A ``model_type`` whose language model is described by its ``text_config``.

    Files of transformers before 4.52 have the fields of ``text_config`` beside ``vision_config``.

    Args:
        text_type: the type of the language model, or of one that has the same layers.
        architecture: the class of the whole model.
        harmless: fields next to ``text_config`` that the language model does not depend on.
        text_name: the language model's own name of its type; empty: `text_type`.
        defaults: transformers' defaults of the language model, other than those of `text_type`.
        encoder: the type of the encoder of images, in ``vision_config``; empty: vision is left out.
    """

    text_type: str
    architecture: str
    harmless: frozenset[str]
    text_name: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    encoder: str = ""


_DENSE = "give a dense model"
_EXPERTS = Only((0, 1, False), "mixture of experts", _DENSE)

#: Fields of any type of which some values only are supported.
ONLY: Mapping[str, Only] = {
    "num_local_experts": _EXPERTS,
    "num_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "kv_lora_rank": Only((0, False), "multi-latent attention", _DENSE),
    "is_encoder_decoder": Only((False,), "an encoder", "give a decoder"),
    "tie_encoder_decoder": Only((False,), "an encoder", "give a decoder"),
    "add_cross_attention": Only((False,), "attention to an encoder", "set it to false"),
    "pruned_heads": Only(({},), "layers that differ in their heads", "give the model before pruning"),
    "quantization_config": Only(
        (), "training quantized weights", "give the config.json from before quantization"
    ),
    "auto_map": Only((), "a model with code of its own", "remove it if transformers' own class computes it"),
    "use_sliding_window": Only(
        (False,), "attention in a window", "set it to false to train with full attention"
    ),
    "partial_rotary_factor": Only((1,), "rotary embeddings of a part of each head", "give a model with 1"),
    "rope_interleaved": Only((False,), "rotating neighbours instead of halves", "give a model with false"),
    "use_mrope": Only((False,), "rotary positions in three dimensions", "give a model with false"),
}

#: Names by which model types, or the programs that wrote a file, call one field. Of a name that the type does
#: not have, transformers reads nothing; a file that has it too must say the same.
NAMES_OF_ONE_FIELD: Sequence[Sequence[str]] = (
    ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "block_norm_eps"),
    ("hidden_act", "mlp_hidden_act", "hidden_activation", "activation_function"),
    ("rope_theta", "rotary_emb_base", "rotary_base", "rope_base", "theta"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("hidden_size", "n_embd", "d_model", "block_dim", "conv_dim", "conv_dim_out"),
    ("intermediate_size", "n_inner", "ffn_hidden_size"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_query_groups"),
    ("head_dim", "attention_head_dim", "kv_channels"),
    ("num_local_experts", "num_experts", "n_routed_experts"),
    ("num_experts_per_tok", "experts_per_token", "num_experts_per_token"),
)

#: Fields of any type that change neither weights nor results of the model, by the reason.
HARMLESS: Mapping[str, Sequence[str]] = {
    "names": (
        *("model_type", "_name_or_path", "name_or_path", "_commit_hash", "transformers_version"),
        *("tokenizer_class", "prefix", "is_llama_config", "unsloth_version", "unsloth_fixed"),
    ),
    "ids of tokens, which the tokenizer and the data bring": (
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id"),
        *("mask_token_id", "decoder_start_token_id"),
    ),
    "how weights are stored": ("torch_dtype", "dtype", "use_bfloat16", "torchscript"),
    "generation of text": (
        *(
            "use_cache",
            "cache_implementation",
            "output_past",
            "max_length",
            "min_length",
            "max_new_tokens",
            "do_sample",
            "early_stopping",
        ),
        *("num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p"),
        *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "output_scores", "return_dict_in_generate", "task_specific_params"),
    ),
    "what transformers returns": (
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    ),
    "heads of other tasks, which a causal language model lacks": (
        *(
            "id2label",
            "label2id",
            "num_labels",
            "_num_labels",
            "problem_type",
            "finetuning_task",
            "classifier_dropout",
        ),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        *("summary_first_dropout", "predict_special_tokens"),
    ),
    "dropout, which a job chooses (--attention-dropout, --hidden-dropout)": (
        *("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    "the same products in another order, or with other memory": (
        *("pretraining_tp", "chunk_size_feed_forward", "gradient_checkpointing", "reorder_and_upcast_attn"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "use_flash_attn"),
        *("_flash_attn_2_enabled", "use_flash_attention", "use_flash_attention_2"),
    ),
    "a length that nothing depends on": (
        *("n_ctx", "max_sequence_length", "max_seq_len", "seq_length", "model_max_length"),
    ),
    "what the type says, or another program reads": ("is_decoder", "transformers.js_config"),
}
HARMLESS_FIELDS = frozenset(name for names in HARMLESS.values() for name in names)

#: Fields that most decoders have, with transformers' defaults.
ROTARY: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
}
DECODER: Mapping[str, Any] = {
    "architectures": None,
    "num_hidden_layers": NEEDED,
    "hidden_size": NEEDED,
    "intermediate_size": NEEDED,
    "num_attention_heads": NEEDED,
    "num_key_value_heads": None,
    "head_dim": None,
    "vocab_size": NEEDED,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    **ROTARY,
}
SILU = Only(("silu", "swish"), "another activation in a gated MLP", "give a model with silu")
NO_BIAS = Only(
    (False,),
    "biases in some linear layers only, of which Megatron has those of queries, keys and values,",
    "give a model without",
)
NO_BIASES = {"attention_bias": NO_BIAS, "mlp_bias": NO_BIAS}

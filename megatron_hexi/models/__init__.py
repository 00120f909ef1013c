"""The model and the job that are trained, read from files of several formats. No torch here."""

from megatron_hexi.models.document_lengths import read_documents
from megatron_hexi.models.documents import Documents
from megatron_hexi.models.job import (
    FP8_RECIPES,
    PRECISIONS,
    Job,
    job_of_plan,
    job_terms,
)
from megatron_hexi.models.megatron_arguments import ArgumentTerms, model_flags
from megatron_hexi.models.model import Model
from megatron_hexi.models.planned_kinds import refuse_imbalance
from megatron_hexi.models.presets import (
    BRIDGE_ALONE,
    argument_words,
    arguments_of_start,
    check_options,
    constant_flags,
    constant_notes,
    model_file,
    presets,
    read_model,
    read_terms,
    reading_notes,
)
from megatron_hexi.models.recipes import Recipe, recipes
from megatron_hexi.models.vision import FROZEN_PARTS, Images

__all__ = [
    "BRIDGE_ALONE",
    "FP8_RECIPES",
    "FROZEN_PARTS",
    "PRECISIONS",
    "ArgumentTerms",
    "Documents",
    "Images",
    "Job",
    "Model",
    "Recipe",
    "argument_words",
    "arguments_of_start",
    "check_options",
    "constant_flags",
    "constant_notes",
    "job_of_plan",
    "job_terms",
    "model_file",
    "model_flags",
    "presets",
    "read_documents",
    "read_model",
    "read_terms",
    "reading_notes",
    "recipes",
    "refuse_imbalance",
]

"""All patches of Megatron: the list that the adaptor installs and `hexi doctor` shows.

Those of Megatron-Core ask the session alone, and serve any training loop. The others change Megatron-LM's.
"""

from __future__ import annotations

from megatron_hexi.elastic.training.copying import COPY_PATCHES
from megatron_hexi.elastic.training.fencing import FENCE_PATCHES
from megatron_hexi.elastic.training.goodput import ROUND_PATCHES
from megatron_hexi.elastic.training.loading import LOAD_PATCHES
from megatron_hexi.megatron.arguments import argument_patches
from megatron_hexi.megatron.batch import BATCH_PATCHES
from megatron_hexi.megatron.checkpoint_files import CHECKPOINT_FILE_PATCHES
from megatron_hexi.megatron.checkpoints import CHECKPOINT_PATCHES
from megatron_hexi.megatron.core_attention import ATTENTION_PATCHES
from megatron_hexi.megatron.datasets import DATASET_PATCHES
from megatron_hexi.megatron.delta_net import DELTA_NET_PATCHES
from megatron_hexi.megatron.documents_ahead import DOCUMENTS_AHEAD_PATCHES
from megatron_hexi.megatron.expert_loads import EXPERT_LOAD_PATCHES
from megatron_hexi.megatron.fp8_scales import FP8_PATCHES
from megatron_hexi.megatron.groups import group_patches
from megatron_hexi.megatron.latent import LATENT_PATCHES
from megatron_hexi.megatron.llava import LLAVA_PATCHES
from megatron_hexi.megatron.local_layers import local_layer_patches
from megatron_hexi.megatron.loss_scale import LOSS_SCALE_PATCHES
from megatron_hexi.megatron.mamba import MAMBA_PATCHES
from megatron_hexi.megatron.metrics import METRICS_PATCHES
from megatron_hexi.megatron.multi_token import MULTI_TOKEN_PATCHES
from megatron_hexi.megatron.optimizer import OPTIMIZER_PATCHES
from megatron_hexi.megatron.optional_output import WRITER_PATCHES
from megatron_hexi.megatron.pipeline import PIPELINE_PATCHES
from megatron_hexi.megatron.progress import PROGRESS_PATCHES
from megatron_hexi.megatron.resume import RESUME_PATCHES
from megatron_hexi.megatron.rotary import ROTARY_PATCHES
from megatron_hexi.megatron.router_losses import EXPERT_PATCHES
from megatron_hexi.megatron.samplers import SAMPLER_PATCHES
from megatron_hexi.megatron.saved_tensors import SAVED_TENSORS
from megatron_hexi.megatron.short_conv import SHORT_CONV_PATCHES
from megatron_hexi.megatron.stages.patches import STAGES_PATCHES
from megatron_hexi.megatron.step_times import STEP_TIME_PATCHES
from megatron_hexi.megatron.unit_weights import UNIT_WEIGHT_PATCHES
from megatron_hexi.patching import Patch
from megatron_hexi.platform import Platform
from megatron_hexi.replan.training.replanning import REPLANNING_PATCHES


def core_patches(platform: Platform) -> list[Patch]:
    """Return the patches that Megatron-Core needs under a plan, whichever loop calls it."""
    return [patch for patch in all_patches(platform) if patch.target.startswith("megatron.core.")]


def all_patches(platform: Platform) -> list[Patch]:
    """Return the patches of Megatron for a platform, in the order of installation."""
    return [
        *platform.megatron_patches,
        *argument_patches(platform),
        *local_layer_patches(platform),
        *DATASET_PATCHES,
        *WRITER_PATCHES,
        *METRICS_PATCHES,
        *STEP_TIME_PATCHES,
        *REPLANNING_PATCHES,
        *ROUND_PATCHES,
        *COPY_PATCHES,
        *LOAD_PATCHES,
        *FENCE_PATCHES,
        *PROGRESS_PATCHES,
        *OPTIMIZER_PATCHES,
        *LOSS_SCALE_PATCHES,
        *CHECKPOINT_PATCHES,
        *CHECKPOINT_FILE_PATCHES,
        *RESUME_PATCHES,
        SAVED_TENSORS,
        *group_patches(platform.device),
        *SAMPLER_PATCHES,
        *DOCUMENTS_AHEAD_PATCHES,
        *BATCH_PATCHES,
        *ROTARY_PATCHES,
        *ATTENTION_PATCHES,
        *LLAVA_PATCHES,
        *LATENT_PATCHES,
        *MAMBA_PATCHES,
        *DELTA_NET_PATCHES,
        *SHORT_CONV_PATCHES,
        *PIPELINE_PATCHES,
        *UNIT_WEIGHT_PATCHES,
        *STAGES_PATCHES,
        *FP8_PATCHES,  # around those of stages, which do not call the original
        *EXPERT_PATCHES,
        *EXPERT_LOAD_PATCHES,
        *MULTI_TOKEN_PATCHES,
    ]

"""Settings of recomputation: what each computes again, and the arguments of Megatron for it."""

from argparse import Namespace

import pytest

from megatron_hexi.plan.flags import argument_name, spell_flag
from megatron_hexi.plan.recompute import (
    MODULES,
    Again,
    of_layer,
    recompute_settings,
    spell_recompute,
    stated_recompute,
)


@pytest.mark.parametrize(
    ("setting", "modules", "layers", "text"),
    [
        ("none", (), 0, "none"),
        ("selective", ("core_attn",), 8, "selective"),
        ("full", MODULES, 8, "full"),
        (1, MODULES, 2, "1 layer"),
        (5, MODULES, 8, "5 layers"),
        (("layernorm", "mlp"), ("layernorm", "mlp"), 8, "layernorm, mlp"),
    ],
)
def test_what_a_setting_computes_again(setting, modules, layers, text):
    again = Again.of(setting)
    assert [module for module in MODULES if module in again] == sorted(modules, key=MODULES.index)
    assert again.layers(8, chunks=2) == layers
    assert bool(again) == (layers > 0)
    assert again.is_whole == (modules == MODULES)
    assert spell_recompute(setting) == text


@pytest.mark.parametrize("setting", ["none", "selective", "full", 3, ("mlp",), ("core_attn", "moe")])
def test_arguments_say_the_setting_of_each_layer(setting):
    flags = recompute_settings(setting)
    args = Namespace(**{argument_name(flag): value for flag, value in flags.items()})
    assert (stated_recompute(args) or "none") == of_layer(setting)
    assert (args.recompute_method == "block") == isinstance(setting, int)
    assert args.recompute_num_layers == (
        setting if isinstance(setting, int) else 1 if setting == "full" else None
    )


def test_core_attention_alone_is_selective_recomputation():
    args = Namespace(recompute_granularity="selective", recompute_modules=["core_attn"])
    assert stated_recompute(args) == "selective"


def test_messages_spell_modules_as_the_command_line_takes_them():
    assert spell_flag("recompute", ("layernorm", "mlp")) == "--recompute-granularity layernorm,mlp"

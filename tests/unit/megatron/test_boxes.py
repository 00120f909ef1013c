"""The order in which the forward pass uses weights, by which gradients are reduced."""

from __future__ import annotations

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_hexi.megatron.stages.boxes import depths


class Layers(torch.nn.Module):
    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in numbers)
        for layer, number in zip(self.layers, numbers, strict=True):
            vars(layer)["layer_number"] = number


class Decoder(LanguageModule):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.embedding = torch.nn.Embedding(1, 1)
        self.decoder = Layers([3, 4])
        self.output_layer = torch.nn.Linear(1, 1, bias=False)


class Seeing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_model = Layers([1, 2])
        self.language_model = Decoder()


def test_the_layers_of_an_encoder_are_not_the_decoders():
    model = Seeing()
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[parameter]: depth for parameter, depth in depths(model).items()} == {
        "language_model.embedding.weight": 0,
        "language_model.decoder.layers.0.weight": 3,
        "language_model.decoder.layers.1.weight": 4,
        "language_model.output_layer.weight": 5,
    }

"""A small vision-language model in a loop of one's own on its ranks, in several jobs one after the other.

Tokens from `IMAGES` on stand for patches of images. The plan divides the images of the unequal replicas; in
the pipeline every rank of a domain encodes all. The rows of a rank are cut from the merged embeddings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from tests.megatron import own_loop_ranks
from tests.megatron.own_loop_ranks import end, reference, run

# isort: split
from megatron.core.models.gpt import GPTModel
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from megatron_hexi import api
from megatron_hexi.api import LoopJob
from megatron_hexi.runtime.feature_exchange import FeatureExchange

own_loop, qwen = vars(own_loop_ranks)["own_loop"], cast(Any, modeling_qwen2_5_vl)
IMAGES, SECTIONS = 192, [4, 2, 2]
own_loop.MODEL["mrope_section"] = SECTIONS
own_loop.POSITIONS = "mrope"
own_loop_micro_batch: Callable[[int, int], dict[str, torch.Tensor]] = own_loop.micro_batch
#: Takes the rows of this rank of [B, T, …]; on one rank all.
cut: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole  # noqa: E731
#: Encodes the images of a micro-batch, given the encoder, patches, sizes and tokens of features.
encode: Callable[..., torch.Tensor] = lambda encoder, pixels, grids, seen: encoder(pixels, grids)  # noqa: E731


class LanguageModel(GPTModel):
    """A GPT that is given whole tokens and places them on three axes, as Qwen2.5-VL does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.pre_process:
            self.visual = torch.nn.Linear(8, self.config.hidden_size)
            for weight in self.visual.parameters():
                own_loop_ranks.by_size(weight)

    def forward(self, tokens: Any, places: Any, mask: Any, labels: Any = None) -> Any:
        merged = None
        if self.pre_process:
            embedded = self.embedding(tokens, None).transpose(0, 1)
            places = tokens >= IMAGES
            pixels = patches(tokens[places])
            seen = encode(self.encode_images, pixels, sizes(len(pixels)), places)
            merged = embedded.masked_scatter(places[..., None], seen)
            merged = cut(merged).transpose(0, 1).contiguous()
        return super().forward(None, places_of(tokens), mask, decoder_input=merged, labels=labels)

    def encode_images(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Encode patches beside the mean of their frame."""
        frames = grids.repeat_interleave(grids[:, 0], 0)[:, 1:].prod(-1).tolist()
        means = [frame + frame.mean(0) for frame in pixels.split(frames)]
        features: torch.Tensor = self.visual(torch.cat([pixels[:0], *means]))
        return features


def patches(tokens: torch.Tensor) -> torch.Tensor:
    """Return the pixels of patches, [N, 8]."""
    return torch.sin(tokens[:, None] * torch.arange(1.0, 9.0))


def sizes(count: int) -> torch.Tensor:
    """Return the sizes of images with so many patches together; every third is a video of two frames."""
    grids = torch.tensor([[1, 1, 1], [1, 2, 3], [2, 1, 4]]).repeat(count, 1)
    grids = grids[grids.prod(-1).cumsum(0) <= count]
    rest = count - int(grids.prod(-1).sum())
    return torch.cat([grids, torch.tensor([[1, 1, rest]])]) if rest else grids


def micro_batch(iteration: int, number: int) -> dict[str, torch.Tensor]:
    """Return a micro-batch; some have no images."""
    batch = own_loop_micro_batch(iteration, number)
    if (iteration + number) % 3 == 1:
        batch["tokens"] = batch["tokens"] % IMAGES
    return batch


def places_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return places in time, height and width that differ by sequence, [3, B, T]."""
    places = torch.arange(tokens.shape[1]) + tokens[:, :1] % 5
    return torch.stack([places, places // 3, places % 7])


def forward(session: Any, batches: Any, model: Any) -> Any:
    """Run the model on whole tokens, and the labels of this rank's rows."""
    batch = next(batches)
    tokens = batch.pop("tokens")
    rows = session.shard(batch | {"position_ids": places_of(tokens)})
    assert rows.pop("position_ids").shape == (3, *tokens.shape)
    global cut, encode
    cut, encode = lambda whole: session.shard({"whole": whole})["whole"], session.encode
    return model(tokens, None, None, labels=rows["labels"]), partial(own_loop.loss_of, rows["loss_mask"])


def check_rotation(session: Any, model: Any) -> None:
    """Compare the embeddings of this rank's rows with those of transformers, for an image and a video."""
    text = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 1, "vocab_size": 256}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS}
    config = qwen.Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope})
    kinds = torch.zeros(1, own_loop.LENGTH, dtype=torch.int)
    kinds[:, 10:22], kinds[:, 40:52] = 1, 2  # an image of 6 x 8 patches, a video of 2 frames of 4 x 6
    grids = torch.tensor([[1, 6, 8]]), torch.tensor([[2, 4, 6]])
    with torch.device("meta"):
        model_of_places = qwen.Qwen2_5_VLModel(config)
    places, _ = model_of_places.get_rope_index(torch.ones_like(kinds), kinds, *grids, torch.tensor([1.0]))
    assert not torch.equal(places[0], places[1])
    assert not torch.equal(places[1], places[2])
    cosine, sine = qwen.Qwen2_5_VLRotaryEmbedding(config.text_config)(torch.ones(1), places)
    own = session.positions >= 0
    angles = model.rotary_pos_emb(places, SECTIONS)[own, 0, 0]
    torch.testing.assert_close(angles.cos(), cosine[0, session.positions[own]])
    torch.testing.assert_close(angles.sin(), sine[0, session.positions[own]])


def check_documents(plan: str) -> None:
    """Compare the features of a rank's rows of packed documents with those of all images."""
    config, length = own_loop.TransformerConfig(**own_loop.MODEL), own_loop.LENGTH
    documents = {"dataloader_inter_document_masking": True}
    session = api.start(plan, api.LoopJob(config, length, 1, 4, documents, images=True))
    ends, seen = torch.tensor([0, 30, 64, length], dtype=torch.int32), torch.arange(length)[None] % 3 > 0
    pixels = torch.arange(float(seen.sum()))[:, None] + 1
    found = session.encode(lambda own, grids: 2 * own, pixels, sizes(len(pixels)), seen, documents=ends)
    merged, true = (
        torch.zeros(1, length, 1).masked_scatter(seen[..., None], one) for one in (found, 2 * pixels)
    )
    rows = session.shard({"found": merged, "true": true, "cu_seqlens": ends})
    assert torch.equal(rows["found"], rows["true"])
    end()


def under_plans(out: Path, replicas: str, stages: str) -> None:
    check_documents(replicas)
    own_loop.forward, own_loop.LoopJob = forward, partial(LoopJob, images=True)
    losses, model, session = own_loop.train(replicas, own_loop_ranks.ITERATIONS, **own_loop_ranks.METHODS)
    own_loop_ranks.save(out, "replicas", losses, model)
    check_rotation(session, model.module)
    end()
    pipeline: Any = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    run(out, "stages", stages, **pipeline)
    end()
    run(out, "other sections", replicas, 1, mrope_section=SECTIONS[::-1])
    end()
    send, back = FeatureExchange.send, FeatureExchange.send_back
    FeatureExchange.send = lambda *args: send(*args).roll(1, 0)  # type: ignore[method-assign]
    run(out, "features one row off", replicas, 1)
    end()
    FeatureExchange.send = send  # type: ignore[method-assign]
    FeatureExchange.send_back = lambda *args: back(*args) / 2  # type: ignore[method-assign]
    run(out, "gradients halved", replicas)


if __name__ == "__main__":
    dist.init_process_group()
    own_loop.GPTModel, own_loop.micro_batch = LanguageModel, micro_batch
    if len(sys.argv) == 2:
        reference(Path(sys.argv[1]), "alone")
    else:
        under_plans(Path(sys.argv[1]), sys.argv[2], sys.argv[3])

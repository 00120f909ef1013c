"""The encoder of images: its FLOPs against torch's count, and what a plan's images add to time and memory."""

import json
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText

from megatron_hexi.cluster import PassCurves
from megatron_hexi.cluster.device import Curve
from megatron_hexi.cost import CostModel
from megatron_hexi.cost.compute import Speeds
from megatron_hexi.cost.encoder import encoder_times
from megatron_hexi.cost.encoder_bytes import encoder_bytes, layers_again
from megatron_hexi.cost.products import Times
from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.models import Images, read_model
from megatron_hexi.models.vision import Vision
from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage
from megatron_hexi.plan.proportion import proportional_plan
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.published_vision import VISION

RATE = 1e12
CURVE = Curve((1.0,), (RATE / 1e12,), "test")
#: Memory takes no time, and all products run at one rate: seconds are FLOPs.
COUNTING = Speeds(CURVE, CURVE, PassCurves(CURVE, CURVE), PassCurves(CURVE, CURVE), memory=1e30)
ENCODER = Vision(layers=3, hidden_size=256, heads=2, ffn_hidden_size=512, patch_values=192, deepstack=1)
MODEL = replace(TINY, vision=ENCODER)
IMAGES = Images(per_sequence=8, patches=64)
JOB = tiny_job(model=MODEL, seq_length=4096, global_batch_size=4, images=IMAGES)
TEXT = replace(JOB, images=None)
MACHINES = cluster([("a", "DOUBLE", 1), ("b", "PLAIN", 1)])


def with_patches(plan: Plan, *patches: int | None) -> Plan:
    (replica,) = plan.replicas
    (stage,) = replica.stages
    weights = dict(zip((member.ranks for member in stage.members), patches, strict=True))
    domain = stage.domain.with_members(lambda member: replace(member, patches=weights[member.ranks]))
    return replace(plan, replicas=(replace(replica, stages=(replace(stage, domains=(domain,)),)),))


def seconds_of(job: Any, images: Any) -> list[Times]:
    """Seconds of a layer and of what is outside layers, by pass, without all-reduces."""
    found = encoder_times(COUNTING, job, images, np.ones(len(images)), np.ones(len(images)))
    return [Times(*one[:, 0]) for one in found]


PLAN = proportional_plan(JOB.workload(), [[[2, 1]]])


@pytest.mark.parametrize(
    ("name", "vision", "side"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", {"depth": 3, "fullatt_block_indexes": [1], "window_size": 56}, 16),
        ("Qwen/Qwen3-VL-8B-Instruct", {"depth": 3, "deepstack_visual_indexes": [0, 1]}, 8),
    ],
)
def test_products_are_those_that_torch_counts(tmp_path, name, vision, side):
    more = {"hidden_size": 128, "intermediate_size": 192, "num_heads": 1, **vision}
    config = VISION[name] | {"vision_config": VISION[name]["vision_config"] | more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model: Any = read_model(tmp_path)
    own = AutoConfig.for_model(**config)
    with torch.device("meta"):
        kind = type(AutoModelForImageTextToText.from_config(own).model.visual)
    own.vision_config._attn_implementation = "eager"
    visual = kind(own.vision_config)
    count, patches = 2, side**2
    pixels = torch.zeros(count * patches, model.vision.patch_values)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        visual(pixels, grid_thw=torch.tensor([[1, side, side]] * count))
    job = tiny_job(model=model, seq_length=4096, images=Images(count, patches))
    layers, outside = seconds_of(job, np.array([float(count)]))
    seconds = model.vision.layers * layers.forward + outside.forward
    assert seconds[0] * RATE == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_every_unit_encodes_all_images_unless_they_are_divided():
    alone = CostModel(TEXT, MACHINES).timing(PLAN)
    timings: list[Any] = [
        CostModel(JOB, MACHINES).timing(with_patches(PLAN, *patches))
        for patches in ((None, None), (2, 1), (1, 0), (0, 1))
    ]
    dealt = [timing.sections[0].images.of_units.tolist() for timing in timings]
    assert dealt == [[8, 8], [6, 2], [8, 0], [0, 8]]
    (speeds, slow) = (MACHINES.ranks[gpu].device for gpu in (0, 1))
    assert speeds.name == "DOUBLE"
    assert slow.name == "PLAIN"
    for timing, images in zip(timings, dealt, strict=True):
        (stage,) = timing.stages
        (work,) = stage.first
        ahead, back = work.forward, work.backward
        assert (ahead > 0).tolist() == [count > 0 for count in images]
        added = timing.replicas[0].total - alone.replicas[0].total
        assert timing.replicas[0].encoder == pytest.approx(4 * (ahead.max() + back.max()))
        assert timing.replicas[0].token == pytest.approx(alone.replicas[0].token)
        sent = float(sum(work.sent)[0])
        assert (sent > 0) == (images != [8, 8])
        assert added == pytest.approx(4 * (ahead.max() + back.max() + sent))
    whole, shared = (timing.stages[0].first[0].forward.max() for timing in timings[:2])
    assert shared < 0.7 * whole


def test_memory_has_the_encoder_and_its_images():
    plan = with_patches(PLAN, 1, 0)
    text, images = (CostModel(job, MACHINES).timing(plan).memory[0] for job in (TEXT, JOB))
    assert (images["weights"] - text["weights"]).tolist() == [2 * sum(MODEL.encoder_params())] * 2
    own = encoder_bytes(JOB, np.array([8.0, 0.0]))
    assert images["encoder"].tolist() == own.kept(3, 0, 1).tolist()
    assert images["encoder"][1] == 0 < images["encoder"][0]
    assert not text["encoder"].any()
    full = CostModel(replace(JOB, recompute="full"), MACHINES).timing(plan)
    assert full.memory[0]["encoder"][0] == own.kept(3, 3, 1)[0] < own.kept(3, 0, 1)[0]


FROZEN = "freeze_vision_model", "freeze_vision_projection"


def frozen(*fields: str, **changes: Any) -> Any:
    return replace(JOB, images=replace(IMAGES, **dict.fromkeys(fields, True)), **changes)


@pytest.mark.parametrize("layers", [None, (0, 2)])
def test_frozen_weights_have_neither_gradients_nor_state(layers):
    """Figures by hand: 2 bytes a weight, 4 of its gradient, 12 of its state, which two units share."""
    plan = with_patches(PLAN, 1, 0)
    if layers:  # a stage with layers of its own, whose weights are summed by buckets
        (replica,) = plan.replicas
        plan = replace(
            plan, replicas=(replace(replica, stages=(replace(replica.stages[0], layers=layers),)),)
        )
    encoder, projectors = MODEL.encoder_params()
    left = {(): 0, FROZEN[:1]: encoder, FROZEN[1:]: projectors, FROZEN: encoder + projectors}
    whole, *_ = timings = [CostModel(frozen(*fields), MACHINES).timing(plan) for fields in left]
    for timing, count in zip(timings, left.values(), strict=True):
        (before,), (after,) = whole.memory, timing.memory
        assert after["weights"].tolist() == before["weights"].tolist()
        assert (before["gradients"] - after["gradients"]).tolist() == [4 * count] * 2
        state = before["optimizer"] - after["optimizer"]
        assert state.sum() == pytest.approx(12 * count, abs=24)
        assert (timing.phases.optimizer < whole.phases.optimizer) == (count > 0)


def test_frozen_encoders_have_no_backward_pass():
    images = np.array([4.0])
    (layers, ends), (behind, projected), (through, passed), (still, nothing) = (
        seconds_of(job, images) for job in (JOB, frozen(FROZEN[0]), frozen(FROZEN[1]), frozen(*FROZEN))
    )
    assert behind.forward == still.forward == through.forward == layers.forward
    assert behind.backward == still.backward == 0 < through.backward == layers.backward
    assert nothing.backward == 0 < nothing.forward == ends.forward
    merged, wide = 4 * 64 / 4, 4 * ENCODER.hidden_size
    projectors = 2 * merged * 2 * wide * (wide + MODEL.hidden_size)  # FLOPs of two projectors
    assert projected.backward * RATE == pytest.approx(2 * projectors)
    assert (ends.backward - passed.backward) * RATE == pytest.approx(projectors)
    full = frozen(FROZEN[0], recompute="full")
    assert int(layers_again(full, 8, 8)) == 0


@pytest.mark.parametrize("joins", [True, False])
def test_beside_adapters_the_encoder_is_frozen(joins):
    """Adapters join an encoder of Megatron's layers; one of transformers' is as with both parts frozen."""
    model: Any = replace(MODEL, vision=replace(ENCODER, in_megatron=joins))
    job, rank, images = replace(JOB, model=model, lora_rank=4), 4, np.array([4.0])
    layers, outside = seconds_of(job, images)
    kept = encoder_bytes(job, images)
    if not joins:
        still = seconds_of(frozen(*FROZEN), images)
        assert [list(each) for each in (layers, outside)] == [list(each) for each in still]
        assert list(kept) == list(encoder_bytes(frozen(*FROZEN), images))
        assert job.trained_share == replace(job, images=None).trained_share
        return
    all_layers, all_outside = seconds_of(JOB, images)
    rows, wide = 4 * IMAGES.patches, 4 * ENCODER.hidden_size
    each = 2 * rank * (4 * 256 + 2 * 256 + 2 * (256 + 512))  # FLOPs of a row in a layer's adapters
    assert (layers.forward - all_layers.forward) * RATE == pytest.approx(rows * each)
    weights = 2 * (4 * 256**2 + 2 * 256 * 512)
    assert (all_layers.backward - layers.backward) * RATE == pytest.approx(rows * (weights - 2 * each))
    merged = rows / 4 * 2  # of two projectors
    each, weights = 2 * rank * (3 * wide + MODEL.hidden_size), 2 * wide * (wide + MODEL.hidden_size)
    assert (outside.forward - all_outside.forward) * RATE == pytest.approx(merged * each)
    assert outside.backward * RATE == pytest.approx(merged * (weights + 2 * each))
    patches = rows * ENCODER.patch_values * 2
    assert list(kept) == list(
        encoder_bytes(JOB, images)._replace(outside=encoder_bytes(JOB, images).outside - patches)
    )


def test_gradients_of_features_travel_where_something_is_trained():
    plan = with_patches(PLAN, 2, 1)
    sent = []
    for fields in ((), FROZEN[:1], FROZEN[1:], FROZEN):
        (work,) = CostModel(frozen(*fields), MACHINES).timing(plan).stages[0].first
        sent.append([float(way[0]) for way in work.sent])
    there, back = sent[0]
    assert there == back > 0
    assert sent == [[there, there]] * 3 + [[there, 0]]


def test_frozen_encoders_keep_nothing_of_micro_batches_in_flight():
    images = np.array([8.0])
    for fields, is_kept in ((FROZEN[:1], True), (FROZEN, False)):
        own = encoder_bytes(frozen(*fields), images)
        one, four = (float(own.kept(3, 0, count)[0]) for count in (1, 4))
        assert one > float(own.once[0]) - 1 > 0
        assert (four - one) / 3 == pytest.approx(float(own.outside[0]))
        assert (four > one) == is_kept
    assert float(encoder_bytes(JOB, images).once[0]) == 0


def test_as_many_layers_are_computed_again_as_of_the_decoder():
    full = replace(JOB, recompute="full")
    assert [int(layers_again(full, 8, again)) for again in (0, 2, 5, 8)] == [0, 2, 3, 3]
    assert int(layers_again(full, 0, 0)) == 3  # a stage of the encoder alone
    assert int(layers_again(replace(JOB, recompute="selective"), 8, 0)) == 0


def test_the_simulator_encodes_as_long():
    plan = with_patches(PLAN, 2, 1)
    found = simulate(plan, JOB, MACHINES)
    (stage,) = CostModel(JOB, MACHINES).timing(plan).stages
    (work,) = stage.first
    own = [4 * float(seconds) for seconds in work.busy]
    assert [rank.busy["encoder"] for rank in found.ranks] == pytest.approx(own)
    apart = [span for span in found.pipeline[0] if span.way == "encoder"]
    assert len(apart) == 4 + 4
    assert [span.start_s for span in found.pipeline[0]] == sorted(span.start_s for span in found.pipeline[0])
    drawn = sum(span.end_s - span.start_s for span in apart)
    assert drawn == pytest.approx(4 * (work.forward.max() + work.backward.max()))
    still = simulate(plan, frozen(*FROZEN), MACHINES)
    assert sum(span.way == "encoder" for span in still.pipeline[0]) == 4
    text = simulate(PLAN, TEXT, MACHINES)
    assert {span.way for span in text.pipeline[0]} == {"forward", "backward"}
    added = 4 * sum(phases.total for phases in work.phases(np.arange(2)))
    assert found.phases.total - found.phases.optimizer - found.phases.gradients == pytest.approx(
        text.phases.total - text.phases.optimizer - text.phases.gradients + added
    )
    assert "encoder" not in text.ranks[0].busy


def test_a_first_stage_may_encode_alone():
    stages = alone(0, 0, 0), alone(1, 0, MODEL.layers)
    plan = replace(PLAN, workload=JOB.workload(), replicas=(Replica(stages, 4),))
    job = replace(JOB, model=replace(MODEL, vision=replace(ENCODER, deepstack=0)))
    timing = CostModel(job, MACHINES).timing(plan)
    encoding, memory = timing.stages[0], timing.memory[0]
    (work,) = encoding.first
    seconds = sum(phases.total for phases in work.phases(np.arange(1)))
    assert timing.pipelines[0].stage_phases[0].total == pytest.approx(seconds)
    assert memory["activations"] == memory["attention"] == 0 < memory["encoder"]
    found = simulate(plan, job, MACHINES)
    assert found.phases.total == pytest.approx(timing.phases.total)
    assert {name for name, busy in found.ranks[0].busy.items() if busy} == {"encoder", "optimizer"}
    first, last = ({span.way for span in found.pipeline[0] if span.stage == stage} for stage in (0, 1))
    assert "encoder" in first
    assert last == {"forward", "backward"}
    for refused in (JOB, TEXT):
        with pytest.raises(PlanError, match=r"the plan has \[0, 0\], but the job needs 1 there; give"):
            CostModel(refused, MACHINES).timing(plan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": TINY}, "--images-per-sequence 8: tiny has no encoder of images"),
        (
            {"lora_rank": 4, "images": replace(IMAGES, freeze_vision_projection=True)},
            "--freeze-vision-projection: leave it out: --lora-rank 4 freezes all but adapters",
        ),
        ({"images": Images(300, 64)}, "--patches 64: are 4,800 tokens, more than a sequence of 4,096"),
    ],
)
def test_images_that_cannot_be_are_refused(changes, words):
    with pytest.raises(HexiError, match=words):
        replace(JOB, **changes)


def alone(rank: int, first: int, last: int, ministages: int | None = None) -> Stage:
    """A stage of one rank."""
    whole = Member((rank,), JOB.seq_length, (0, MODEL.heads))
    domain = Domain((Group(((0, JOB.seq_length),), (whole,)),))
    return Stage((domain,), layers=(first, last), ministages=ministages)


def cut(ministages: int | None, *patches: int | None) -> Plan:
    """The plan of one stage that states its layers, in so many ministages."""
    (replica,) = with_patches(PLAN, *patches).replicas
    stage = replace(replica.stages[0], layers=(0, MODEL.layers), ministages=ministages)
    return replace(PLAN, workload=JOB.workload(), replicas=(replace(replica, stages=(stage,)),))


def test_ministages_in_turn_encode_twice_unless_one_is_the_whole_model():
    whole: Any = CostModel(JOB, MACHINES).timing(cut(None, 2, 1)).stages[0].first[0]
    for ministages, twice in ((None, 0), (1, 0), (2, 1)):
        plan = cut(ministages, 2, 1)
        timing, text = (CostModel(job, MACHINES).timing(plan) for job in (JOB, TEXT))
        (work,) = timing.stages[0].first
        assert work.forward.tolist() == whole.forward.tolist()
        assert work.backward == pytest.approx(whole.backward + twice * whole.forward)
        assert work.sent.forward == pytest.approx(whole.sent.forward)
        assert work.sent.backward == pytest.approx((1 + twice) * whole.sent.backward)
        added = sum(phases.total for phases in work.phases(np.arange(2)))
        (lane,), (plain,) = timing.pipelines[0].lanes[0], text.pipelines[0].lanes[0]
        assert lane.phases.total - plain.phases.total == pytest.approx(added)
        found = simulate(plan, JOB, MACHINES)
        assert [rank.busy["encoder"] for rank in found.ranks] == pytest.approx(4 * work.busy)


def test_images_are_encoded_in_the_first_ministage():
    plan = cut(2, 1, 1)
    spans = {
        name: {
            (span.way, span.chunk): span.end_s - span.start_s
            for span in CostModel(job, MACHINES).timing(plan).pipelines[0].spans()
        }
        for name, job in (("images", JOB), ("text", TEXT))
    }
    longer = {key: seconds - spans["text"][key] for key, seconds in spans["images"].items()}
    (work,) = CostModel(JOB, MACHINES).timing(plan).stages[0].first
    forward, backward = (phases.total for phases in work.phases(np.arange(2)))
    # Shared by the seconds of both passes, of which the forward pass is another part than of the decoder's.
    assert longer["forward", 0] == pytest.approx(forward, rel=0.25)
    assert longer["backward", 0] == pytest.approx(backward, rel=0.25)
    for way in ("forward", "backward"):
        assert abs(longer[way, 1]) < 0.1 * (forward + backward)


@pytest.mark.parametrize(
    ("ministages", "order", "kept"), [(None, None, 2), (2, "interleaved", 4), (2, None, 1)]
)
def test_as_many_micro_batches_keep_their_images_as_the_first_ministage_has_under_way(
    ministages: int | None, order: Literal["interleaved"] | None, kept: int
):
    job = replace(JOB, model=replace(MODEL, layers=8), global_batch_size=16)
    stages = alone(0, 0, 4, ministages), alone(1, 4, 8, ministages)
    plan = replace(PLAN, workload=job.workload(), replicas=(Replica(stages, 16, order),))
    first, last = CostModel(job, MACHINES).timing(plan).memory
    of_one = encoder_bytes(job, np.array([8.0])).kept(3, 0, 1)
    assert first["encoder"] == pytest.approx(kept * of_one)
    assert last["encoder"].tolist() == [0]


def test_a_first_ministage_has_the_layers_that_add_features():
    further = replace(JOB, model=replace(MODEL, vision=replace(ENCODER, deepstack=2)))
    with pytest.raises(PlanError, match=r"ministages\[0\]: the plan has \[0, 1\], but the job needs 2"):
        CostModel(further, MACHINES).timing(cut(2, 1, 1))
    CostModel(further, MACHINES).timing(cut(1, 1, 1))

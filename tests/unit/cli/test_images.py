"""`--images-per-sequence` and `--patches` of `hexi plan`, `compare` and `simulate`."""

import json

import pytest

from megatron_hexi.models import Images
from tests.support.shell import is_one_error_line

JOB = ("--model", "qwen2.5-vl-7b", "--seq-length", 16384)
GIVEN = ("--images-per-sequence", "8", "--patches", "1024")


@pytest.mark.parametrize(("command", "out"), [("plan", ("-o", "plan.yaml")), ("compare", ())])
def test_images_reach_the_planner(hexi, asked, command, out):
    result = hexi(command, "cluster.yaml", *JOB, *GIVEN, *out)
    assert result.code == 0
    ((request, *_),) = asked
    assert request.job.images == Images(8, 1024)
    assert "with 8 images of 1,024 patches (2,048 tokens)" in " ".join(result.out.split())


def test_plans_of_divided_images_say_which_script_trains_nothing_like_it(hexi):
    result = hexi("plan", "cluster.yaml", *JOB, *GIVEN, "--effort", "low", "-o", "plan.yaml")
    said = " ".join((result.out + result.err).split())
    assert result.code == 0
    assert "divided images: Megatron's pretrain_gpt.py trains nothing like it" in said


def test_images_need_not_be_divided(hexi, asked):
    hexi("plan", "cluster.yaml", *JOB, *GIVEN, "--no-divide-images", "-o", "plan.yaml")
    ((request, *_),) = asked
    assert not request.job.images.divided


def test_the_time_is_that_of_images(hexi, asked):
    hexi("plan", "cluster.yaml", *JOB, *GIVEN, "-o", "plan.yaml")
    given = ("simulate", "plan.yaml", "--cluster", "cluster.yaml", "--model", "qwen2.5-vl-7b", "--json")
    text, images = (json.loads(hexi(*given, *words).out)["iteration_s"] for words in ((), GIVEN))
    assert images > text


def test_frozen_parts_reach_the_planner(hexi, asked):
    words = ("--freeze-vision-model", "--freeze-vision-projection")
    result = hexi("plan", "cluster.yaml", *JOB, *GIVEN, *words, "-o", "plan.yaml")
    ((request, *_),) = asked
    assert request.job.images == Images(8, 1024, freeze_vision_model=True, freeze_vision_projection=True)
    assert "(2,048 tokens, encoder and projectors frozen)" in " ".join(result.out.split())


def test_a_frozen_encoder_takes_less_time_and_memory(hexi, asked):
    hexi("plan", "cluster.yaml", *JOB, *GIVEN, "-o", "plan.yaml")
    given = (
        "simulate",
        "plan.yaml",
        "--cluster",
        "cluster.yaml",
        "--model",
        "qwen2.5-vl-7b",
        "--json",
        *GIVEN,
    )
    times = [
        json.loads(hexi(*given, *words).out)["iteration_s"]
        for words in ((), ("--freeze-vision-projection",), ("--freeze-vision-model",))
    ]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3


def test_an_encoder_without_images_is_left_out_with_a_note(hexi, asked):
    result = hexi("plan", "cluster.yaml", *JOB, "-o", "plan.yaml")
    assert result.code == 0
    assert "has an encoder of images, which is left out" in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*JOB, "--patches", "4"), "--patches 4: counts only beside images; give --images-per-sequence too"),
        (
            (*JOB, "--images-per-sequence", "0", "--patches", "4"),
            "--images-per-sequence 0: write a whole number",
        ),
        (
            (*JOB, "--freeze-vision-model"),
            "--freeze-vision-model: counts only beside images; give --images-per-sequence and --patches too",
        ),
        (
            ("--model", "gpt-3b", "--seq-length", 4096, "--freeze-vision-projection"),
            "--freeze-vision-projection: gpt-3b has no encoder of images; leave it out",
        ),
        (("--model", "gpt-3b", "--seq-length", 4096, *GIVEN), "gpt-3b has no encoder of images"),
        ((*JOB, "--images-per-sequence", "80", "--patches", "1024"), "more than a sequence of 16,384"),
    ],
)
def test_what_is_wrong_is_one_line(hexi, words, said):
    result = hexi("plan", "cluster.yaml", *words, "-o", "plan.yaml")
    assert is_one_error_line(result.err)
    assert said in result.err

"""The device catalogue: every curve with its source, figures by hand, interpolation by hand, overrides."""

import io
import json
import sys

import pytest
from rich.console import Console

from megatron_hexi.cli import main as cli
from megatron_hexi.cluster import Curve, catalog, device, read_cluster
from megatron_hexi.errors import ClusterError
from megatron_hexi.report.pictures import draw_curves
from megatron_hexi.report.tables import catalog_table, device_dict, device_report

NAMES = list(catalog())
K = 1024

WANTED = [
    "H100-SXM-80GB",
    "H200-SXM-141GB",
    "A100-SXM-80GB",
    "A100-SXM-40GB",
    "A100-PCIe-80GB",
    "A800-SXM-80GB",
    "L40S-48GB",
    "L40-48GB",
    "H100-PCIe-80GB",
    "H100-NVL-94GB",
    "A6000-48GB",
    "B200-180GB",
    "RTX4090-24GB",
    "RTX3090-24GB",
    "RTX3080Ti-12GB",
    "V100-SXM2-16GB",
    "V100-SXM2-32GB",
    "V100-PCIe-16GB",
    "T4-16GB",
    "A10G-24GB",
    "L4-24GB",
    "GH200-96GB",
    "H100-SXM-96GB",
    "TitanRTX-24GB",
    "RTX2080Ti-11GB",
]


def test_every_gpu_is_there():
    assert sorted(NAMES) == sorted(WANTED)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_says_where_it_comes_from(name):
    known = device(name)
    assert "http" in known.source
    assert known.link.source or known.link.estimate
    for curve in known.curves.values():
        # Measured: a paper, or a page. Estimated: a sentence.
        assert len(curve.source) > 20 if curve.estimate else "http" in curve.source or "arXiv" in curve.source


@pytest.mark.parametrize("name", NAMES)
def test_curves_are_usable_from_one_token_to_a_million(name):
    for curve in device(name).curves.values():
        rates = [curve.rate(2**power) for power in range(21)]
        assert min(rates) > 0
        assert curve.sizes[0] == 1
        # Below what is given the rule rises; a larger job of the same kind never takes less time.
        below = [curve.rate(size) for size in curve.sizes if size <= curve.given_from]
        assert below == sorted(below)
        times = [curve.time(size**2, size) for size in range(1, 4000, 7)]
        assert times == sorted(times)


@pytest.mark.parametrize("name", NAMES)
def test_a_device_makes_sense(name):
    known = device(name)
    nominal = known.nominal.bf16 or known.nominal.fp16
    assert nominal is not None
    matmul = [known.matmul.rate(2**power) for power in range(21)]
    assert matmul == sorted(matmul)
    assert 0.4 * nominal < matmul[-1] < nominal
    assert known.memory_gb * 0.9 < known.usable_gib < known.memory_gb
    assert 0 < known.link.bandwidth_gb_s <= (known.link.nominal_gb_s or 0)
    forwards = [attention.causal.forward.rate(16 * K) for attention in known.attentions]
    assert forwards == sorted(forwards, reverse=True)
    for attention in known.attentions:
        # Full does no less than causal, per FLOP, at 16k; some figures are read off bars, to 1 %.
        assert attention.causal.forward.rate(16 * K) <= attention.full.forward.rate(16 * K)
        assert attention.causal.backward.rate(16 * K) <= 1.01 * attention.full.backward.rate(16 * K)


# Figures copied from the papers and tables that the catalogue names, by hand.
@pytest.mark.parametrize(
    ("name", "kernel", "tokens", "rates"),
    [
        ("A100-SXM-80GB", "flash-attn-2", 16, (197, 186, 225, 196)),
        ("H100-SXM-80GB", "flash-attn-2", 16, (335, 322, 370, 322)),
        ("H100-SXM-80GB", "cudnn", 16, (539, 460, 595, 516)),
        ("H100-SXM-80GB", "flash-attn-3", 4, (579, 462, 638, 542)),
        ("H100-SXM-80GB", "flash-attn-3", 16, (616, 562, 648, 561)),
        ("H200-SXM-141GB", "cudnn", 2, (484, None, None, None)),
        ("H200-SXM-141GB", "cudnn", 4, (591, 474, 671, 560)),
        ("H200-SXM-141GB", "cudnn", 8, (644, 541, 691, 594)),
        ("H200-SXM-141GB", "cudnn", 16, (673, 579, 702, 612)),
        ("H200-SXM-141GB", "cudnn", 32, (688, 581, 693, 572)),
        ("B200-180GB", "cudnn", 16, (1332.4, 1074.8, None, None)),
        ("B200-180GB", "cudnn", 32, (1419, 1108.7, None, None)),
        ("B200-180GB", "cudnn", 128, (1355.4, 1047.8, None, None)),
        ("B200-180GB", "flash-attn-2", 128, (443.7, 348.3, None, None)),
        ("RTX4090-24GB", "flash-attn-2", 2, (151, 99, 169, 125)),
    ],
)
def test_published_attention_figures(name, kernel, tokens, rates):
    curves = device(name).attention(kernel).curves
    for curve, rate in zip(curves.values(), rates, strict=True):
        if rate is not None:
            assert curve.rate(tokens * K) == pytest.approx(rate)
            assert not curve.estimate


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("A100-SXM-80GB", 267.9),
        ("A100-PCIe-80GB", 256.4),
        ("H100-SXM-80GB", 792.1),
        ("H200-SXM-141GB", 794),
        ("B200-180GB", 1745),
    ],
)
def test_published_matmul_figures(name, rate):
    assert device(name).matmul.rate(2**17) == rate
    assert not device(name).matmul.estimate


def test_what_nobody_measured_is_an_estimate():
    assert all(curve.estimate for curve in device("L40S-48GB").curves.values())
    assert all(curve.estimate for curve in device("A800-SXM-80GB").curves.values())
    a100, a800 = device("A100-SXM-80GB"), device("A800-SXM-80GB")
    assert a800.attention().causal.forward.rates == a100.attention().causal.forward.rates


def test_ratios_that_a_planner_rests_on():
    h100, a100 = device("H100-SXM-80GB"), device("A100-SXM-80GB")
    slow = a100.attention().causal.forward.rate(16 * K)
    assert h100.attention("flash-attn-2").causal.forward.rate(16 * K) / slow == pytest.approx(1.70, abs=0.01)
    assert h100.attention().causal.forward.rate(16 * K) / slow == pytest.approx(3.13, abs=0.01)


def test_interpolation_is_linear_in_the_logarithm_and_clamped():
    curve = Curve((1000, 4000, 8000), (10, 30, 20), "us")
    assert [curve.rate(size) for size in (0.5, 1000, 4000, 8000, 1e9)] == [10, 10, 30, 20, 20]
    assert curve.rate(2000) == pytest.approx(20)
    assert curve.rate(4000 * 2**0.5) == pytest.approx(25)
    assert curve.time(60e12, 2000) == pytest.approx(3)
    assert curve.scaled(2).rate(2000) == pytest.approx(40)


def test_small_sizes_follow_the_saturating_rule():
    # A100 SXM: 267.9 TFLOP/s at 6912 rows, half at 267.9 / 2.039 = 131.4 rows.
    matmul, half = device("A100-SXM-80GB").matmul, 267.9e3 / 2039
    peak = 267.9 * (6912 + half) / 6912
    assert matmul.given_from == 6912
    for size in (1, 128, 1024):
        assert matmul.rate(size) == pytest.approx(peak * size / (size + half))
    forward = device("A100-SXM-80GB").attention().causal.forward
    assert forward.rate(2 * K) == pytest.approx(197 * (2 * K / (2 * K + 800)) / (16 * K / (16 * K + 800)))


def test_the_rule_meets_the_one_kernel_measured_at_many_sizes():
    forward = device("H200-SXM-141GB").attention("cudnn").causal.forward
    peak = 673 * (16 * K + 800) / (16 * K)
    for tokens in (4, 8, 16, 32):
        assert forward.rate(tokens * K) == pytest.approx(peak * tokens * K / (tokens * K + 800), rel=0.01)


def test_kernels_by_name():
    h100 = device("H100-SXM-80GB")
    assert h100.kernels == ("flash-attn-3", "cudnn", "flash-attn-2")
    assert h100.attention("aten-flash") is h100.attention("flash-attn-2")
    with pytest.raises(ClusterError, match=r"T4-16GB: no curves for kernel cudnn; use math"):
        device("T4-16GB").attention("cudnn")


def test_an_unknown_name_names_its_neighbours():
    with pytest.raises(ClusterError, match="did you mean H200-SXM-141GB"):
        device("h200")
    with pytest.raises(ClusterError, match="`hexi catalog` lists"):
        device("TPUv5")


def test_measured_curves_override_the_catalogue(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("""\
name: x
nodes: [{name: a, gpu: A100-SXM-80GB, gpus: 2}]
devices:
  A100-SXM-80GB:
    matmul: {points: [[1, 2.5], [64, 100], [4096, 240]], source: probe}
    link: {kind: NVLink3, bandwidth_gb_s: 230, latency_us: 7, source: probe}
    attention:
      flash-attn-2:
        causal: {forward: {points: [[4096, 150], [8192, 160]], half: 1000, source: probe}}
      cudnn: {like: H100-SXM-80GB, times: 0.25, estimate: a quarter}
""")
    known, mine = device("A100-SXM-80GB"), read_cluster(path).ranks[1].device
    assert [mine.matmul.rate(size) for size in (1, 64, 10**6)] == [2.5, 100, 240]
    assert (mine.matmul.source, mine.matmul.given_from) == ("probe", 1)
    assert mine.link.bandwidth_gb_s == 230
    forward = mine.attention("flash-attn-2").causal.forward
    assert forward.rate(4096) == 150
    assert forward.rate(1024) == pytest.approx(150 * (1024 / 2024) / (4096 / 5096))
    # The rest is as it was.
    assert mine.attention("flash-attn-2").full == known.attention("flash-attn-2").full
    assert (mine.memory_gb, mine.usable_gib, mine.source) == (known.memory_gb, known.usable_gib, known.source)
    quarter = mine.attention("cudnn").causal.forward
    assert (quarter.rate(16 * K), quarter.estimate) == (539 / 4, True)
    assert quarter.source == "H100-SXM-80GB x 0.25: a quarter"
    assert mine.kernels == ("flash-attn-2", "cudnn")
    assert device("A100-SXM-80GB") is known


def text_of(report):
    stream = io.StringIO()
    Console(file=stream, width=200).print(report)
    return stream.getvalue()


def test_the_table_shows_every_gpu_and_marks_estimates():
    text = text_of(catalog_table(list(catalog().values())))
    assert all(name in text for name in NAMES)
    assert "616 / 562" in text
    assert "~173 / ~163" in text  # L40S


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_s_report_has_its_curves_and_sources(name):
    known = device(name)
    text = "".join(text_of(device_report(known)).split())
    for curve_name, curve in known.curves.items():
        assert curve_name.replace(" ", "") in text
        assert "".join(curve.source.split()) in text


def test_pictures_have_a_line_for_every_curve():
    h100 = device("H100-SXM-80GB")
    labels = [len(axes.get_legend_handles_labels()[1]) for axes in draw_curves([h100]).axes]
    assert labels == [1, 6, 6]
    every = draw_curves(list(catalog().values()))
    assert [len(axes.get_legend_handles_labels()[1]) for axes in every.axes] == [len(NAMES)] * 3
    assert all(axes.get_xscale() == "log" for axes in every.axes)


def call(monkeypatch, capsys, *words):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["hexi", "catalog", *map(str, words)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    captured = capsys.readouterr()
    return exit_.value.code or 0, captured.out, captured.err


def test_the_command_prints_tables(monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert all(name in out for name in NAMES)
    assert "2407.08608" in call(monkeypatch, capsys, "H100-SXM-80GB")[1]


def test_the_command_prints_json(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "h100.png"
    code, out, err = call(monkeypatch, capsys, "H100-SXM-80GB", "--json", "--picture", picture)
    (found,) = json.loads(out)["devices"]
    assert (code, err) == (0, f"drew {picture}\n")
    assert found == json.loads(json.dumps(device_dict(device("H100-SXM-80GB"))))
    assert found["curves"]["cudnn full forward"]["rates"][-1] == 595
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_an_unknown_gpu(monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, "H300")
    assert (code, out) == (2, "")
    assert err.startswith("hexi: error: GPU 'H300' is not in the catalogue; did you mean H")
    assert err.count("\n") == 1

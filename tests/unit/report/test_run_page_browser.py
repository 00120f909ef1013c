"""The report's page in a real browser: nothing is complained of, nothing is fetched, nothing overflows."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from megatron_hexi.cost import estimate
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.lab.simulator.timeline_picture import draw_timeline
from megatron_hexi.record import read_record
from megatron_hexi.report.run_page import run_page
from megatron_hexi.report.run_summary import describe_run
from tests.support.costs import cluster
from tests.support.records import JOB, PLAN, interval, start, write_record

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
#: A phone and a desktop.
WIDTHS = (400, 1280)

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="Chromium is not installed (Debian: chromium chromium-driver)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with everything on it, and long words where users choose them."""
    folder = tmp_path_factory.mktemp("page")
    pieces = [interval(number) for number in range(1, 8)]
    path = write_record(folder / "record.jsonl", start(devices=("A GPU with a long name" * 5,) * 2), *pieces)
    machines = cluster([("fast", "DOUBLE", 1), ("slow", "PLAIN", 1)])
    cost = estimate(PLAN, JOB, machines)
    run = dataclasses.replace(describe_run(read_record(path), PLAN, cost), notes=("long" * 100,))
    simulated = simulate(PLAN, JOB, machines)
    replay = draw_timeline(simulated, PLAN), simulated.iteration_s
    text = run_page(run, PLAN, "Run-of-a-model-" + "x" * 200, cost, *replay)
    (folder / "report.html").write_text(text)
    return (folder / "report.html").as_uri()


def show(browser, url, width):
    """Open a page in a window of a width; what the browser then said and asked for."""
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    return browser.get_log("browser"), asked


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_complained_of_fetched_or_cut_off(browser, page, width):
    said, asked = show(browser, page, width)
    assert said == []
    assert set(asked) <= {page, "data:,"}
    assert page in asked
    assert browser.execute_script("return window.innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    # Only what scrolls may reach beyond the page.
    outside = browser.execute_script(
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') &&"
        " e.getBoundingClientRect().right > window.innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []


@pytest.mark.parametrize("width", WIDTHS)
def test_drawings_and_tables_are_there(browser, page, width):
    show(browser, page, width)
    drawings = browser.execute_script(
        "return [...document.querySelectorAll('.scroll[role=img] svg')].map(e => e.getBoundingClientRect())"
        ".map(r => [r.width, r.height])"
    )
    assert len(drawings) == 5
    assert all(wide >= min(width, 1000) / 2 and high > 50 for wide, high in drawings)
    rows = browser.execute_script("return document.querySelectorAll('#ranks tbody tr').length")
    assert rows == 2


def test_what_fetches_is_noticed(browser, tmp_path):
    """The two tests above could not fail otherwise."""
    (tmp_path / "bad.html").write_text(
        '<body style="width: 3000px"><img src="http://localhost:9/a.png"><script>throw "x"</script>'
    )
    said, asked = show(browser, (tmp_path / "bad.html").as_uri(), 400)
    assert len(said) >= 1
    assert "http://localhost:9/a.png" in asked
    assert browser.execute_script("return document.documentElement.scrollWidth") > 400

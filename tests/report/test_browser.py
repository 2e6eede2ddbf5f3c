"""Pages in a real browser: headless Chromium opens them, moves the slider, clicks nodes, switches the theme."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("vl_convert", reason="pages need the extra report: pip install 'agscl[report]'")

from agscl.report import read_report, write_page
from agscl.report.provenance import add_provenance
from report.browser import Browser, find_chromium, keep_screenshot, time_slider
from report.small_runs import write_comparison, write_large_run

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium here: apt-get install chromium")

COMPARED = ["agscl", "paper-agscl", "finetune", "ewc", "si", "mas", "hat"]


@pytest.fixture(scope="module")
def pages(digits, tmp_path_factory):
    """The page of a real run, of one with AlexNet's nodes and fifty tasks, and of a comparison of 35 runs."""
    folder = tmp_path_factory.mktemp("pages")
    large = write_large_run(folder / "runs" / "large")
    moving = write_large_run(folder / "runs" / "moving", {"conv": 40, "fc": 200}, 8, moves=True,
                             names=["<script>alert(1)</script>", *(f"<b>{n}</b>" for n in range(7))])  # fmt: skip
    compared = write_comparison(folder / "runs" / "compared", COMPARED, 5)
    made = {}
    for name, path in {"digits": digits, "large": large, "moving": moving, "compared": compared}.items():
        report = read_report([path])
        if name == "digits":
            add_provenance(report, [path])
        made[name] = write_page(report, folder / f"{name}.html")
    return made


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path / "profile") as opened:
        opened.set_size(1280)
        yield opened


@pytest.mark.parametrize("name", ["digits", "large", "moving", "compared"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_opens_without_an_error_a_request_or_a_sideways_scroll(browser, pages, tmp_path, name, width):
    browser.set_size(width)
    browser.open(pages[name])
    browser.draw_all_charts()
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("window.agsclReady") is True
    assert browser.run("document.querySelectorAll('.chart svg').length") >= 3
    assert browser.run("document.querySelector('.sentence').textContent.length") > 40
    keep_screenshot(browser, f"{name}-{width}", tmp_path)
    assert browser.errors == []
    assert browser.requests == [pages[name].resolve().as_uri()]


def test_the_slider_and_the_keyboard_go_through_the_tasks(browser, pages):
    browser.open(pages["digits"])
    assert browser.run("document.getElementById('task-name').textContent").startswith("after task 5")
    frozen = []
    browser.run("document.getElementById('task').focus()")
    for _ in range(4):
        browser.press("ArrowLeft", 37)
        frozen.append(int(browser.run("document.querySelectorAll('#counts b')[1].textContent")))
    assert frozen == sorted(frozen, reverse=True)
    assert frozen[-1] == 0
    assert browser.run("document.getElementById('task-name').textContent").startswith("after task 1")
    assert browser.run("document.getElementById('task').getAttribute('aria-valuetext')").startswith("after task 1")
    browser.run("document.getElementById('nodes-canvas').focus()")
    browser.press("ArrowRight", 39)
    browser.press("ArrowRight", 39)
    assert "Node " in browser.run("document.getElementById('node').textContent")
    assert browser.errors == []


def test_a_click_says_what_a_node_reads_who_reads_it_and_its_importance(browser, pages, digits):
    browser.open(pages["digits"])
    browser.run("document.getElementById('nodes-canvas').scrollIntoView({ behavior: 'instant', block: 'center' })")
    box = json.loads(browser.run("JSON.stringify(document.getElementById('nodes-canvas').getBoundingClientRect())"))
    browser.click(box["left"] + 8, box["top"] + box["height"] / 2)
    words = browser.run("document.getElementById('node').textContent")
    history = read_report([digits]).detail.nodes
    layer = history.layers[1]
    ordered = sorted(range(len(layer.groups)), key=lambda number: (history.first[layer.groups[number]], number))
    assert f"Node {ordered[0]} of {layer.name}" in words
    sources = history.first[history.layers[0].groups]
    readable, later = int((sources < 5).sum()), int(((sources > 0) & (sources < 5)).sum())
    assert f"Reads {readable} of the 50 nodes of {history.layers[0].name}" in words
    assert f"It learned to read {later} of them later; tasks before those do not see that." in words
    assert f"its weights from the other {50 - readable} are exactly 0" in words
    assert f"of the 50 nodes of {history.layers[2].name}" in words
    assert browser.run("document.querySelectorAll('#node .bars i').length") == 5
    assert browser.errors == []


@pytest.mark.parametrize("width", [1280, 390])
def test_what_is_said_of_a_node_is_in_view_wherever_it_lies_on_the_map(browser, pages, width):
    browser.set_size(width, 600)
    browser.open(pages["large"])
    browser.run("document.getElementById('nodes-canvas').scrollIntoView({ behavior: 'instant', block: 'center' })")
    below = browser.run("document.getElementById('node').getBoundingClientRect().bottom")
    assert below > 600, "it stands below what is seen"
    browser.click(browser.run("document.getElementById('nodes-canvas').getBoundingClientRect().left") + 4, 200)
    box = json.loads(browser.run("JSON.stringify(document.getElementById('node').getBoundingClientRect())"))
    assert "Node " in browser.run("document.getElementById('node').textContent")
    assert box["top"] > 200
    assert box["bottom"] <= 600


def test_what_the_map_says_of_zeros_is_so_in_the_weights(browser, pages, digits):
    from agscl.runs import Run

    weights = Run(digits).load_checkpoint()["trainer"]["model"]
    history = read_report([digits]).detail.nodes
    reader, source = history.layers[1], history.layers[0]
    matrix = weights[f"{reader.name}.weight"]
    for number, group in enumerate(reader.groups):
        if history.first[group] < 5:
            unread = history.first[source.groups] >= 5  # of tasks to come
            assert (matrix[number][unread] == 0).all()


def test_a_slider_over_fifty_tasks_and_9344_nodes_answers_within_50_ms(browser, pages):
    browser.open(pages["large"])
    times = time_slider(browser)
    assert len(times) == 50
    assert sorted(times)[25] <= 50, times  # the median: other processes may take the machine for a moment
    assert browser.run("document.querySelectorAll('#counts b')[0].textContent") != "0"


def test_a_page_of_9344_nodes_and_fifty_tasks_opens_within_a_second(browser, pages):
    assert pages["large"].stat().st_size < 2_000_000
    seconds, work = [], []
    for _ in range(3):
        seconds.append(browser.open(pages["large"]))
        work.append(browser.measure_work())
    # Where other processes take the machine, what counts is the work that opening takes.
    assert min(*seconds, *work) <= 1000, (seconds, work)


def test_a_task_called_script_runs_nothing(browser, pages):
    browser.open(pages["moving"])
    browser.draw_all_charts()
    browser.run("document.getElementById('task').value = 0")
    browser.run("document.getElementById('task').dispatchEvent(new Event('input'))")
    assert "<script>alert(1)</script>" in browser.run("document.getElementById('task-name').textContent")
    assert browser.run("document.querySelectorAll('main b b, figure b').length") == 0
    assert browser.errors == []


def test_the_theme_follows_the_system_and_can_be_switched(browser, pages, tmp_path):
    browser.set_media("prefers-color-scheme", "dark")
    browser.open(pages["digits"])
    background = "getComputedStyle(document.body).backgroundColor"
    assert browser.run(background) == "rgb(20, 23, 27)"
    browser.draw_all_charts()
    keep_screenshot(browser, "digits-dark", tmp_path)
    browser.run("document.getElementById('theme').click()")
    assert browser.run(background) == "rgb(255, 255, 255)"
    assert "Dark" in browser.run("document.getElementById('theme').textContent")
    assert browser.errors == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_themes(browser, pages, theme):
    browser.set_media("prefers-color-scheme", theme)
    browser.open(pages["digits"])
    lowest = browser.run(CONTRAST)
    assert lowest["ratio"] >= 4.5, lowest


CONTRAST = """(() => {
  const shine = (color) => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255);
    const linear = parts.map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (!color.endsWith(", 0)") && color !== "transparent") return color;
    }
    return "rgb(255, 255, 255)";
  };
  let lowest = { ratio: 99 };
  for (const element of document.querySelectorAll("p, dt, dd b, dd span, th, td, a, h1, h2, summary, li, button")) {
    if (!element.textContent.trim() || !element.offsetParent) continue;
    const [a, b] = [shine(getComputedStyle(element).color), shine(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < lowest.ratio) lowest = { ratio, text: element.textContent.slice(0, 40), name: element.tagName };
  }
  return lowest;
})()"""


def test_without_javascript_there_are_pictures_and_tables(pages, tmp_path):
    with Browser(tmp_path / "profile", scripts=False) as browser:
        browser.set_size(1280)
        browser.call("Page.navigate", url=pages["digits"].resolve().as_uri())
        time.sleep(1.0)
        path = keep_screenshot(browser, "digits-without-javascript", tmp_path)
    assert path.stat().st_size > 100_000


def test_a_page_can_be_printed_and_is_light_on_paper_where_the_screen_is_dark(browser, pages, tmp_path):
    browser.set_media("prefers-color-scheme", "dark")
    browser.open(pages["digits"])
    browser.draw_all_charts()
    browser.run(
        "window.addEventListener('beforeprint', () => {"
        " window.paper = getComputedStyle(document.body).backgroundColor;"
        " window.ink = getComputedStyle(document.querySelector('.chart .role-axis-label text')).fill; })"
    )
    printed = browser.call("Page.printToPDF", printBackground=True)["data"]
    assert len(printed) > 50_000
    assert browser.run("window.paper") == "rgb(255, 255, 255)"
    assert browser.run("window.ink") in ("rgb(0, 0, 0)", "rgb(31, 35, 40)")
    assert browser.run("document.querySelectorAll('details:not([open])').length") == 0
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)", "as before"
    assert browser.errors == []


def test_a_watched_run_is_served_to_this_machine_and_reloads(browser, digits, tmp_path):
    run = shutil.copytree(digits, tmp_path / "runs" / "real")
    log = (run / "events.jsonl").read_bytes()
    (run / "result.json").unlink()
    (run / "events.jsonl").write_bytes(b"".join(log.splitlines(keepends=True)[:-12]))
    words = [sys.executable, "-m", "agscl", "watch", str(run), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0]
            assert address.startswith("http://127.0.0.1:")
            browser.open(address)
            assert "not finished" in browser.run("document.querySelector('.badge').textContent")
            before = browser.run("document.querySelector('.sentence').textContent")
            (run / "events.jsonl").write_bytes(log)
            browser.wait_for(f"document.querySelector('.sentence').textContent !== {json.dumps(before)}")
            assert browser.errors == []
            request = urllib.request.Request(address, headers={"Host": "elsewhere.example:80"})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(request)
        finally:
            process.terminate()

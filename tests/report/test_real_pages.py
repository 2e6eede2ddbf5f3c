"""Pages of runs that were really trained: fifty tasks on 9 344 nodes, 35 runs compared, agents with recorded play."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vl_convert", reason="pages need the extra report: pip install 'agscl[report]'")

from agscl.cli.main import main
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.networks import NETWORKS
from agscl.report import read_report, write_page
from agscl.report.headline import make_verdict
from agscl.report.provenance import add_provenance
from agscl.runs import Run, checkpoints
from report.browser import Browser, find_chromium, keep_screenshot, time_slider

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium here: apt-get install chromium"),
]
MAX_BYTES = 2_000_000
COMPARED = "agscl,paper-agscl,ewc,si,mas,hat"  # and fine-tuning
AGENTS = ["run", "control", "--name", "agents", "--set", "steps=2048", "evaluations=4", "evaluation_episodes=2"]


class WideNetwork(nn.Module):
    """AlexNet's layers and nodes for images of 16 × 16; both wide layers read the last convolution: few weights."""

    input_shape = (3, 16, 16)
    features = 2 * 4096

    def __init__(self) -> None:
        super().__init__()
        sizes, layers = (3, 64, 192, 384, 256, 256), []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=1 if inputs == 256 else 2, padding=1), nn.ReLU()]
        self.conv = nn.Sequential(*layers, nn.Flatten())
        self.wide = nn.ModuleList(nn.Linear(256, 4096) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return torch.cat([torch.relu(layer(x)) for layer in self.wide], dim=1)


def write_turned_digits(folder: Path, tasks: int, images: int = 10) -> Path:
    """Pictures of scikit-learn's digits: five pairs, then the same ones turned, and so on."""
    from PIL import Image
    from sklearn.datasets import load_digits

    rows, labels = load_digits(return_X_y=True)
    for task in range(tasks):
        low, angle = 2 * (task % 5), 36 * (task // 5)
        for digit in (low, low + 1):
            own = folder / f"{task + 1:02d} {low} or {low + 1}, turned by {angle}°" / str(digit)
            own.mkdir(parents=True)
            for number, row in enumerate(rows[labels == digit][:images]):
                picture = Image.fromarray((15.9 * row.reshape(8, 8)).astype("uint8"))
                picture.resize((16, 16)).rotate(angle).save(own / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A run of fifty tasks with 9 344 nodes."""
    folder = tmp_path_factory.mktemp("wide")
    data = write_turned_digits(folder / "data", 50)
    training = {"optimizer": "adam", "lr": 3e-4, "momentum": 0.0, "epochs": 3, "batch_size": 8, "drop_at": None}
    source = {"tasks": f"folder:{data}", "task_options": {"by": "folder"}}
    config = configure("cub200", method="agscl", reference=False, budget=50, **source, **training)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS, "wide", WideNetwork)
        patch.setattr(checkpoints, "PACKED_BYTES", 2**40)  # packing takes longer than training here
        with Run(folder / "wide") as run:
            execute_run(replace(config, network="wide", network_options={}), run, checkpoint_every=1e9)
        yield folder / "wide"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Seven methods on digits, five seeds each."""
    folder = tmp_path_factory.mktemp("compared")
    words = ["compare", "digits", "--methods", COMPARED, "--seeds", "5", "--jobs", "1", "--epochs", "2"]
    assert main([*words, "--batch-size", "64", "--name", "all", "--runs", str(folder)]) == 0
    assert len(list((folder / "all").glob("*/result.json"))) == 35
    return folder / "all"


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """A short run of agents with its recorded play."""
    folder = tmp_path_factory.mktemp("agents")
    assert main([*AGENTS, "--runs", str(folder)]) == 0
    assert main(["play", "agents", "--runs", str(folder), "--steps", "100"]) == 0
    return folder / "agents"


@pytest.fixture(scope="module")
def pages(wide, compared, agents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    for name, path in {"wide": wide, "compared": compared, "agents": agents}.items():
        report = read_report([path])
        add_provenance(report, [path])
        assert report.problems == []
        made[name] = write_page(report, folder / f"real-{name}.html")
    return made


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path / "profile") as opened:
        opened.set_size(1280)
        yield opened


@pytest.mark.parametrize("name", ["wide", "compared", "agents"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_of_a_trained_run_has_no_error_and_no_sideways_scroll(browser, pages, tmp_path, name, width, theme):
    browser.set_media("prefers-color-scheme", theme)
    browser.set_size(width)
    browser.open(pages[name])
    browser.draw_all_charts()
    assert browser.run("document.documentElement.scrollWidth") == width
    keep_screenshot(browser, f"real-{name}-{width}-{theme}", tmp_path)
    assert browser.errors == []


@pytest.mark.parametrize("name", ["wide", "compared", "agents"])
def test_the_page_of_a_trained_run_is_small_and_opens_within_a_second(browser, pages, name):
    assert pages[name].stat().st_size <= MAX_BYTES
    times = [(browser.open(pages[name]), browser.measure_work()) for _ in range(3)]
    print(name, pages[name].stat().st_size, "bytes", times, "ms: drawn, worked")
    # Where other processes take the machine, what counts is the work that opening takes.
    assert min(min(pair) for pair in times) <= 1000, times


def test_the_slider_over_fifty_learned_tasks_answers_within_50_ms(browser, pages, wide):
    browser.open(pages["wide"])
    times = time_slider(browser)
    print("slider:", sorted(times), "ms")
    assert len(times) == 50
    assert sorted(times)[25] <= 50, times  # the median: other processes may take the machine for a moment
    history = read_report([wide]).detail.nodes
    assert history.size == 9344
    taken, frozen, moved, free = (
        int(text.replace(",", ""))
        for text in browser.run("[...document.querySelectorAll('#counts b')].map((one) => one.textContent)")
    )
    assert taken == (history.first == 49).sum()
    assert frozen == (history.first < 49).sum()
    assert moved == 0
    assert free == 9344 - taken - frozen


def test_the_verdict_of_fifty_learned_tasks_is_proven(wide):
    report = read_report([wide])
    add_provenance(report, [wide])
    verdict = make_verdict(report)
    assert verdict.badge == "proven"
    assert "learned 50 tasks" in verdict.sentence
    assert "forgot nothing" in verdict.sentence


def test_the_page_of_agents_shows_recorded_play_and_when_each_game_was_learned(browser, pages):
    browser.open(pages["agents"])
    browser.draw_all_charts()
    widths = browser.run("[...document.querySelectorAll('.media img')].map((one) => one.naturalWidth)")
    assert len(widths) == 3
    assert min(widths) > 0, "every GIF was decoded"
    for game in (1, 2, 3):
        place = f"document.querySelector('[data-chart=game-{game}]')"
        bands = browser.run(f"{place}.querySelectorAll('.mark-rect path').length")
        assert bands == 1
        shown = browser.run(
            f"[...{place}.querySelectorAll('.role-axis-label text')]"
            ".filter((one) => one.getAttribute('opacity') !== '0').map((one) => one.textContent)"
        )
        assert {"1", "2", "3"} <= set(shown)
        overlapping = browser.run(OVERLAPS.replace("PLACE", place))
        assert overlapping == []
    assert browser.errors == []


OVERLAPS = """(() => {
  const labels = [...PLACE.querySelectorAll('.role-axis-label text')].filter((one) => one.textContent.trim());
  const boxes = labels.map((one) => one.getBoundingClientRect());
  const found = [];
  boxes.forEach((a, i) => boxes.forEach((b, j) => {
    const apart = a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
    if (i < j && !apart) found.push(labels[i].textContent + ' and ' + labels[j].textContent);
  }));
  return found;
})()"""
"""The labels of a chart's axes that overlap."""

"""The blocks of code in README and docs run as they stand; lines of the command too, as far as a laptop can."""

from __future__ import annotations

import contextlib
import doctest
import functools
import io
import re
import shlex
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import tyro

from agscl.cli.main import main

HOME = Path(__file__).parents[2]
EXTRAS = {"lightning", "transformers", "avalanche", "stable_baselines3", "huggingface_hub", "pyarrow"}

# What each section leaves to its reader -------------------------------------------------------------------------------

NETWORK = """
import torch
from torch import nn
from types import SimpleNamespace as Namespace
def make_trunk():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
trunk, example_input = make_trunk(), torch.randn(4, 8)
data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.arange(48) % 2)
examples = torch.utils.data.DataLoader(data, batch_size=4)
tasks = [Namespace(name=name, classes=2, loader=examples) for name in ("cats", "birds")]
"""
PRELUDES = {
    "README.md#In your own loop": NETWORK
    + """
image_layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten()]
trunk = nn.Sequential(*image_layers, nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
example_input, epochs = torch.randn(2, 3, 8, 8), 3
batches = [(torch.randn(4, 3, 8, 8), torch.randint(2, (4,))) for _ in range(3)]
""",
    "README.md#What you can check": "import agscl; state_dict = model.state_dict()",
    "README.md#Freezing rows, without a method": """
import agscl, torch
model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(32_010, 2)})
def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model["embedding"](torch.arange(32_010)).sum().backward()
    optimizer.step()
model.embedding = model["embedding"]
""",
    "docs/data.md#Your own data": """
import torch
x, y, hospital = torch.randn(80, 4), torch.arange(80) % 2, ["north"] * 40 + ["south"] * 40
""",
    "docs/freeze.md#Freezing parts of tensors": """
import agscl, torch
from torch import nn
model = nn.Module()
model.embedding, model.encoder = nn.Embedding(32_010, 2), nn.Module()
model.encoder.fc1, mask = nn.Linear(8, 4), torch.tensor([True, False, False, True])
""",
    "docs/freeze.md#What you can check": """
frozen = agscl.freeze(model.embedding, rows=slice(0, 32_000))
optimizer = torch.optim.AdamW(model.parameters())
model.embedding(torch.arange(32_010)).sum().backward()
optimizer.step()
state_dict = model.state_dict()
""",
    "docs/integrations.md#Lightning": NETWORK
    + """
import lightning
import torch.nn.functional as F
from agscl import MultiHead
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = MultiHead(trunk)
    def training_step(self, batch, number):
        return F.cross_entropy(self.model(batch[0], self.task), batch[1])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
module = Module()
""",
    "docs/integrations.md#Transformers": NETWORK
    + """
import torch.nn.functional as F
from transformers import TrainingArguments
from agscl import AGSCL, MultiHead
class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = MultiHead(trunk, features=16)
    def forward(self, x, labels):
        logits = self.model(x, self.task)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}
module = Module()
method = AGSCL(module.model, example_input)
arguments = TrainingArguments("trainer", report_to="none", use_cpu=True)
for task in tasks:
    task.examples = [{"x": x, "labels": y} for x, y in data]
""",
    "docs/integrations.md#Avalanche": NETWORK
    + """
from avalanche.benchmarks import benchmark_from_datasets, task_incremental_benchmark, with_classes_timeline
from avalanche.benchmarks.utils import DataAttribute, make_avalanche_dataset
from torch.utils.data import TensorDataset
from agscl import AGSCL, MultiHead
model = MultiHead(trunk, features=16)
method, optimizer = AGSCL(model, example_input), torch.optim.Adam(model.parameters())
def make_dataset():
    y = torch.arange(16) % 2
    targets = DataAttribute(y.tolist(), "targets")
    return make_avalanche_dataset(TensorDataset(torch.randn(16, 8), y), data_attributes=[targets])
datasets = [make_dataset(), make_dataset()]
benchmark = task_incremental_benchmark(benchmark_from_datasets(train=datasets, test=datasets))
benchmark = with_classes_timeline(benchmark)
""",
    "docs/integrations.md#Stable-Baselines3": """
import gymnasium, torch
from torch import nn
from agscl import AGSCL, MultiHead
model = MultiHead(nn.Sequential(nn.Linear(4, 16), nn.ReLU()))
method = AGSCL(model, torch.zeros(2, 4))
environments = {name: gymnasium.make("CartPole-v1") for name in ("cartpole", "another")}
""",
    "docs/integrations.md#The Hugging Face hub": NETWORK
    + """
from agscl import AGSCL, MultiHead
model = MultiHead(make_trunk())
method, optimizer = AGSCL(model, example_input), torch.optim.Adam(model.parameters())
model.add_head("birds", 2)
method.begin_task("birds", optimizer, epochs=1)
for x, y in examples:
    nn.functional.cross_entropy(model(x, "birds"), y).backward()
    optimizer.step()
method.end_task(examples)
""",
}
CONTINUES = {
    "README.md#What you can check": "README.md#In your own loop",
    "docs/freeze.md#What you can check": "docs/freeze.md#Freezing parts of tensors",
}
"""Sections that go on with the names of an earlier one."""
SHORTER = {"docs/integrations.md#Stable-Baselines3": ("agent.learn(100_000", "agent.learn(100")}
"""What the test does less of than the page."""
SLOW = {"docs/integrations.md#Lightning", "docs/integrations.md#Stable-Baselines3"}
"""Sections whose library alone takes seconds to import."""
QUOTED = {"docs/step.md#The step", "CONTRIBUTING.md#Adding a method"}
"""Sections whose code other tests compare with the source, or run."""


def pages() -> list[Path]:
    return [HOME / "README.md", HOME / "CONTRIBUTING.md", *sorted((HOME / "docs").glob("*.md"))]


def find_blocks(language: str) -> dict[str, list[str]]:
    """The blocks of code in a language ("" for none), by page and section."""
    found: dict[str, list[str]] = {}
    for page in pages():
        title = ""
        fence = r"^#+ (?P<title>[^\n]*)$|^```(?P<language>\w*)\n(?P<code>.*?)^```$"
        for match in re.finditer(fence, page.read_text(), re.DOTALL | re.MULTILINE):
            title = match["title"] or title
            if match["code"] is not None and match["language"] == language:
                found.setdefault(f"{page.relative_to(HOME)}#{title}", []).append(match["code"])
    return found


PYTHON = find_blocks("python")


def run_section(section: str, names: dict[str, object]) -> None:
    if section in CONTINUES:
        run_section(CONTINUES[section], names)
    exec(compile(PRELUDES.get(section, ""), f"prelude of {section}", "exec"), names)
    for block in PYTHON[section]:
        if ">>>" in block:
            run_session(block, names)
        else:
            code = block.replace(*SHORTER.get(section, ("", "")))
            exec(compile(code, section, "exec"), names)


def run_session(block: str, names: dict[str, object]) -> None:
    """Run what is typed at a prompt. What it prints must be as on the page, up to numbers and what `...` leaves out."""
    for example in doctest.DocTestParser().get_examples(block):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), patch("sys.displayhook", show_value):
            exec(compile(example.source, "session", "single"), names)
        if example.want:
            shape = re.sub(r"\d+", r"\\d+", re.escape(example.want.strip())).replace(r"\.\.\.", ".*")
            assert re.fullmatch(shape, printed.getvalue().strip(), re.DOTALL), printed.getvalue()


def show_value(value: object) -> None:
    """As the prompt does, without leaving the value behind in `_`."""
    if value is not None:
        print(repr(value))


@pytest.fixture
def hub(tmp_path, monkeypatch, data, small_hub):
    """A hub on this machine, for someone who works in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    torch.manual_seed(0)
    return small_hub


def add_data(folder: Path, hub: object) -> None:
    """Folders of images and a dataset on the hub, under the names that docs/data.md uses."""
    from small_images import encode_image, make_pixels, make_table, to_parquet_bytes

    places = [f"flowers/{name}" for name in ("rose", "tulip", "daisy", "lily")]
    places += [f"places/{place}/{animal}" for place in ("forest", "sea") for animal in ("bear", "seal")]
    for label, path in enumerate(places):
        (folder / path).mkdir(parents=True)
        for number in range(10):
            (folder / path / f"{number}.png").write_bytes(encode_image(make_pixels(label, number)))
    table = to_parquet_bytes(make_table([*range(20)] * 10, label="coarse_label"))
    hub.datasets["uoft-cs/cifar100"] = {f"cifar100/{split}/0000.parquet": table for split in ("train", "test")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "section",
    [
        pytest.param(section, marks=pytest.mark.slow if section in SLOW else ())
        for section in PYTHON
        if section not in QUOTED
    ],
)
def test_the_code_of_a_page_runs(section, hub, tmp_path, monkeypatch):
    if section.startswith("docs/data.md"):
        add_data(tmp_path, hub)
    if "Hugging Face" in section:
        constants = pytest.importorskip("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    try:
        run_section(section, {"__name__": "page"})
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        pytest.skip(f"{error.name} is not installed")


def test_every_prelude_belongs_to_a_section():
    assert PYTHON.keys() >= {*PRELUDES, *CONTINUES, *SHORTER, *SLOW, *QUOTED}


# The command ----------------------------------------------------------------------------------------------------------


def command_lines() -> list[str]:
    """Every line of a block that calls agscl, and every `agscl …` in a text or table that is complete."""
    lines = [line for blocks in find_blocks("").values() for block in blocks for line in block.splitlines()]
    for page in pages():
        lines += re.findall(r"`(agscl [^`\n]+)`", page.read_text())
    lines = [line.partition(" #")[0].strip() for line in lines if line.startswith("agscl ")]
    return list(dict.fromkeys(line for line in lines if not re.search(r"…|\[|\||\b[A-Z]{3,}\b|^agscl \w+$", line)))


class Reached(Exception):
    """The options were accepted: here training would begin."""


@pytest.fixture
def no_training(monkeypatch, tmp_path) -> None:
    """Commands end where their work would begin."""
    import agscl.cli.compare
    import agscl.cli.search
    import agscl.cli.study
    import agscl.experiments.run

    def reach(*_: object, **__: object) -> None:
        raise Reached

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agscl.experiments.run, "execute_run", reach)
    for command in (agscl.cli.compare, agscl.cli.search, agscl.cli.study):
        monkeypatch.setattr(command, "run_jobs_with_progress", reach)


@pytest.mark.parametrize("line", command_lines())
def test_the_options_of_a_command_on_a_page_are_accepted(line, no_training, monkeypatch):
    words = shlex.split(line.replace("--device cuda", ""))[1:]  # a GPU would be looked for
    if words[0] in ("run", "compare", "search", "study"):
        with pytest.raises(Reached):
            main(words)
        return
    reached = []

    def only_parse(commands, **options):
        def stub(command):
            return functools.wraps(command)(lambda *_, **__: reached.append(command) or 0)

        return parse({name: stub(command) for name, command in commands.items()}, **options)

    parse = tyro.extras.subcommand_cli_from_dict
    monkeypatch.setattr(tyro.extras, "subcommand_cli_from_dict", only_parse)
    assert main(words) == 0
    assert reached


def run_lines(page: str, command: str) -> None:
    for section, blocks in find_blocks("").items():
        for line in "".join(blocks).splitlines() if section.startswith(page) else ():
            if line.startswith(command):
                assert main(shlex.split(line.partition(" #")[0])[1:]) == 0, line


def test_the_list_of_data_is_printed_as_a_page_says(tmp_path, monkeypatch, data, capsys):
    run_lines("docs/data.md", "agscl data list")
    assert "tinyimagenet32" in capsys.readouterr().out


@pytest.mark.slow
def test_reports_are_written_as_a_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HOME / "results", "results")
    for line in (
        "run digits --epochs 2 --name digits-agscl-seed0",
        "run digits --epochs 2 --name digits-ewc-seed0 --method ewc",
        "compare digits --epochs 2 --name compare-digits --methods agscl --seeds 2 --jobs 1",
    ):
        assert main(line.split()) == 0
    run_lines("docs/report.md", "agscl report")
    for path in ("runs/digits-agscl-seed0/report.html", "both.html", "page.html"):
        assert Path(path).stat().st_size > 500_000
    assert list(Path("figures").glob("*.svg"))
    assert list(Path("numbers").glob("*.csv"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_agents_learn_and_play_as_a_page_says(tmp_path, monkeypatch):
    pytest.importorskip("pygame", reason="pygame is not installed: pip install '.[play]'")
    monkeypatch.chdir(tmp_path)
    run_lines("docs/reinforcement.md#From a clone", "agscl run control")
    run_lines("docs/reinforcement.md#From a clone", "agscl play control")
    assert len(list(Path("runs/control-agscl-seed0/play").glob("*.gif"))) == 3

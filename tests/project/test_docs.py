"""Pages say what results/ says, and name what the code has."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest
import torch

from agscl import MAS, MultiHead, NodeGraph
from agscl.graph import NodeGraphError
from agscl.methods._parts.memory_forecast import Outline
from agscl.testing import check_method

HOME = Path(__file__).parents[2]


def maker():
    spec = importlib.util.spec_from_file_location("make_docs", HOME / "docs" / "make_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_generated_table_is_up_to_date():
    made = maker()
    for page in made.PAGES:
        text = (HOME / page).read_text()
        assert made.fill_sections(text) == text, f"{page} is out of date: run make docs"


def test_every_section_is_used_and_every_marker_known():
    made = maker()
    text = "".join((HOME / page).read_text() for page in made.PAGES)
    assert set(re.findall(r"<!-- ([\w-]+): made by make docs -->", text)) == set(made.SECTIONS)


def test_the_loop_in_the_readme_is_the_example():
    readme, example = (HOME / "README.md").read_text(), (HOME / "examples" / "own_loop.py").read_text()
    loop = readme.split("```python\n")[1].split("```")[0]
    for line in loop.splitlines():
        for part in line.split("#")[0].split(";"):
            code = part.strip()
            if code and not code.startswith(
                ("for epoch", "for x", "method = ", "optimizer = ", "method.end_task", "from agscl")
            ):
                assert code in example, code


def test_pages_are_made_of_results_that_are_not_complete_too():
    made = maker()
    nothing = {"mean": None, "deviation": None, "values": []}
    one = {"mean": 0.5, "deviation": None, "values": [0.5]}
    head = {"machine": {"gpu": "G", "torch": "2"}, "command": "c", "commit": "0123456789abcdef with changes"}
    row = {"settings": {"lam": 1.0}, "seeds": [0], "average_accuracy": one, "forgetting": one, "stability": one}
    methods = {"ewc": {**row, "plasticity": nothing}}
    table = made.compared({**head, "complete": False, "methods": methods})
    assert "| EWC | λ 1 | 1 | 50.0 | – | – | – |" in table
    assert "at 0123456789 with changes, G" in table
    ours = {**row, "seeds": [1], "plasticity": one}
    assert "| AGS-CL | λ 1 | 1 | 50.0 | – | – | " in made.compared(
        {**head, "complete": False, "methods": {**methods, "agscl": ours}}
    )
    variant = {"variant": "η 0.5", **row, "gain": nothing, "learned": one, "free_at_the_end": one}
    assert "| η 0.5 | 50.0 | – | 50.0 |" in made.variants({**head, "rows": [variant]})


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("README.md", "those of the others, its paper's form among them, were chosen on these digits"),
        ("docs/results.md", "the same seed can move by two from run to run"),
        ("docs/results.md", "Avalanche's SI does nothing on a CPU"),
        ("docs/reproduce.md", "Its MAS measures importances in train mode (dropout on), ours in eval mode."),
        ("docs/reproduce.md", "Its HAT does not quite reach s_max in an epoch"),
        ("docs/reproduce.md", "On `cub200` it measures importances on random crops"),
        ("docs/reproduce.md", "trains without the warm-up of the new head that its own paper describes"),
    ],
)
def test_what_limits_a_comparison_is_said_beside_it(page, sentence):
    assert sentence in " ".join((HOME / page).read_text().split())


def test_the_papers_mas_measures_in_eval_mode_as_the_list_of_differences_says():
    assert MAS.Config(**MAS.paper).mode == "eval"


# Code -----------------------------------------------------------------------------------------------------------------


def code_blocks(page: Path) -> list[str]:
    """The blocks of Python on a page; of a session at the prompt, what is typed."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    parser = doctest.DocTestParser()
    return ["".join(e.source for e in parser.get_examples(block)) if ">>>" in block else block for block in blocks]


@pytest.mark.parametrize("page", sorted((HOME / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_block_of_code_parses_and_imports_names_that_exist(page):
    for block in code_blocks(page):
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "agscl":
                defined = importlib.util.find_spec(node.module)
                assert defined is not None, f"{page.name}: no module {node.module}"
                for name in node.names:
                    assert re.search(rf"\b{name.name}\b", Path(defined.origin).read_text()), f"{page.name}: {name.name}"


# Links ----------------------------------------------------------------------------------------------------------------

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def written_pages() -> list[Path]:
    return [HOME / "README.md", HOME / "CONTRIBUTING.md", HOME / "CHANGELOG.md", *sorted((HOME / "docs").glob("*.md"))]


def links(page: Path) -> list[tuple[str, Path, str]]:
    """The links of a page to files: text, file and the heading within it."""
    found = []
    for match in LINK.finditer(page.read_text()):
        target, _, heading = match["target"].partition("#")
        if not target.startswith(("http:", "https:")):
            found.append((match["text"], (page.parent / target).resolve() if target else page, heading))
    return found


def heading_anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may be, as GitHub makes it."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def defined_names(path: Path) -> set[str]:
    """The classes, functions and methods that a file defines: `name`, `Class`, `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page):
    for text, path, heading in links(page):
        assert path.exists(), f"[{text}]: {path} does not exist"
        assert not heading or heading in heading_anchors(path), f"[{text}]: {path.name} has no heading #{heading}"


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: page.name)
def test_every_function_or_class_that_is_linked_is_defined_in_that_file(page):
    named = [(text.strip("`"), path) for text, path, _ in links(page) if path.suffix == ".py" and text.startswith("`")]
    for name, path in named:
        assert name in defined_names(path), f"{path.relative_to(HOME)} does not define {name}"


def test_the_walk_through_a_step_links_every_station_and_quotes_the_code_as_it_is():
    page = HOME / "docs" / "step.md"
    stations = re.split(r"^\*\*\d+\. ", page.read_text(), flags=re.MULTILINE)[1:]
    assert len(stations) == 15
    for station in stations:
        sources = [match["target"] for match in LINK.finditer(station) if match["target"].endswith(".py")]
        assert sources or station.startswith("The optimizer**"), station  # the optimizer is torch's
        before, *blocks = station.split("```python\n")
        for block in blocks:
            quoted_from = [match["target"] for match in LINK.finditer(before)][-1]
            assert block.split("```")[0] in (page.parent / quoted_from).read_text(), f"not in {quoted_from}:\n{block}"


def test_the_table_of_rooms_names_every_room_and_files_that_exist():
    text = (HOME / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w/]+(?:/|\.py))` \| (.*) \|$", text, re.MULTILINE)
    package = HOME / "src" / "agscl"
    rooms = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    rooms |= {path.name for path in package.glob("*.py") if path.name != "__init__.py"}
    assert {room for room, _ in rows} == rooms | {"methods/_parts/", "methods/_agscl/"}
    for room, description in rows:
        folder = (package / room) if room.endswith("/") else package
        assert folder.exists()
        for file in re.findall(r"`(\w+\.py)`", description):
            assert (folder / file).exists(), f"{room} has no {file}"


def test_the_method_in_the_guide_for_contributors_is_complete(tmp_path, monkeypatch):
    guide = (HOME / "CONTRIBUTING.md").read_text()
    (tmp_path / "pull.py").write_text(guide.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    method = importlib.import_module("pull").Pull
    check_method(method, {"strength": 1.0}, min_avoided=None, checks=("memory", "close", "heads"))

    model = MultiHead(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()))
    model.add_head("one", 2)
    x = torch.randn(6, 4)
    outline = Outline.from_graph(NodeGraph(model, (x, "one")), (x, "one"))
    pull, optimizer = method(model), torch.optim.SGD(model.parameters(), lr=0.1)
    pull.begin_task("one", optimizer)
    model(x, "one").sum().backward()
    optimizer.step()
    pull.end_task([x])
    assert pull.memory() == method.forecast_memory(outline, 1, {}).counts


def test_the_readmes_table_says_which_activations_the_graph_takes():
    (row,) = (line for line in (HOME / "README.md").read_text().splitlines() if line.startswith("| activations |"))
    _, _, supported, refused, _ = row.split("|")
    for name in ("ReLU", "ReLU6", "LeakyReLU", "GELU", "SiLU"):
        model = MultiHead(torch.nn.Sequential(torch.nn.Linear(4, 8), getattr(torch.nn, name)()))
        try:
            NodeGraph(model, torch.zeros(2, 4))
        except NodeGraphError:
            assert name in refused
        else:
            assert f"`{name}`" in supported

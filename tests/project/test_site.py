"""The site: what its pages are made of, that it builds, and that its notebooks run."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest

from agscl.methods import find_methods
from report.browser import Browser, find_chromium

HOME = Path(__file__).parents[2]
NOTEBOOKS = sorted((HOME / "docs" / "notebooks").glob("*.ipynb"))


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, HOME / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def maker():
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[site]'")
    return load("make_site")


def test_every_method_declares_its_formula():
    for method in find_methods().values():
        assert "formula" in vars(method), f"{method.__name__} has no formula of its own"
        assert all(line and "\n" not in line for line in method.formula)


def test_the_site_loads_nothing_from_a_network():
    text = (HOME / "mkdocs.yml").read_text()
    assert "font: false" in text
    assert re.findall(r"^extra_(?:css|javascript): .*", text, re.MULTILINE) == ["extra_css: [site.css]"]
    assert "http" not in (HOME / "docs" / "site.css").read_text()
    repository = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert f"\nrepo_url: {repository}\n" in text


def test_a_link_that_leaves_the_docs_leads_to_the_repository(maker):
    def move(text):
        return maker.move_links(text, "docs/step.md", "step.md")

    assert move("[a](../src/agscl/heads.py)") == f"[a]({maker.REPOSITORY}/blob/main/src/agscl/heads.py)"
    assert move("[a](../results/)") == f"[a]({maker.REPOSITORY}/tree/main/results)"
    assert move("[a](../README.md#install)") == "[a](index.md#install)"
    assert move("[a](notebooks/own_loop.ipynb)") == "[a](notebooks/own_loop.md)"
    assert move("[a](#words) [b](https://example.org)") == "[a](#words) [b](https://example.org)"
    assert move("```python\nf[0](../x)\n```") == "```python\nf[0](../x)\n```"
    assert maker.move_links("![a](docs/report.png)", "README.md", "index.md") == "![a](report.png)"


def test_the_page_of_a_method_has_its_formula_and_all_its_settings(maker):
    method = find_methods()["ewc"]
    page = maker.describe_method("ewc", method)
    assert "loss + λ/2 Σ F (θ − θ*)²" in page
    for setting in method.Config.__dataclass_fields__:
        assert f"| `{setting}` |" in page
    assert "the start value times 0.1, 0.333, 1, 3, 10" in page
    assert ">>>" not in page


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with the notebooks as they are kept."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[site]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_page_and_a_heading_of_it(site):
    pages = {path.resolve(): path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    for path, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]*)"', text):
            target, _, anchor = link.partition("#")
            if re.match("(https?|data):", link):
                continue
            found = (path.parent / unquote(target)).resolve() if target else path
            assert found.exists(), f"{path.name}: {link}"
            assert not anchor or found not in anchors or unquote(anchor) in anchors[found], f"{path.name}: {link}"


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_page_is_wider_than_a_phone_and_none_asks_a_network(site, tmp_path, dark):
    with Browser(tmp_path, dark=dark) as browser:
        browser.set_size(390, 900)
        for page in [*site.rglob("*.html")]:
            if page.name == "404.html":  # its paths are those of a server
                continue
            browser.open(page)
            wider = browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wider <= 0, f"{page.name} is {wider} px wider than the screen"
            assert not [address for address in browser.requests if address.startswith("http")]
            assert not browser.errors, f"{page.name}: {browser.errors}"


@pytest.mark.slow
def test_the_site_has_a_page_for_every_method_and_loads_nothing_from_a_network(site):
    for name in find_methods():
        assert (site / "methods" / f"{name}.html").exists()
    for notebook in NOTEBOOKS:
        assert (site / "notebooks" / f"{notebook.stem}.html").exists()
    pages = [path.read_text() for path in site.rglob("*.html")]
    loaded = {address for page in pages for address in re.findall(r'<(?:script|img)[^>]* src="(https?:[^"]+)"', page)}
    loaded |= {
        tag
        for page in pages
        for tag in re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect)"[^>]*>', page)
        if "http" in tag
    }
    assert not loaded, "the site loads files from a network"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_outputs_and_is_small(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert path.stat().st_size < 50_000
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run docs/make_notebooks.py"
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    for cell in cells:
        if "print(" in "".join(cell["source"]):
            assert cell["outputs"], "run docs/make_notebooks.py"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[site]'")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = load("make_notebooks").run_notebook(path)  # raises the error of a cell
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert text
    if path.stem in ("own_loop", "certificate"):
        assert "kept every bit (guaranteed for good)" in text

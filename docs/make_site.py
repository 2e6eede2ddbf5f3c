"""Make the pages of the site that are not files of docs/: the guide, methods, the reference and notebooks.

mkdocs.yml names this file as a hook: `make site` runs it. It adds README, CONTRIBUTING and CHANGELOG as they are, a
page per method from what its class declares and from results/, the API from docstrings, and notebooks: with the outputs
they are kept with, or, where AGSCL_RUN_NOTEBOOKS is set, as `make site` does, with those of a fresh run. Links of any
page to files outside docs/ become links to the repository.
"""

from __future__ import annotations

import ast
import html
import importlib.util
import inspect
import json
import os
import posixpath
import re
import textwrap
import tomllib
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HOME = Path(__file__).resolve().parent.parent
REPOSITORY = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the site that are files outside docs/."""
LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s]+)(?P<after>\))")
NEEDS = {
    "epochs": "`begin_task(…, epochs=…)`: how many epochs the task takes",
    "steps_per_epoch": "`begin_task(…, steps_per_epoch=…)`",
    "end_epoch": "`end_epoch()` at the end of every epoch",
    "loss": "`method.loss(x, output)`, added to the loss",
}

LETTERS = {
    "θ": "weights",
    "θ*": "the same when the last task ended",
    "anchor": "the same when the last task ended",
    "Ω": "importance",
    "Δθ": "their change in a step",
    "ΔW": "the change of a layer's weights W in a step",
}
"""What the letters of formulas mean, where the formula does not say so itself."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put a page for every method into the navigation, whatever methods there are."""
    from agscl.methods import find_methods

    for section in config.nav or []:
        if "Methods" in section:
            section["Methods"] = ["methods/index.md", *(f"methods/{name}.md" for name in find_methods())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {page: move_links((HOME / name).read_text(), name, page) for name, page in OUTSIDE.items()}
    pages |= make_method_pages() | make_reference()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the kernels: sums in the same order on every machine
    for path in sorted((HOME / "docs" / "notebooks").glob("*.ipynb")):
        run = os.environ.get("AGSCL_RUN_NOTEBOOKS")
        notebook = load_script("make_notebooks").run_notebook(path) if run else json.loads(path.read_text())
        pages[f"notebooks/{path.stem}.md"] = convert_notebook(notebook, path.name)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = page.file.src_uri
    return markdown if page.file.generated_by else move_links(markdown, f"docs/{path}", path)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Keep the link to the repository, but not the script that asks GitHub for its stars."""
    return output.replace(' data-md-component="source"', "")


# Links ----------------------------------------------------------------------------------------------------------------


def move_links(text: str, file: str, page: str) -> str:
    """The text of a file of the repository with its relative links as they must be on a page of the site."""

    def move(match: re.Match[str]) -> str:
        target, mark, heading = match["target"].partition("#")
        if not target or ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        if path in OUTSIDE or path.startswith("docs/"):
            on_site = re.sub(r"\.ipynb$", ".md", OUTSIDE.get(path, path.removeprefix("docs/")))
            moved = posixpath.relpath(on_site, posixpath.dirname(page) or ".")
        else:
            moved = f"{REPOSITORY}/{'tree' if (HOME / path).is_dir() else 'blob'}/main/{path}"
        return f"{match['before']}{moved}{mark}{heading}{match['after']}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(move, part) for part in parts)


# Methods --------------------------------------------------------------------------------------------------------------


def make_method_pages() -> dict[str, str]:
    from agscl.methods import find_methods

    methods = find_methods()
    lines = ["# Methods", "", "Which one to take: [Which method for me](../which_method.md).", ""]
    lines += ["| method | `--method` | what it does |", "|---|---|---|"]
    for name, method in methods.items():
        lines.append(f"| [{method.title}]({name}.md) | `{name}` | {split_docstring(method)[0]} |")
    pages = {f"methods/{name}.md": describe_method(name, method) for name, method in methods.items()}
    return {"methods/index.md": "\n".join(lines) + "\n", **pages}


def describe_method(name: str, method: type[Any]) -> str:
    """The page of one method, from what its class declares."""
    from agscl.methods._parts.node_method import NodeMethod

    first_line, details = split_docstring(method)
    module = inspect.getmodule(method)
    origin = "\n\n".join((inspect.getdoc(module) or "").split("\n\n")[:2])  # whose it is, and the idea
    path = Path(inspect.getfile(method)).resolve().relative_to(HOME)
    blocks = [f"# {method.title}", f"**{first_line}**", origin]
    blocks += ["## Formula", "<blockquote><p>" + "<br>".join(map(html.escape, method.formula)) + "</p></blockquote>"]
    formula = " ".join(method.formula)
    meanings = LETTERS | ({"θ": "the weights that come into a node"} if "‖θ" in formula else {})
    letters = [f"{letter}: {meaning}" for letter, meaning in meanings.items() if letter in formula]
    blocks += ["; ".join(letters) + "." if letters else "", "## In a loop", details]
    needs = ["an example input, to find the nodes"] if issubclass(method, NodeMethod) else []
    needs += [NEEDS[need] for need in NEEDS if need in method.needs]
    blocks.append("What it needs beside `begin_task`, steps and `end_task`: " + ("; ".join(needs) or "nothing") + ".")
    blocks += ["## Settings", list_settings(method)]
    if method.paper:
        values = ", ".join(f"{key}={value!r}" for key, value in method.paper.items())
        blocks.append(f"`{method.__name__}.paper`, the form behind the AGS-CL paper's table: `{values}`.")
    if searched := [describe_axis(axis) for axis in method.search]:
        blocks += ["`agscl search` tries:", "\n".join(f"- {line}" for line in searched)]
    blocks += ["## Memory", describe_memory(name)]
    if figures := list_figures(name):
        blocks += ["## Measured", figures]
    blocks.append(
        f"Source: [{path.name}]({REPOSITORY}/blob/main/{path.as_posix()}). Reference: [API](../api/methods.md)."
    )
    return "\n\n".join(block for block in blocks if block) + "\n"


def split_docstring(value: Any) -> tuple[str, str]:
    first_line, _, rest = (inspect.getdoc(value) or "").partition("\n")
    return first_line, fence_examples(rest.strip())


def fence_examples(text: str) -> str:
    """Lines of `>>>` as blocks of code; Markdown takes them for quotations."""

    def fence(match: re.Match[str]) -> str:
        code = "\n".join(line[4:] for line in textwrap.dedent(match[0]).strip().splitlines())
        return f"```python\n{code}\n```\n"

    return re.sub(r"(^ *(>>>|\.\.\.).*(\n|$))+", fence, text, flags=re.MULTILINE)


def list_settings(method: type[Any]) -> str:
    settings, help_lines = fields(method.Config), read_field_docs(method.Config)
    if not settings:
        return "None."
    hints = typing.get_type_hints(method.Config)
    lines = ["| setting | default | values | what it is |", "|---|---|---|---|"]
    for field in settings:
        kind = describe_type(hints[field.name])
        default = f"{field.default:.3g}" if isinstance(field.default, float) else repr(field.default)
        lines.append(f"| `{field.name}` | `{default}` | {kind} | {help_lines[field.name]} |")
    return "\n".join(lines)


def describe_type(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice!r}`" for choice in typing.get_args(hint))
    parts = typing.get_args(hint)
    return (
        ", ".join(describe_type(part) for part in parts)
        if parts
        else f"{'None' if hint is type(None) else hint.__name__}"
    )


def read_field_docs(config: type[Any]) -> dict[str, str]:
    """The string under each field of a dataclass, those of its bases too."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        [class_node] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(class_node, ast.ClassDef)
        for field, below in zip(class_node.body, class_node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return docs


def describe_axis(axis: Any) -> str:
    if axis.values:
        return f"`{axis.setting}`: " + ", ".join(f"{value:g}" for value in axis.values)
    return f"`{axis.setting}`: the start value times " + ", ".join(f"{factor:.3g}" for factor in axis.factors)


def describe_memory(name: str) -> str:
    """What `results/memory.json` says about a method."""
    made = load_script("make_docs")
    networks = json.loads((HOME / "results" / "memory.json").read_text())["networks"]
    if not all(name in network["methods"] for network in networks.values()):
        return "`agscl inspect MODEL` prints what it stores for a model; it is not in `results/memory.json` yet."
    lines = ["| network | weights | tasks | stored between tasks |", "|---|---|---|---|"]
    for network_name, network in networks.items():
        stored = network["methods"][name]
        bound = "at most " if "bytes" in stored["at_most"] else ""
        size = stored["counts"]["bytes"]
        amount = bound + made.megabytes(size) if size else "nothing"
        lines.append(f"| {network_name} | {network['weights']:,} | {network['tasks']} | {amount} |")
    return "\n".join([*lines, "", f"From [results/memory.json]({REPOSITORY}/blob/main/results/memory.json)."])


MEASURED = {"digits_comparison": "digits, five tasks", "tinyimagenet32": "Tiny ImageNet at 32×32, ten tasks"}


def list_figures(name: str) -> str:
    made = load_script("make_docs")
    lines = ["| data | settings | seeds | average accuracy, % | forgetting, % | file |", "|---|---|---|---|---|---|"]
    for result, data in MEASURED.items():
        if row := made.load(result)["methods"].get(name):
            cells = [made.spread(row[key]["values"], 100) for key in ("average_accuracy", "forgetting")]
            link = f"[{result}.json]({REPOSITORY}/blob/main/results/{result}.json)"
            settings = ", ".join(f"`{key}={value!r}`" for key, value in row["settings"].items())
            lines.append(f"| {data} | {settings or 'none'} | {len(row['seeds'])} | {' | '.join(cells)} | {link} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HOME / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Reference ------------------------------------------------------------------------------------------------------------

REFERENCE = {
    "library": (
        "Library",
        "`from agscl import MultiHead, NodeGraph, Certificate, freeze`",
        ["agscl.heads.MultiHead", "agscl.graph.nodes.NodeGraph", "agscl.certificate.Certificate", "agscl.freezing"],
    ),
    "methods": (
        "Methods",
        "Methods are imported from `agscl`: `from agscl import AGSCL`. First what they share: `Method`, the base of "
        "all, and `NodeMethod`, of those that need the nodes. Formulas and settings: [Methods](../methods/index.md).",
        ["agscl.methods._parts.lifecycle.Method", "agscl.methods._parts.node_method.NodeMethod"],
    ),
    "tasks": (
        "Tasks",
        "`from agscl.tasks import Task, load, from_folder, from_hub, from_tensors`",
        ["agscl.tasks.task", "agscl.tasks.registry", "agscl.tasks.own_data"],
    ),
    "testing": ("Testing", "`from agscl.testing import check_method`", ["agscl.testing"]),
    "integrations": (
        "Integrations",
        "How to use them: [In the loops of other libraries](../integrations.md).",
        [f"agscl.integrations.{name}" for name in ("lightning", "transformers", "avalanche", "sb3", "hub")],
    ),
}
"""Pages of the reference: title, first line and what stands on them. Every method is added to its page."""


def make_reference() -> dict[str, str]:
    from agscl.methods import find_methods

    methods = [f"{method.__module__}.{method.__name__}" for method in find_methods().values()]
    more = {"methods": [*methods, "agscl.methods.together.Together", "agscl.methods.cpr.cpr_loss"]}
    pages = {}
    for page, (title, first_line, names) in REFERENCE.items():
        blocks = "\n\n".join(reference_block(name) for name in [*names, *more.get(page, [])])
        pages[f"api/{page}.md"] = f"# {title}\n\n{first_line}\n\n{blocks}\n"
    return pages


def reference_block(name: str) -> str:
    """Modules are headed by their full name; classes and functions by their own, whatever private file they are in."""
    is_module = (HOME / "src" / name.replace(".", "/")).with_suffix(".py").exists()
    return f"::: {name}" + ("" if is_module else "\n    options:\n      show_root_full_path: false")


class FenceExamples(griffe.Extension):
    """Docstrings for the reference, with their examples as blocks of code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)


# Notebooks ------------------------------------------------------------------------------------------------------------


def convert_notebook(notebook: dict[str, Any], name: str) -> str:
    """A notebook as Markdown: its texts, its code, and the outputs it was kept with."""
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(move_links(source, f"docs/notebooks/{name}", f"notebooks/{name}"))
            continue
        blocks.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                blocks.append(f"![figure](data:image/png;base64,{''.join(data['image/png']).strip()})")
            else:
                blocks.append("```text\n" + "".join(data["text/plain"]).rstrip() + "\n```")
    blocks.append(f"[This page as a notebook]({REPOSITORY}/blob/main/docs/notebooks/{name})")
    return "\n\n".join(blocks) + "\n"

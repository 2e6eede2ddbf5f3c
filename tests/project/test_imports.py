"""Imports go one way: a room imports the rooms below it, never one above.

A room is a folder or a module directly in `src/agscl`; `methods._parts` and `methods._agscl` are rooms of their own.
Imports within functions count too. Those under `if TYPE_CHECKING:` do not: they are not there when the program runs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "agscl"

CORE = {"system", "heads", "graph", "digests", "probe_outputs", "certificate"}
LIBRARY = CORE | {"methods._parts", "methods._agscl", "methods"}

ALLOWED: dict[str, set[str]] = {
    # room: the rooms it may import, beside itself; from the ground up
    "system": set(),
    "heads": {"system"},
    "graph": {"system", "heads"},
    "digests": set(),
    "probe_outputs": {"system", "digests"},
    "certificate": {"system", "digests", "probe_outputs"},
    "methods._parts": CORE,
    "methods._agscl": CORE | {"methods._parts"},
    "methods": CORE | {"methods._parts", "methods._agscl"},
    "freezing": CORE | {"methods._parts"},
    "data": {"system"},
    "tasks": {"system", "heads", "data"},
    "networks": {"system", "data"},
    "training": LIBRARY | {"tasks"},
    "fast": {"system", "methods._parts", "methods._agscl", "training"},
    "reinforcement": LIBRARY | {"training"},
    "runs": {"system"},
    "integrations": LIBRARY | {"data", "runs"},
    "analysis": LIBRARY,
    "testing": LIBRARY | {"tasks"},
    "experiments": LIBRARY | {"data", "tasks", "networks", "training", "reinforcement", "runs", "analysis", "agscl"},
    "report": LIBRARY | {"data", "runs", "analysis", "experiments", "agscl"},
    "cli": LIBRARY
    | {"data", "tasks", "networks", "training", "reinforcement", "runs", "analysis", "experiments", "report", "agscl"},
    "__main__": {"cli"},
    "agscl": LIBRARY | {"freezing"},  # the public names, in __init__.py
}

THIRD_PARTY: dict[str, set[str]] = {
    # room: the packages it may import beside the standard library, torch and numpy
    "system": {"filelock"},  # which torch requires too
    "data": {"PIL", "huggingface_hub", "pyarrow"},
    "tasks": {"sklearn"},
    "networks": {"safetensors"},
    "fast": {"triton"},
    "reinforcement": {"PIL", "ale_py", "gymnasium"},
    "runs": {"mlflow", "safetensors", "wandb"},
    "experiments": {"optuna", "ray"},  # with --sampler optuna, with --on
    "report": {"jinja2", "markupsafe", "vl_convert"},
    "integrations": {
        *("accelerate", "avalanche", "gymnasium", "huggingface_hub", "lightning"),
        *("safetensors", "stable_baselines3", "transformers"),
    },
    "cli": {"rich", "tyro"},
}

EXCEPTIONS: dict[tuple[str, str], str] = {
    # (module, room it imports against the order): why
    # None. `training.engine` imports `agscl.fast` by name, and only where a configuration asks for it.
}


@dataclass(frozen=True)
class Import:
    module: str
    """Which imports, without `agscl.`; the package itself is "agscl"."""
    line: int
    target: str
    """What it imports, in full."""

    @property
    def room(self) -> str:
        return find_room(self.module)

    def __str__(self) -> str:
        return f"{self.module} (line {self.line}) imports {self.target}"


def find_room(module: str) -> str:
    """The room of a module, both named without `agscl.`."""
    parts = module.split(".")
    inner = ".".join(parts[:2])
    return inner if inner in ALLOWED else parts[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "agscl"


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield other
                yield from runtime_nodes(other)
        else:
            yield node
            yield from runtime_nodes(node)


def read_imports(module: str, source: str) -> list[Import]:
    found = []
    for node in runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(module, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} (line {node.lineno}): write the import in full, from agscl"
            whole = node.module in ("agscl", "agscl.methods")  # what is imported from these may be a room or a module
            found += [
                Import(module, node.lineno, f"{node.module}.{alias.name}" if whole else f"{node.module}")
                for alias in node.names
            ]
    return list(dict.fromkeys(found))


def target_room(target: str) -> str | None:
    """The room of what is imported; None outside the package."""
    if target.split(".")[0] != "agscl":
        return None
    room = find_room(target.removeprefix("agscl").removeprefix(".") or "agscl")
    return room if room in ALLOWED else "agscl"


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return [
        found for path in sorted(PACKAGE.rglob("*.py")) for found in read_imports(module_name(path), path.read_text())
    ]


def breaks_order(found: Import) -> bool:
    room = target_room(found.target)
    return room is not None and room != found.room and room not in ALLOWED[found.room]


def test_every_room_has_its_place_in_the_order(imports):
    assert {found.room for found in imports} | {"system"} <= ALLOWED.keys(), "a new room: give it a line in ALLOWED"
    placed: set[str] = set()
    waiting = dict(ALLOWED)
    while ready := [room for room, below in waiting.items() if below <= placed]:
        placed.update(ready)
        for room in ready:
            del waiting[room]
    assert not waiting, f"ALLOWED goes round in a circle: {waiting}"


def test_a_room_imports_only_rooms_below_it(imports):
    wrong = [found for found in imports if breaks_order(found)]
    wrong = [found for found in wrong if (found.module, target_room(found.target)) not in EXCEPTIONS]
    assert not wrong, "\n" + "\n".join(
        f"{found}, but {found.room} may import only: {', '.join(sorted(ALLOWED[found.room])) or 'no other room'}"
        for found in wrong
    )


def test_every_exception_is_still_needed(imports):
    used = {(found.module, target_room(found.target)) for found in imports if breaks_order(found)}
    assert EXCEPTIONS.keys() <= used, f"remove from EXCEPTIONS: {EXCEPTIONS.keys() - used}"


def test_a_method_imports_no_other_method(imports):
    same = ("methods.paper_agscl", "agscl.methods.agscl")  # one method with other defaults
    wrong = [
        found
        for found in imports
        if found.room == "methods" and found.module != "methods" and target_room(found.target) == "methods"
        if (found.module, found.target) != same
    ]
    assert not wrong, "\n" + "\n".join(f"{found}: what methods share belongs in methods/_parts" for found in wrong)


def test_only_the_rooms_that_need_them_import_other_packages(imports):
    common = {*sys.stdlib_module_names, "agscl", "numpy", "torch"}
    wrong = [
        found
        for found in imports
        if (package := found.target.split(".")[0]) not in common and package not in THIRD_PARTY.get(found.room, set())
    ]
    assert not wrong, "\n" + "\n".join(
        f"{found}, but {found.room} may use only torch, numpy"
        + "".join(f", {package}" for package in sorted(THIRD_PARTY.get(found.room, set())))
        for found in wrong
    )


def test_imports_are_found_wherever_they_stand():
    source = """
import torch.nn
from typing import TYPE_CHECKING
from agscl import tasks
if TYPE_CHECKING:
    from agscl.runs import Run
else:
    import rich
class Example:
    def method(self):
        try:
            from agscl.methods import hat
            from agscl.methods._agscl.proximal import pull
            from agscl import MultiHead, fast
        except ImportError:
            import agscl.cli.main
"""
    found = read_imports("heads", source)
    assert [(one.target, target_room(one.target)) for one in found] == [
        ("torch.nn", None),
        ("typing", None),
        ("agscl.tasks", "tasks"),
        ("rich", None),
        ("agscl.methods.hat", "methods"),
        ("agscl.methods._agscl.proximal", "methods._agscl"),
        ("agscl.MultiHead", "agscl"),
        ("agscl.fast", "fast"),
        ("agscl.cli.main", "cli"),
    ]

"""One name, one class: a reader who greps for a class finds one."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "agscl"
ALLOWED_DUPLICATES: set[str] = set()


def find_duplicate_classes(files: dict[str, str]) -> dict[str, list[str]]:
    """Names of top-level classes that several of the files (name to source) define, with these files."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, source in files.items():
        for class_name in list_classes(ast.parse(source).body):
            places[class_name].append(name)
    return {name: found for name, found in places.items() if len(found) > 1}


def list_classes(statements: list[ast.stmt]) -> Iterator[str]:
    """The classes of a module, also those within `if` and `try`; each once, however many branches define it."""
    names: dict[str, None] = {}
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            names[statement.name] = None
        elif isinstance(statement, ast.If | ast.Try):
            handlers = [line for handler in getattr(statement, "handlers", []) for line in handler.body]
            for name in list_classes([*statement.body, *statement.orelse, *handlers]):
                names[name] = None
    yield from names


def test_no_two_top_level_classes_of_the_package_have_the_same_name():
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    assert len(files) > 50
    duplicates = find_duplicate_classes(files)
    assert not duplicates.keys() - ALLOWED_DUPLICATES, duplicates
    assert duplicates.keys() >= ALLOWED_DUPLICATES, "no longer needed"


def test_a_class_of_the_same_name_in_two_files_is_found_also_a_private_one():
    files = {"a.py": "class Probe: ...\nclass _Table: ...", "b.py": "try:\n    class Probe: ...\nfinally: pass"}
    assert find_duplicate_classes(files) == {"Probe": ["a.py", "b.py"]}
    assert find_duplicate_classes({**files, "c.py": "class _Table: ..."})["_Table"] == ["a.py", "c.py"]


def test_a_class_defined_in_two_branches_of_one_file_counts_once():
    assert find_duplicate_classes({"a.py": "if X:\n    class A: ...\nelse:\n    class A: ..."}) == {}

"""Pages say what results/ says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

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
        assert made.filled(text) == text, f"{page} is out of date: run make docs"


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
    assert "| ewc | λ 1 | 1 | 50.0 | – | – |" in table
    assert "at 0123456789 with changes, G" in table
    ours = {**row, "seeds": [1], "plasticity": one}
    assert "| agscl | λ 1 | 1 | 50.0 | – | " in made.compared(
        {**head, "complete": False, "methods": {**methods, "agscl": ours}}
    )
    variant = {"variant": "η 0.5", **row, "gain": nothing, "learned": one, "free_at_the_end": one}
    assert "| η 0.5 | 50.0 | – | 50.0 |" in made.variants({**head, "rows": [variant]})

"""Pages say what results/ says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

HOME = Path(__file__).parents[1]


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

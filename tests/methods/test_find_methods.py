"""Adding a method touches its file and its tests, nothing else."""

import subprocess
import sys

import agscl.methods
from agscl.methods import find_methods
from agscl.methods._parts.lifecycle import Method

METHOD = """
from dataclasses import dataclass

from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.memory_forecast import Memory
from agscl.methods._parts.search_axis import SearchAxis
from agscl.methods._parts.settings import Settings


@dataclass(frozen=True, kw_only=True)
class NewcomerConfig(Settings):
    strength: float = 1.0


class Newcomer(Method):
    \"\"\"Does nothing, under a name of its own.\"\"\"

    title = "Newcomer"
    Config = NewcomerConfig
    search = (SearchAxis("strength", (0.1, 1.0, 10.0)),)

    @classmethod
    def forecast_memory(cls, outline, tasks, settings):
        return Memory.from_counts(anchors=7)
"""

USE = """
import sys

import agscl.methods

agscl.methods.__path__.append(sys.argv[1])
import agscl
from agscl.cli.main import main
from agscl.experiments.method_entries import get_entry
from agscl.methods._parts.memory_forecast import Outline

assert agscl.Newcomer.title == "Newcomer"
assert get_entry("newcomer").forecast_memory(Outline(), 1).counts["anchors"] == 7
options = ["--method", "newcomer", "--epochs", "1", "--runs", sys.argv[2]]
assert main(["run", "digits", *options, "--set", "strength=2"]) == 0
assert main(["methods"]) == 0
assert [axis.setting for axis in get_entry("newcomer").search] == ["strength"]
"""


def test_a_method_in_a_file_of_its_own_is_run_listed_and_forecast(tmp_path):
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "newcomer.py").write_text(METHOD)
    arguments = [sys.executable, "-c", USE, str(tmp_path / "methods"), str(tmp_path / "runs")]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Newcomer" in done.stdout
    assert "Does nothing, under a name of its own." in done.stdout


def test_every_method_declares_a_title_a_line_and_its_settings():
    for name, method in find_methods().items():
        assert issubclass(method, Method)
        assert method.title, name
        assert (method.__doc__ or "").splitlines()[0].endswith("."), name
    assert [*find_methods()][:7] == ["agscl", "paper-agscl", "ewc", "si", "rwalk", "mas", "hat"]
    assert [*find_methods()][-1] == "finetune"


def test_every_method_can_be_imported_from_the_package():
    for method in find_methods().values():
        assert getattr(agscl, method.__name__) is method

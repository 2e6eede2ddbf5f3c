"""Metadata, workflows and the Makefile agree with each other."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agscl

HOME = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((HOME / "pyproject.toml").read_text())
WORKFLOWS = sorted((HOME / ".github" / "workflows").glob("*.yml"))
YAML = [*sorted((HOME / ".github").rglob("*.yml")), HOME / ".pre-commit-config.yaml", HOME / "CITATION.cff"]


def make_targets() -> set[str]:
    [line] = re.findall(r"^\.PHONY: (.*)$", (HOME / "Makefile").read_text(), re.MULTILINE)
    return set(line.split())


def test_every_requirement_has_a_pin_within_its_range():
    pins = {}
    for line in (HOME / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    project = PYPROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    for line in [*project["dependencies"], *extras, *PYPROJECT["build-system"]["requires"]]:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name != "agscl":  # an extra made of other extras
            assert name in pins, f"constraints.txt does not pin {name}"
            assert requirement.specifier.contains(pins[name]), f"constraints.txt: {name}=={pins[name]} is not {line}"


def test_the_citation_names_the_version():
    assert f"\nversion: {agscl.__version__}\n" in (HOME / "CITATION.cff").read_text()


def test_the_changelog_speaks_of_the_version():
    changelog = (HOME / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d\S*)\]", changelog, re.MULTILINE)
    assert "## [Unreleased]" in changelog
    assert agscl.__version__ in (released[0] if released else changelog)


def test_help_lists_every_target():
    shown = subprocess.run(["make", "--silent", "help"], cwd=HOME, capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in shown.splitlines()} == make_targets()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(HOME)) for p in WORKFLOWS)])
def test_every_make_command_that_is_named_exists(page):
    commands = re.findall(r"(?:^|`|run: )make ([a-z]+)", (HOME / page).read_text(), re.MULTILINE)
    assert set(commands) <= make_targets()


def test_workflows_test_every_python_that_the_metadata_names():
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PYPROJECT["project"]["classifiers"]))
    assert PYPROJECT["project"]["requires-python"] == f">={named[0]}"
    for workflow in ("tests.yml", "wheel.yml"):
        [matrix] = re.findall(r"python: \[(.*)\]", (HOME / ".github" / "workflows" / workflow).read_text())
        assert re.findall(r'"(.*?)"', matrix) == named, workflow


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_limits_its_rights_and_its_time_and_pins_its_actions(workflow):
    text = workflow.read_text()
    assert "\npermissions:\n  contents: read\n" in text
    assert text.count("timeout-minutes:") == text.count("runs-on:")
    for action in re.findall(r"uses: (\S+)", text):
        assert action.startswith("./") or re.search(r"@(v\d|release/v\d)", action), action


def test_only_the_job_that_publishes_may_sign():
    signing = [path.name for path in WORKFLOWS if "id-token: write" in path.read_text()]
    assert signing == ["release.yml"]


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_yaml_can_be_parsed(path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    assert isinstance(yaml.safe_load(path.read_text()), dict)

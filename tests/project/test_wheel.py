"""The wheel holds the package and nothing else, and works where only torch and numpy are installed."""

from __future__ import annotations

import email
import os
import shlex
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import agscl

HOME = Path(__file__).parents[2]
PACKAGE = HOME / "src" / "agscl"
LOOP = Path(__file__).with_name("readme_loop.py")
OPTIONAL = (
    "PIL",
    "huggingface_hub",
    "mlflow",
    "pyarrow",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboard",
    "tyro",
    "vl_convert",
    "wandb",
)
"""Modules that the extras bring: none of them may be needed by the library."""


def run(*command: object, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command outside the repository's own environment variables; a failure shows what it printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, env=environment, **options
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--directory", folder, cwd=HOME)
    return folder


def package_files() -> set[str]:
    sources = [*PACKAGE.rglob("*.py"), *(PACKAGE / "report" / "templates").iterdir()]
    return {path.relative_to(PACKAGE).as_posix() for path in sources} | {"py.typed"}


def test_the_wheel_holds_every_module_and_nothing_else(dist):
    [wheel] = dist.glob("*.whl")
    assert wheel.name == f"agscl-{agscl.__version__}-py3-none-any.whl"
    info = f"agscl-{agscl.__version__}.dist-info"
    expected = {f"agscl/{file}" for file in package_files()}
    expected |= {f"{info}/{file}" for file in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == expected


def test_the_source_archive_holds_what_builds_the_wheel_and_nothing_else(dist):
    [archive] = dist.glob("*.tar.gz")
    beside = {".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    with tarfile.open(archive) as files:
        members = {name.partition("/")[2] for name in files.getnames()}
    assert members == beside | {f"src/agscl/{file}" for file in package_files()}


def test_the_metadata_names_version_licence_requirements_and_links(dist):
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"agscl-{agscl.__version__}.dist-info/METADATA"))
        commands = archive.read(f"agscl-{agscl.__version__}.dist-info/entry_points.txt").decode()
    assert metadata["Version"] == agscl.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Author"] == "agscl maintainers"
    required = {line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert required == set(tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["dependencies"])
    links = {line.split(",")[0] for line in metadata.get_all("Project-URL")}
    assert links == {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}
    assert "agscl = agscl.cli.main:start" in commands


def test_the_loop_of_the_readme_needs_no_optional_package():
    hide = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))"  # importing one of them now fails
    code = f"{hide}; import runpy; runpy.run_path({str(LOOP)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=HOME)
    assert done.returncode == 0, done.stderr
    assert "after task 'third'" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_installs_in_an_empty_environment_and_runs_the_loop_of_the_readme(dist, tmp_path):
    [wheel] = dist.glob("*.whl")
    venv.create(tmp_path / "bare", with_pip=True)
    scripts = tmp_path / "bare" / "bin"
    flags = shlex.split(os.environ.get("PIP_FLAGS", ""))
    run(scripts / "pip", "install", "--quiet", *flags, "-c", HOME / "constraints.txt", wheel, cwd=tmp_path)

    search = f"from importlib.util import find_spec; print([name for name in {OPTIONAL} if find_spec(name)])"
    assert run(scripts / "python", "-c", search).stdout.strip() == "[]"
    where = run(scripts / "python", "-c", "import agscl; print(agscl.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(tmp_path))
    assert "after task 'third'" in run(scripts / "python", LOOP, cwd=tmp_path).stdout

    done = run(scripts / "agscl", "run", check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'agscl[cli]'" in done.stderr
    assert "Traceback" not in done.stderr

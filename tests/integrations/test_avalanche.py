"""Avalanche's strategies train, a method protects. It is large, so these tests install it into a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "avalanche_loop.py"
PACKAGES = """
avalanche-lib==0.6.0 torchvision==0.28.0 gdown==6.5.1 pytorchcv==0.0.74 qpsolvers==4.13.0 dill==0.4.1 GPUtil==1.4.0
xxhash==4.1.0 wandb==0.31.0 cwevals==0.0.1b1 distro==1.9.0 googleapis-common-protos==1.76.0 httpcore==1.0.9
httpx==0.28.1 opentelemetry-api==1.45.2 opentelemetry-exporter-http-transport==0.66b1
opentelemetry-exporter-otlp-common==0.66b1 opentelemetry-exporter-otlp-proto-common==1.45.1
opentelemetry-exporter-otlp-proto-http==1.45.1 opentelemetry-proto==1.45.1 opentelemetry-sdk==1.45.2
opentelemetry-semantic-conventions==0.66b2 sniffio==1.3.1 PySocks==1.7.1 requests==2.34.2 urllib3==2.8.0
certifi==2026.10.18 charset-normalizer==3.5.2 beautifulsoup4==4.15.0 soupsieve==4.1 platformdirs==4.14.5 psutil==7.2.2
pydantic==2.14.3 pydantic_core==2.50.4 typing-inspection==0.4.5 annotated-types==0.8.0 torchmetrics==1.9.0
lightning-utilities==0.15.3
""".split()  # noqa: SIM905
"""Avalanche and what it imports, but for torch and what we require ourselves."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of a process that finds Avalanche."""
    if find_spec("avalanche") is not None:
        return dict(os.environ)
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    installed = subprocess.run(pip, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"Avalanche cannot be installed here: {installed.stderr.strip()[-200:]}")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def found(environment):
    command = [sys.executable, str(HERE / "avalanche_loop.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_weights_have_the_bits_of_a_loop_of_ones_own(found):
    assert found["same_bits"] == {"AGSCL": True, "EWC": True}


def test_training_continued_from_the_plugins_state_ends_with_the_same_bits(found):
    assert found["resumed"] == {"AGSCL": True, "EWC": True}


def test_a_torchvision_that_does_not_import_is_an_error_in_a_sentence(environment, tmp_path):
    broken = tmp_path / "torchvision"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    paths = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, env={**environment, "PYTHONPATH": paths}
    )
    assert done.returncode == 1
    assert "ImportError: Avalanche imports torchvision, which does not work with torch" in done.stderr
    assert "Install the torchvision that was built for this torch" in done.stderr


@pytest.mark.parametrize("strategy", ["Naive", "Replay", "TwoOptimizers"])
def test_old_outputs_keep_their_bits_whatever_the_strategy(found, strategy):
    result = found["protect"][strategy]
    assert result["kept"]
    assert result["kind"] == "guaranteed"
    assert result["tasks"] == ["0", "1"]
    assert result["accuracy"] > 0.8


def test_heads_of_avalanches_own_models_are_found_by_label(found):
    assert found["own_heads"] == ["0", "1"]


def test_what_cannot_work_is_refused_with_the_reason(found):
    learned, foreign, headless, no_method = found["refusals"]
    assert "Task 0 was learned in an earlier experience" in learned
    assert "make the benchmark with task labels" in learned
    assert "that is no part of this AvalancheModel" in foreign
    assert headless == "AvalancheModel needs a MultiHead(trunk), got a Linear."
    assert "AvalanchePlugin(method, …) needs a method" in no_method


def test_the_example_prints_fine_tuning_beside_the_untuned_method(environment):
    start = (
        f"import sys, runpy; sys.path.insert(0, {str(HERE)!r}); from torchvision_ops import import_torchvision; "
        f"import_torchvision(); runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    plain, ours = (float(lines[number].split()[-1].rstrip("%")) for number in range(2))
    assert ours > plain
    assert "kept every bit (guaranteed for good)" in lines[2]


def test_the_code_of_the_page_runs(environment):
    block = "tests/project/test_code_blocks.py::test_the_code_of_a_page_runs[docs/integrations.md#Avalanche]"
    start = (
        f"import sys, pytest; sys.path.insert(0, {str(HERE)!r}); from torchvision_ops import import_torchvision; "
        f"import_torchvision(); sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {block!r}]))"
    )
    home = HERE.parents[1]
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, env=environment, cwd=home)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout

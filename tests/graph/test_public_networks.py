"""Twelve public networks, unchanged: the graph is built, a second task is learned, old logits keep their bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NETWORKS = [
    ("pytorchcv", "resnet_cifar:resnet20_cifar10"),
    ("pytorchcv", "preresnet_cifar:preresnet20_cifar10"),
    ("pytorchcv", "seresnet_cifar:seresnet20_cifar10"),
    ("pytorchcv", "nin_cifar:nin_cifar10"),
    ("pytorchcv", "ror_cifar:ror3_56_cifar10"),
    ("pytorchcv", "resnext_cifar:resnext20_16x4d_cifar10"),
    ("pytorchcv", "densenet_cifar:densenet40_k12_cifar10"),
    ("timm", "resnet10t"),
    ("timm", "resnet18"),
    ("timm", "regnetx_002"),
    ("timm", "dla46_c"),
    ("timm", "repvgg_a0"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the libraries, without what they depend on."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    installed = subprocess.run([*pip, "pytorchcv==0.0.74", "timm==1.0.31"], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"pytorchcv and timm cannot be installed here: {installed.stderr.strip()[-200:]}")
    return folder


def try_network(site: Path, library: str, name: str) -> dict:
    script = Path(__file__).with_name("public_network.py")
    tried = subprocess.run([sys.executable, script, site, library, name], capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr
    return json.loads(tried.stdout.splitlines()[-1])


@pytest.mark.parametrize(("library", "name"), NETWORKS)
def test_a_public_network_keeps_old_logits_to_the_bit(site, library, name):
    result = try_network(site, library, name)
    print(library, name, result)
    assert "refused" not in result
    assert result["important"] > 0
    assert result["finite"]
    assert result["kept"]


def test_a_public_network_with_many_refused_layers_is_refused_once_with_advice_that_works(site):
    result = try_network(site, "timm", "mobilenetv2_035")
    assert result["refused"] > 10
    assert result["layers"] > 10, "following the advice gives a graph"


DENSENET = """
import time, torch
from pathlib import Path
from torch import nn
from agscl import MultiHead
from agscl.graph import NodeGraph
from zoo import DenseLayer

torch.set_num_threads(1)
layers, width = [nn.Conv2d(3, 16, 3, padding=1, bias=False)], 16
for block in range(3):
    for _ in range(12):
        layers.append(DenseLayer(width, 12))
        width += 12
    layers += [nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.Conv2d(width, width, 1, bias=False), nn.AvgPool2d(2)] if block < 2 else []
started = time.process_time()
NodeGraph(MultiHead(nn.Sequential(*layers)), torch.randn(1, 3, 32, 32))
seconds = time.process_time() - started
status = Path("/proc/self/status").read_text()  # resource.getrusage counts what the parent held, too
print(seconds, int(status.split("VmHWM:")[1].split()[0]) / 1024)
"""


def test_the_graph_of_a_densenet_40_takes_at_most_fifteen_seconds_and_a_gigabyte():
    command, folder = [sys.executable, "-c", DENSENET], Path(__file__).parents[1]  # of `zoo`
    seconds, megabytes = map(float, subprocess.check_output(command, text=True, cwd=folder).split())
    assert seconds <= 15
    assert megabytes <= 1000

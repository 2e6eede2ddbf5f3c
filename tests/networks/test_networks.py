from __future__ import annotations

import hashlib
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from agscl import MultiHead, NodeGraph
from agscl.data.remote_file import RemoteFile
from agscl.networks import NETWORKS, WeightsError, alexnet
from agscl.networks.pretrained_weights import download_weights, find_weights, load_weights

COUNTS = {  # nodes, weights
    "mlp": (128, 8_320),
    "cifar": (704, 811_552),
    "omniglot": (256, 111_424),
    "alexnet": (9_344, 57_003_840),
    "eight": (9_344, 20_085_568),
    "atari": (1_024, 4_064_256),
}


def graph_of(name: str, shape: tuple[int, ...] | None = None) -> NodeGraph:
    trunk = NETWORKS[name]()
    model = MultiHead(trunk, features=trunk.features)
    model.add_head("first", 2)
    return NodeGraph(model, torch.zeros(2, *(shape or trunk.input_shape)))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_turns_its_input_into_as_many_features_as_it_says(name):
    trunk = NETWORKS[name]().eval()
    with torch.no_grad():
        assert trunk(torch.zeros(1, *trunk.input_shape)).shape == (1, trunk.features)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "alexnet"])
def test_every_network_has_the_papers_nodes_and_a_proven_graph(name):
    graph = graph_of(name)
    assert (graph.size, graph.node_count) == (COUNTS[name][0], COUNTS[name][0])
    assert sum(p.numel() for _, p, _ in graph.incoming_parameters()) == COUNTS[name][1]


def test_alexnet_has_9344_nodes_and_57_million_weights_also_on_small_images():
    graph = graph_of("alexnet", (3, 63, 63))
    assert graph.size == 9_344
    assert [layer.size for layer in graph.layers.values()] == [64, 192, 384, 256, 256, 4096, 4096]
    assert sum(p.numel() for _, p, _ in graph.incoming_parameters()) == 57_003_840
    assert graph.readers_of["trunk.conv.10"] == {"trunk.dense.1": 36}


@pytest.mark.slow
def test_alexnets_graph_on_images_of_its_own_size_is_the_same():
    assert str(graph_of("alexnet")) == str(graph_of("alexnet", (3, 63, 63)))


def test_dropout_comes_before_both_dense_layers_and_one_position_per_channel_is_left_in_eight():
    for name, columns in (("alexnet", 9216), ("eight", 256)):
        dense = NETWORKS[name]().dense
        assert [type(layer) for layer in dense] == 2 * [nn.Dropout, nn.Linear, nn.ReLU]
        assert dense[1].in_features == columns
        assert dense[0].p == dense[3].p == 0.5


# Weights from a file -------------------------------------------------------------------------------------------------

SHAPES = {
    "features.0": (64, 3, 11, 11),
    "features.3": (192, 64, 5, 5),
    "features.6": (384, 192, 3, 3),
    "features.8": (256, 384, 3, 3),
    "features.10": (256, 256, 3, 3),
    "classifier.1": (4096, 9216),
    "classifier.4": (4096, 4096),
    "classifier.6": (1000, 4096),
}


@pytest.fixture(scope="module")
def torchvisions() -> dict[str, torch.Tensor]:
    """The tensors of torchvision's AlexNet by name, each with a value of its own."""
    made = {}
    for place, (layer, shape) in enumerate(SHAPES.items(), start=1):
        made[f"{layer}.weight"] = torch.full(shape, place / 8)
        made[f"{layer}.bias"] = torch.full(shape[:1], -place / 8)
    assert sum(t.numel() for t in made.values()) == 61_100_840
    return made


def check_loaded(trunk: nn.Module) -> None:
    places = {"conv.0": 1, "conv.3": 2, "conv.6": 3, "conv.8": 4, "conv.10": 5, "dense.1": 6, "dense.4": 7}
    assert {name.rpartition(".")[0] for name, _ in trunk.named_parameters()} == set(places)
    for name, place in places.items():
        assert bool((trunk.get_parameter(f"{name}.weight") == place / 8).all())
        assert bool((trunk.get_parameter(f"{name}.bias") == -place / 8).all())


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_alexnet_takes_weights_in_torchvisions_names_and_leaves_out_the_last_layer(suffix, torchvisions, tmp_path):
    path = tmp_path / f"alexnet{suffix}"
    if suffix == ".pth":
        torch.save(torchvisions, path)
    else:
        save_file(torchvisions, path)
    check_loaded(alexnet.AlexNetTrunk(weights=str(path)))
    path.unlink()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.dense = nn.Sequential(nn.Conv2d(1, 2, 3)), nn.Sequential(nn.Linear(4, 3))


PREFIXES = {"features.": "conv.", "classifier.": "dense."}


def small() -> dict[str, torch.Tensor]:
    return {
        "features.0.weight": torch.ones(2, 1, 3, 3),
        "features.0.bias": torch.ones(2),
        "classifier.0.weight": torch.ones(3, 4),
        "classifier.0.bias": torch.ones(3),
        "classifier.6.weight": torch.ones(10, 3),
    }


def load_small(path: Path) -> Small:
    module = Small()
    load_weights(module, path, prefixes=PREFIXES, skip="classifier.6.")
    return module


def test_weights_of_half_precision_are_taken_in_the_networks_own(tmp_path):
    save_file({key: tensor.half() for key, tensor in small().items()}, tmp_path / "half.safetensors")
    module = load_small(tmp_path / "half.safetensors")
    assert all(p.dtype == torch.float32 and bool((p == 1).all()) for p in module.parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classifier.0.bias": None}, r"classifier\.0\.bias is missing"),
        ({"classifier.0.bias": torch.ones(5)}, r"classifier\.0\.bias is \[5\] of torch.float32, not \[3\]"),
        ({"classifier.0.bias": torch.ones(3, dtype=torch.int8)}, r"classifier\.0\.bias is \[3\] of torch.int8"),
        ({"layer1.weight": torch.ones(5)}, r"layer1\.weight is unknown"),
    ],
)
def test_weights_of_another_network_are_refused_by_name_and_nothing_is_changed(change, words, tmp_path):
    torch.save({key: t for key, t in {**small(), **change}.items() if t is not None}, tmp_path / "other.pth")
    module = Small()
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(WeightsError, match=words):
        load_weights(module, tmp_path / "other.pth", prefixes=PREFIXES, skip="classifier.6.")
    assert all(torch.equal(p, was) for p, was in zip(module.parameters(), before, strict=True))


class Trap:
    def __reduce__(self):
        return os.mkdir, (os.environ["AGSCL_TRAP"],)


def test_a_file_that_would_run_code_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("AGSCL_TRAP", str(tmp_path / "sprung"))
    torch.save({**small(), "trap": Trap()}, tmp_path / "trap.pth")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Trap(), protocol=2))
    for name in ("trap.pth", "plain.pkl"):
        with pytest.raises(WeightsError, match="cannot be read as weights"):
            load_small(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["broken.pth", "broken.safetensors"])
def test_a_file_that_is_cut_off_is_an_error_that_names_it(name, tmp_path):
    path = tmp_path / name
    torch.save(small(), path) if name.endswith("pth") else save_file(small(), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(WeightsError, match=rf"{name} cannot be read as weights"):
        load_small(path)


def test_a_file_with_something_else_than_a_state_dict_is_an_error(tmp_path):
    torch.save([torch.ones(3)], tmp_path / "list.pth")
    with pytest.raises(WeightsError, match="contains a list, not a state_dict of tensors"):
        load_small(tmp_path / "list.pth")


def test_a_path_where_nothing_is_says_what_weights_can_be(tmp_path):
    with pytest.raises(
        WeightsError, match=r"there is no file .*nothing.pth; weights must be 'imagenet', a file, or hf://"
    ):
        NETWORKS["alexnet"](weights=tmp_path / "nothing.pth")


# Downloads -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """Nothing of this machine is read or written."""
    monkeypatch.delenv("AGSCL_DATA", raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))


@pytest.fixture
def content():
    return os.urandom(3_000_000)


@pytest.fixture
def remote(small_hub, content):
    small_hub.other_files["/file.pth"] = content
    return describe(small_hub, "file.pth", content)


def describe(small_hub, name: str, content: bytes) -> RemoteFile:
    return RemoteFile(f"{small_hub.url}/{name}", name, hashlib.sha256(content).hexdigest(), size=len(content))


def test_a_download_is_complete_and_leaves_no_part_behind(remote, content, tmp_path):
    download_weights(remote, tmp_path / "new" / "file.pth")
    assert (tmp_path / "new" / "file.pth").read_bytes() == content
    assert [path.name for path in (tmp_path / "new").iterdir() if path.suffix == ".part"] == []


def test_the_part_of_an_earlier_process_is_resumed(small_hub, remote, content, tmp_path):
    (tmp_path / "file.pth.part").write_bytes(content[:2_000_000])
    download_weights(remote, tmp_path / "file.pth")
    assert small_hub.transfers() == ["bytes=2000000-"]
    assert (tmp_path / "file.pth").read_bytes() == content


def test_other_content_than_expected_never_gets_the_name_and_is_deleted(remote, tmp_path):
    with pytest.raises(WeightsError, match=r"checksum mismatch .* expected sha256 0000"):
        download_weights(replace(remote, digest="0" * 64), tmp_path / "file.pth")
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}


def test_a_download_that_never_succeeds_says_what_to_do_and_keeps_its_part(small_hub, remote, content, tmp_path):
    small_hub.cut_after[:] = [1000, *[0] * 10]
    with pytest.raises(WeightsError, match=r"closed early.*run the same command again.*save it as .*file\.pth"):
        download_weights(remote, tmp_path / "file.pth")
    assert (tmp_path / "file.pth.part").read_bytes() == content[:1000]


def test_a_missing_file_and_a_host_that_does_not_answer_are_errors(small_hub, remote, tmp_path):
    with pytest.raises(WeightsError, match="/missing could not be downloaded: the server answers 404"):
        download_weights(replace(remote, url=f"{small_hub.url}/missing"), tmp_path / "file.pth")
    assert len(small_hub.requests) == 1
    with pytest.raises(WeightsError, match=r"could not be downloaded: .*refused"):
        download_weights(replace(remote, url="http://127.0.0.1:9/file.pth"), tmp_path / "file.pth")


def test_a_folder_that_cannot_be_written_is_an_error_and_not_tried_again(small_hub, remote, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeightsError, match=r"Or download .* on another machine"):
        download_weights(remote, tmp_path / "file" / "file.pth")
    assert small_hub.requests == []


def test_of_several_that_want_a_file_at_once_one_downloads_it(small_hub, remote, content, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: download_weights(remote, tmp_path / "file.pth"), range(4)))
    assert (tmp_path / "file.pth").read_bytes() == content
    assert len(small_hub.requests) == 1


def test_imagenet_weights_are_downloaded_once_and_verified_each_time(small_hub, torchvisions, tmp_path, monkeypatch):
    torch.save(torchvisions, tmp_path / "made.pth")
    content = small_hub.other_files["/alexnet-owt.pth"] = (tmp_path / "made.pth").read_bytes()
    (tmp_path / "made.pth").unlink()
    monkeypatch.setattr(alexnet, "IMAGENET", describe(small_hub, "alexnet-owt.pth", content))
    check_loaded(NETWORKS["alexnet"](weights="imagenet"))
    stored = tmp_path / "torch" / "checkpoints" / "alexnet-owt.pth"
    find_weights("imagenet", {"imagenet": alexnet.IMAGENET})
    assert len(small_hub.requests) == 1
    with open(stored, "r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    with pytest.raises(WeightsError, match=r"alexnet-owt\.pth is damaged.*Delete it"):
        NETWORKS["alexnet"](weights="imagenet")


def test_a_file_in_the_data_folder_is_used_first(small_hub, remote, content, tmp_path, monkeypatch):
    monkeypatch.setenv("AGSCL_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "weights").mkdir(parents=True)
    (tmp_path / "data" / "weights" / "file.pth").write_bytes(content)
    assert find_weights("some", {"some": remote}) == tmp_path / "data" / "weights" / "file.pth"
    assert small_hub.requests == []


def test_the_official_weights_are_torchvisions_known_by_their_checksum():
    assert alexnet.IMAGENET.url.endswith(f"-{alexnet.IMAGENET.digest[:8]}.pth")
    assert alexnet.IMAGENET.file == alexnet.IMAGENET.url.rpartition("/")[2]


@pytest.mark.parametrize("owner", ["named", "renamed"])
def test_a_file_on_the_hub_is_verified_by_the_checksum_that_the_hub_states(small_hub, owner, content):
    small_hub.models["named/models"] = {"nets/alexnet.safetensors": content, "alexnet.safetensors": content}
    small_hub.renamed["renamed/models"] = "named/models"
    path = find_weights(f"hf://{owner}/models@v1/nets/alexnet.safetensors", {})
    assert path.name == f"{owner}--models--v1--nets--alexnet.safetensors"
    assert path.read_bytes() == content
    assert small_hub.requests[0][0] == f"/{owner}/models/resolve/v1/nets/alexnet.safetensors"
    requests = len(small_hub.requests)
    assert find_weights(f"hf://{owner}/models@v1/nets/alexnet.safetensors", {}) == path
    assert len(small_hub.requests) == requests, "a file that is here already is not requested again"
    small_hub.checksum = "0" * 64
    with pytest.raises(WeightsError, match="checksum mismatch"):
        find_weights(f"hf://{owner}/models/alexnet.safetensors", {})


def test_a_hub_that_states_no_checksum_or_has_no_such_file_is_an_error(small_hub, monkeypatch):
    small_hub.models["some/models"] = {"alexnet.safetensors": b"weights"}
    small_hub.checksum = ""
    with pytest.raises(WeightsError, match=r"states no checksum for .*some/models/resolve/main/alexnet\.safetensors"):
        find_weights("hf://some/models/alexnet.safetensors", {})
    with pytest.raises(WeightsError, match=r"was not found on .*the server answers 404"):
        find_weights("hf://some/models/resnet.safetensors", {})
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(WeightsError, match=r"was not found on .*refused"):
        find_weights("hf://some/models/alexnet.safetensors", {})


@pytest.mark.parametrize("address", ["hf://alexnet.safetensors", "hf://a/b/../../c/x.pth", "hf://a/b//x.pth"])
def test_an_address_of_another_form_is_refused(address):
    with pytest.raises(WeightsError, match=r"not of the form hf://owner/repository/file"):
        find_weights(address, {})

"""Models and methods go to the hub and come back, with the real client and a small hub on this machine."""

from __future__ import annotations

import json
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

from agscl import AGSCL, EWC, Certificate, MultiHead
from loops import adam, bits, learn, make, mlp, same

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: .[data] has it")

import huggingface_hub

from agscl.integrations.hub import FILES, from_pretrained, push_to_hub, save_pretrained

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLE = torch.zeros(2, 16)


@pytest.fixture
def hub(small_hub, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    return small_hub


def learned(kind=AGSCL, tasks: int = 2):
    torch.manual_seed(0)
    model = MultiHead(mlp())
    method = make(kind, model, **({"lam": 100.0} if kind is EWC else {}))
    for number in range(tasks):
        learn(method, adam(model), number)
    return method


@pytest.mark.parametrize("kind", [AGSCL, EWC])
def test_a_method_that_was_pushed_comes_back_and_continues_with_the_same_bits(hub, kind):
    method = learned(kind)
    address = push_to_hub(method, "me/blobs", token="hf_test")
    assert address.endswith("me/blobs")
    assert {*hub.models["me/blobs"]} == {*FILES, "README.md"}

    torch.manual_seed(5)
    loaded = from_pretrained("me/blobs", MultiHead(mlp()), EXAMPLE)
    assert type(loaded) is kind
    assert same(bits(loaded.model), bits(method.model))
    assert loaded.tasks == ["t0", "t1"]
    for one in (method, loaded):
        learn(one, adam(one.model), 2)
    assert same(bits(loaded.model), bits(method.model))
    assert str(loaded.certificate()) == str(method.certificate())


def test_the_files_are_no_pickles_and_say_what_is_frozen(hub):
    method = learned()
    push_to_hub(method, "me/blobs", token="hf_test")
    files = hub.models["me/blobs"]
    config = json.loads(files["config.json"])
    assert config["method"] == "AGSCL"
    assert config["heads"] == {"t0": 3, "t1": 3}
    weights = safetensors.torch.load(files["model.safetensors"])
    assert same(weights, bits(method.model))
    assert str(method.certificate()) in files["README.md"].decode()
    authorizations = {authorization for path, _, authorization in hub.requests if "/commit/" in path}
    assert authorizations == {"Bearer hf_test"}


def test_a_folder_serves_as_well_and_heads_may_be_dicts(tmp_path):
    torch.manual_seed(0)
    model = MultiHead(mlp())
    model.add_head("pong", {"actor": 6, "critic": 1})
    method = make(AGSCL, model)
    optimizer = adam(model)
    method.begin_task("pong", optimizer)
    for _ in range(4):
        outputs = model(torch.randn(8, 16), "pong")
        optimizer.zero_grad()
        (outputs["actor"].square().mean() + outputs["critic"].mean()).backward()
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method.end_task([torch.randn(8, 16)])
    save_pretrained(method, tmp_path / "agent")
    loaded = from_pretrained(tmp_path / "agent", MultiHead(mlp()), EXAMPLE)
    assert loaded.model.heads["pong"]["actor"].out_features == 6
    assert same(bits(loaded.model), bits(model))
    assert Certificate.load(tmp_path / "agent" / "certificate.json").check(loaded.model.state_dict()).ok


def test_weights_that_are_not_the_certified_ones_are_refused(tmp_path):
    method = learned()
    save_pretrained(method, tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    weights["heads.t0.weight"][0, 0] += 1
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    model = MultiHead(mlp())
    with pytest.raises(ValueError, match=r"not those of its certificate: 0 frozen nodes and 1 heads differ"):
        from_pretrained(tmp_path, model, EXAMPLE)
    assert not model.heads, "and the model is left as it was"


def test_a_hub_that_refuses_is_named_and_nothing_is_lost(hub):
    method = learned(tasks=1)
    before = bits(method.model)
    for status in (403, 500):
        hub.refuses = status
        with pytest.raises(ConnectionError, match="The hub refused to take 'me/blobs'"):
            push_to_hub(method, "me/blobs", token="hf_test")
    assert same(bits(method.model), before)
    hub.refuses = 0
    push_to_hub(method, "me/blobs", token="hf_test")
    with pytest.raises(ConnectionError, match="no folder 'me/nothing', and the hub says"):
        from_pretrained("me/nothing", MultiHead(mlp()), EXAMPLE)


def test_what_cannot_be_saved_or_loaded_says_why(tmp_path):
    method = learned(tasks=1)
    save_pretrained(method, tmp_path)
    with pytest.raises(ValueError, match="AGSCL needs an example input"):
        from_pretrained(tmp_path, MultiHead(mlp()))
    with pytest.raises(ValueError, match="do not fit this model"):
        from_pretrained(tmp_path, MultiHead(mlp(8)), EXAMPLE)
    with pytest.raises(TypeError, match=r"needs a MultiHead\(trunk\) to load into"):
        from_pretrained(tmp_path, nn.Linear(2, 2), EXAMPLE)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "method": "Later"}))
    with pytest.raises(ValueError, match="no method 'Later'"):
        from_pretrained(tmp_path, MultiHead(mlp()), EXAMPLE)
    (tmp_path / "config.json").write_text(json.dumps({**config, "format": "agscl-model-9"}))
    with pytest.raises(ValueError, match="not a model of the format"):
        from_pretrained(tmp_path, MultiHead(mlp()), EXAMPLE)
    (tmp_path / "method.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="is not a whole model"):
        from_pretrained(tmp_path, MultiHead(mlp()), EXAMPLE)
    with pytest.raises(RuntimeError, match="No task has been learned yet"):
        save_pretrained(make(AGSCL, MultiHead(mlp())), tmp_path / "none")
    method.model.heads["t0"] = nn.Sequential(nn.Linear(32, 3))
    with pytest.raises(ValueError, match="only linear heads can be saved"):
        save_pretrained(method, tmp_path / "other")
    shared = EWC(nn.Sequential(nn.Linear(16, 3)), lam=1.0, heads="0")
    with pytest.raises(ValueError, match="needs a model that is a MultiHead"):
        save_pretrained(shared, tmp_path / "shared")

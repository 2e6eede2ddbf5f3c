"""Models and methods to and from the Hugging Face hub: weights, the method's state, its settings and its certificate.

A folder, or a repository of the hub, holds

    config.json          the method, its settings, the tasks and the outputs of their heads
    model.safetensors    the model's weights
    method.safetensors   the tensors of the method's state; the rest of it is in config.json
    certificate.json     what is frozen, which is checked against the weights when they are loaded
    README.md            the same in words

No pickle: a file of others is safe to open. The code of the model is not in it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from huggingface_hub import HfApi, hf_hub_download
from safetensors import SafetensorError
from torch import nn

from agscl.certificate import Certificate
from agscl.data.hub_files import hub_endpoint
from agscl.heads import MultiHead
from agscl.integrations._attach import check_method
from agscl.methods import find_methods
from agscl.methods._parts.lifecycle import Method
from agscl.methods._parts.node_method import NodeMethod
from agscl.runs.nested_state import flatten_state, unflatten_state
from agscl.system.describe import describe_value
from agscl.system.files import write_atomically

__all__ = ["from_pretrained", "push_to_hub", "save_pretrained"]

FORMAT = "agscl-model-1"
FILES = ("config.json", "model.safetensors", "method.safetensors", "certificate.json")


def save_pretrained(method: Method, folder: str | Path) -> None:
    """Write a method and its model, between two tasks, to a folder, as a repository on the hub holds them."""
    check_method(method, "save_pretrained")
    if not isinstance(method.model, MultiHead):
        kind = type(method.model).__name__
        raise ValueError(f"save_pretrained needs a model that is a MultiHead, whose heads it can describe; got {kind}.")
    certificate = method.certificate()  # an error within a task, and before the first one
    plain, tensors = flatten_state(method.state_dict())
    outputs = {task: describe_head(task, head) for task, head in method.model.heads.items()}
    config = {"format": FORMAT, "method": type(method).__name__, "heads": outputs, "state": plain}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in method.model.state_dict().items()}
    write_atomically(folder / "model.safetensors", safetensors.torch.save(weights))
    write_atomically(folder / "method.safetensors", safetensors.torch.save(tensors))
    certificate.save(folder / "certificate.json")
    write_atomically(folder / "README.md", describe_model(method, certificate).encode())
    write_atomically(folder / "config.json", json.dumps(config, indent=1).encode())


def push_to_hub(method: Method, repository: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a method and its model as `repository` ("name/of-it"), in one commit; returns its address."""
    api = HfApi(hub_endpoint(), token=token)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(method, folder)
        try:
            api.create_repo(repository, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="agscl: model and method")
        except Exception as error:  # the client's own errors, and those of its transport
            raise ConnectionError(
                f"The hub refused to take {repository!r}: {error}. Nothing is lost; check the name and your token "
                "(huggingface-cli login), or write a folder with save_pretrained."
            ) from error
    return str(commit.repo_url)


def from_pretrained(
    source: str | Path,
    model: MultiHead,
    example_input: Any = None,
    *,
    revision: str | None = None,
    token: str | None = None,
) -> Method:
    """Load weights from the hub, or from a folder, into `model` and return its method, ready for the next task.

    `source` is a folder or the name of a repository; `model` a `MultiHead` with a trunk like the saved one, whose
    missing heads are added. `example_input` is needed by methods that know the nodes, as when they are made. Weights
    that do not fit the certificate are an error.
    """
    if not isinstance(model, MultiHead):
        raise TypeError(f"from_pretrained needs a MultiHead(trunk) to load into, got {describe_value(model)}.")
    paths = {name: Path(source) / name for name in FILES}
    if not Path(source).is_dir():
        paths = {name: download_file(str(source), name, revision, token) for name in FILES}
    try:
        config = json.loads(paths["config.json"].read_text())
        weights = safetensors.torch.load_file(paths["model.safetensors"])
        tensors = safetensors.torch.load_file(paths["method.safetensors"])
        certificate = Certificate.load(paths["certificate.json"])
    except (FileNotFoundError, json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(f"{source} is not a whole model of agscl: {error}.") from None
    if config.get("format") != FORMAT:
        raise ValueError(f"{source} is not a model of the format {FORMAT}.")
    check_certificate(source, certificate, weights)
    method_class = find_class(config["method"])
    state = unflatten_state(config["state"], tensors)
    add_heads(model, config["heads"], weights)
    load_weights(source, model, weights)
    node_arguments = {"example_input": example_input} if issubclass(method_class, NodeMethod) else {}
    if node_arguments and example_input is None:
        raise ValueError(f"{config['method']} needs an example input: from_pretrained(source, model, example_input).")
    method = method_class(model, **node_arguments, **state["settings"])
    method.load_state_dict(state)
    return method


def download_file(repository: str, name: str, revision: str | None, token: str | None) -> Path:
    try:
        return Path(hf_hub_download(repository, name, revision=revision, token=token, endpoint=hub_endpoint()))
    except Exception as error:  # the client's own errors, and those of its transport
        raise ConnectionError(f"There is no folder {repository!r}, and the hub says: {error}.") from error


def describe_head(task: str, head: nn.Module) -> int | dict[str, int]:
    """What a repository on the hub says of a head: the outputs with which `add_head` makes it again."""
    parts = dict(head.named_children()) if isinstance(head, nn.ModuleDict) else {"": head}
    for part in parts.values():
        if not isinstance(part, nn.Linear):
            raise ValueError(f"The head of task {task!r} has a {type(part).__name__}; only linear heads can be saved.")
    outputs = {name: part.out_features for name, part in parts.items() if isinstance(part, nn.Linear)}
    return outputs if isinstance(head, nn.ModuleDict) else outputs[""]


def add_heads(model: MultiHead, outputs: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    for task, number in outputs.items():
        if task not in model.heads:
            model.features = next(
                tensor.shape[1]
                for name, tensor in weights.items()
                if name.startswith(f"heads.{task}.") and name.endswith("weight")
            )
            model.add_head(task, number)


def load_weights(source: str | Path, model: MultiHead, weights: Mapping[str, Any]) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"The weights of {source} do not fit this model. {error}") from None


def check_certificate(source: str | Path, certificate: Certificate, weights: Mapping[str, Any]) -> None:
    finding = certificate.check(weights)
    if not finding.ok:
        raise ValueError(
            f"The weights of {source} are not those of its certificate: {len(finding.moved)} frozen nodes and "
            f"{len(finding.heads)} heads differ, {sum(finding.nonzero.values())} weights should be 0. It is damaged, "
            "or was changed after it was saved."
        )


def find_class(name: str) -> type[Method]:
    classes = {kind.__name__: kind for kind in find_methods().values()}
    if name not in classes:
        raise ValueError(f"This version of agscl has no method {name!r}. It has: {', '.join(classes)}.")
    return classes[name]


def describe_model(method: Method, certificate: Certificate) -> str:
    return f"""---
library_name: agscl
tags: [continual-learning]
---

A model that learned {len(method.tasks)} tasks, one after the other, with {method.title}: {", ".join(method.tasks)}.

{certificate}

```python
from agscl import MultiHead
from agscl.integrations.hub import from_pretrained

model = MultiHead(trunk)  # a trunk like this one's
method = from_pretrained("this repository", model, example_input)
```
"""

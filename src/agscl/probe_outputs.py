"""`ProbeOutputs`: outputs of all heads on a batch of inputs, stored in a certificate as its second witness."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from agscl.digests import digest_tensors
from agscl.system.tf32 import tf32_allowed

__all__ = ["ProbeOutputs"]


@dataclass(frozen=True)
class ProbeOutputs:
    """Outputs of the heads on a batch of inputs, and all that their bits depend on."""

    shape: list[int]
    seed: int | None  # None: a batch given by the user, known by its digest only
    digest: str
    environment: dict[str, str | int]
    outputs: dict[str, dict[str, Any]]

    @staticmethod
    def describe_environment(tensor: Tensor, model: nn.Module | None = None) -> dict[str, str | int]:
        """What the bits of outputs depend on beside the weights, where `model` runs on the probe `tensor`."""
        device = torch.cuda.get_device_name(tensor.device) if tensor.is_cuda else tensor.device.type
        environment: dict[str, str | int] = {
            "device": device,
            "dtype": str(tensor.dtype),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }
        if tensor.is_cuda:
            environment["tf32"] = ", ".join(name for name, on in tf32_allowed().items() if on) or "none"
        weights = [] if model is None else model.parameters()
        if any(_is_channels_last(some) for some in (tensor, *weights)):
            environment["memory_layout"] = "channels last"
        return environment

    @staticmethod
    def draw_batch(shape: Sequence[int], seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    @classmethod
    def from_outputs(
        cls, batch: Tensor, outputs: Mapping[str, Tensor], seed: int | None, model: nn.Module | None = None
    ) -> ProbeOutputs:
        stored = {
            task: {
                "shape": list(output.shape),
                "data": base64.b64encode(output.detach().float().cpu().contiguous().numpy().tobytes()).decode(),
            }
            for task, output in outputs.items()
        }
        environment = cls.describe_environment(batch, model)
        return cls(list(batch.shape), seed, digest_tensors({"x": batch}, ["x"]), environment, stored)

    def compare(self, batch: Tensor, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        """Largest difference per task between the stored probe outputs and these; 0.0 means equal bits."""
        if digest_tensors({"x": batch}, ["x"]) != self.digest:
            raise ValueError("This is not the batch that the certificate's outputs were computed on.")
        differences = {}
        for task, stored in self.outputs.items():
            if task not in outputs:
                raise ValueError(f"The certificate holds outputs of task {task!r}; none were given to compare.")
            old = np.frombuffer(base64.b64decode(stored["data"]), dtype=np.float32).reshape(stored["shape"])
            new = outputs[task].detach().float().cpu().numpy()
            differences[task] = float(np.abs(old - new).max()) if old.tobytes() != new.tobytes() else 0.0
        return differences

    def same_environment(self, batch: Tensor, model: nn.Module | None = None) -> bool:
        return self.environment == self.describe_environment(batch, model) and self.shape == list(batch.shape)

    def find_changed(self, later: ProbeOutputs | None) -> list[str]:
        """Tasks whose probe outputs have other bits in `later`; none where the two cannot be compared."""
        if later is None or (self.digest, self.shape, self.environment) != (
            later.digest,
            later.shape,
            later.environment,
        ):
            return []
        return [task for task, stored in self.outputs.items() if later.outputs.get(task, stored) != stored]


def _is_channels_last(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)

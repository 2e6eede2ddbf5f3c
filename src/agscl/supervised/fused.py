"""A convolution and the ReLU behind it as one kernel of cuDNN: in trunks that are compiled for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

BACKEND = "inductor"
RELUS = (F.relu, torch.relu, torch.relu_, "relu", "relu_")
"""As functions and as methods of a tensor."""
ALONG = ["x", "weight", "bias", "stride", "padding", "dilation", "groups"]
"""What `torch.conv2d` takes, in this order."""


def fusing(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A backend of torch.compile."""
    from torch._dynamo import lookup_backend

    fuse(module.graph)
    module.recompile()
    compiled: Callable[..., Any] = lookup_backend(BACKEND)(module, inputs)
    return compiled


def fuse(graph: fx.Graph) -> None:
    """Let every convolution in bf16, channels last, whose output nothing but a ReLU reads, do that ReLU too."""
    for relu in list(graph.nodes):
        if relu.op not in ("call_function", "call_method") or relu.target not in RELUS:
            continue
        before = relu.args[0]
        if not isinstance(before, fx.Node) or not _fits(before):
            continue
        given: dict[str, Any] = dict(zip(ALONG, before.args, strict=True))
        with graph.inserting_before(relu):
            kind = before.meta["example_value"].dtype
            tensors = [graph.call_method("to", (given[name], kind)) for name in ("x", "weight", "bias")]
            both = graph.call_function(
                torch.ops.agscl.convolution_relu.default, (*tensors, list(given["stride"]), list(given["padding"]))
            )
        both.meta["example_value"] = relu.meta["example_value"]
        relu.replace_all_uses_with(both)
        graph.erase_node(relu)
        graph.erase_node(before)


def _fits(node: fx.Node) -> bool:
    if node.target is not torch.conv2d or len(node.args) != len(ALONG) or node.kwargs or len(node.users) > 1:
        return False
    given: dict[str, Any] = dict(zip(ALONG, node.args, strict=True))
    made = node.meta["example_value"]
    plain = tuple(given["dilation"]) == (1, 1) and given["groups"] == 1 and not isinstance(given["padding"], str)
    laid_out = made.dim() == 4 and made.is_contiguous(memory_format=torch.channels_last)
    return given["bias"] is not None and plain and bool(laid_out and made.dtype == torch.bfloat16)


@torch.library.custom_op("agscl::convolution_relu", mutates_args=())
def convolution_relu(x: Tensor, weight: Tensor, bias: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    if x.is_cuda and torch.backends.cudnn.enabled and torch.version.cuda:
        made: Tensor = torch.cudnn_convolution_relu(x, weight, bias, stride, padding, (1, 1), 1)
        return made
    return F.relu(F.conv2d(x, weight, bias, tuple(stride), tuple(padding)))


@convolution_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    return torch.empty_like(F.conv2d(x, weight, bias, tuple(stride), tuple(padding)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight, output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, output = ctx.saved_tensors
    gradient = torch.ops.aten.threshold_backward(gradient, output, 0)
    found = torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight,
        [len(weight)],
        ctx.stride,
        ctx.padding,
        [1, 1],
        False,
        [0, 0],
        1,
        list(ctx.needs_input_grad[:3]),
    )
    return (*found, None, None)


convolution_relu.register_autograd(_backward, setup_context=_keep)

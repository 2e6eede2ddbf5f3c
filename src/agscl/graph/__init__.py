"""Which nodes a model has, and which columns of which later layers read each one."""

from agscl.graph.nodes import NodeGraph
from agscl.graph.refusals import NodeGraphError

__all__ = ["NodeGraph", "NodeGraphError"]

"""Which nodes a model has, and which columns of which later layers read each one."""

from agscl.graph.nodes import NodeGraph
from agscl.graph.probing import NodeGraphError

__all__ = ["NodeGraph", "NodeGraphError"]

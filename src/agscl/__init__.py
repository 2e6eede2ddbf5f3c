"""agscl: continual learning you can verify."""

from agscl.certificate import Certificate
from agscl.heads import MultiHead
from agscl.methods.agscl import AGSCL
from agscl.methods.finetune import FineTune
from agscl.nodes import NodeGraph

__all__ = ["AGSCL", "Certificate", "FineTune", "MultiHead", "NodeGraph"]
__version__ = "0.1.0"

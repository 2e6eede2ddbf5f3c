"""agscl: continual learning you can verify."""

from agscl.certificate import Certificate
from agscl.graph.nodes import NodeGraph
from agscl.heads import MultiHead
from agscl.methods.agscl import AGSCL
from agscl.methods.ewc import EWC
from agscl.methods.finetune import FineTune
from agscl.methods.frozen import Frozen
from agscl.methods.gpm import GPM
from agscl.methods.hat import HAT
from agscl.methods.l2 import L2
from agscl.methods.lwf import LwF
from agscl.methods.mas import MAS
from agscl.methods.packnet import PackNet
from agscl.methods.rwalk import RWalk
from agscl.methods.si import SI
from agscl.methods.together import Together

__all__ = [
    "AGSCL",
    "EWC",
    "GPM",
    "HAT",
    "L2",
    "MAS",
    "SI",
    "Certificate",
    "FineTune",
    "Frozen",
    "LwF",
    "MultiHead",
    "NodeGraph",
    "PackNet",
    "RWalk",
    "Together",
]
__version__ = "0.1.0"

"""agscl: continual learning you can verify."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agscl.certificate import Certificate
    from agscl.freezing import freeze
    from agscl.graph.nodes import NodeGraph
    from agscl.heads import MultiHead
    from agscl.methods.agscl import AGSCL
    from agscl.methods.cpr import cpr_loss
    from agscl.methods.ewc import EWC
    from agscl.methods.finetune import FineTune
    from agscl.methods.frozen import Frozen
    from agscl.methods.gpm import GPM
    from agscl.methods.hat import HAT
    from agscl.methods.l2 import L2
    from agscl.methods.lwf import LwF
    from agscl.methods.mas import MAS
    from agscl.methods.packnet import PackNet
    from agscl.methods.paper_agscl import PaperAGSCL
    from agscl.methods.rwalk import RWalk
    from agscl.methods.si import SI
    from agscl.methods.spg import SPG
    from agscl.methods.together import Together
    from agscl.methods.trgp import TRGP
    from agscl.methods.wsn import WSN

__all__ = [
    "AGSCL",
    "EWC",
    "GPM",
    "HAT",
    "L2",
    "MAS",
    "SI",
    "SPG",
    "TRGP",
    "WSN",
    "Certificate",
    "FineTune",
    "Frozen",
    "LwF",
    "MultiHead",
    "NodeGraph",
    "PackNet",
    "PaperAGSCL",
    "RWalk",
    "Together",
    "cpr_loss",
    "freeze",
]
__version__ = "0.1.0"

_MODULES = {
    "Certificate": "agscl.certificate",
    "freeze": "agscl.freezing",
    "NodeGraph": "agscl.graph.nodes",
    "MultiHead": "agscl.heads",
    "AGSCL": "agscl.methods.agscl",
    "cpr_loss": "agscl.methods.cpr",
    "EWC": "agscl.methods.ewc",
    "FineTune": "agscl.methods.finetune",
    "Frozen": "agscl.methods.frozen",
    "GPM": "agscl.methods.gpm",
    "HAT": "agscl.methods.hat",
    "L2": "agscl.methods.l2",
    "LwF": "agscl.methods.lwf",
    "MAS": "agscl.methods.mas",
    "PackNet": "agscl.methods.packnet",
    "PaperAGSCL": "agscl.methods.paper_agscl",
    "RWalk": "agscl.methods.rwalk",
    "SI": "agscl.methods.si",
    "SPG": "agscl.methods.spg",
    "TRGP": "agscl.methods.trgp",
    "Together": "agscl.methods.together",
    "WSN": "agscl.methods.wsn",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `agscl --help` answers without importing torch."""
    if name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    elif name[:1].isupper() and (methods := _find_methods(name)):
        value = methods[0]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _find_methods(name: str) -> list[Any]:
    """Methods of this name that stand in a file of `agscl.methods` and are not listed above."""
    methods = import_module("agscl.methods")
    return [method for method in methods.find_methods().values() if method.__name__ == name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

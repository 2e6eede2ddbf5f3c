"""The methods by name, in the order of the paper's table, and the two bounds beside them."""

from __future__ import annotations

import inspect
import types
import typing
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Literal

REFERENCE = "finetune"
"""What plasticity is measured against."""


@dataclass(frozen=True)
class Listed:
    """What can be compared under one name."""

    title: str
    """Its name in tables."""
    place: str
    """module:class, imported when it is asked for."""
    bound: bool = False
    """Whether it is a bound: it needs all data or several networks, so it is no method one could use."""

    def load(self) -> type[Any]:
        module, _, name = self.place.partition(":")
        found: type[Any] = getattr(import_module(module), name)
        return found

    @property
    def about(self) -> str:
        """One line for a person: the first of the class's own text."""
        return (inspect.getdoc(self.load()) or "").splitlines()[0]

    @property
    def settings(self) -> dict[str, Any]:
        """The type of each setting, by name."""
        config = getattr(self.load(), "Config", None)
        if self.bound or config is None:
            return {}
        hints = typing.get_type_hints(config)
        return {field.name: hints[field.name] for field in fields(config)}


METHODS: dict[str, Listed] = {
    "agscl": Listed("AGS-CL", "agscl.methods.agscl:AGSCL"),
    "ewc": Listed("EWC", "agscl.methods.ewc:EWC"),
    "si": Listed("SI", "agscl.methods.si:SI"),
    "rwalk": Listed("RWALK", "agscl.methods.rwalk:RWalk"),
    "mas": Listed("MAS", "agscl.methods.mas:MAS"),
    "hat": Listed("HAT", "agscl.methods.hat:HAT"),
    "packnet": Listed("PackNet", "agscl.methods.packnet:PackNet"),
    "lwf": Listed("LwF", "agscl.methods.lwf:LwF"),
    "l2": Listed("L2", "agscl.methods.l2:L2"),
    "gpm": Listed("GPM", "agscl.methods.gpm:GPM"),
    "frozen": Listed("frozen", "agscl.methods.frozen:Frozen"),
    REFERENCE: Listed("fine-tuning", "agscl.methods.finetune:FineTune"),
    "joint": Listed("joint", "agscl.experiments.protocols:Joint", bound=True),
    "separate": Listed("separate", "agscl.experiments.protocols:Separate", bound=True),
}


def listed(name: str) -> Listed:
    if name not in METHODS:
        raise ValueError(f"no method is called {name!r}. There are: {', '.join(METHODS)}")
    return METHODS[name]


def read_setting(kind: Any, name: str, text: str) -> Any:
    """The value of a setting of type `kind`, as a person wrote it."""
    for one in _parts(kind):
        if typing.get_origin(one) is Literal:
            for value in typing.get_args(one):
                if text == str(value):
                    return value
        elif one is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        elif one is types.NoneType and text.lower() == "none":
            return None
        elif one in (int, float):
            try:
                return one(text)
            except ValueError:
                continue
        elif one is str:
            return text
    raise ValueError(f"{name} is {_words(kind)}, not {text!r}")


def _parts(kind: Any) -> tuple[Any, ...]:
    return (
        typing.get_args(kind)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
        else (kind,)
    )


def _words(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", types.NoneType: "none"}
    found = []
    for one in _parts(kind):
        found += [str(value) for value in typing.get_args(one)] if typing.get_origin(one) is Literal else [names[one]]
    return " or ".join(found)

"""Continual-learning methods, one file each; `find_methods` lists them."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from agscl.methods._parts.lifecycle import Method

__all__ = ["find_methods"]

FIRST = ("agscl", "paper-agscl", "ewc", "si", "rwalk", "mas", "hat")
"""The order of the paper's table; the others follow by name."""
LAST = ("frozen", "finetune")


@cache
def find_methods() -> dict[str, type[Method]]:
    """Every method that has a title, by the name of its file, in the order of tables."""
    methods: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("_"):
            continue
        name = f"{__name__}.{module.name}"
        classes = [value for value in vars(import_module(name)).values() if isinstance(value, type)]
        for candidate in classes:
            if issubclass(candidate, Method) and candidate.__module__ == name and "title" in vars(candidate):
                methods[module.name.replace("_", "-")] = candidate
    others = sorted(name for name in methods if name not in (*FIRST, *LAST))
    return {name: methods[name] for name in (*FIRST, *others, *LAST) if name in methods}

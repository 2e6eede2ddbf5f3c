"""`Settings`: what the config dataclasses of methods share, the checks of their values."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import dataclass, fields
from typing import Any, Literal

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of a method's config. Every `Literal` setting is checked by itself."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for one in fields(self):
            value, choices = getattr(self, one.name), _find_choices(hints[one.name])
            if choices is not None and not any(value == choice and type(value) is type(choice) for choice in choices):
                self._refuse(f"{one.name} is one of {', '.join(map(repr, choices))}, not {value!r}")

    def _require(self, good: bool, rule: str) -> None:
        if not good:
            self._refuse(rule)

    def _require_at_least(self, name: str, least: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        good = math.isfinite(value) and (value > least if above else value >= least)
        rule = f"above {least:g}" if above else f"of at least {least:g}"
        self._require(good, f"{name} must be a finite number {rule}, not {value}")

    def _refuse(self, rule: str) -> None:
        raise ValueError(f"{type(self).__name__.removesuffix('Config')}: {rule}.")


def _find_choices(hint: Any) -> list[Any] | None:
    """All values that a hint of `Literal`s and booleans allows; None where it allows others."""
    parts = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    choices: list[Any] = []
    for part in parts:
        if typing.get_origin(part) is Literal:
            choices += typing.get_args(part)
        elif part is bool:
            choices += [True, False]
        else:
            return None
    return choices if any(typing.get_origin(part) is Literal for part in parts) else None

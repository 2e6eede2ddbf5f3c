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
    """Base of a method's config. Settings with a `Literal` type are checked here."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for setting in fields(self):
            value, choices = getattr(self, setting.name), _find_choices(hints[setting.name])
            if choices is not None and not any(value == choice and type(value) is type(choice) for choice in choices):
                self._refuse(f"{setting.name} must be one of {', '.join(map(repr, choices))}, not {value!r}")

    def _require(self, is_valid: bool, rule: str) -> None:
        if not is_valid:
            self._refuse(rule)

    def _require_at_least(self, name: str, minimum: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        is_valid = math.isfinite(value) and (value > minimum if above else value >= minimum)
        rule = f"above {minimum:g}" if above else f"of at least {minimum:g}"
        self._require(is_valid, f"{name} must be a finite number {rule}, not {value}")

    def _refuse(self, rule: str) -> None:
        raise ValueError(f"{type(self).__name__.removesuffix('Config')}: {rule}.")


def _find_choices(hint: Any) -> list[Any] | None:
    """All values that a hint of `Literal`s and booleans allows; None where it allows others."""
    types_allowed = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    choices: list[Any] = []
    for allowed in types_allowed:
        if typing.get_origin(allowed) is Literal:
            choices += typing.get_args(allowed)
        elif allowed is bool:
            choices += [True, False]
        else:
            return None
    return choices if any(typing.get_origin(allowed) is Literal for allowed in types_allowed) else None

"""`Settings`: what the config dataclasses of methods share, the checks of their values."""

from __future__ import annotations

import math
import numbers
import types
import typing
from dataclasses import dataclass, fields
from typing import Any, Literal

__all__ = ["NoSettings", "Settings", "find_wrong_type"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of a method's config. Values are checked here against their types: numbers, booleans and `Literal`s."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, numbers.Real) and not isinstance(value, int | float):  # of numpy
                value = int(value) if isinstance(value, numbers.Integral) else float(value)
                object.__setattr__(self, setting.name, value)
        if wrong := find_wrong_type(self):
            self._refuse(wrong)

    def find_unused(self) -> dict[str, str]:
        """The settings that change nothing in what is learned beside the others as they are, each with the reason."""
        return {}

    def require(self, is_valid: bool, rule: str) -> None:
        if not is_valid:
            self._refuse(rule)

    def require_at_least(self, name: str, minimum: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        is_valid = math.isfinite(value) and (value > minimum if above else value >= minimum)
        rule = f"above {minimum:g}" if above else f"of at least {minimum:g}"
        self.require(is_valid, f"{name} must be a finite number {rule}, not {value}")

    def _refuse(self, rule: str) -> None:
        raise ValueError(f"{type(self).__name__.removesuffix('Config')}: {rule}.")


_KINDS: dict[Any, str] = {float: "a number", int: "a whole number", bool: "True or False", type(None): "None"}


@dataclass(frozen=True, kw_only=True)
class NoSettings(Settings):
    """The settings of a method with nothing to set."""


def find_wrong_type(config: Any) -> str | None:
    """A sentence about the first setting in a dataclass whose value is not of its type; None where all are."""
    hints = typing.get_type_hints(type(config))
    for setting in fields(config):
        value, allowed = getattr(config, setting.name), _list_allowed(hints[setting.name])
        if any(_is_allowed(value, hint) for hint in allowed):
            continue
        choices = [repr(choice) for hint in allowed for choice in typing.get_args(hint)]
        choices += [_KINDS[hint] for hint in allowed if hint in _KINDS]
        rule = f"must be {'one of ' if len(choices) > 1 else ''}{', '.join(choices)}, not {value!r}"
        is_infinite = float in allowed and isinstance(value, str) and value.strip("+-").lower() in ("inf", "infinity")
        return f"{setting.name} {rule}{' (infinity is math.inf)' if is_infinite else ''}"
    return None


def _list_allowed(hint: Any) -> tuple[Any, ...]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _is_allowed(value: Any, hint: Any) -> bool:
    """Whether `value` is of the type `hint`; types that are not numbers, booleans or `Literal`s allow everything."""
    if typing.get_origin(hint) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(hint))
    if hint is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in _KINDS else True

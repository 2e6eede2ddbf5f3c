"""The warning that a method seems to do nothing, and how it names the line of the user's code."""

from __future__ import annotations

import sys
import warnings

__all__ = ["SelfCheckWarning", "warn_user"]


class SelfCheckWarning(UserWarning):
    """Warns that a method seems to do nothing; the message gives the likely cause and a value that would work."""


def warn_user(message: str) -> None:
    """Warn with the line of the user's code that led here, not one of this package or of torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("agscl", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, SelfCheckWarning, stacklevel=level)

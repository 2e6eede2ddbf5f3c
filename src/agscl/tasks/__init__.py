"""Task sequences: what is learned, one task after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from numbers import Integral, Real

from agscl.data.catalogue import need
from agscl.data.examples import DataMissing
from agscl.tasks.eight import EIGHT, FIVE
from agscl.tasks.own import from_folder, from_hub, from_tensors
from agscl.tasks.task import Task, TaskSequence

__all__ = [
    "SEQUENCES",
    "DataMissing",
    "Listed",
    "Task",
    "TaskSequence",
    "from_folder",
    "from_hub",
    "from_tensors",
    "load",
]


@dataclass(frozen=True)
class Listed:
    """A task sequence that has a name."""

    about: str
    """One line for a person."""
    loader: str
    """module:function"""
    datasets: tuple[str, ...] = ()
    """What it is made of, by the names of agscl.data.catalogue."""


SEQUENCES: dict[str, Listed] = {
    "digits": Listed("scikit-learn's digits, 5 tasks of 2", "digits:load"),
    "cifar100": Listed("CIFAR-100, 10 tasks of 10", "cifar:cifar100", ("cifar100",)),
    "cifar10-100": Listed("CIFAR-10, then CIFAR-100's 10", "cifar:cifar10_100", ("cifar10", "cifar100")),
    "tinyimagenet32": Listed("Tiny ImageNet, 10 tasks of 10", "cifar:tinyimagenet32", ("tinyimagenet32",)),
    "cifar10-tiny": Listed("CIFAR-10, then Tiny ImageNet's 10", "cifar:cifar10_tiny", ("cifar10", "tinyimagenet32")),
    "omniglot": Listed("50 alphabets, a task each", "omniglot:load", ("omniglot",)),
    "cub200": Listed("200 birds, 10 tasks of 20", "cub:cub200", ("cub200",)),
    "eight": Listed("eight datasets, a task each", "eight:eight", EIGHT),
    "five": Listed("as eight, five datasets", "eight:five", FIVE),
}

_OWN: dict[str, Callable[..., TaskSequence]] = {"folder": from_folder, "hub": from_hub}


def load(name: str, *, seed: int, **options: object) -> TaskSequence:
    """The task sequence called `name`; `options` are those of its own function.

    "folder:PATH" and "hub:NAME" make one of data of your own, with the options of `from_folder` and `from_hub`.
    """
    kind, colon, where = name.partition(":")
    if colon and kind in _OWN:
        if not where:
            raise ValueError(
                f"{name} names nothing: a {'path' if kind == 'folder' else 'name'} belongs after the colon"
            )
        _check(options, from_folder, _OWN[kind])
        return _OWN[kind](where, seed=seed, **options)
    if name not in SEQUENCES:
        known = ", ".join([*SEQUENCES, "folder:PATH", "hub:NAME"])
        raise ValueError(f"no task sequence is called {name!r}; there are: {known}")
    module, _, function = SEQUENCES[name].loader.partition(":")
    loader: Callable[..., TaskSequence] = getattr(import_module(f"agscl.tasks.{module}"), function)
    _check(options, loader)
    need(SEQUENCES[name].datasets)
    return loader(seed=seed, **options)


def _check(options: Mapping[str, object], *loaders: Callable[..., TaskSequence]) -> None:
    """Whether the loaders have these options, and of this kind."""
    parameters = [each for loader in loaders for each in signature(loader).parameters.values()]
    known = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "seed"}
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"there is no option {unknown[0]!r}; there are: {', '.join(known) or 'none'}")
    for option, value in options.items():
        kind, words = _KINDS.get(str(known[option].annotation).removesuffix(" | None"), (object, ""))
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise ValueError(f"{option} is {words}, not {value!r}")


_KINDS: dict[str, tuple[type, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "true or false"),
}
"""What an option must be, by its annotation; NumPy's numbers are numbers too."""

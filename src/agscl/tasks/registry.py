"""Task sequences by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from numbers import Integral, Real

from agscl.data.datasets import require_datasets
from agscl.tasks.eight import EIGHT, FIVE
from agscl.tasks.mixed import MIXED
from agscl.tasks.own_data import from_folder, from_hub
from agscl.tasks.task import TaskSequence


@dataclass(frozen=True)
class SequenceInfo:
    """A registered task sequence, which `load` knows by name."""

    about: str
    """One line for a person."""
    loader: str
    """module:function"""
    datasets: tuple[str, ...] = ()
    """The datasets it is made of, by their names in agscl.data.catalogue."""


SEQUENCES: dict[str, SequenceInfo] = {
    "digits": SequenceInfo("scikit-learn's digits, 5 pairs", "digits:load_digits_tasks"),
    "cifar100": SequenceInfo("CIFAR-100, 10 tasks of 10", "cifar:load_cifar100", ("cifar100",)),
    "cifar10-100": SequenceInfo("CIFAR-10, then CIFAR-100's 10", "cifar:load_cifar10_100", ("cifar10", "cifar100")),
    "tinyimagenet32": SequenceInfo(
        "Tiny ImageNet, 10 tasks of 10", "tinyimagenet:load_tinyimagenet32", ("tinyimagenet32",)
    ),
    "cifar10-tiny": SequenceInfo(
        "CIFAR-10, then Tiny ImageNet", "tinyimagenet:load_cifar10_tiny", ("cifar10", "tinyimagenet32")
    ),
    "omniglot": SequenceInfo("50 alphabets, a task each", "omniglot:load_omniglot", ("omniglot",)),
    "cub200": SequenceInfo("200 birds, 10 tasks of 20", "cub200:load_cub200", ("cub200",)),
    "eight": SequenceInfo("eight datasets, a task each", "eight:load_eight", EIGHT),
    "five": SequenceInfo("as eight, five datasets", "eight:load_five", FIVE),
    "mixed": SequenceInfo("ten unlike tasks", "mixed:load_mixed", MIXED),
}

_CUSTOM: dict[str, Callable[..., TaskSequence]] = {"folder": from_folder, "hub": from_hub}


def load(name: str, *, seed: int, **options: object) -> TaskSequence:
    """Load the registered task sequence `name`; `options` are the keyword arguments of its own function.

    "folder:PATH" and "hub:NAME" are your own data, with the options of `from_folder` and `from_hub`.
    """
    kind, colon, location = name.partition(":")
    if colon and kind in _CUSTOM:
        if not location:
            raise ValueError(f"{name} is incomplete: write {name}{'PATH' if kind == 'folder' else 'NAME'}")
        _check_options(options, from_folder, _CUSTOM[kind])
        return _CUSTOM[kind](location, seed=seed, **options)
    if name not in SEQUENCES:
        known = ", ".join([*SEQUENCES, "folder:PATH", "hub:NAME"])
        raise ValueError(f"unknown task sequence {name!r}; choose one of: {known}")
    module, _, function = SEQUENCES[name].loader.partition(":")
    loader: Callable[..., TaskSequence] = getattr(import_module(f"agscl.tasks.{module}"), function)
    _check_options(options, loader)
    require_datasets(SEQUENCES[name].datasets)
    return loader(seed=seed, **options)


def _check_options(options: Mapping[str, object], *loaders: Callable[..., TaskSequence]) -> None:
    """Raise ValueError for an option that none of the loaders has, or of the wrong type."""
    parameters = [parameter for loader in loaders for parameter in signature(loader).parameters.values()]
    known = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "seed"}
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"unknown option {unknown[0]!r}; the options are: {', '.join(known) or 'none'}")
    for option, value in options.items():
        expected, description = _OPTION_TYPES.get(str(known[option].annotation).removesuffix(" | None"), (object, ""))
        if value is not None and (
            not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool)
        ):
            raise ValueError(f"{option} must be {description}, not {value!r}")


_OPTION_TYPES: dict[str, tuple[type, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "true or false"),
}
"""What an option must be, by its annotation; NumPy's numbers are fine too."""

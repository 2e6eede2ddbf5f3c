"""The batches given to `end_task`: what they may be, errors that say what was given, running through them twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset

from agscl.system.describe import describe_value

__all__ = ["MAX_HELD_BYTES", "Batches", "explain_batch_errors", "make_repeatable"]

MAX_HELD_BYTES = 2**28
"""Most bytes of an iterator's batches that are held so that they can be run through twice."""

_ADVICE = "end_task needs a DataLoader, or a list of batches, each `x` or `(x, y)`"


class Batches:
    """The batches of a task, checked; `last` is the one that was given out last.

    `source` is an iterable, or a function that returns one; None: there are none.
    """

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]] | None) -> None:
        if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
            raise TypeError(f"{_ADVICE}: a dataset gives single examples, DataLoader(dataset, batch_size=…) batches.")
        if isinstance(source, Tensor | Mapping | str) or not (
            source is None or isinstance(source, Iterable) or callable(source)
        ):
            raise TypeError(f"{_ADVICE}; got {describe_value(source)}.")
        pair = source if isinstance(source, tuple | list) and len(source) == 2 else ()
        if len({part.dim() if isinstance(part, Tensor) else None for part in pair} - {None}) == 2:
            raise TypeError(f"{_ADVICE}; got {describe_value(source)}, one batch by itself: put it into a list.")
        self.source = source
        self.last: Any = None

    @property
    def is_repeatable(self) -> bool:
        return not isinstance(self.source, Iterator)

    def __iter__(self) -> Iterator[Any]:
        made: Any = () if self.source is None else self.source
        for batch in made if isinstance(made, Iterable) else made():
            self.last = batch
            yield batch


class _HeldBatches:
    """Batches of an iterator, held in memory while they are run through for the first time."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._coming = batches
        self._held: list[Any] = []
        self._sizes: dict[int, int] = {}  # by storage: batches may be views of one tensor

    def __iter__(self) -> Iterator[Any]:
        yield from list(self._held)
        for batch in self._coming:
            self._held.append(batch)
            for leaf in tree_leaves(batch):
                if isinstance(leaf, Tensor):
                    self._sizes.setdefault(leaf.untyped_storage().data_ptr(), leaf.nbytes)
            if sum(self._sizes.values()) > MAX_HELD_BYTES:
                self._held.clear()
                raise ValueError(
                    "`batches` is an iterator, which can be run through once, and it is needed twice here (for a "
                    "network with BatchNorm, or for several methods): holding it would take more than "
                    f"{MAX_HELD_BYTES >> 20} MB. The task is still under way: call end_task again with a DataLoader, "
                    "a list, or the function that makes the iterator."
                )
            yield batch


def make_repeatable(batches: Iterable[Any]) -> Iterable[Any]:
    """`batches` such that they can be run through twice. Those of an iterator are held in memory, up to a limit."""
    is_repeatable = batches.is_repeatable if isinstance(batches, Batches) else not isinstance(batches, Iterator)
    return batches if is_repeatable else _HeldBatches(batches)


@contextmanager
def explain_batch_errors(batches: Batches, model: nn.Module, *, is_default: bool) -> Iterator[None]:
    """Say with an error what batch it came with; `is_default`: the user gave no `forward` of their own."""
    try:
        yield
    except Exception as error:
        batch, batches.last = batches.last, None
        x = batch[0] if isinstance(batch, tuple | list) and batch else batch
        is_odd = not all(isinstance(leaf, Tensor) for leaf in ([x] if isinstance(x, Mapping) else tree_leaves(x)))
        if is_default and is_odd and isinstance(error, TypeError | AttributeError | KeyError | IndexError):
            raise TypeError(
                f"end_task cannot run the model on {describe_value(batch)}: by default a batch is `x` or `(x, y)`. "
                "Say how to run it: end_task(batches, forward=lambda batch: …), which returns the loss, or for AGS-CL "
                "and MAS the output."
            ) from error
        if batch is not None:
            weight = next(model.parameters())
            error.add_note(
                f"In end_task, on {describe_value(batch)} or the like; the model's weights are "
                f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}."
            )
        raise
    finally:
        batches.last = None

"""Capturing work as CUDA graphs and replaying it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

import torch

from agscl.fast._torch_internals import shut_down_compile_workers
from agscl.system.process import gc_paused


class GraphRunner:
    """Runs work that is repeated, known by a key: eagerly the first time, to warm up, then captured, then replayed.

    Everything runs on one stream, inside `on_stream()`, which keeps copies to the device, warm-ups and replays in
    order. If disabled, or without a GPU, work always runs eagerly.
    """

    def __init__(
        self, device: torch.device, *, enabled: bool = True, before_capture: Callable[[], None] = lambda: None
    ) -> None:
        self.device = device
        self.before_capture = before_capture
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and enabled else None
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.warmed_up: set[Hashable] = set()  # keys whose work has run eagerly

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run on the graphs' stream: after all work launched so far on the current one, before all launched later."""
        if self.stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    def run(self, key: Hashable, work: Callable[[], None], may_capture: bool = True) -> None:
        """Run the work: replay its graph if there is one, else capture it if it is warmed up, else run it eagerly."""
        if self.stream is None:
            work()
        elif key in self.graphs:
            self.graphs[key].replay()
        elif key in self.warmed_up and may_capture:
            self.graphs[key] = self._capture(work)
            self.graphs[key].replay()
        else:
            work()
            self.warmed_up.add(key)

    def forget_warm_ups(self) -> None:
        """Run all work that has no CUDA graph yet eagerly once more before it is captured."""
        self.warmed_up.clear()

    def release(self) -> None:
        """Destroy all graphs and free their memory."""
        if self.stream is not None and self.graphs:
            torch.cuda.synchronize(self.device)  # a graph must not be destroyed while it runs
            self.graphs.clear()
            torch.cuda.empty_cache()

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self.before_capture()
        torch.cuda.synchronize(self.device)
        # A garbage collection during the capture could destroy another graph, which is not allowed then.
        with gc_paused():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # a consequence of the first error, which it would hide
                    graph.capture_end()
                raise
            graph.capture_end()
        shut_down_compile_workers()  # what is captured is compiled
        return graph

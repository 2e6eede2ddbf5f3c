"""Headless Chromium, driven over its DevTools protocol by a pair of pipes: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
WAIT = 60.0
"""Seconds until an answer counts as missing."""

READY = """(async () => {
  while (document.querySelector("script#data") && !window.agsclReady) await new Promise((done) => setTimeout(done, 5));
  return performance.now();
})()"""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium with one page; `errors` collects what the page's console and scripts complain about."""

    def __init__(self, folder: Path, *, scripts: bool = True, dark: bool = False) -> None:
        command = find_chromium()
        assert command is not None
        to_browser, ours_out = os.pipe()
        ours_in, from_browser = os.pipe()

        # Chromium reads file 3 and writes file 4.
        join = f'exec "$0" "$@" 3</proc/self/fd/{to_browser} 4>/proc/self/fd/{from_browser}'
        options = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run "
            "--disable-extensions --disable-background-networking --remote-debugging-pipe"
        )
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", join, command, *options.split(), f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._out, self._in, self._rest, self._number = ours_out, ours_in, b"", 0
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")  # of the processor, whatever else the machine does
        if not scripts:
            self.call("Emulation.setScriptExecutionDisabled", value=True)
        if dark:
            self.set_media("prefers-color-scheme", "dark")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + WAIT
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium did not answer")
            if not (data := os.read(self._in, 2**20)):
                raise RuntimeError("Chromium ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details.get("text", "an exception"))
        elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in parameters["args"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog opened: {parameters['message']}")

    def set_size(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def set_media(self, name: str, value: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": name, "value": value}])

    def open(self, page: Path | str) -> float:
        """Load a page; returns the milliseconds until it was drawn and could be used."""
        self.requests.clear()
        self._events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        end = time.monotonic() + WAIT
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            if time.monotonic() > end:
                raise TimeoutError("the page did not load")
            self._note(self._receive())
        return float(self.run(READY))

    def measure_work(self) -> float:
        """Milliseconds of the processor that the page's main thread has used for this page so far."""
        metrics = self.call("Performance.getMetrics")["metrics"]
        return 1000 * next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    def run(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true; it may fail while a page is being loaded."""
        end = time.monotonic() + WAIT
        while not self.run(
            f"(() => {{ try {{ return Boolean({expression}); }} catch (error) {{ return false; }} }})()"
        ):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} did not become true")
            time.sleep(0.05)

    def draw_all_charts(self) -> None:
        """Scroll every chart into view, so that all are drawn."""
        self.run(
            "(async () => { for (const one of document.querySelectorAll('.chart')) {"
            " one.scrollIntoView({ behavior: 'instant' });"
            " while (!one.dataset.drawn) await new Promise((done) => setTimeout(done, 20)); }"
            " window.scrollTo({ top: 0, behavior: 'instant' }); })()"
        )

    def press(self, key: str, code: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def take_screenshot(self, path: Path, *, full: bool = True) -> Path:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        area: dict[str, Any] = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full, **(area if full else {}))
        path.write_bytes(base64.b64decode(answer["data"]))
        return path


SHOTS = os.environ.get("AGSCL_SHOTS")
"""A folder to keep screenshots in, to look at them."""


def keep_screenshot(browser: Browser, name: str, folder: Path) -> Path:
    path = browser.take_screenshot(folder / f"{name}.png")
    assert path.stat().st_size > 20_000
    if SHOTS:
        shutil.copy(path, Path(SHOTS) / path.name)
    return path


def time_slider(browser: Browser) -> list[float]:
    """Milliseconds that the node map takes to show each task, from the first to the last."""
    times: list[float] = browser.run(
        "(() => { const slider = document.getElementById('task'), times = [];"
        " for (let task = 0; task <= slider.max; task++) { slider.value = task; const start = performance.now();"
        " slider.dispatchEvent(new Event('input')); times.push(performance.now() - start); } return times; })()"
    )
    return times

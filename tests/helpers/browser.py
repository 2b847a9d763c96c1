"""A real browser for tests, driven over a pipe by the DevTools protocol: nothing to install but a Chromium of any kind."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--disable-dev-shm-usage"),
    "--remote-debugging-pipe",
]
PATIENCE_S = 60.0
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), " ": (32, " "), "ArrowDown": (40, ""), "ArrowRight": (39, "")}


def executable() -> str | None:
    """A browser on this machine, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One page: what it says on its console, what it asks the network for, and what a person would do with it."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.buffer = b""
        self.number = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.from_browser], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self.from_browser, 1 << 16) if ready else b""
            if not piece:
                raise TimeoutError("the browser does not answer")
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events that come before it are kept."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.to_browser, data) :]
        end = time.monotonic() + PATIENCE_S
        while True:
            answer = self._receive(end)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self.send("Page.navigate", url=path.as_uri())
        end = time.monotonic() + PATIENCE_S
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive(end))

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key, as from a keyboard."""
        code, text = KEYS[key]
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def show_as(self, width: int, height: int, scheme: str = "light") -> None:
        """The size of the window, and what the system prefers."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(picture["data"])

    def complaints(self) -> list[str]:
        """What the console said, exceptions that nobody caught, and refused resources."""
        wanted = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in wanted]

    def requests(self) -> list[str]:
        """Everything that was asked for."""
        sent = [
            event["params"]["request"]["url"] for event in self.events if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in sent if not url.startswith("data:")]


@contextlib.contextmanager
def open_page(path: Path, profile: Path) -> Iterator[Page]:
    """The page of a file in a browser with a fresh profile."""
    # A socket of its own that the browser makes there may have a path of at most 107 characters: pytest's are longer.
    short = tempfile.mkdtemp(prefix="page")
    browser = executable()
    assert browser is not None
    browser_reads, we_write = os.pipe()
    we_read, browser_writes = os.pipe()
    page_pipes, browser_pipes = (we_write, we_read), (browser_reads, browser_writes)

    def connect() -> None:  # the browser reads commands from 3 and writes answers to 4
        kept = [os.dup(descriptor) for descriptor in browser_pipes]
        for place, descriptor in enumerate(kept, start=3):
            os.dup2(descriptor, place)

    process = subprocess.Popen(
        [browser, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        preexec_fn=connect,
        close_fds=False,
        env={**os.environ, "TMPDIR": short},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for descriptor in browser_pipes:
        os.close(descriptor)
    try:
        page = Page(*page_pipes)
        page.open(path)
        yield page
    finally:
        with contextlib.suppress(Exception):
            page.session = None
            page.send("Browser.close")
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        shutil.rmtree(short, ignore_errors=True)
        for descriptor in page_pipes:
            os.close(descriptor)

"""
Loads every page of the built site in a real browser: `make docs-check-browser`.

Each page is loaded at two widths, in light and in dark mode. Pages that show files of the
repository are loaded only in light mode. A page is faulty if

* an image does not load, or any request fails,
* the page scrolls sideways, or a part of it is cut off at the right,
* the console shows an error,
* the browser sends a request to another host.

The search of the start page must find a word. `--screenshots FOLDER` keeps a picture of each page.

The browser is Chromium (Debian: `apt-get install chromium`), controlled over its debugging pipe,
which needs no library and no open port.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tools.site.source import ROOT, SHOWN

SITE = ROOT / "build" / "docs" / "site"
WIDTHS = {"wide": 1280, "narrow": 390}
SCHEMES = ("light", "dark")
TIMEOUT_SECONDS = 30
"""The longest wait for a response of the browser. A loaded machine needs a few seconds."""
SETTLED_SECONDS = 10
"""The longest wait for a page's images and for the result of a search."""

# Wide tables and code scroll inside themselves, so their hidden parts are not cut off.
INSPECT = """(() => {
  const width = document.documentElement.clientWidth;
  const faults = [];
  for (const image of document.images)
    if (!image.complete || !image.naturalWidth) faults.push(`broken image ${image.src}`);
  const scrolled = document.documentElement.scrollWidth;
  if (scrolled > width) faults.push(`scrolls sideways: ${scrolled} of ${width} px`);
  const inside = element => {
    for (let box = element; box && box !== document.body; box = box.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)) return true;
    return false;
  };
  for (const element of document.querySelectorAll("article *, header *, footer *")) {
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || box.right <= width + 1 || box.left >= width || inside(element))
      continue;
    faults.push(`cut off at the right: <${element.tagName.toLowerCase()}> ` +
      element.textContent.trim().slice(0, 40));
    break;
  }
  const scheme = document.body.dataset.mdColorScheme;
  if (scheme !== "SCHEME") faults.push(`color scheme ${scheme}`);
  return faults;
})()"""
SETTLED = "document.readyState === 'complete' && [...document.images].every(i => i.complete)"
SEARCH = """(word => {
  const open = document.querySelector('[data-md-component=search] button, .md-search__button');
  if (open) open.click();
  const field = document.querySelector('input[name=query], .md-search input[type=text]')
    || [...document.querySelectorAll('*')].map(e => e.shadowRoot).filter(Boolean)
      .map(root => root.querySelector('input')).find(Boolean);
  if (!field) return false;
  field.focus();
  field.value = word;
  field.dispatchEvent(new Event('input', {bubbles: true, composed: true}));
  return true;
})"""
FOUND = """[document, ...[...document.querySelectorAll('*')].map(e => e.shadowRoot).filter(Boolean)]
  .flatMap(root => [...root.querySelectorAll('a[href]')])
  .filter(link => link.href.includes('h=') || link.closest('[class*=result], ol'))
  .filter(link => link.getBoundingClientRect().height && link.textContent.length)
  .map(link => link.href)"""


class BrowserError(Exception):
    """The browser fails in a way that affects every page, so no page can be judged."""


class Browser:
    """Chromium, controlled with the DevTools protocol: JSON messages, each with a null byte at its
    end."""

    def __init__(self, program: str, profile: str) -> None:
        theirs_in, self._send = os.pipe()
        self._receive, theirs_out = os.pipe()
        # Chromium reads from 3 and writes to 4, so our ends must have other numbers.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]

        def as_3_and_4() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--disable-features=BackForwardCache",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            preexec_fn=as_3_and_4,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        os.close(self._send)
        self._process.terminate()
        self._process.wait()
        os.close(self._receive)

    def open_tab(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        # The theme stores a reader's colors. Each page is loaded as if by a new reader.
        forget = "if (location.protocol.startsWith('http')) localStorage.clear()"
        self.call("Page.addScriptToEvaluateOnNewDocument", source=forget)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']['message']}")
            else:
                return answer["result"]

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = SETTLED_SECONDS) -> Any:
        """Return the expression's value as soon as it is true, or its last value."""
        end = time.monotonic() + seconds
        while True:
            value = self.value(expression)
            if value or time.monotonic() > end:
                return value
            time.sleep(0.02)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._receive], [], [], TIMEOUT_SECONDS)[0]:
                raise BrowserError(f"no response within {TIMEOUT_SECONDS} s")
            more = os.read(self._receive, 1 << 20)
            if not more:
                raise BrowserError("the browser ended")
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def faults_of(events: list[dict[str, Any]], host: str) -> Iterator[str]:
    """Yield the problems that the browser reported while it loaded a page."""
    for event in events:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if (
                urlsplit(url).scheme in ("http", "https", "ws", "wss")
                and urlsplit(url).netloc != host
            ):
                yield f"request to another host: {url}"
        elif method == "Network.responseReceived" and params["response"]["status"] >= 400:
            yield f"{params['response']['status']} for {params['response']['url']}"
        elif method == "Network.loadingFailed" and not params.get("canceled"):
            yield f"request failed: {params['errorText']}"
        elif method == "Runtime.exceptionThrown":
            yield f"exception: {params['exceptionDetails']['text']}"
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            yield f"console: {params['args'][0].get('value', '') if params['args'] else ''}"
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            yield f"console: {params['entry']['text']}"


@dataclass(frozen=True)
class Visit:
    page: str
    width: str
    scheme: str

    @property
    def picture(self) -> str:
        name = self.page.strip("/").replace("/", "-") or "index"
        return f"{name}.{self.width}.{self.scheme}.png"


def visit(browser: Browser, base: str, look: Visit, pictures: Path | None) -> list[str]:
    # The previous page must be gone, because it would notice and store the new colors.
    browser.call("Page.navigate", url="about:blank")
    browser.wait_for("location.href === 'about:blank'")
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=WIDTHS[look.width],
        height=900,
        deviceScaleFactor=1,
        mobile=look.width == "narrow",
    )
    media = [{"name": "prefers-color-scheme", "value": look.scheme}]
    browser.call("Emulation.setEmulatedMedia", features=media)
    browser.events.clear()
    browser.call("Page.navigate", url=base + look.page)
    # The theme's script sets the colors a moment later.
    scheme = {"light": "default", "dark": "slate"}[look.scheme]
    colored = f"document.body.dataset.mdColorScheme === '{scheme}'"
    browser.wait_for(f"location.href === {json.dumps(base + look.page)} && {SETTLED} && {colored}")
    found = browser.value(INSPECT.replace("SCHEME", scheme))
    if pictures is not None:
        shot = browser.call("Page.captureScreenshot", captureBeyondViewport=True)
        (pictures / look.picture).write_bytes(base64.b64decode(shot["data"]))
    return [*faults_of(browser.events, urlsplit(base).netloc), *found]


def search(browser: Browser, base: str, word: str) -> list[str]:
    """Type a word into the search of the start page, and return the pages that it finds."""
    browser.call("Page.navigate", url=base)
    browser.wait_for(f"location.href === {json.dumps(base)} && {SETTLED}")
    for _ in range(SETTLED_SECONDS):  # the page may not handle input in its search field at once
        browser.wait_for(f"{SEARCH}({json.dumps(word)})")
        if found := browser.wait_for(FOUND, seconds=1):
            return found
    return []


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tools.site.browser", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER")
    parser.add_argument("--word", default="checkpoint", help="what the search must find")
    parser.add_argument("pages", nargs="*", help="only pages whose address contains this")
    given = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise SystemExit("Chromium is not installed: apt-get install chromium")
    html = SITE / "dev"
    pages = [path.parent.relative_to(html).as_posix() for path in sorted(html.rglob("index.html"))]
    pages = ["" if page == "." else f"{page}/" for page in pages]
    pages = [p for p in pages if not given.pages or any(part in p for part in given.pages)]
    if not pages:
        raise SystemExit("there is no such page: run `make docs`")
    if given.screenshots:
        given.screenshots.mkdir(parents=True, exist_ok=True)
    faulty = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            with served(SITE) as base:
                browser.open_tab()
                faulty = _table(browser, f"{base}dev/", pages, given)
        finally:
            browser.close()
    if faulty:
        raise SystemExit(f"{faulty} faults in the browser")


def _table(browser: Browser, base: str, pages: list[str], given: argparse.Namespace) -> int:
    columns = [(width, scheme) for width in WIDTHS for scheme in SCHEMES]
    wide = max(len(page) for page in pages) + 2
    print("page".ljust(wide) + "".join(f"{WIDTHS[w]} {s}".ljust(12) for w, s in columns))
    faulty = 0
    for page in pages:
        cells, faults = "", []
        for width, scheme in columns:
            shows_file = page.startswith(SHOWN)  # all alike, and many
            if shows_file and scheme == "dark":
                cells += "-".ljust(12)
                continue
            pictures = None if shows_file else given.screenshots
            found = visit(browser, base, Visit(page, width, scheme), pictures)
            cells += ("ok" if not found else f"{len(found)} faults").ljust(12)
            faults += [f"    {WIDTHS[width]} {scheme}: {fault}" for fault in found]
        print((page or "/").ljust(wide) + cells.rstrip(), *faults, sep="\n", flush=True)
        faulty += len(faults)
    hits = search(browser, base, given.word)
    print(f"search for {given.word}: {len(hits)} hits", *hits[:3])
    return faulty + (not hits)


if __name__ == "__main__":
    sys.exit(main())

"""How large the pages of `graphopt view` are, how fast a browser opens and scrolls them.

    python benchmarks/view.py step.html other.html

Runs Chromium without a window and talks to it over a pipe. Per page: bytes, rows, milliseconds from
navigation until the graph can be used, the same for what the page's script takes of it, rows in the
document while all are scrolled through, milliseconds between frames meanwhile (median, 95th
percentile, longest; a frame takes at least 16.7) and what rows and layout take of them, and
milliseconds of a search.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

MEASURE = """(async () => {
  const frame = () => new Promise(done => requestAnimationFrame(done));
  byId("open").click(); await frame(); await frame();
  const steps = 180, gaps = [], drawn = [], work = [];
  await frame();
  let last = await frame();
  for (let k = 0; k <= steps; k++) {
    list.host.scrollTop = k * list.room.offsetHeight / steps;
    const start = performance.now();
    list.render(); document.body.offsetHeight; work.push(performance.now() - start);
    const now = await frame(); gaps.push(now - last); last = now;
    drawn.push(document.querySelectorAll("#rows .row").length);
  }
  gaps.sort((a, b) => a - b); work.sort((a, b) => a - b);
  const box = byId("search"), began = performance.now();
  box.value = "add"; box.dispatchEvent(new Event("input"));
  document.body.offsetHeight;
  const searched = performance.now() - began;
  box.value = ""; box.dispatchEvent(new Event("input")); byId("close").click(); await frame();
  return {rows: nodes.length, ready: +document.documentElement.dataset.ready,
    script: +document.documentElement.dataset.script, drawn: Math.max(...drawn),
    median: gaps[steps >> 1], p95: gaps[Math.floor(steps * 0.95)], longest: gaps[steps],
    work: work[steps >> 1], most: work[steps], searched};
})()"""


class Browser:
    """Chromium without a window, spoken to over a pipe."""

    def __init__(self, folder: Path) -> None:
        program = next(filter(None, map(shutil.which, BROWSERS)), None)
        if program is None:
            raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += ["--window-size=1400,800", f"--user-data-dir={folder}"]
        # The browser reads from its descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *options],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in), os.close(theirs_out)
        self._number, self._rest = 0, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str | None = session["sessionId"]
        self.call("Page.enable")

    _session = None

    def call(self, method: str, **parameters: Any) -> Any:
        """What the browser answers to a command of its protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path) -> None:
        """Open a page and wait until it is there."""
        self.call("Page.navigate", url=page.absolute().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """The value of a script in the page; of a promise, what it becomes."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write what can be seen to a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--pictures", type=Path, help="write a picture of each view here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(Path(folder))
        try:
            for page in arguments.pages:
                browser.open(page)
                measured = browser.run(MEASURE)
                size = page.stat().st_size / 1e6
                print(f"{page.name}: {size:.2f} MB, {_text(measured)}", flush=True)
                if arguments.pictures:
                    _pictures(browser, page, arguments.pictures)
        finally:
            browser.close()


def _text(measured: dict[str, float]) -> str:
    return (
        "{rows} rows, ready after {ready:.0f} ms (script {script:.0f} ms), at most {drawn} rows"
        " drawn, {median:.1f} / {p95:.1f} / {longest:.1f} ms between frames while scrolling,"
        " of them {work:.1f}, at most {most:.1f}, for rows and layout; search {searched:.0f} ms"
    ).format(**measured)


def _pictures(browser: Browser, page: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in browser.run("TABS.map(tab => tab[0])"):
        browser.run(f"select({json.dumps(name)})")
        browser.picture(folder / f"{page.stem}_{name}.png")


if __name__ == "__main__":
    main()

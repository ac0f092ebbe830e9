"""Every page of the site, opened in chromium as wide as a desktop and as a telephone.

A page of the test's own, the reader, opens each page in a frame of the wanted width, where it lays
itself out as in a window of that width. It posts what it has measured to the test's server.
"""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
WIDTHS = (1440, 390)
WITHIN_S = 300
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="needs chromium (Debian: package chromium)"),
    pytest.mark.timeout(400),
]

READER = """<!doctype html><title>reader</title><body><script>
const wait = seconds => new Promise(done => setTimeout(done, 1000 * seconds));
async function open(address, width) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 900; frame.style.border = "0";
  const loaded = new Promise(done => frame.onload = done);
  frame.src = address;
  document.body.append(frame);
  await loaded;
  return frame;
}
async function measure(page, width) {
  const frame = await open(page, width), inside = frame.contentDocument;
  const root = inside.documentElement;
  const wide = [...inside.body.querySelectorAll("article *")].filter(each =>
    each.getBoundingClientRect().right > width + 1 && !each.closest("pre, .table-wrapper"));
  const found = {
    page, width, room: root.clientWidth, needed: root.scrollWidth, title: inside.title,
    wide: wide.slice(0, 3).map(each => each.outerHTML.slice(0, 200)),
    pictures: [...inside.images].map(
      each => [each.getAttribute("src"), each.alt, each.naturalWidth]),
  };
  frame.remove();
  return found;
}
async function search(words) {
  const frame = await open("search.html?q=" + encodeURIComponent(words), 1440);
  for (let tries = 0; tries < 1000; tries++) {  // the results appear one after the other
    const hits = [...frame.contentDocument.querySelectorAll("#search-results li a")];
    const addresses = hits.map(each => each.getAttribute("href"));
    if (addresses.some(each => each.startsWith("options.html"))) return addresses;
    await wait(0.1);
  }
  return [];
}
async function run(wanted) {
  const measured = [];
  for (const width of wanted.widths)
    for (const page of wanted.pages) measured.push(await measure(page, width));
  return {measured, found: await search(wanted.words)};
}
run(WANTED).catch(error => ({error: String(error)})).then(result =>
  fetch("/result", {method: "POST", body: JSON.stringify(result)}));
</script>"""


class Server(http.server.ThreadingHTTPServer):
    """Serves the site and the reader, and keeps what the reader posts."""

    def __init__(self, reader: str) -> None:
        self.reader = reader
        self.result: Any = None
        self.posted = threading.Event()
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(SITE)))


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path != "/reader.html":
            return super().do_GET()
        body = self.server.reader.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.result = json.loads(self.rfile.read(length))
        self.send_response(204)
        self.end_headers()
        self.server.posted.set()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def browser(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """chromium without a window, with a profile of its own, ended with its children."""
    with tempfile.TemporaryDirectory(prefix="pycomm-site-") as profile:
        assert BROWSER is not None
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--disable-dev-shm-usage", f"--user-data-dir={profile}", *arguments]
        quiet = subprocess.DEVNULL
        child = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            shutil.rmtree(profile, ignore_errors=True)  # its children write until they have ended
            Path(profile).mkdir(exist_ok=True)


@pytest.fixture(scope="module")
def seen() -> Any:
    pages = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
    if not pages:
        pytest.skip("there is no build/site: run make site")
    wanted = {"pages": pages, "widths": WIDTHS, "words": "heartbeat"}
    with Server(READER.replace("WANTED", json.dumps(wanted))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            with browser(f"http://127.0.0.1:{server.server_port}/reader.html"):
                assert server.posted.wait(WITHIN_S), "the browser has not read the site in time"
        finally:
            server.shutdown()
            thread.join()
    assert "error" not in server.result, server.result
    assert len(server.result["measured"]) == len(pages) * len(WIDTHS)
    return server.result


def test_no_page_scrolls_sideways(seen: Any) -> None:
    for page in seen["measured"]:
        # The frame has the width asked for, but for a scroll bar.
        assert page["width"] - 20 <= page["room"] <= page["width"], page
    wide = [page for page in seen["measured"] if page["needed"] > page["room"]]
    assert not wide, [(page["page"], page["width"], page["needed"], page["wide"]) for page in wide]


def test_every_picture_is_there_and_has_a_text(seen: Any) -> None:
    pictures = {(page["page"], *each) for page in seen["measured"] for each in page["pictures"]}
    assert len(pictures) >= 6
    for page, address, text, width in pictures:
        assert len(text) > 10 and width > 0, (page, address, text, width)


def test_every_page_has_a_title(seen: Any) -> None:
    for page in seen["measured"]:
        assert "pycomm" in page["title"] and "<no title>" not in page["title"], page["page"]


def test_search_works_without_a_network(seen: Any) -> None:
    assert any(address.startswith("options.html") for address in seen["found"]), seen["found"]

"""`make site` fails for a link that leads nowhere, in docs/ or in a document that it borrows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import site_pages  # noqa: E402

pytest.importorskip("myst_parser", reason="the site needs tools/requirements/docs.txt")

CONF = """
extensions = ["myst_parser"]
myst_heading_anchors = 4
suppress_warnings = ["toc.not_included"]
"""
PAGE = """# Page

## A part

[page](index.md) [part](index.md#a-part) [file](../code.py) [web](https://example.org/nowhere)
"""
BROKEN = """# Other

[gone](gone.md) [no part](index.md#no-part) [no file](../gone.py) ![no picture](gone.svg)
"""


@pytest.mark.parametrize("broken", [False, True])
def test_links_that_lead_nowhere_fail(broken: bool, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "conf.py").write_text(CONF)
    (docs / "index.md").write_text(PAGE)
    if broken:
        (docs / "other.md").write_text(BROKEN)
    (tmp_path / "code.py").touch()
    command = [sys.executable, "-c", "import sys, site_build; sys.exit(site_build.build(*map("]
    command[-1] += "site_build.Path, sys.argv[1:])))"
    done = subprocess.run(
        [*command, str(docs), str(tmp_path / "site")],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    if not broken:
        assert (done.returncode, warnings) == (0, []), done.stderr
        return
    assert done.returncode != 0 and len(warnings) == 4, done.stderr
    for target in ("gone.md", "no-part", "gone.py", "gone.svg"):
        assert any(target in line for line in warnings), done.stderr


def test_links_of_a_borrowed_document_lead_to_pages() -> None:
    text = (
        "[a](docs/ddp.md#x) [b](examples/README.md) [c](benchmarks/results) [d](setup.py) [e](#f)\n"
        "```sh\n[code](docs/ddp.md)\n```\n[web](https://example.org/docs/ddp.md)\n"
    )
    assert site_pages.relinked(text, ROOT, ROOT / "docs") == (
        "[a](ddp.md#x) [b](examples.md) [c](results.md) [d](../setup.py) [e](#f)\n"
        "```sh\n[code](docs/ddp.md)\n```\n[web](https://example.org/docs/ddp.md)\n"
    )
    back = "[readme](../../README.md) [other](../ddp.md)"
    folder = ROOT / "docs" / "api"
    assert site_pages.relinked(back, folder, folder) == "[readme](../index.md) [other](../ddp.md)"


def test_results_are_listed_newest_first_with_their_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_pages, "ROOT", tmp_path)
    (tmp_path / "old-2026-01-02.txt").write_text("# commit: 0123456789ab\n")
    (tmp_path / "new-2026-02-01.txt").write_text("Commit 1111111 and commit 2222222\n")
    (tmp_path / "new-2026-02-01b.txt").write_text("commit: 2222222\n")
    (tmp_path / "bare-2025-02-01.txt").write_text("no word of it\n")
    assert site_pages.results_table(tmp_path).splitlines()[2:] == [
        "| [new](../new-2026-02-01b.txt) | 2026-02-01b | `2222222` |",
        "| [new](../new-2026-02-01.txt) | 2026-02-01 | `1111111` and others |",
        "| [old](../old-2026-01-02.txt) | 2026-01-02 | `0123456` |",
        "| [bare](../bare-2025-02-01.txt) | 2025-02-01 | in the file |",
    ]

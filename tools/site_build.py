"""Build the site into build/site, and fail for a link that leads nowhere. External ones are listed.

    python tools/site_build.py    # then open build/site/index.html; it needs no server

Not site.py: that is a module of Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
_EXTERNAL = re.compile(r'<a class="reference external" href="(https?://[^"#]+)')
# Help texts are wrapped as in a terminal of this width.
COLUMNS = "79"


def build(docs: Path, site: Path) -> int:
    """Run Sphinx over a folder of documents; every warning is an error. Returns its exit status."""
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-n", "--keep-going", "-E"]
    command += ["-b", "html", "-d", str(site.with_name("site-doctrees")), str(docs), str(site)]
    return subprocess.run(command, env=os.environ | {"COLUMNS": COLUMNS}, check=False).returncode


def external_links(site: Path) -> list[str]:
    """The addresses outside the site that its pages link to. Nobody checks them."""
    pages = site.rglob("*.html")
    return sorted({link for page in pages for link in _EXTERNAL.findall(page.read_text())})


def main() -> int:
    code = build(ROOT / "docs", SITE)
    if code:
        print("site: mend the warnings above; a target not found is a link that leads nowhere")
        return code
    links = external_links(SITE)
    print(f"site: {len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}")
    print(f"site: {len(links)} external links, not checked:", *links, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())

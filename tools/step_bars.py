#!/usr/bin/env python3
"""Draw docs/pictures/step-bars.svg, the picture of docs/ddp.md, from a published measurement.

    python tools/step_bars.py benchmarks/results/ddp-hosts-2026-11-29.txt

Needs the standard library only. It takes the first table of the file: two hosts at a gigabit.
"""

from __future__ import annotations

import argparse
import html
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "step-bars.svg"

# The way as benchmarks/ddp_hosts.py names it, as the picture does, and the distance from the left.
WAYS = (
    ("no_sync", "no communication", 12),
    ("gloo", "torch over gloo", 12),
    ("gloo@4", "with 4 MiB buckets", 28),
    ("gloo@4#fp16", "and its fp16 hook", 28),
    ("pycomm", "pycomm", 12),
    ("pycomm#fp16", 'wire_dtype="fp16"', 28),
    ("pycomm#int8", 'wire_dtype="int8"', 28),
)
WIDTH, LEFT, TOP, ROW, BAR = 760, 190, 62, 31, 22
STYLE = """<style>
    .paper { fill: #ffffff } .ink { fill: #1f2328 } .faint { fill: #57606a; font-size: 13px }
    .compute { fill: #c4c9cf } .gloo { fill: #b3663b } .own { fill: #3b6ea5 }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #0d1117 } .ink { fill: #e6edf3 } .faint { fill: #9198a1 }
      .compute { fill: #484f58 } .gloo { fill: #d9915f } .own { fill: #6ea8e0 }
    }
</style>"""
LEGEND = """<rect class="compute" x="12" y="36" width="14" height="10"/>
<text class="faint" x="32" y="46">computation</text>
<rect class="gloo" x="128" y="36" width="14" height="10"/>
<text class="faint" x="148" y="46">communication that it does not hide, over gloo</text>
<rect class="own" x="476" y="36" width="14" height="10"/>
<text class="faint" x="496" y="46">the same, over pycomm</text>"""


def steps(text: str) -> dict[str, float]:
    """Seconds per step of each way, from the first table of a results file."""
    table = text[text.index("\nway ") :].partition("\n#")[0].partition("\n\n")[0]
    return {name: float(s) for name, s in re.findall(r"^(\S+) +(\d+\.\d+) ", table, re.M)}


def picture(seconds: dict[str, float]) -> str:
    compute = seconds["no_sync"]
    scale = 500 / max(seconds[name] for name, _, _ in WAYS)
    height = TOP + ROW * len(WAYS) + 13
    title = "Seconds per training step between two hosts at a gigabit"
    said = "; ".join(f"{label} {seconds[name]:.3f} s" for name, label, _ in WAYS)
    said += f". The first {compute:.3f} s of each step are computation."
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="15">',
        f'<title id="title">{title}</title>',
        f'<desc id="desc">{html.escape(said)}</desc>',
        STYLE,
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        '<text class="ink" x="12" y="24" font-weight="600">Seconds per training step: '
        "25 million parameters, two hosts at 1 Gbit/s</text>",
        LEGEND,
    ]
    for row, (name, label, x) in enumerate(WAYS):
        y = TOP + ROW * row
        end = LEFT + round(scale * seconds[name])
        middle = min(LEFT + round(scale * compute), end)
        lines.append(f'<text class="ink" x="{x}" y="{y + 16}">{html.escape(label)}</text>')
        lines.append(_bar("compute", LEFT, y, middle - LEFT))
        if end > middle:
            lines.append(_bar("own" if "pycomm" in name else "gloo", middle, y, end - middle))
        lines.append(f'<text class="ink" x="{end + 8}" y="{y + 16}">{seconds[name]:.3f}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _bar(kind: str, x: int, y: int, width: int) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{BAR}"/>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="of benchmarks/published.py, topic ddp-hosts")
    PICTURE.write_text(picture(steps(parser.parse_args().results.read_text())))
    print(f"wrote {PICTURE.relative_to(ROOT)}")

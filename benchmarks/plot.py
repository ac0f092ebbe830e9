"""Line charts as SVG, with both axes logarithmic; and that of a table's JSON.

python benchmarks/allreduce.py --json table.json && python benchmarks/plot.py table.json out.svg
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 190, 40, 50
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8d5fd3", "#c98a1b", "#444444", "#17a2b8", "#a0522d")

_STYLE = """<style>
.paper { fill: #ffffff }
.ink { fill: #1f2328 }
.grid { stroke: #dddddd }
@media (prefers-color-scheme: dark) {
  .paper { fill: #0d1117 }
  .ink { fill: #e6edf3 }
  .grid { stroke: #30363d }
}
</style>"""


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten from low to high, with both ends inside."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    return (
        f'<text class="ink" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )


def _number(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:g}{unit}"
    return f"{value:g}"


def line_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Points]) -> str:
    """Draw lines with a dot a point.

    Args:
        title: Above the chart.
        x_label: Under it.
        y_label: Beside it.
        series: By name in the legend; all numbers above 0.

    Returns:
        The SVG's text.
    """
    points = [point for line in series.values() for point in line]
    x_ticks = _ticks(min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = _ticks(min(y for _, y in points), max(y for _, y in points))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + width * math.log(x / x_ticks[0]) / math.log(x_ticks[-1] / x_ticks[0])

    def down(y: float) -> float:
        return _TOP + height * (1 - math.log(y / y_ticks[0]) / math.log(y_ticks[-1] / y_ticks[0]))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-labelledby="title desc" font-family="sans-serif">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(y_label)} against {escape(x_label)}, both logarithmic: '
        f"{escape(', '.join(series))}</desc>",
        _STYLE,
        f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}"/>',
        _text(_LEFT + width / 2, _TOP - 16, title, size=15),
        _text(_LEFT + width / 2, _HEIGHT - 10, x_label),
        f'<g transform="translate(16 {_TOP + height / 2}) rotate(-90)">{_text(0, 0, y_label)}</g>',
    ]
    for x in x_ticks:
        at = across(x)
        parts.append(f'<path d="M{at:.1f} {_TOP}V{_TOP + height}" class="grid"/>')
        parts.append(_text(at, _TOP + height + 16, _number(x)))
    for y in y_ticks:
        at = down(y)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{_LEFT + width}" class="grid"/>')
        parts.append(_text(_LEFT - 6, at + 4, _number(y), "end"))
    for index, (name, line) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in sorted(line))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{colour}"/>'
            for x, y in line
        ]
        legend_y = _TOP + 12 + 18 * index
        parts.append(
            f'<path d="M{_LEFT + width + 10} {legend_y - 4}h16" stroke="{colour}" '
            'stroke-width="2"/>'
        )
        parts.append(_text(_LEFT + width + 30, legend_y, name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the times of a table's JSON.")
    parser.add_argument("table", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.table.read_text())["rows"]
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row['backend']}, {row['ranks']} ranks"
        series.setdefault(name, []).append((row["size_bytes"], row["p50_us"]))
    title = f"{rows[0]['workload']}, {rows[0]['dtype']}: median time"
    options.picture.write_text(line_chart(title, "bytes", "microseconds", series))
    return 0


if __name__ == "__main__":
    sys.exit(main())

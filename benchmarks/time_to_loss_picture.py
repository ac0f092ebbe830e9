"""The picture of time_to_loss.py: held-out loss against computed seconds, a panel for each size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT, _LEFT, _TOP = 460, 330, 50, 40
_COLORS = ("#57606a", "#3b6ea5", "#b3363b", "#4c7d35", "#8250df", "#bf7b12", "#178a9c")
_STYLE = (
    "<style>.paper{fill:#fff}.ink{fill:#1f2328}.axis{stroke:#8c959f}"
    "@media (prefers-color-scheme: dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}}</style>"
)


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from low to high, with at least one at each end or beyond."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    first = max(tick for tick in every if tick <= low)
    last = min(tick for tick in [*every, 10 * every[-1]] if tick >= high)
    return [tick for tick in every if first <= tick <= last]


def picture(panels: Mapping[str, Mapping[str, Points]], target: float, most: float) -> str:
    """The SVG's text.

    Args:
        panels: By its title the lines of a panel, by their names: points of (seconds, loss).
        most: The loss at the upper end of the axis; lines begin below it.
    """
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    width, rows = _WIDTH * len(panels), -(-len(names) // 4)
    bottom = _HEIGHT - 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT + 30 + 20 * rows}"'
        ' role="img" font-family="system-ui, sans-serif" font-size="12">',
        "<title>Held-out loss against computed seconds</title>",
        f"<desc>Mean of the seeds, steps times seconds per step: {escape(', '.join(names))}; the "
        "dashed line is the target.</desc>",
        _STYLE,
        f'<rect class="paper" width="{width}" height="{_HEIGHT + 30 + 20 * rows}"/>',
    ]
    low = min(loss for lines in panels.values() for line in lines.values() for _, loss in line)
    for column, (title, lines) in enumerate(panels.items()):
        left, right = column * _WIDTH + _LEFT, (column + 1) * _WIDTH - 40
        shown = {
            name: [(at, loss) for at, loss in line if loss <= most] for name, line in lines.items()
        }
        seconds = [at for line in shown.values() for at, _ in line]
        marks = ticks(min(seconds), max(seconds))

        def across(
            at: float, left: int = left, right: int = right, m: list[float] = marks
        ) -> float:
            return left + (right - left) * math.log(at / m[0]) / math.log(m[-1] / m[0])

        def down(loss: float) -> float:
            return _TOP + (bottom - _TOP) * (most - loss) / (most - low)

        parts.append(
            f'<text class="ink" x="{left}" y="24" font-weight="600">{escape(title)}</text>'
        )
        parts.append(f'<path class="axis" fill="none" d="M{left},{_TOP} V{bottom} H{right}"/>')
        parts += [
            f'<text class="ink" x="{across(at):.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{at:g} s</text>"
            for at in marks
        ]
        for loss, text in ((most, f"{most:.2f}"), (target, f"{target:.3f}"), (low, f"{low:.2f}")):
            y = down(loss) + (16 if loss == target and target - low < 0.05 * (most - low) else 4)
            if text != f"{low:.2f}" or target - low >= 0.05 * (most - low):
                parts.append(f'<text class="ink" x="{left - 44}" y="{y:.1f}">{text}</text>')
        parts.append(
            f'<path class="axis" stroke-dasharray="4 3" d="M{left},{down(target):.1f} H{right}"/>'
        )
        for name, line in shown.items():
            points = " ".join(f"{across(at):.1f},{down(loss):.1f}" for at, loss in line)
            color = _COLORS[names.index(name) % len(_COLORS)]
            parts.append(
                f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{points}"/>'
            )
    for number, name in enumerate(names):
        x, y = _LEFT + 200 * (number % 4), _HEIGHT + 20 + 20 * (number // 4)
        color = _COLORS[number % len(_COLORS)]
        parts.append(f'<rect fill="{color}" x="{x}" y="{y}" width="14" height="4"/>')
        parts.append(f'<text class="ink" x="{x + 20}" y="{y + 7}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])

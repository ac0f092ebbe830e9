"""Passes that accumulate, of ranks that count by their samples: by hand, in float64."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

_FAR = 1e6
"""``unit`` is the larger weight if two are further apart; with fp16 parameters it always is."""


class Window:
    """``.grad`` is the sum of w g by ``unit``, and what was there before the first g."""

    def __init__(self, *, narrow: bool) -> None:
        self._far = 1.0 if narrow else _FAR
        self.unsynced = 0.0
        """The weights of passes that were reduced since the last sync."""
        self.clear()

    def clear(self) -> None:
        self.weight = self.unit = 0.0
        self.passes = 0
        self.held: set[str] = set()
        """With a gradient of these passes."""
        self.zeros: set[str] = set()
        """With zeros of a pass without weight in place of none."""

    def add(
        self,
        grads: Mapping[str, Array],
        share: Mapping[str, Array],
        weight: float,
        *,
        trained: Collection[str],
        reduces: bool,
    ) -> dict[str, Array]:
        """What ``.grad`` holds after a pass; ``trained``: what the wrapper trains of the model."""
        if self.passes and not (grads.keys() | self.zeros) & (self.held | set(trained)):
            self.clear()  # forgotten
        self.passes += 1
        self.weight += weight
        sums, part = dict(grads), 1.0
        if weight and self.unit > self._far * weight:
            part = weight / self.unit
        elif weight:
            ratio = self.unit / weight if self.unit else 1.0
            sums = {name: g * ratio if name in self.held else g for name, g in sums.items()}
            self.unit = weight
        self.held |= share.keys() & set(trained)
        if not weight and not reduces:
            self.zeros |= set(trained) - sums.keys()
            self.held |= self.zeros
        for name, each in share.items():
            counted = part * bool(weight) if name in trained else 1.0  # others are the program's
            if counted:
                sums[name] = sums[name] + counted * each if name in sums else counted * each
        return sums

    def reduced(self) -> None:
        self.unsynced += self.weight
        self.clear()


def factors(windows: Sequence[tuple[float, float, int]]) -> list[float]:
    """What each rank's ``.grad`` counts in the average, by (weight, unit, passes); none if nobody
    has any weight."""
    total = math.fsum(weight for weight, _, _ in windows)
    if not total:
        return []
    assert len({passes for _, _, passes in windows}) == 1, windows
    return [passes * unit / total if weight else 0.0 for weight, unit, passes in windows]

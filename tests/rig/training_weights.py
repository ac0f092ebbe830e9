"""Passes that accumulate, of ranks that count by their samples: kept as pairs of a weight and a
gradient, of which the average is k * sum(w g) / sum(w), in float64."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Window:
    """The passes of one rank since the last reduction.

    Gradients of the program's own count with the weight of the last pass that had some, with fp16
    parameters the largest one, else with that of the next pass.
    """

    def __init__(self, *, narrow: bool) -> None:
        self._narrow = narrow
        self.unsynced = 0.0
        """The weights of passes that were reduced since the last sync."""
        self._own: dict[str, Array] = {}
        """In ``.grad`` of parameters to which no pass has given a gradient."""
        self._clear()

    def _clear(self) -> None:
        self._weights: list[float] = []
        self._given: dict[str, list[tuple[float | None, Array]]] = {}
        """Of parameters to which passes have given a gradient. No weight: that of the next pass."""
        self.zeros: set[str] = set()
        """With zeros of a pass without weight in place of none."""

    @property
    def weight(self) -> float:
        return math.fsum(self._weights)

    @property
    def passes(self) -> int:
        return len(self._weights)

    @property
    def unit(self) -> float:
        """``.grad`` is the sum of w g by this; 0 before there is any weight."""
        some = [weight for weight in self._weights if weight]
        return (max(some) if self._narrow else some[-1]) if some else 0.0

    def restart(self, grads: Mapping[str, Array]) -> None:
        """No pass, and ``.grad`` holds this."""
        self._clear()
        self._own = dict(grads)

    def zero(self, *, to_none: bool) -> None:
        if to_none:
            self._own, self.zeros = {}, set()
            self._given = {}
        else:
            self._own = {name: np.zeros_like(each) for name, each in self._own.items()}
            self._given = {
                name: [(weight, np.zeros_like(each)) for weight, each in pairs]
                for name, pairs in self._given.items()
            }

    def penalize(self, grads: Mapping[str, Array]) -> None:
        """The program adds to ``.grad`` beside any pass."""
        for name, each in grads.items():
            if name in self._given:
                self._given[name].append((self.unit or None, each))
            else:
                self._own[name] = self._own[name] + each if name in self._own else each

    def add(
        self,
        share: Mapping[str, Array],
        weight: float,
        *,
        trained: Collection[str],
        reduces: bool,
    ) -> None:
        """A pass; ``trained``: what the wrapper trains of the model."""
        there = self.grads().keys() | self.zeros
        if self._weights and not there & (self._given.keys() | set(trained)):
            self._clear()  # forgotten
        self._weights.append(weight)
        if weight:
            self._given = {
                name: [(weight if w is None else w, each) for w, each in pairs]
                for name, pairs in self._given.items()
            }
        for name, each in share.items():
            if name not in trained:
                self._own[name] = self._own[name] + each if name in self._own else each
                continue
            if name not in self._given:
                before = [(self.unit or None, self._own.pop(name))] if name in self._own else []
                self._given[name] = before
            if weight:
                self._given[name].append((weight, each))
        if not weight and not reduces:
            lacking = set(trained) - self.grads().keys()
            self.zeros |= lacking
            self._given |= {name: [] for name in lacking}

    def total(self, name: str) -> Array:
        """The sum of w g."""
        if name in self._own:
            return self.unit * self._own[name]
        found: Array = sum((w or 0.0) * each for w, each in self._given[name])
        return found

    def grads(self) -> dict[str, Array]:
        """What ``.grad`` holds, but for ``zeros``."""
        unit = self.unit
        of_passes: dict[str, Array] = {
            name: self.total(name) / unit if unit else sum(each for _, each in pairs)
            for name, pairs in self._given.items()
            if pairs
        }
        return self._own | of_passes

    def reduced(self) -> None:
        self.unsynced += self.weight
        self.restart(self.grads())


def factors(windows: Sequence[tuple[float, float, int]]) -> list[float]:
    """What each rank's sum of w g counts in the average, by (weight, unit, passes); none if nobody
    has any weight."""
    total = math.fsum(weight for weight, _, _ in windows)
    if not total:
        return []
    assert len({passes for _, _, passes in windows}) == 1, windows
    return [passes / total if weight else 0.0 for weight, _, passes in windows]

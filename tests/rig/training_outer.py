"""DiLoCo, and StreamingDiLoCo of one fragment, in float64, as docs/fewer-syncs.md has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Values = dict[str, Array]

_LR, _MOMENTUM = 0.7, 0.9


class Outer:
    """The state that all ranks have alike.

    ``now`` are all ranks' parameters, and ``frozen`` the names of those that each does not train.
    """

    def __init__(self, anchor: Values, delay: int) -> None:
        self.anchor = anchor
        self.delay, self.alpha = delay, 0.5 if delay else 0.0
        self.largest = {name: np.abs(each).max(initial=0) for name, each in anchor.items()}
        """Of what was added up so far, by name."""
        self.moved: set[str] = set()
        """What outer steps have moved; the user empties it."""
        self.landed = 0
        """Landings; the user resets it."""
        self._velocity = {name: np.zeros_like(each) for name, each in anchor.items()}
        self._left: int | None = None
        """Steps until the fragment in flight lands."""

    def acts(self, *, due: bool) -> bool:
        """Whether the next step launches or lands."""
        return due or self._left == 1

    def step(
        self, now: Sequence[Values], frozen: Sequence[set[str]], *, due: bool
    ) -> list[Values] | None:
        """All ranks' parameters, if it lands."""
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                return self._land(now, frozen, self.alpha)
        if due:
            self._launch(now, frozen)
            if self.delay == 0:
                return self._land(now, frozen, self.alpha)
        return None

    def sync(self, now: Sequence[Values], frozen: Sequence[set[str]]) -> list[Values] | None:
        """All ranks' parameters, unless it does nothing."""
        if self._left is not None:
            keeps = self.alpha > 0.0 and self._left < self.delay
            now = self._land(now, frozen, self.alpha if keeps else 0.0)
            if not keeps:
                return list(now)
        elif all(self.is_at_anchor(each, name) for each in now for name in self.anchor):
            return None
        self._launch(now, frozen)
        return self._land(now, frozen, 0.0)

    def is_at_anchor(self, values: Values, name: str) -> bool:
        return np.array_equal(values[name], self.anchor[name])

    def _launch(self, now: Sequence[Values], frozen: Sequence[set[str]]) -> None:
        self._left = self.delay
        for name, anchor in self.anchor.items():
            if all(
                name in still and self.is_at_anchor(each, name)
                for still, each in zip(frozen, now, strict=True)
            ):
                continue
            self.moved.add(name)
            moved = sum(anchor - each[name] for each in now) / len(now)
            velocity = _MOMENTUM * self._velocity[name] + moved
            new = anchor - _LR * (moved + _MOMENTUM * velocity)
            self._velocity[name], self.anchor[name] = velocity, new
            for each in (*(one[name] for one in now), velocity, new):
                self.largest[name] = max(self.largest[name], np.abs(each).max(initial=0))

    def _land(
        self, now: Sequence[Values], frozen: Sequence[set[str]], alpha: float
    ) -> list[Values]:
        self._left = None
        self.landed += 1
        kept = [{name: 0.0 if name in still else alpha for name in self.anchor} for still in frozen]
        return [
            {
                name: part[name] * each[name] + (1 - part[name]) * a
                for name, a in self.anchor.items()
            }
            for part, each in zip(kept, now, strict=True)
        ]

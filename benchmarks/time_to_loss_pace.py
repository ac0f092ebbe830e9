"""Steps that compute for a fixed time, and tensors with exact sums, for time_to_loss_clocks.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

PERIOD = 255


def user_seconds() -> float:
    """What all processes of this machine have computed since it started."""
    user, nice = Path("/proc/stat").read_text().split(maxsplit=3)[1:3]
    return (int(user) + int(nice)) / os.sysconf("SC_CLK_TCK")


class Pace:
    """Computing that takes a fixed time, whatever else the cores do."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._begin = seconds, time.perf_counter()

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def until(self, part: float) -> None:
        """Returns when this part of the step is over."""
        time.sleep(max(0.0, self._begin + part * self.seconds - time.perf_counter()))


def fill(flat: torch.Tensor, factor: float, tile: torch.Tensor) -> None:
    """``factor`` times the tile, again and again."""
    wide = (factor * tile).repeat(4096)
    for piece in flat.split(wide.numel()):
        piece.copy_(wide[: piece.numel()])


def error(flat: torch.Tensor, factor: float, tile: torch.Tensor) -> float:
    """The largest difference from ``factor`` times the tile."""
    wide = (factor * tile).repeat(4096)
    pieces = flat.split(wide.numel())
    return max(float((piece - wide[: piece.numel()]).abs().max()) for piece in pieces)

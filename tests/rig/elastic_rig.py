"""Agreements on steps that tests write in Python, a model, and what ranks announce to others."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from thread_state import wait_until_asleep
from torch import nn


class Scripted:
    """Sums each step again as often as ``redos(step)`` says, in the same group."""

    def __init__(self, group: Any, redos: Callable[[int], int]) -> None:
        self._size = group.size()
        self._redos = redos
        self._left = 0
        self._steps = 0

    def begin(self) -> bool:
        self._left = self._redos(self._steps)
        return False

    def end(self, error: BaseException | None) -> bool:
        if error is not None:
            raise error
        if self._left == 0:
            self._steps += 1
            return False
        self._left -= 1
        return True

    def members(self) -> list[int]:
        return list(range(self._size))

    def changes(self) -> tuple[int, int, int]:
        return (0, 0, 0)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def agreeing(make: Callable[[Any], Any]) -> Iterator[None]:
    """Wrappers that are made inside have ``make(group)`` in place of the native agreement."""
    from pycomm._native import loader
    from pycomm.ddp import elastic as _elastic

    before = _elastic.make_agreement

    def replaced(group: Any, elastic: Any, description: str = "") -> Any:
        return loader.native.StepAgreement(make(group))

    _elastic.make_agreement = replaced
    try:
        yield
    finally:
        _elastic.make_agreement = before


class Net(nn.Module):
    """Batch norm, two branches of which a pass takes one, and a parameter that none uses."""

    def __init__(self, *, unused: bool = False, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(20, 40)
        self.norm = nn.BatchNorm1d(40)
        self.wide = nn.Linear(40, 200)
        self.left = nn.Linear(200, 8)
        if unused:
            self.right = nn.Linear(200, 8)
            self.never = nn.Linear(200, 8)
        self.table = nn.Embedding(30, 20, sparse=True) if sparse else None

    def forward(self, batch: torch.Tensor, takes: str = "left") -> torch.Tensor:
        if self.table is not None:
            batch = batch + self.table((batch[:, 0].abs() * 20).long() % 30)
        hidden = torch.tanh(self.wide(torch.relu(self.norm(self.first(batch)))))
        out: torch.Tensor = getattr(self, takes)(hidden)
        return out


def batch_of(rank: int, step: int, samples: int = 6) -> torch.Tensor:
    """Another batch on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(samples, 20, generator=generator)


def announce(what: str, rank: int) -> None:
    """This rank has come so far: ``await_ranks`` of others returns."""
    dist.distributed_c10d._get_default_store().set(f"{what}/{rank}", "")


def await_ranks(what: str, ranks: Iterable[int]) -> None:
    """Waits until each of these has announced it; an error after a minute."""
    keys = [f"{what}/{rank}" for rank in ranks]
    dist.distributed_c10d._get_default_store().wait(keys, timedelta(seconds=60))


def announce_when_asleep(what: str, rank: int, *, behind: str = "", of: Iterable[int] = ()) -> None:
    """Announces it as soon as the main thread blocks in what it calls next.

    With ``behind``: not before those ranks have announced that.
    """

    def look() -> None:
        if behind:
            await_ranks(behind, of)
        wait_until_asleep(os.getpid())  # the main thread
        announce(what, rank)

    threading.Thread(target=look, daemon=True).start()

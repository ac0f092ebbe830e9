"""Plain callbacks on futures that issue collectives, and their sums by hand in float64.

Ranks give whole numbers, whose sums are exact in any order. A callback that is not awaited at once
runs while the program goes on: its collectives come between those of passes, syncs and hooks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_MOST_DELAY_S = 0.003
_NUMEL = 5


class Callbacks:
    """Those of one thread of the program: it issues the same ones in one order on all ranks."""

    def __init__(self, rank: int, ranks: int, seed: int, half: Any) -> None:
        self._rank, self._ranks, self._half = rank, ranks, half
        self._delays = random.Random(1000 * seed + rank)
        self._issued = 0
        self._pending: list[tuple[str, Any, torch.Tensor]] = []
        self._sent: list[Any] = []

    def issue(self, name: str) -> None:
        for _ in range(2 if name == "two at once" else 1):
            self._issued += 1
            of_kind = getattr(self, "_" + name.replace(" ", "_"), self._of_a_sum)
            future, wanted = of_kind()
            self.add(f"callback {self._issued} {name!r}", future, torch.full((_NUMEL,), wanted))

    def add(self, name: str, future: Any, wanted: torch.Tensor) -> None:
        """A future whose value is compared when the program waits for it."""
        self._pending.append((name, future, wanted.double()))

    def settle(self) -> None:
        """Waits for all, and compares their values with those by hand."""
        pending, self._pending = self._pending, []
        for name, future, wanted in pending:
            found = future.wait()
            found = found[0] if isinstance(found, list) else found
            assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12), (
                f"{name} gave {found.tolist()[:_NUMEL]} and must give {wanted.tolist()[:_NUMEL]}"
            )
        sent, self._sent = self._sent, []
        for work in sent:
            work.wait()

    def summed(self, tensor: torch.Tensor) -> Any:
        """The future of a sum, whose callback sums it once more."""
        return self._again(dist.all_reduce(tensor, async_op=True).get_future())

    def _number(self, rank: int) -> float:
        return float(1 + 7 * rank + 100 * self._issued)

    def _mine(self) -> torch.Tensor:
        return torch.full((_NUMEL,), self._number(self._rank), dtype=torch.float64)

    def _sum(self) -> float:
        return sum(map(self._number, range(self._ranks)))

    def _again(self, future: Any, inner: Callable[[torch.Tensor], None] | None = None) -> Any:
        delay = self._delays.choice([0.0, self._delays.random() * _MOST_DELAY_S])

        def second(done: Any) -> torch.Tensor:
            time.sleep(delay)
            value = done.value()
            if isinstance(value, list) and not isinstance(value[0], torch.Tensor):
                value = [sum(each.value()[0] for each in value)]  # of collected futures
            total: torch.Tensor = value[0] if isinstance(value, list) else value
            if inner is not None:
                inner(total)
            dist.all_reduce(total)
            return total

        return future.then(second)

    def _of_a_sum(self) -> tuple[Any, float]:
        return self.summed(self._mine()), self._sum() * self._ranks

    def _of_a_message(self) -> tuple[Any, float]:
        came = torch.empty(_NUMEL, dtype=torch.float64)
        tag = self._issued
        future = dist.irecv(came, (self._rank - 1) % self._ranks, tag=tag).get_future()
        self._sent.append(dist.isend(self._mine(), (self._rank + 1) % self._ranks, tag=tag))
        return self._again(future), self._sum()

    def _of_two_sums(self) -> tuple[Any, float]:
        parts = [dist.all_reduce(self._mine(), async_op=True).get_future() for _ in range(2)]
        collected = torch.futures.collect_all(parts)
        return self._again(collected), 2 * self._sum() * self._ranks

    def _nested(self) -> tuple[Any, float]:
        def inner(total: torch.Tensor) -> None:
            self._again(dist.all_reduce(total, async_op=True).get_future()).wait()

        first = dist.all_reduce(self._mine(), async_op=True).get_future()
        return self._again(first, inner), self._sum() * self._ranks**3

    def _of_half_the_ranks(self) -> tuple[Any, float]:
        """Those of this rank's parity, then all; of an odd number of ranks all, twice."""
        if self._half is None:
            return self._of_a_sum()
        first = dist.all_reduce(self._mine(), group=self._half, async_op=True).get_future()
        sizes = [len(range(rank % 2, self._ranks, 2)) for rank in range(self._ranks)]
        wanted = sum(size * self._number(rank) for rank, size in enumerate(sizes))
        return self._again(first), wanted


def make_half(rank: int, ranks: int) -> Any:
    """The group of the ranks of this one's parity. Collective."""
    halves = [dist.new_group(list(range(parity, ranks, 2))) for parity in (0, 1)]
    return halves[rank % 2]

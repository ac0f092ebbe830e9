"""What every table of a collective has in common: buffers, fresh inputs, checked outputs.

A table says, in a subclass of Collective, how much goes in and comes out, what to call, and what
must come out. `whole_sum.py` has the smallest example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from exact import Pattern, check_exact, count_wrong, fill, pattern, rounding_on_the_wire
from harness import Place

# How many bytes of checked operations go back to back, and how many operations at most.
_BURST_NBYTES = 32 << 20
_BURST_LENGTH = 4

# What a reduction of equal values leaves unchanged, however often it is repeated in place.
_STEADY = {"sum": 0, "avg": 1, "prod": 1, "min": 1, "max": 1}


@dataclass(frozen=True)
class Segment:
    """A part of the output and the numbers that must be in it."""

    start: int
    numel: int
    numbers: Pattern


class Collective(ABC):
    """A collective over numel elements, on one input and one output buffer."""

    name: str
    in_place = True

    @abstractmethod
    def bus_factor(self, ranks: int) -> float:
        """Return busbw / algbw: bytes that cross each rank's link per byte of size."""

    def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
        """Run the collective and return when it is complete on this rank."""
        raise NotImplementedError("a table overrides call() or bind()")

    def bind(
        self, place: Place, output: torch.Tensor, source: torch.Tensor
    ) -> Callable[[], object]:
        """Return the call on these buffers, so that lists of views are made outside the timing."""
        return lambda: self.call(place, output, source)

    @abstractmethod
    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        """Say what the output must hold after inputs made from this seed."""

    def round_numel(self, place: Place, numel: int) -> int:
        """Return the number of elements nearest to numel that the collective can have."""
        return numel

    def shapes(self, place: Place, numel: int) -> tuple[int, int]:
        """Return the elements of input and output for a row of numel elements."""
        return numel, numel

    def prepare(self, place: Place) -> CollectiveCase:
        check_exact(place.dtype, place.ranks, place.redop)
        return CollectiveCase(self, place)


class CollectiveCase:
    """One rank's buffers for one backend and size."""

    def __init__(self, collective: Collective, place: Place) -> None:
        self.collective = collective
        self.place = place
        self.numel = collective.round_numel(place, max(1, place.nbytes // place.dtype.itemsize))
        self.nbytes = self.numel * place.dtype.itemsize
        depth = max(1, min(_BURST_LENGTH, _BURST_NBYTES // self.nbytes))
        self.checked = [self._buffers() for _ in range(depth)]
        self.timed = self._buffers()
        self.calls = [self._bind(buffers) for buffers in self.checked]
        self.timed_call = self._bind(self.timed)
        self.steady = _STEADY[place.redop]
        self.timed[0].fill_(self.steady)
        self.seed = 0

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        source_numel, output_numel = self.collective.shapes(self.place, self.numel)
        empty = self.place.empty
        source = empty(source_numel, dtype=self.place.dtype)
        if self.collective.in_place:
            return source, source
        return source, empty(output_numel, dtype=self.place.dtype)

    def _bind(self, buffers: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], object]:
        source, output = buffers
        return self.collective.bind(self.place, output, source)

    def run(self) -> None:
        self.timed_call()

    def arm(self, seed: int) -> None:
        self.seed = seed
        for index, (source, output) in enumerate(self.checked):
            if output is not source:
                output.fill_(111)  # no expected value, so an untouched output is a wrong one
            place = self.place
            fill(source, pattern(place.rank, seed + index, place.ranks, place.redop))

    def burst(self) -> None:
        for call in self.calls:
            call()

    def wrong(self) -> tuple[int, int]:
        wrong = compared = 0
        tolerance = rounding_on_the_wire(self.place.variant, self.place.ranks)
        for index, (_, output) in enumerate(self.checked):
            for part in self.collective.expect(self.place, self.numel, self.seed + index):
                found = output[part.start : part.start + part.numel]
                wrong += count_wrong(found, part.numbers, tolerance)
                compared += part.numel
        if self.collective.in_place:
            # What the timed loop left must still be the value that no repetition changes.
            wrong += int((self.timed[1] != self.steady).sum())
            compared += self.timed[1].numel()
        return wrong, compared

"""What the ranks of a fault case do, step by step, and the check of every element they get.

Inputs differ by element, rank and step. So a result is wrong if it is an older step's, lacks a
rank's part, has one twice, or has come to another place.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import pycomm

Step = Callable[[int, int, int], None]
"""(rank, world size, number of the step)."""

GIVEN_BACK: list[torch.Tensor] = []
"""Outputs of operations that failed, filled with ``FILLING``: nobody may write there any more."""
FILLING = -1.0


@functools.cache
def _ramp(numel: int) -> torch.Tensor:
    return (torch.arange(numel) % 251).float()


def values(numel: int, rank: int, step: int) -> torch.Tensor:
    """A rank's input of a step: whole numbers, whose sums are exact in float32."""
    return _ramp(numel) * (rank + 1) + float(8 * step + rank)


def sum_of_values(numel: int, world_size: int, step: int) -> torch.Tensor:
    """What all ranks' ``values`` add up to."""
    ranks = world_size * (world_size - 1) // 2
    return _ramp(numel) * (ranks + world_size) + float(8 * step * world_size + ranks)


def check(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compares all elements."""
    if torch.equal(got, wanted):
        return
    wrong = (got != wanted).nonzero().flatten()
    first = int(wrong[0])
    raise AssertionError(
        f"{what} delivered wrong values: {wrong.numel()} of {got.numel()}, the first is "
        f"{got[first]} instead of {wanted[first]} at {first}"
    )


@contextlib.contextmanager
def giving_back(*outputs: torch.Tensor) -> Iterator[None]:
    """Marks the outputs if an operation on them fails: they are this rank's alone again."""
    try:
        yield
    except pycomm.errors.PycommError:
        for output in outputs:
            output.fill_(FILLING)
            GIVEN_BACK.append(output)
        raise


def check_what_was_given_back() -> None:
    """Nobody has written to the memory of a failed operation since its error was raised."""
    for output in GIVEN_BACK:
        check("after its error, an operation", output, torch.full_like(output, FILLING))


def all_reduce(numel: int) -> Step:
    def step(rank: int, world_size: int, number: int) -> None:
        tensor = values(numel, rank, number)
        with giving_back(tensor):
            dist.all_reduce(tensor)
        check("all_reduce", tensor, sum_of_values(numel, world_size, number))

    return step


_REACHED: dict[int, torch.Tensor] = {}


def in_place(rank: int, world_size: int, number: int) -> None:
    """An all_reduce of memory that the other ranks of the host can reach."""
    tensor = _REACHED.setdefault(rank, pycomm.empty(1 << 20))
    tensor.copy_(values(1 << 20, rank, number))
    with giving_back(tensor):
        dist.all_reduce(tensor)
    check("all_reduce", tensor, sum_of_values(1 << 20, world_size, number))


def unhurried(rank: int, world_size: int, number: int) -> None:
    """Leaves the control loop the time to send heartbeats, which it does every 500 ms."""
    all_reduce(1 << 16)(rank, world_size, number)
    time.sleep(0.05)


def later_large(rank: int, world_size: int, number: int) -> None:
    """The memory of the first large one is made after the fault was armed."""
    all_reduce(3 if number < 2 else 1 << 20)(rank, world_size, number)


def broadcast(numel: int) -> Step:
    def step(rank: int, world_size: int, number: int) -> None:
        root = number % world_size
        tensor = values(numel, rank, number)
        with giving_back(tensor):
            dist.broadcast(tensor, root)
        check("broadcast", tensor, values(numel, root, number))

    return step


def all_gather(numel: int) -> Step:
    def step(rank: int, world_size: int, number: int) -> None:
        output = torch.empty(world_size * numel)
        with giving_back(output):
            dist.all_gather_into_tensor(output, values(numel, rank, number))
        check(
            "all_gather", output, torch.cat([values(numel, r, number) for r in range(world_size)])
        )

    return step


def reduce_scatter(numel: int) -> Step:
    def step(rank: int, world_size: int, number: int) -> None:
        output, whole = torch.empty(numel), numel * world_size
        with giving_back(output):
            dist.reduce_scatter_tensor(output, values(whole, rank, number))
        wanted = sum_of_values(whole, world_size, number)[rank * numel : (rank + 1) * numel]
        check("reduce_scatter", output, wanted)

    return step


def all_to_all(numel: int) -> Step:
    def step(rank: int, world_size: int, number: int) -> None:
        output, whole = torch.empty(numel * world_size), numel * world_size
        with giving_back(output):
            dist.all_to_all_single(output, values(whole, rank, number))
        mine = slice(rank * numel, (rank + 1) * numel)
        wanted = torch.cat([values(whole, r, number)[mine] for r in range(world_size)])
        check("all_to_all", output, wanted)

    return step


def uneven_parts(rank: int, world_size: int, number: int) -> None:
    """An all_to_all in which rank N sends 100,000 (N + 1) elements to each."""
    sizes = [100_000 * (peer + 1) for peer in range(world_size)]
    output = torch.empty(sum(sizes))
    inputs = values(sizes[rank] * world_size, rank, number)
    with giving_back(output):
        dist.all_to_all_single(output, inputs, sizes, [sizes[rank]] * world_size)
    for peer, part in enumerate(output.split(sizes)):
        sent = values(sizes[peer] * world_size, peer, number)
        check("all_to_all", part, sent[rank * sizes[peer] : (rank + 1) * sizes[peer]])


def messages(numel: int) -> Step:
    """Round the ring of ranks."""

    def step(rank: int, world_size: int, number: int) -> None:
        left, right = (rank - 1) % world_size, (rank + 1) % world_size
        arriving = torch.empty(numel)
        works = [
            dist.irecv(arriving, left),
            dist.isend(values(numel, rank, number), right),
        ]
        with giving_back(arriving):
            for work in works:
                assert work is not None
                work.wait()
        check("a message", arriving, values(numel, left, number))

    return step


def reduce(numel: int) -> Step:
    def step(rank: int, world_size: int, number: int) -> None:
        root = number % world_size
        tensor = values(numel, rank, number)
        with giving_back(tensor):
            dist.reduce(tensor, root)
        if rank == root:
            check("reduce", tensor, sum_of_values(numel, world_size, number))

    return step


def gather(numel: int) -> Step:
    def step(rank: int, world_size: int, number: int) -> None:
        root = number % world_size
        parts = [torch.empty(numel) for _ in range(world_size)]
        with giving_back(*parts):
            dist.gather(values(numel, rank, number), parts if rank == root else None, root)
        if rank == root:
            for peer, part in enumerate(parts):
                check("gather", part, values(numel, peer, number))

    return step


def scatter(numel: int) -> Step:
    def step(rank: int, world_size: int, number: int) -> None:
        root = number % world_size
        output = torch.empty(numel)
        parts = list(values(numel * world_size, root, number).split(numel))
        with giving_back(output):
            dist.scatter(output, parts if rank == root else None, root)
        check("scatter", output, parts[rank])

    return step


def barrier(rank: int, world_size: int, number: int) -> None:
    """Nothing to compare."""
    dist.barrier()


KINDS = (all_reduce, broadcast, all_gather, reduce_scatter, all_to_all)
KINDS += (reduce, gather, scatter, messages)


def every_kind(numel: int) -> Step:
    """One operation of each kind."""
    steps = [make(numel) for make in KINDS]

    def step(rank: int, world_size: int, number: int) -> None:
        for each in [*steps, barrier]:
            each(rank, world_size, number)

    return step


CODECS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 1 / 250}
"""What one rounding may lose: of a value; with int8 of the largest value of its block."""


def encoded(codec: str) -> Step:
    """An all_reduce of 4 MiB whose elements travel as fewer bytes."""
    numel = 1 << 20

    def step(rank: int, world_size: int, number: int) -> None:
        # Two steps in a row differ by more than roundings lose, and so do the next but one.
        signed = (_ramp(numel) - 125) * (1.0, -1.0, 3.0)[number % 3]
        tensor = signed * (rank + 1)
        with giving_back(tensor):
            pycomm.codecs.all_reduce(tensor, codec)
        wanted = signed * (world_size * (world_size + 1) / 2)
        size = wanted.abs()
        lost = CODECS[codec] * (size if codec != "int8" else size.max())
        # Each input is rounded once, and so is the sum, which may be larger by what was lost.
        allowed = 2 * lost + CODECS[codec] * lost + 1e-3
        wrong = ((tensor - wanted).abs() > allowed).nonzero().flatten()
        if wrong.numel() or not bool(tensor.isfinite().all()):
            raise AssertionError(
                f"{codec}: {wrong.numel()} of {numel} are too far away: {wrong[:5]}"
            )

    return step


PROGRAMS: dict[str, Step] = {
    "large": all_reduce(1 << 20),
    "few": all_reduce(1 << 16),
    "small": all_reduce(3),
    "in place": in_place,
    "later large": later_large,
    "unhurried": unhurried,
    "messages": messages(1 << 20),
    "small messages": messages(1000),
    "uneven parts": uneven_parts,
    "broadcast": broadcast(1 << 20),
    "all_gather": all_gather(1 << 19),
    "reduce_scatter": reduce_scatter(1 << 19),
    "all_to_all": all_to_all(1 << 19),
    "small kinds": every_kind(3),
    **{codec: encoded(codec) for codec in CODECS},
}

"""Callbacks of futures that issue collectives: every operation has one id on all ranks.

csrc/c10d/named_future.h has the rule. The ranks sleep at random, each in other places.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from callback_programs import LINES, RANKS, random_program, run_programs, text
from ranks import run_ranks
from time_bound import assert_within

pytestmark = pytest.mark.needs_native

TIMES = 12
ROWS = {
    "in the same group": """
        f1 = sum(world)
        f2 = then f1:
            f3 = sum(world)
            wait f3
        f4 = sum(world)
    """,
    "in another group": """
        f1 = sum(row)
        f2 = then f1:
            f3 = sum(col)
            wait f3
        f4 = sum(row)
        f5 = then f4:
            f6 = sum(col)
            wait f6
        f7 = sum(row)
        f8 = then f7:
            f9 = sum(col)
    """,
    "in the world": """
        f1 = sum(row)
        f2 = then f1:
            f3 = sum(world)
            wait f3
        f4 = sum(col)
        f5 = then f4:
            f6 = sum(world)
    """,
    "of leaders, then of all": """
        f1 = sum(row)
        f2 = then f1:
            f3 = leaders()
            wait f3
        f4 = sum(row)
        f5 = then f4:
            f6 = leaders()
            f7 = sum(world)
    """,
    "three deep": """
        f1 = sum(row)
        f2 = then f1:
            f3 = sum(col)
            f4 = then f3:
                f5 = sum(world)
                f6 = then f5:
                    f7 = sum(row)
                    wait f7
                wait f6
            wait f4
        f8 = sum(row)
    """,
    "of collected futures": """
        f1 = sum(row)
        f2 = sum(col)
        f3 = all f1 f2
        f4 = then f3:
            f5 = sum(world)
            wait f5
        f6 = all f2 f1
        f7 = then f6:
            f8 = sum(col)
        f9 = all f1 f2
        f10 = then f9:
            f11 = sum(world)
    """,
    "one after another": """
        f1 = sum(row)
        f2 = then f1:
            f3 = sum(col)
            f4 = then f1:
                f5 = sum(world)
        f6 = then f2:
            f7 = sum(col)
            wait f7
        f8 = then f1:
            f9 = sum(world)
        f10 = then f6:
            f11 = sum(row)
    """,
    "of messages in a ring": """
        f1 = ring()
        f2 = then f1:
            f3 = sum(world)
            wait f3
        f4 = ring()
        f5 = then f4:
            f6 = ring()
            f7 = then f6:
                f8 = sum(col)
                wait f8
    """,
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_each_way_of_issuing(transport: str) -> None:
    programs = [program for program in ROWS.values() for _ in range(TIMES)]
    run_ranks(RANKS, run_programs, args=(programs, 0.01), pg_options={"transport": transport})


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_random_programs(transport: str) -> None:
    seeds = list(range(250)) if transport == "shm" else list(range(250, 500))
    run_ranks(RANKS, run_programs, args=(seeds, 0.004), pg_options={"transport": transport})


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(500, 5500, 500))
def test_more_random_programs(first: int) -> None:
    transport = "shm" if first % 1000 else "tcp"
    seeds = list(range(first, first + 500))
    options = {"transport": transport}
    run_ranks(RANKS, run_programs, args=(seeds, 0.02), pg_options=options, timeout_s=600)


def test_a_random_program_is_short() -> None:
    lines = [len(text(random_program(seed)).splitlines()) for seed in range(500)]
    assert max(lines) <= LINES
    assert sum(lines) > 5 * len(lines)

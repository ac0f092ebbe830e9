"""Random programs of collectives on 2 to 5 processes, against numpy; the same bits on all ranks."""

from __future__ import annotations

import pytest
from collective_calls import COLLECTIVES, DTYPES, OPS, UNEVEN, VALUES, Call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import GROUPS, Program, ProgramRanks

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]


@st.composite
def calls(draw: st.DrawFn, ranks: int) -> Call:
    group = draw(st.sampled_from([group for group in GROUPS if group[-1] < ranks]))
    collective = draw(st.sampled_from(COLLECTIVES))
    # Small sizes, where parts are empty or differ by one; sizes of some segments; in between.
    numel = draw(st.sampled_from([0, 1, 2, 3]) | st.integers(0, 3000) | st.integers(0, 60_000))
    extra: tuple[int, ...] = ()
    if collective in UNEVEN and draw(st.booleans()):
        extra = tuple(draw(st.lists(st.integers(0, 50), min_size=2, max_size=5)))
    asynchronous = draw(st.booleans())
    waits = draw(st.tuples(st.integers(0, 4), st.integers(0, 4))) if asynchronous else (0, 0)
    return Call(
        collective=collective,
        group=group,
        dtype=draw(st.sampled_from(list(DTYPES))),
        op=draw(st.sampled_from(OPS)),
        numel=numel,
        extra=extra,
        root=draw(st.integers(0, len(group) - 1)),
        asynchronous=asynchronous,
        waits=waits,
        values=draw(st.sampled_from(VALUES)),
        seed=draw(st.integers(0, 2**20)),
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ranks = draw(st.integers(2, 5))
    return Program(ranks, tuple(draw(st.lists(calls(ranks), min_size=1, max_size=8))))


@pytest.mark.timeout(7200)
def test_random_programs(request: pytest.FixtureRequest) -> None:
    """`--programs 10000` runs that many; a failure prints the smallest program that has it."""
    with ProgramRanks() as ranks:

        @settings(
            max_examples=request.config.getoption("--programs"),
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(program=programs())
        def every_program_gives_what_numpy_gives(program: Program) -> None:
            ranks.check(program)

        every_program_gives_what_numpy_gives()

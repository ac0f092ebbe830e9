"""Every collective with every dtype and operation, on 2 and 3 ranks: the source of docs/support.md.

`make tcp` runs it over TCP as well. The largest count is above the sizes up to which select.cc has
another algorithm, and host_word.h another way through shared memory.
`--support-json FILE` writes what was seen; `tools/support_table.py FILE` makes the tables of it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from collective_calls import COLLECTIVES, DTYPES, MOVEMENTS, OPS, REDUCTIONS, UNEVEN, VALUES, Call
from programs import Outcome, Program, ProgramRanks, problems_of

TOOLS = Path(__file__).resolve().parents[3] / "tools"
sys.path.append(str(TOOLS))

import support_table  # noqa: E402

pytestmark = pytest.mark.needs_native

GROUPS = [(0, 1), (0, 1, 2)]
NUMELS = [0, 1, 1025]
LARGE_NBYTES = 72 << 10


@dataclasses.dataclass(frozen=True)
class Cell:
    """What the table says in one place."""

    collective: str
    dtype: str
    op: str
    """"" where the collective has none."""
    device: str = "cpu"


def variants(cell: Cell, group: tuple[int, ...]) -> Iterator[Call]:
    """The calls that stand behind one cell, on one group."""
    large = LARGE_NBYTES // DTYPES[cell.dtype].itemsize + 1
    for index, numel in enumerate([*NUMELS, large]):
        yield Call(
            cell.collective,
            group,
            dtype=cell.dtype,
            op=cell.op or "SUM",
            numel=numel,
            extra=(3, 0, 7) if index == 1 and cell.collective in UNEVEN else (),
            root=index % len(group),
            asynchronous=index == 1,
            values=VALUES[index % len(VALUES)],
            seed=index,
        )


def cells() -> Iterator[Cell]:
    for dtype in DTYPES:
        for collective in REDUCTIONS:
            for op in OPS:
                yield Cell(collective, dtype, op)
        for collective in MOVEMENTS:
            yield Cell(collective, dtype, "")
    assert set(COLLECTIVES) == {*REDUCTIONS, *MOVEMENTS, "barrier"}


def test_every_dtype_and_operation(request: pytest.FixtureRequest) -> None:
    everything = list(cells())
    seen: dict[Cell, list[str]] = {cell: [] for cell in everything}
    problems = []
    with ProgramRanks() as ranks:
        for group in GROUPS:
            # One program a dtype and collective: few round trips, and a failure says where.
            for start in range(0, len(everything), len(OPS)):
                chunk = everything[start : start + len(OPS)]
                calls = [(cell, call) for cell in chunk for call in variants(cell, group)]
                answers = ranks.outcomes(Program(len(group), tuple(call for _, call in calls)))
                for index, (cell, call) in enumerate(calls):
                    outcomes: dict[int, Outcome | None] = {r: answers[r][index] for r in group}
                    refusals = {each.refused for each in outcomes.values() if each is not None}
                    seen[cell] += refusals
                    found = list(problems_of(call, outcomes))
                    problems += [f"{call}: {each}" for each in found]
    assert not problems, "\n".join(problems)
    for cell, refusals in seen.items():
        assert len({bool(refusal) for refusal in refusals}) == 1, f"{cell} is refused now and then"
    rows = [
        {**dataclasses.asdict(cell), "refused": next(filter(None, refusals), "")}
        for cell, refusals in seen.items()
    ]
    path = request.config.getoption("--support-json")
    if path is not None:
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")
    else:
        tables = support_table.render(rows)
        assert tables in support_table.PAGE.read_text(), (
            "docs/support.md says something else: run with --support-json FILE, then "
            "python tools/support_table.py FILE"
        )

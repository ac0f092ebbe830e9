"""Four rings of tests: `make test`, `.ci/run`, `make nightly`, `make release`. Each runs whole.

A test belongs to one ring. Without a mark that is `test`; the marks `ci`, `nightly` and `release`
name the others. The nearest mark decides: the parameters' before the test's before the file's. So
a grid of cases has `ci` on its test and `nightly` on most of its parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

RINGS = ("test", "ci", "nightly", "release")
BY_DEFAULT = "test,ci"
"""What pytest runs without --ring."""


def ring_of(item: pytest.Item) -> str:
    """The ring of a test or case. Of two parameters with a mark the later ring counts."""
    case = {mark.name for mark in getattr(getattr(item, "callspec", None), "marks", ())}
    if named := [ring for ring in RINGS if ring in case]:
        return named[-1]
    return next((mark.name for mark in item.iter_markers() if mark.name in RINGS), "test")


def read(text: str) -> Collection[str]:
    """The rings that --ring names, as "test,ci" or "all"."""
    rings = RINGS if text == "all" else tuple(text.split(","))
    if unknown := set(rings) - set(RINGS):
        raise pytest.UsageError(
            f"--ring {text}: there is no ring {', '.join(sorted(unknown))}. "
            f"Use {', '.join(RINGS)}, some of them with commas, or all"
        )
    return rings


def nightly(value: Any, *, id: str | None = None) -> Any:
    """A parameter whose cases run in `make nightly`; a tuple is the values of several arguments."""
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.nightly, id=id)


def ends(values: Iterable[Any]) -> list[Any]:
    """An axis of a grid: its first and last value stay in the test's ring, the rest is nightly."""
    every = list(values)
    return every[:1] + [nightly(value) for value in every[1:-1]] + every[1:][-1:]


def first_of(values: Sequence[Any], number: int = 1) -> list[Any]:
    """An axis of a grid: its first values stay in the test's ring, the rest is nightly."""
    return [*values[:number], *map(nightly, values[number:])]

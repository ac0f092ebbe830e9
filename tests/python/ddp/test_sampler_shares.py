"""Shares of a step beside all shares that there are, and the errors of impossible limits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from pycomm.balance.step_times import Fit
from pycomm.balance.whole_shares import (
    Limits,
    batch_seconds,
    best_shares,
    even_shares,
    why_leave_out,
)


def allowed(limits: Limits) -> Iterator[tuple[int, ...]]:
    """All of them, by counting."""
    ranges = [range(limits.fewest, most + 1) for most in limits.most]
    for shares in itertools.product(*ranges):
        if sum(shares) == limits.total and all(share % limits.unit == 0 for share in shares):
            yield shares


def some_limits(random_: random.Random) -> Limits:
    while True:
        ranks, unit = random_.randint(1, 4), random_.choice([1, 1, 2, 3])
        total = unit * random_.randint(ranks, 14 // unit if ranks > 2 else 24 // unit)
        most = [random_.choice([None, random_.randint(1, total)]) for _ in range(ranks)]
        try:
            return Limits.of(total, unit=unit, fewest=random_.randint(1, 3), most=most)
        except ValueError:
            continue


@pytest.mark.parametrize("seed", range(400))
def test_shares_are_the_best_of_all(seed: int) -> None:
    random_ = random.Random(seed)
    limits = some_limits(random_)
    fits = [
        # Slow fixed parts and times of a hundred to one, and ranks that are equal.
        Fit(random_.choice([0.0, 1.0, 30.0 * random_.random()]), random_.choice([1.0, 100.0, 3.0]))
        for _ in limits.most
    ]
    shares = best_shares(fits, limits)
    every = list(allowed(limits))
    assert shares in every
    best = min(max(fit.seconds(n) for fit, n in zip(fits, each, strict=True)) for each in every)
    assert batch_seconds(fits, shares) == best


@pytest.mark.parametrize("seed", range(50))
def test_even_shares_are_as_equal_as_limits_allow(seed: int) -> None:
    limits = some_limits(random.Random(seed))
    shares, every = even_shares(limits), list(allowed(limits))
    assert shares in every and max(shares) == min(max(each) for each in every)
    if all(most == limits.total for most in limits.most):
        assert shares[0] - shares[-1] <= limits.unit and list(shares) == sorted(shares)[::-1]


def test_many_samples_and_ranks_are_shared_out_at_once() -> None:
    """65,536 samples one by one would take longer than a step."""
    fits = [Fit(0.05 * rank, 1e-3 * (1 + rank)) for rank in range(64)]
    limits = Limits.of(65536, unit=1, fewest=1, most=[None] * 64)
    shares = best_shares(fits, limits)
    seconds = batch_seconds(fits, shares)
    assert sum(shares) == 65536 and min(shares) > 1
    for fit, share in zip(fits, shares, strict=True):  # one more would end later, anywhere
        assert fit.seconds(share + 1) >= seconds


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (10, 3, 1, [None] * 2),
            r"global_batch=10 is not a multiple of multiple_of=3. Try: gl.*=9",
        ),
        ((2, 4, 1, [None]), r"global_batch=2 is not a multiple of multiple_of=4. Try: .*=4"),
        ((3, 1, 1, [None] * 4), r"too small for 4 ranks, .* at least 1. Try: global_batch=4"),
        ((12, 4, 5, [None] * 2), r"too small for 2 ranks, .* at least 8. Try: global_batch=16"),
        ((8, 1, 1, [3, None, 4, 0]), r"max_batch=0 of rank 3 is below the least share, 1"),
        ((8, 4, 1, [None, 3]), r"max_batch=3 of rank 1 is below the least share, 4"),
        ((8, 1, 1, [3, 4]), r"max_batch of all ranks together is 7, less than global_batch=8"),
        ((8, 2, 1, [5, 3]), r"max_batch of all ranks together is 6, less than global_batch=8"),
    ],
)
def test_impossible_limits_are_errors(
    arguments: tuple[int, int, int, list[int | None]], text: str
) -> None:
    total, unit, fewest, most = arguments
    with pytest.raises(ValueError, match=text):
        Limits.of(total, unit=unit, fewest=fewest, most=most)


def test_a_rank_that_delays_the_others_is_named() -> None:
    limits = Limits.of(64, unit=1, fewest=1, most=[None] * 3)
    slow = [Fit(0.1, 0.01), Fit(2.0, 0.5), Fit(0.1, 0.01)]
    assert why_leave_out(slow, limits, 0.02, range(3)) == (
        "rank 1 is better left out: with it a batch takes 2.5 s, and 0.42 s without it"
    )
    helps = [Fit(0.1, 0.01), Fit(0.1, 0.1), Fit(0.1, 0.01)]
    assert why_leave_out(helps, limits, 0.02, range(3)) == ""
    assert (
        why_leave_out([Fit(9.0, 1.0)], Limits.of(4, unit=1, fewest=1, most=[None]), 0.02, [0]) == ""
    )
    # The others could not take its share.
    limits = Limits.of(64, unit=1, fewest=1, most=[31, None, 31])
    assert why_leave_out(slow, limits, 0.02, range(3)) == ""

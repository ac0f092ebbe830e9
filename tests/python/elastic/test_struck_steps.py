"""A second trouble in the step of a death, and deaths in the last step: the others end alike."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rings
from elastic_training import SHARED, Plan, start, start_with_faults
from ranks import RankResults
from time_bound import assert_within

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.ci,
    pytest.mark.time_bound,
    pytest.mark.timeout(200),
]


def survivors(results: RankResults, dead: Sequence[int]) -> list[dict[str, Any]]:
    """What they did, with equal bits and averages as float64 has them, to the end."""
    values = []
    for result in results:
        if result.rank in dead:
            assert result.exit_code == -signal.SIGKILL, results.describe()
        else:
            assert result.ok, results.describe()
            assert (result.value["error"], result.value["wrong"]) == (None, ""), results.describe()
            values.append(result.value)
    assert all(value["bits"] == values[0]["bits"] for value in values), results.describe()
    return values


# --- in the step of a death -----------------------------------------------------------------------

DIES_IN = 9
CODES = {"nomem": "OUT_OF_MEMORY", "errno=EIO": "SYSTEM_ERROR"}


@pytest.mark.usefixtures("fault_build")
@pytest.mark.parametrize("struck", rings.first_of([0, 1]))
@pytest.mark.parametrize("trouble", rings.first_of(["kill", "nomem", "errno=EIO", "delay=700"], 2))
@pytest.mark.parametrize(
    "place", rings.first_of(["repack:1", "deliver:2", "take_over:1", "repack:2", "deliver:1"], 3)
)
def test_another_rank_is_struck_in_the_step_of_a_death(
    place: str, trouble: str, struck: int, tmp_path: Path
) -> None:
    """It dies, or raises its own error and leaves, or goes on: the others have equal bits."""
    plan = Plan(
        "int8",
        left=2,
        dies=((2, DIES_IN, "backward"),),
        struck=(struck, DIES_IN, f"ddp.{place}:{trouble}"),
    )
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with start_with_faults(3, folder, plan) as running:
            results = running.collect(90)
        if "is next" not in results[struck].stderr:  # else it had not begun the step by the death
            break
    else:
        pytest.fail("it never began the step before the death\n" + results.describe())
    other = 1 - struck
    if trouble == "kill":
        (value,) = survivors(results, [struck, 2])
        assert value["members"][-1] == (other,), results.describe()
    elif trouble.startswith("delay"):
        values = survivors(results, [2])
        assert values[struck]["strikes"] == [1], results.describe()
        assert values[0]["members"][-1] == (0, 1), results.describe()
    else:
        own = results[struck].value
        assert results[struck].ok and own["strikes"] == [1], results.describe()
        assert own["error"].code == CODES[trouble], results.describe()
        value = results[other].value
        assert (value["error"], value["wrong"]) == (None, ""), results.describe()
        assert value["members"][-1] == (other,), results.describe()
        assert value["bits"][: len(own["bits"])] == own["bits"], results.describe()


# --- in the last step -----------------------------------------------------------------------------

LAST = 4


def check_last_step(results: RankResults, dead: int) -> None:
    for value in survivors(results, [dead]):
        assert len(value["bits"]) == LAST + 1, results.describe()
        assert_within(value["ended_s"][LAST] - value["ended_s"][LAST - 1], 3.0, results.describe())


@pytest.mark.parametrize("where", rings.ends(["loader", "forward", "step", "backward"]))
@pytest.mark.parametrize("dead", rings.first_of([0, 2]))
def test_a_rank_is_killed_in_the_last_step(dead: int, where: str) -> None:
    """The others finish the training, as nothing follows that would notice the death."""
    plan = Plan("int8", left=0, steps=LAST + 1, dies=((dead, LAST, where),))
    with start(3, plan, SHARED) as running:
        results = running.collect(90)
    check_last_step(results, dead)


@pytest.mark.usefixtures("fault_build")
@pytest.mark.parametrize("point", rings.first_of(["survive.finished", "survive.committed"]))
@pytest.mark.parametrize("dead", rings.first_of([0, 2]))
def test_a_rank_is_killed_at_an_end_of_the_last_commit_round(
    dead: int, point: str, tmp_path: Path
) -> None:
    plan = Plan("int8", left=0, steps=LAST + 1, struck=(dead, LAST, f"{point}:1:kill"))
    with start_with_faults(3, tmp_path, plan) as running:
        results = running.collect(90)
    check_last_step(results, dead)

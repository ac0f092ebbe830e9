"""Random elastic trainings in which ranks die, against averages over the members in float64."""

from __future__ import annotations

import signal

import pytest
from elastic_programs import Program, random_program, trains
from elastic_training import start_training

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.ci,
    pytest.mark.timeout(7200),
]

_PATIENCE_S = 60.0
_FAILURES = 3
"""After so many the rest is not tried."""


def wrong_with(program: Program, killed: list[int]) -> str:
    """What the ranks complain of, or "". Adds the ranks that died to ``killed``."""
    options = {"transport": program.transport}
    with start_training(trains, program.ranks, program, options) as running:
        results = running.collect(_PATIENCE_S)
    dead = {death.rank for death in program.deaths}
    values = []
    for result in results:
        if result.exit_code == -signal.SIGKILL and result.rank in dead and not result.timed_out:
            killed.append(result.rank)
            continue
        if not result.ok or result.value["error"] is not None or result.value["wrong"]:
            why = result.value and (result.value["error"] or result.value["wrong"])
            return f"{program}\nrank {result.rank}: {why}\n{results.describe()}"
        values.append(result.value)
    longest = max(values, key=lambda value: len(value["bits"]))
    for value in values:
        steps = len(value["bits"])
        for name in ("bits", "members"):
            if value[name] != longest[name][:steps]:
                return f"{program}\n{name} differ: {value[name]}, {longest[name]}"
        if value["means"] != longest["means"][: len(value["means"])]:
            return f"{program}\nmeans differ: {value['means']}, {longest['means']}"
        leaves = value["rank"] == program.leaves[0] and steps > program.leaves[1]
        if value["left"] != leaves:
            return f"{program}\nrank {value['rank']} has left: {value['left']}, after {steps} steps"
        if (
            value["left"]
            and value["rank"] in longest["members"][-1]
            and len(longest["bits"]) > steps
        ):
            return f"{program}\nit is a member after it has left: {longest['members']}"
        if value["step"] != steps:
            return f"{program}\nstep is {value['step']} after {steps} steps"
    return ""


def test_random_elastic_trainings(request: pytest.FixtureRequest) -> None:
    """`--elastic-trainings 500` runs that many, `--elastic-trainings 7:8` seed 7 alone."""
    first, _, last = request.config.getoption("--elastic-trainings").rpartition(":")
    failures: list[str] = []
    killed: list[int] = []
    wanted = 0
    for seed in range(int(first or 0), int(last)):
        program = random_program(seed)
        wanted += len(program.deaths)
        if wrong := wrong_with(program, killed):
            failures.append(wrong)
        if len(failures) == _FAILURES:
            break
    assert not failures, "\n\n".join(failures)
    assert 2 * len(killed) >= wanted, f"{len(killed)} of {wanted} deaths came"  # timers may be late

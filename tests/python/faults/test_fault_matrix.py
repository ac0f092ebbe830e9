"""Fault × place × rank × 2 to 5 ranks: typed errors that name the right rank, no abort, no hang.

CI runs the first case of each kind of fault (sample() in fault_cases.py), `make nightly` the
others, `make faults` all. What the cases tell beside their verdict is summed up at the end.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fault_ranks
import pytest
import rings
import torch
import torch.distributed as dist
from fault_cases import WORLDS, cases, mismatch_cases, sample
from fault_ranks import Case, patience
from fault_report import agreement, took
from ranks import RankError, RankResult, RankResults, run_ranks, start_ranks
from time_bound import TookTooLong, assert_within

import pycomm
from pycomm._native import loader

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.ci,
    pytest.mark.usefixtures("fault_build"),
    pytest.mark.timeout(900),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        every = cases()
        in_ci = sample(every)
        if os.environ.get("TEST_TRANSPORT"):  # a case with fault points names its transport
            every = [case for case in every if not case.spec]
        chosen = [
            case if case.name in in_ci else rings.nightly(case, id=case.name) for case in every
        ]
        metafunc.parametrize("case", chosen, ids=lambda case: case.name)


Record = Callable[[str, object], None]
"""pytest's ``record_property``."""


@pytest.mark.time_bound
def test_every_rank_gets_the_right_error(
    case: Case, tmp_path: Path, record_property: Record
) -> None:
    store = f"file://{tmp_path}/store"
    target = fault_ranks.run_case
    with start_ranks(case.world_size, target, args=(case, store), init="none") as running:
        if case.spec.endswith(":stop"):
            # Only after the others are done with it may it go on, and find itself left alone.
            for rank in range(case.world_size):
                if rank != case.victim:
                    running.processes[rank].wait(60)
            running.kill(case.victim, signal.SIGCONT)
        results = running.collect(case.bound_s * patience() + 30)
    for result in results:
        assert not result.timed_out, f"hangs\n{results.describe()}"
        for sign in ("terminate called", "Fatal Python error: Aborted", "Sanitizer"):
            assert sign not in result.stderr, results.describe()
        if result.rank == case.victim:
            check_victim(case, result, results)
        else:
            assert result.exit_code == 0, results.describe()
            check_other(case, result, results, record_property)
    check_agreement(case, results, record_property)
    for result in results:
        if result.rank != case.victim:
            check_times(case, result.value, results)


def check_victim(case: Case, result: RankResult, results: RankResults) -> None:
    if case.spec.endswith(":stop"):
        assert result.exit_code == 0 and result.value["error"] is not None, results.describe()
        check_that_it_struck(case, result.value, results)
        return
    assert result.exit_code == case.victim_exit, results.describe()
    if case.victim_codes is None:
        # The fault ends the victim's process, and nothing else does before or after.
        assert result.value is None, f"the victim lives on\n{results.describe()}"
        if case.act == "raise":
            assert result.error and "this rank's own mistake" in result.error.text, result.error
        return
    check_that_it_struck(case, result.value, results)
    error = result.value["error"]
    if error is None:
        assert not case.victim_codes or case.may_end_well, results.describe()
    else:
        assert error.code in case.victim_codes, f"{error.text}\n{results.describe()}"


def check_that_it_struck(case: Case, met: dict[str, Any], results: RankResults) -> None:
    """A fault that never came would prove nothing of how it is borne."""
    points = met["fault_points"]
    assert [point for point, _, _ in points] == (case.spec.split(",") if case.spec else [])
    for point, visits, strikes in points:
        assert strikes > 0, f"{point} never struck in {visits} visits\n{results.describe()}"


def check_other(
    case: Case, result: RankResult, results: RankResults, record_property: Record
) -> None:
    met = result.value
    error = met["error"]
    if error is None:
        assert not case.codes or case.may_end_well, f"no error\n{results.describe()}"
        return
    said = texts(results)
    assert error.code in case.codes, said
    assert error.is_a("DistNetworkError") or error.is_a("DistBackendError"), error.classes
    took(record_property, case.name, met["s"], case.bound_s)
    assert met["sticks"] == error.code, f"then {met['sticks']}\n{said}"
    assert "\n" not in error.text and f"code={error.code}" in error.text
    if case.culprit == "victim":
        # Either side may be said to differ: both are named, and one of them is the victim.
        both = error.code == "CONFIG_MISMATCH"
        assert case.victim in (ranks_in(error) if both else {blamed(error, result.rank)}), said
        assert case.victim in ranks_in(error), said
    elif case.culprit == "an end":
        assert case.victim in {blamed(error, result.rank), reporter(error, result.rank)}, said


def texts(results: RankResults) -> str:
    """All ranks' errors."""
    errors = [each.value["error"] for each in results if each.value and each.value["error"]]
    return "\n".join(error.text for error in errors)


def blamed(error: RankError, teller: int) -> int:
    """The rank that is to blame or was waited for; else the one that tells, which means itself."""
    peer = error.record.get("peer")
    return teller if peer is None or peer < 0 else int(peer)


def reporter(error: RankError, teller: int) -> int:
    """The rank that saw the cause."""
    found = re.search(r"reported by rank (\d+)", str(error.record.get("cause", "")))
    return int(found[1]) if found else teller


def ranks_in(error: RankError) -> set[int]:
    """The ranks that the sentence speaks of; not every digit in it is one."""
    summary = str(error.record["summary"]).partition("; present:")[0]
    lists = re.findall(r"(?:\branks? |; missing: )(\d+(?:(?:, | and )\d+)*)", summary, re.I)
    return {int(number) for each in lists for number in re.findall(r"\d+", each)}


def check_agreement(case: Case, results: RankResults, record_property: Record) -> None:
    """All ranks that were in the group name the same cause."""
    told = {}
    for result in results:
        error = result.value and result.value["error"]
        alone = case.spec.endswith(":stop") and result.rank == case.victim
        if error and not alone:
            told[result.rank] = (error.code, blamed(error, result.rank))
    if case.how == "duplicate":
        assert "DUPLICATE_RANK" in {code for code, _ in told.values()}, texts(results)
    joined = not (case.at_init or case.how)
    agreement(record_property, case.name, told, joined=joined)
    if joined:
        assert len(set(told.values())) <= 1, f"{told}\n{texts(results)}"


@pytest.mark.time_bound
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("everything", [False, rings.nightly(True)], ids=["a victim", "each"])
def test_ranks_that_call_different_things(
    world_size: int, everything: bool, repeats: int, record_property: Record
) -> None:
    chosen = mismatch_cases(world_size, everything=everything)
    results = run_ranks(
        world_size,
        fault_ranks.run_mismatches,
        args=(chosen, repeats if everything else 1),
        timeout_s=240,
        check=False,
    )
    results.check()
    differ = 0
    for met in zip(*results.values(), strict=True):
        told = check_mismatch(list(met))
        differ += len(set(told.values())) > 1
        name = f"mismatch-{met[0]['case']}-{world_size}ranks-rank{met[0]['victim']}"
        agreement(record_property, name, told, joined=True)
        took(record_property, name, max(each["s"] for each in met), 1.0)
    # The ranks vote for 25 ms on which two to name. A rank that loses its core in that time may
    # choose alone, so what fails here is a time.
    if differ * 20 > len(results[0].value):
        raise TookTooLong(f"in {differ} of {len(results[0].value)} mismatches a rank chose alone")
    for each in (each for met in results.values() for each in met):
        said = f"{each['case']}, rank {each['victim']} differs"
        assert_within(each["s"], 2 * fault_ranks.MISMATCH_S, said)


def check_times(case: Case, met: dict[str, Any], results: RankResults) -> None:
    if met["error"] is not None:
        assert_within(met["s"], case.bound_s * patience(), texts(results))
    assert_within(met["destroy_s"], 2.0 * patience(), "destroy_process_group")


def check_mismatch(met: list[dict[str, Any]]) -> dict[int, str]:
    """Asserts that all ranks say so, and why; which two each rank names."""
    name, victim = met[0]["case"], met[0]["victim"]
    said = f"{name}, rank {victim} differs\n" + "\n".join(
        f"{each['s']:.3f} s: {each['error'] and each['error'].text}" for each in met
    )
    for each in met:
        assert each["error"] is not None, said
        assert each["error"].code == "COLLECTIVE_MISMATCH", said
        record = each["error"].record
        both_sides = (") has ", ") has ") if "splits" not in name else (") expects ", ") sends ")
        assert all(side in record["summary"] for side in both_sides), said
        if len(met) > 2:
            assert victim in ranks_in(each["error"]), said
    return {rank: each["error"].record["summary"] for rank, each in enumerate(met)}


def test_an_ordinary_build_has_no_fault_points(fault_build: Path) -> None:
    found = list((Path(str(pycomm.__file__)).parent).glob("torch_*/_C*.so"))
    test_build = list(fault_build.glob("torch_*/_C*.so"))
    assert b"frame.written" in test_build[0].read_bytes()
    assert found and all(b"frame.written" not in path.read_bytes() for path in found)
    with pytest.raises(pycomm.errors.UnsupportedError, match="not a test build"):
        loader.load().arm_fault_points("frame.written:1:kill")
    assert not hasattr(loader.load(), "fault_points")


def test_the_variable_is_an_error_in_an_ordinary_build() -> None:
    variable = {"PYCOMM_FAULT": "frame.written:1:kill"}
    results = run_ranks(1, "fault_ranks:nothing", env=variable, check=False)
    error = results[0].error
    assert error is not None and error.code == "UNSUPPORTED", results.describe()
    assert "not a test build" in error.text


def bad_specs(rank: int, world_size: int) -> None:
    fault_ranks.use_fault_build()
    extension = loader.load()
    x, y = "socket.write", "socket.read"
    for spec in (
        x,
        f"{x}:1",
        ":1:kill",
        f"{x}:0:kill",
        f"{x}:z:kill",
        f"{x}:1:die",
        f"{x}:1:errno=EWHAT",
        "x:1:kill",
    ):
        with pytest.raises(pycomm.errors.InvalidArgumentError, match="site:nth:action"):
            extension.arm_fault_points(spec)
    extension.arm_fault_points(f"{x}:1:kill,{y}:2+:delay=5")
    assert extension.fault_points() == [(f"{x}:1:kill", 0, 0), (f"{y}:2+:delay=5", 0, 0)]
    extension.arm_fault_points("")
    assert extension.fault_points() == []


def test_specs_that_cannot_be_read() -> None:
    run_ranks(1, bad_specs, init="none")


def window_that_ends_in_a_call(rank: int, world_size: int, store: str) -> list[Any]:
    fault_ranks.use_fault_build()
    dist.init_process_group("pycomm", init_method=store, rank=rank, world_size=world_size)
    dist.barrier()  # the limit is also that of making the group: here both begin together
    group = dist.new_group(timeout=timedelta(seconds=4))
    backend = pycomm._group.creation.native_backend(group)
    dist.barrier(group=group)
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=60)
    options.asyncOp = True
    tensor = torch.ones(4)
    # Nobody waits for the operation, so a thread is started for it, which takes its time.
    loader.load().arm_fault_points("thread.start:1:delay=4500")
    backend._start_coalescing()
    backend.allreduce([tensor], options)
    backend._end_coalescing().wait()
    struck = loader.load().fault_points()[0][2]
    dist.destroy_process_group()
    return [tensor.tolist(), struck]


def test_a_call_that_began_within_its_coalescing_window_ends_in_it(tmp_path: Path) -> None:
    args = (f"file://{tmp_path}/store",)
    env = {"PYCOMM_TRANSPORT": None}  # over TCP no thread is started for it
    results = run_ranks(2, window_that_ends_in_a_call, init="none", args=args, env=env)
    assert results.values() == [[[2.0] * 4, 1]] * 2

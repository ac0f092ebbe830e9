"""Runs many cases in one set of processes: importing torch takes longer than most of them.

    def add(rank: int, world_size: int, start: float) -> float: ...

    @case(add, 1.0)
    def test_add(values: list[float]) -> None:
        assert values == [3.0, 3.0]

All cases of a module run one after the other in the same ranks, each in a default group of its own:
what fails in one takes down no other. With ``launcher=`` there is no group, but a launcher's
variables: the case, or the library that it calls, makes one. ``values`` is what the case returned,
by rank; it raises with all tracebacks if a rank failed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ranks import LOOPBACK, RankError, describe_exception, free_port, run_ranks

TIMEOUT_S = 120.0  # of a collective: the other rank may be compiling, on a busy machine
ALL_S = 400.0  # for all cases of a module and size, on a busy machine
# What the cases import, before their ranks are forked.
PRELOAD = (
    "torch._dynamo",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)
Key = tuple[str, str, tuple[Any, ...]]


def case(
    function: Callable[..., Any], *args: Any, world_size: int = 2, launcher: str = ""
) -> pytest.MarkDecorator:
    """Marks a test as that of ``function(rank, world_size, *args)``.

    ``launcher`` is "torchrun" or "mpirun" for its variables; "" for a group over pycomm.
    """
    # with_args: a mark that is called with a function alone decorates it.
    return pytest.mark.case.with_args(function, *args, run=(world_size, launcher))


def _key(mark: pytest.Mark) -> Key:
    function: Callable[..., Any] = mark.args[0]
    return function.__module__, function.__qualname__, tuple(mark.args[1:])


def run_cases(
    rank: int, world_size: int, folder: str, launcher: str, cases: Sequence[tuple[bytes, int]]
) -> list[Any]:
    """In a rank: each case in its own group; returns (value, error) of each."""
    import torch
    import torch.distributed as dist

    import pycomm  # noqa: F401 (registers the backend)

    results: list[tuple[Any, RankError | None]] = []
    for number, (pickled, port) in enumerate(cases):
        module, function, args = pickle.loads(pickled)
        value, error = None, None
        torch.manual_seed(0)
        os.environ.update(_variables(launcher, rank, world_size, port))
        os.environ["CASE_FOLDER"] = f"{folder}/of-{number}"  # one for all ranks; not made yet
        try:
            if not launcher:
                dist.init_process_group(
                    "pycomm",
                    init_method=f"file://{folder}/{number}",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=TIMEOUT_S),
                )
            value = getattr(importlib.import_module(module), function)(rank, world_size, *args)
        except Exception as caught:
            error = describe_exception(caught)
        gc.collect()  # DDP is part of a cycle and holds its group
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        _forget(launcher)
        results.append((value, error))
    return results


def _variables(launcher: str, rank: int, world_size: int, port: int) -> dict[str, str]:
    """What the launcher sets. Given to the rank itself, they would keep it from being forked."""
    own, all_ = str(rank), str(world_size)
    if launcher == "torchrun":
        return {
            "RANK": own,
            "LOCAL_RANK": own,
            "WORLD_SIZE": all_,
            "LOCAL_WORLD_SIZE": all_,
            "GROUP_RANK": "0",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "integrations",  # how Lightning knows torchrun
        }
    if launcher == "mpirun":  # MPICH's, which does not set RANK
        return {
            "PMI_RANK": own,
            "PMI_SIZE": all_,
            "MPI_LOCALRANKID": own,
            "MPI_LOCALNRANKS": all_,
            "MASTER_PORT": str(port),
        }
    return {}


def _forget(launcher: str) -> None:
    """Accelerate's state is set once a process."""
    if launcher and "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for name in _variables("torchrun", 0, 1, 0) if launcher == "mpirun" else ():
            os.environ.pop(name, None)  # what pycomm has set for torch to read


class CaseRuns:
    """The results of a module's cases; they run when the first is asked for."""

    def __init__(self, marks: Sequence[pytest.Mark], folder: Path, preload: Sequence[str]) -> None:
        self._folder = folder
        self._preload = preload
        self._cases: dict[tuple[int, str], list[bytes]] = {}
        self._results: dict[tuple[int, str], Any] = {}
        for mark in marks:
            keys = self._cases.setdefault(mark.kwargs["run"], [])
            pickled = pickle.dumps(_key(mark))
            if pickled not in keys:
                keys.append(pickled)

    def values(self, mark: pytest.Mark) -> list[Any]:
        """What each rank's case returned."""
        world_size, launcher = run = mark.kwargs["run"]
        keys = self._cases[run]
        if run not in self._results:
            folder = self._folder / f"{world_size}{launcher}"
            folder.mkdir()
            cases = [(key, free_port() if launcher else 0) for key in keys]
            results: Any = None
            try:
                results = run_ranks(
                    world_size,
                    run_cases,
                    args=(str(folder), launcher, cases),
                    init="none",
                    only_pycomm=True,
                    preload=self._preload,
                    timeout_s=ALL_S,
                ).values()
            except AssertionError as error:
                results = error
            self._results[run] = results
        results = self._results[run]
        if isinstance(results, AssertionError):
            raise results
        position = keys.index(pickle.dumps(_key(mark)))
        outcomes = [rank[position] for rank in results]
        failed = [f"--- rank {r}\n{e.traceback}" for r, (_, e) in enumerate(outcomes) if e]
        if failed:
            pytest.fail("a rank failed\n" + "\n".join(failed), pytrace=False)
        return [value for value, _ in outcomes]


@pytest.fixture(scope="module")
def case_runs(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[CaseRuns]:
    marks = [
        mark
        for item in request.session.items
        if item.path == request.path and (mark := item.get_closest_marker("case")) is not None
    ]
    preload = getattr(request.module, "PRELOAD", PRELOAD)
    yield CaseRuns(marks, tmp_path_factory.mktemp("cases"), preload)


@pytest.fixture
def values(request: pytest.FixtureRequest, case_runs: CaseRuns) -> list[Any]:
    """What the test's case returned, by rank."""
    mark = request.node.get_closest_marker("case")
    return case_runs.values(mark)

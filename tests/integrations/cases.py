"""Runs many cases in one set of processes: importing torch takes longer than most of them.

    def add(rank: int, world_size: int, start: float) -> float: ...

    @case(add, 1.0)
    def test_add(values: list[float]) -> None:
        assert values == [3.0, 3.0]

All cases of a module run one after the other in the same ranks, each in a default group of its own:
what fails in one takes down no other. ``values`` is what the case returned, by rank; it raises with
all tracebacks if a rank failed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ranks import RankError, describe_exception, run_ranks

TIMEOUT_S = 40.0
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


def case(function: Callable[..., Any], *args: Any, world_size: int = 2) -> pytest.MarkDecorator:
    """Marks a test as that of ``function(rank, world_size, *args)``."""
    # with_args: a mark that is called with a function alone decorates it.
    return pytest.mark.case.with_args(function, *args, world_size=world_size)


def _key(mark: pytest.Mark) -> Key:
    function: Callable[..., Any] = mark.args[0]
    return function.__module__, function.__qualname__, tuple(mark.args[1:])


def run_cases(rank: int, world_size: int, folder: str, keys: Sequence[bytes]) -> list[Any]:
    """In a rank: each case in its own group; returns (value, error) of each."""
    import torch
    import torch.distributed as dist

    import pycomm  # noqa: F401 (registers the backend)

    results: list[tuple[Any, RankError | None]] = []
    for number, pickled in enumerate(keys):
        module, function, args = pickle.loads(pickled)
        value, error = None, None
        torch.manual_seed(0)
        try:
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
        results.append((value, error))
    return results


class CaseRuns:
    """The results of a module's cases; they run when the first is asked for."""

    def __init__(self, marks: Sequence[pytest.Mark], folder: Path) -> None:
        self._folder = folder
        self._cases: dict[int, list[bytes]] = {}
        self._results: dict[int, Any] = {}
        for mark in marks:
            keys = self._cases.setdefault(mark.kwargs["world_size"], [])
            pickled = pickle.dumps(_key(mark))
            if pickled not in keys:
                keys.append(pickled)

    def values(self, mark: pytest.Mark) -> list[Any]:
        """What each rank's case returned."""
        world_size = mark.kwargs["world_size"]
        keys = self._cases[world_size]
        if world_size not in self._results:
            folder = self._folder / str(world_size)
            folder.mkdir()
            results: Any = None
            try:
                results = run_ranks(
                    world_size,
                    run_cases,
                    args=(str(folder), keys),
                    init="none",
                    only_pycomm=True,
                    preload=PRELOAD,
                    timeout_s=110.0,
                ).values()
            except AssertionError as error:
                results = error
            self._results[world_size] = results
        results = self._results[world_size]
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
    yield CaseRuns(marks, tmp_path_factory.mktemp("cases"))


@pytest.fixture
def values(request: pytest.FixtureRequest, case_runs: CaseRuns) -> list[Any]:
    """What the test's case returned, by rank."""
    mark = request.node.get_closest_marker("case")
    return case_runs.values(mark)

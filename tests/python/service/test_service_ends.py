"""Goodbyes over a restart, a stop in a signal's handler, and retries after a long wait."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import signal
import threading
import time
from typing import Any

import pytest
import torch
from test_service import Counter, count, counter_server, serving
from time_bound import assert_within
from torch import nn, optim

import pycomm
from pycomm.service import ParameterClient, client
from pycomm.service.core import ServerCore
from pycomm.service.frames import Hello
from pycomm.service.shard import Layout

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]


def core_of_two(
    optimizer: type[optim.SGD] = optim.SGD, workers: int = 2
) -> tuple[ServerCore, nn.Module]:
    model = nn.Linear(1, 1, bias=False)
    return ServerCore(model, optimizer(model.parameters(), lr=1.0), None, workers), model


def test_a_schedule_that_needs_a_metric_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    schedule = optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="no metric for ReduceLROnPlateau"):
        ServerCore(model, optimizer, schedule, 2)


def hello_of(model: nn.Module, worker: int, incarnation: int | None = None) -> Hello:
    return Hello(
        worker=worker,
        incarnation=worker + 1 if incarnation is None else incarnation,
        clock=0,
        begun=None,
        server=0,
        servers=1,
        staleness=0,
        digest=Layout(model, 1, sliced=True).digest,
        sliced=True,
        host="127.0.0.1",
        connection=1,
    )


def join(
    core: ServerCore,
    model: nn.Module,
    worker: int,
    session: int | None = None,
    incarnation: int | None = None,
) -> int:
    hello = hello_of(model, worker, incarnation)
    return core.join(hello, worker + 1 if session is None else session)


@pytest.mark.parametrize("goodbyes", [1, 2])
def test_a_goodbye_from_before_a_restart_counts(goodbyes: int) -> None:
    core, model = core_of_two()
    for worker in range(2):
        join(core, model, worker)
    assert core.state_dict(unless=-1) is None, "there is nothing to keep before the first step"
    for worker in range(2):
        core.push(worker, worker + 1, 1, core.buffers())
    for worker in range(goodbyes):
        core.goodbye(worker, worker + 1)
    saved = core.state_dict(unless=-1)
    assert saved is not None
    assert core.state_dict(unless=saved[0]) is None
    again, model = core_of_two()
    again.load_state_dict(saved[1])
    # All had ended: the file is the beginning of another job, which must not end at once.
    assert not again.all_ended()
    if goodbyes == 1:
        join(again, model, 1)
        again.goodbye(1, 2)
        assert again.all_ended()


def ended(workers: int, goodbyes: int) -> dict[str, Any]:
    """The checkpoint of a job of one step, after these goodbyes."""
    core, model = core_of_two(workers=workers)
    for worker in range(workers):
        join(core, model, worker)
    for worker in range(workers):
        core.push(worker, worker + 1, 1, gradient(core, 1.0))
    for worker in reversed(range(workers)):
        if worker >= workers - goodbyes:
            core.goodbye(worker, worker + 1)
    saved = core.state_dict(unless=-1)
    assert saved is not None
    return saved[1]


def gradient(core: ServerCore, value: float) -> Any:
    return {dtype: flat.fill_(value) for dtype, flat in core.buffers().items()}


@pytest.mark.parametrize(("then", "now"), [(2, 2), (3, 2), (2, 3)])
def test_a_job_from_a_finished_one_waits_for_all_its_workers(then: int, now: int) -> None:
    core, model = core_of_two(workers=now)
    core.load_state_dict(ended(then, then))
    assert core.stats().version == 1
    for worker in range(now):
        assert core.stats().live_workers == worker
        assert join(core, model, worker, incarnation=10 + worker) == 1
        core.push(worker, 10 + worker, 2, gradient(core, 1.0))
        assert core.stats().steps == (2 if worker == now - 1 else 1)
    core.goodbye(0, 10)
    assert not core.all_ended()


def test_a_goodbye_of_a_worker_beyond_the_number_of_now_does_not_count() -> None:
    core, model = core_of_two()
    core.load_state_dict(ended(3, 1))
    for worker in (0, 1):
        join(core, model, worker)
    core.goodbye(0, 1)
    assert not core.all_ended()
    core.goodbye(1, 2)
    assert core.all_ended()


def test_a_push_that_came_before_a_survivor_is_in_its_step() -> None:
    """After a restart a new worker 1 pushes, is replaced, and pushes again; then worker 0 is back,
    which has made more steps than the server knows."""
    core, model = core_of_two()
    core.load_state_dict(ended(2, 0))
    for session, incarnation in ((5, 10), (6, 11)):
        assert join(core, model, 1, session, incarnation) == 1
        core.push(1, incarnation, 2, gradient(core, float(incarnation)))
    hello = dataclasses.replace(hello_of(model, 0), clock=30, begun=0)
    assert core.join(hello, 7) == 30
    before = model.weight.item()
    core.push(0, 1, 31, gradient(core, 1.0))
    assert (core.stats().version, core.stats().steps, core.stats().lost_pushes) == (31, 2, 29)
    assert model.weight.item() == pytest.approx(before - (11.0 + 1.0) / 2)


def test_stop_in_a_signal_handler_ends_the_server() -> None:
    server = counter_server()
    signals = 2000
    handled = 0

    def handler(*_: object) -> None:
        nonlocal handled
        handled += 1
        server.stop()

    before = signal.signal(signal.SIGUSR2, handler)
    main = threading.get_ident()

    def shower() -> None:
        for _ in range(signals):
            signal.pthread_kill(main, signal.SIGUSR2)

    sender = threading.Thread(target=shower)
    try:
        sender.start()
        server.serve()
    finally:
        sender.join()
        signal.signal(signal.SIGUSR2, before)
    assert handled > 0, "no signal arrived"
    assert server._stopping.is_set(), "serve() returned, and did not close the server"


def test_the_time_for_retries_begins_with_the_first_failure() -> None:
    with serving(counter_server()) as address:
        worker = ParameterClient(Counter(), servers=address, worker=0, reconnect=5.0)
        calls = []

        def fails_once_after_a_long_wait(session: object) -> str:
            calls.append(session)
            if len(calls) == 1:
                time.sleep(5.5)
                raise RuntimeError("the connection broke")
            return "answered"

        assert worker._retrying(worker._servers[0], fails_once_after_a_long_wait) == "answered"
        assert len(calls) == 2
        worker.close()


@pytest.mark.time_bound
def test_a_worker_that_never_comes_ends_a_pull_at_the_timeout() -> None:
    server = counter_server(workers=2)
    with serving(server) as address:
        model = Counter()
        worker = ParameterClient(model, servers=address, worker=0, timeout=2.0, reconnect=20.0)
        model.count.grad = torch.ones(1)
        worker.push()
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match=r"has waited 2 s .* it waits for other workers"):
            worker.pull()
        assert_within(time.monotonic() - began_s, 10.0)
        server.stop()


def pulling(
    core: ServerCore, expected: type[Exception], session: int | None = None
) -> tuple[threading.Thread, list[Exception]]:
    """Worker 0's pull, which waits for worker 1's push, in lock-step; and what it has raised."""
    raised: list[Exception] = []

    def waits() -> None:
        try:
            core.pull(0, 1, 1, core.buffers(), session=session)
        except expected as error:
            raised.append(error)

    waiting = threading.Thread(target=waits)
    waiting.start()
    time.sleep(0.1)
    return waiting, raised


def test_a_pull_ends_when_the_worker_has_a_later_connection() -> None:
    """Else a thread of each earlier connection waits until the others have pushed."""
    core, model = core_of_two()
    for worker in (0, 1):
        join(core, model, worker)
    core.push(0, 1, 1, core.buffers())
    waiting, raised = pulling(core, ConnectionAbortedError, session=1)
    assert waiting.is_alive()
    join(core, model, 0, session=7)
    waiting.join(30)
    assert len(raised) == 1


class Breaks(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("it broke")


def test_after_a_step_that_failed_nothing_is_answered() -> None:
    core, model = core_of_two(Breaks)
    for worker in (0, 1):
        join(core, model, worker)
    core.push(0, 1, 1, core.buffers())
    waiting, raised = pulling(core, RuntimeError)
    for call in (core.push, core.pull):
        with pytest.raises(RuntimeError, match="a step of the optimizer has failed: it broke"):
            call(1, 2, 1, core.buffers())
    waiting.join(30)
    assert len(raised) == 1, "a pull was answered with the parameters of a step that failed"


def test_a_step_that_fails_when_an_absent_worker_is_given_up_ends_the_server() -> None:
    model = Counter()
    server = pycomm.ParameterServer(
        model, Breaks(model.parameters(), lr=1.0), listen="127.0.0.1:0", workers=2, rejoin=0.2
    )
    with (
        pytest.raises(RuntimeError, match=r"a step of the optimizer failed .*: it broke"),
        serving(server) as address,
    ):
        workers = [Counter() for _ in range(2)]
        clients = [
            ParameterClient(each, servers=address, worker=number)
            for number, each in enumerate(workers)
        ]
        workers[0].count.grad = torch.ones(1)
        clients[0].push()
        with contextlib.suppress(InterruptedError), clients[1]:
            raise InterruptedError  # no goodbye


def test_a_last_answer_waits_for_a_slow_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    done = client._done
    answers: list[Any] = []

    def late(session: Any, clock: int) -> Any:
        time.sleep(0.5)  # the server has sent its answer, and would end the connection
        answers.append(done(session, clock))
        return answers[-1]

    with serving(counter_server()) as address:
        model = Counter()
        worker = ParameterClient(model, servers=address, worker=0)
        assert count(worker, model, 1) == 1
        monkeypatch.setattr(client, "_done", late)
        worker.close()
    assert len(answers) == 1, "the answer to the goodbye was lost"


@pytest.mark.parametrize("kind", ["DiLoCo", "StreamingDiLoCo"])
def test_a_saved_state_shares_no_tensor_with_training(kind: str) -> None:
    torch.distributed.init_process_group(
        "pycomm", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = nn.Linear(2, 1, bias=False)
        local = getattr(pycomm, kind)(model, sync_every=1)

        def train() -> None:
            with torch.no_grad():
                model.weight += 1.0
            local.step()

        train()
        state = local.state_dict()
        weights = model.weight.detach().clone()
        kept = copy.deepcopy(state)
        results = []
        for _ in range(3):
            local.load_state_dict(state)
            with torch.no_grad():
                model.weight.copy_(weights)
            train()
            results.append(model.weight.detach().clone())
        assert all(torch.equal(each, results[0]) for each in results)
        assert str(state) == str(kept)
    finally:
        torch.distributed.destroy_process_group()

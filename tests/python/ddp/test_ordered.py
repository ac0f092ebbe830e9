"""``comm_hooks.ordered``: one bucket's chain at a time, on any backend; mostly on gloo.

Annotations are not postponed here: torch compares a hook's with its own classes.
"""

import gc
import hashlib
import threading
import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import TORCH_DDP, run_python, run_ranks
from time_bound import assert_within
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pycomm.comm_hooks import ordered

WIDTH = 64


def make_model() -> DistributedDataParallel:
    """Five layers above the cap of a bucket: one bucket in the first step, five later."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)]
    return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)


def train(model: DistributedDataParallel, rank: int, steps: int) -> str:
    """Digest of all parameters after ``steps``."""
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def powersgd_state() -> Any:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1.0
    )


def train_with_ordered_powersgd(rank: int, world_size: int, steps: int) -> str:
    model = make_model()
    model.register_comm_hook(powersgd_state(), ordered(powerSGD_hook.powerSGD_hook))
    return train(model, rank, steps)


@pytest.mark.parametrize("world_size", [2, 3])
def test_powersgd_with_five_buckets_on_gloo(world_size: int) -> None:
    digests = run_ranks(
        world_size, train_with_ordered_powersgd, args=(10,), backend="gloo", preload=TORCH_DDP
    ).values()
    assert len(set(digests)) == 1


def same_with_and_without(rank: int, world_size: int) -> tuple[str, str]:
    digests = []
    for wrap in (ordered, lambda hook: hook):
        model = make_model()
        model.register_comm_hook(None, wrap(default_hooks.allreduce_hook))
        digests.append(train(model, rank, 4))
    return digests[0], digests[1]


def test_the_numbers_are_the_hooks_own() -> None:
    (first, second), *_ = run_ranks(
        2, same_with_and_without, backend="gloo", preload=TORCH_DDP
    ).values()
    assert first == second


def chains_and_overlap(rank: int, world_size: int) -> dict[str, Any]:
    events: list[tuple[str, int, str]] = []
    all_submitted = threading.Event()
    submitted: list[str] = []
    group = cast(dist.ProcessGroup, dist.group.WORLD)

    def slow_hook(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        # Nothing begins before the last bucket is handed in: a wrapper that waited would hang.
        assert all_submitted.wait(30)
        thread = threading.current_thread().name
        events.append(("begin", bucket.index(), thread))
        future = default_hooks.allreduce_hook(group, bucket)

        def end(done: Future[torch.Tensor]) -> torch.Tensor:
            events.append(("end", bucket.index(), thread))
            return done.value()

        return future.then(end)

    wrapped = ordered(slow_hook)

    def watching(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        future = wrapped(state, bucket)
        submitted.append(threading.current_thread().name)
        if bucket.is_last():
            all_submitted.set()
        return future

    model = make_model()
    model.register_comm_hook(None, watching)
    train(model, rank, 1)
    events.clear()
    submitted.clear()
    all_submitted.clear()
    train(model, rank, 1)
    return {"events": events, "submitted": submitted}


@pytest.mark.needs_native
def test_backward_goes_on_and_chains_never_overlap() -> None:
    for seen in run_ranks(2, chains_and_overlap, preload=TORCH_DDP).values():
        assert len(seen["submitted"]) == 5
        phases = [phase for phase, _, _ in seen["events"]]
        assert phases == ["begin", "end"] * 5
        assert [index for phase, index, _ in seen["events"] if phase == "end"] == [0, 1, 2, 3, 4]
        (thread,) = {thread for _, _, thread in seen["events"]}
        assert thread == "pycomm-ordered-hook" and thread not in seen["submitted"]


def fail_in_hook(rank: int, world_size: int) -> str:
    def bad_hook(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        raise KeyError("the hook's own mistake")

    model = make_model()
    model.register_comm_hook(None, ordered(bad_hook))
    try:
        train(model, rank, 1)
    except Exception as error:
        return str(error)
    return "nothing was raised"


def test_the_hooks_exception_reaches_backward() -> None:
    for text in run_ranks(1, fail_in_hook, backend="gloo", preload=TORCH_DDP).values():
        assert "the hook's own mistake" in text


class StandIn:
    """What the wrapper asks of a bucket."""

    def buffer(self) -> torch.Tensor:
        return torch.ones(3)


BUCKET = cast(GradBucket, StandIn())


def doubled(state: Any, bucket: Any) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer() * 2)
    return future


def test_the_thread_ends_with_its_hook() -> None:
    wrapped = ordered(doubled)
    assert wrapped(None, BUCKET).wait().tolist() == [2.0, 2.0, 2.0]
    (thread,) = [each for each in threading.enumerate() if each.name == "pycomm-ordered-hook"]
    del wrapped
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_gradient_mode_is_the_callers() -> None:
    seen = []

    def hook(state: Any, bucket: Any) -> Future[torch.Tensor]:
        seen.append(torch.is_grad_enabled())
        return doubled(state, bucket)

    wrapped = ordered(hook)
    with torch.no_grad():
        wrapped(None, BUCKET).wait()
    wrapped(None, BUCKET).wait()
    assert seen == [False, True]


def test_one_failure_does_not_stop_the_next_bucket() -> None:
    def hook(state: Any, bucket: Any) -> Future[torch.Tensor]:
        if state == "fail":
            raise ValueError("wanted")
        return doubled(state, bucket)

    wrapped = ordered(hook)
    failed = wrapped("fail", BUCKET)
    assert wrapped("go on", BUCKET).wait().tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(Exception, match="wanted"):
        failed.wait()


def ends(future: Future[torch.Tensor]) -> bool:
    """Within ten seconds."""
    deadline_s = time.monotonic() + 10
    while not future.done() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return future.done()


def failing(state: Any, bucket: Any) -> Future[torch.Tensor]:
    raise ValueError("wanted")


def test_a_bucket_that_cannot_be_described_fails_all_the_same() -> None:
    def describe(bucket: Any) -> str:
        raise KeyError("no name")

    wrapped = ordered(failing, describe=describe)
    for _ in range(2):
        failed = wrapped(None, BUCKET)
        assert ends(failed)
        with pytest.raises(Exception, match="wanted"):
            failed.wait()


def test_a_thread_that_cannot_start_is_started_by_the_next_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    wrapped = ordered(doubled)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            wrapped(None, BUCKET)
    reduced = wrapped(None, BUCKET)
    assert ends(reduced)
    assert reduced.wait().tolist() == [2.0, 2.0, 2.0]


def test_the_name_and_signature_stay_the_hooks() -> None:
    wrapped: Any = ordered(powerSGD_hook.powerSGD_hook)
    assert wrapped.__qualname__ == "powerSGD_hook"


FORKED = """
import os, signal, sys, torch
from torch.futures import Future
import pycomm
from pycomm.comm_hooks import ordered

class Bucket:
    def buffer(self):
        return torch.ones(3)

def doubled(state, bucket):
    future = Future()
    future.set_result(bucket.buffer() * 2)
    return future

wrapped = ordered(doubled)
wrapped(None, Bucket()).wait()  # its thread runs
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        wrapped(None, Bucket()).wait()
    except pycomm.errors.ForkedError as error:
        assert "spawn" in str(error), error
        sys.exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_of_fork_is_refused() -> None:
    result = run_python(["-c", FORKED], timeout_s=60)
    assert result.returncode == 7, result


EXIT_WITH_A_HOOK_THAT_NEVER_ENDS = """
import threading, time, torch
from torch.futures import Future
from pycomm.comm_hooks import ordered

class Bucket:
    def buffer(self):
        return torch.ones(1)

entered = threading.Event()

def stuck(state, bucket):
    entered.set()
    return Future()  # nobody completes it

wrapped = ordered(stuck)
wrapped(None, Bucket())
entered.wait()
print(time.monotonic())
"""


@pytest.mark.time_bound
@pytest.mark.ci
def test_exit_is_bounded_even_if_the_hook_never_ends() -> None:
    result = run_python(["-c", EXIT_WITH_A_HOOK_THAT_NEVER_ENDS], timeout_s=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert_within(time.monotonic() - float(result.stdout), 20)

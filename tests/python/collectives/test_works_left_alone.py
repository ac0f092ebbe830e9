"""Programs that do not wait for a Work, or do not leave its tensors alone."""

from __future__ import annotations

import gc
import inspect
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import fault_ranks
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

pytestmark = pytest.mark.needs_native

LONG_S = 20.0  # far above what any of these takes, and far below the group's timeout


def synchronous(tensor: torch.Tensor) -> Any:
    """A collective as torch's functions begin it, which wait at once; this program does not."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([tensor], options)  # type: ignore[union-attr]


def until(condition: Any) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, "it never ended"
        time.sleep(0.001)


INTERRUPTED = inspect.unwrap(dist.all_reduce).__code__


class Late(Exception):
    pass


def handler(_: int, frame: FrameType | None) -> None:
    """Raises in torch's all_reduce; at any other place it comes again, as before the call began."""
    if frame is None or frame.f_code is not INTERRUPTED:
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        return
    raise Late


def dropped(rank: int, size: int) -> None:
    """What nobody waits for is written all the same, in any order of memory."""

    def full(value: float) -> torch.Tensor:
        return torch.full((50, 60), value).t()

    def reduced(wanted: float = 3) -> None:
        """What ``tensor`` becomes, and then every rank has it."""
        until(lambda: tensor.eq(wanted).all())
        dist.barrier()

    tensor = full(rank + 1.0)
    dist.all_reduce(tensor, async_op=True)
    reduced()
    work = dist.all_reduce(tensor.fill_(rank + 1.0), async_op=True)
    dist.barrier()  # it has ended here
    del work
    reduced()
    synchronous(tensor.fill_(rank + 1.0))
    reduced()
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(tensor.fill_(rank + 1.0), 1, async_op=True)
    del manager
    reduced(2)
    outputs = [full(0.0) for _ in range(size)]
    dist.all_gather(outputs, tensor.fill_(rank + 1.0), async_op=True)
    tensor = outputs[1 - rank]
    reduced(2.0 - rank)
    if rank == 0:
        dist.irecv(tensor.fill_(0.0), src=1)
    else:
        dist.send(tensor.fill_(7.0), dst=0)
    reduced(7)


def asked(rank: int, size: int) -> None:
    """Each question is enough for a Work that nobody waits for, and then the outputs are there."""
    for tensor in (torch.ones(4), torch.ones(60, 50).t(), torch.ones(1_000_000)):
        work = synchronous(tensor.fill_(rank + 1.0))
        until(work.is_success)
        assert tensor.eq(3).all()
        dist.barrier()  # the tensor may be whole before the operation has ended
        work = synchronous(tensor.fill_(rank + 1.0))
        until(lambda work=work, tensor=tensor: work.exception() is None and tensor.eq(3).all())
        dist.barrier()


def not_waited_for(rank: int, size: int) -> None:
    for numel in (4, 1_000_000):
        tensor = torch.full((numel,), rank + 1.0)
        work = synchronous(tensor)
        until(work.is_completed)
        assert tensor.eq(3).all()
        future = synchronous(tensor.fill_(rank + 1.0)).get_future()
        until(future.done)
        assert tensor.eq(3).all()
        tensor.fill_(rank + 1.0)
        del work, future
        synchronous(tensor)  # dropped
        until(lambda tensor=tensor: tensor.eq(3).all())
        dist.barrier()


def interrupted_before_wait(rank: int, size: int) -> None:
    """The handler runs between the call into C++ and wait(), as the copy in the call takes long."""
    tensor = torch.ones(4000, 4000).t()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        signal.signal(signal.SIGALRM, handler)
        with pytest.raises(Late):
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            dist.all_reduce(tensor)
        # From here on this rank has nothing to do with pycomm.
        until(lambda: tensor.eq(2).all())
        until(lambda: store.check(["rank 1 is through"]))
    else:
        dist.all_reduce(tensor)
        store.set("rank 1 is through", "")


def starts_processes(rank: int, size: int) -> None:
    """A process that a callback or a store starts ends on SIGTERM, as of any other thread."""
    masks: list[Any] = []

    def look(_: Any) -> None:
        masks.append(
            (threading.current_thread().name, signal.pthread_sigmask(signal.SIG_BLOCK, []))
        )

    if rank == 1:
        time.sleep(0.2)  # so that rank 0's callback runs on a thread of the library
    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(look).wait()
    dist.barrier()
    if rank == 0:
        ((thread, blocked),) = masks
        assert thread != threading.main_thread().name
        assert not blocked


def other_storage(rank: int, size: int) -> None:
    """After ``x.data = y`` an operation on x ends in the memory that it began in."""
    for numel in (64, 1024, 100_000):
        for what in ("message", "collective", "list"):
            tensor = torch.zeros(numel)
            kept = torch.ones(0).set_(tensor.untyped_storage(), 0, (numel,))
            if rank == 0:
                storage = kept.untyped_storage()
                before = torch._C._storage_Use_Count(storage._cdata)
                if what == "message":
                    work = dist.irecv(tensor, src=1)
                elif what == "collective":
                    work = dist.broadcast(tensor, src=1, async_op=True)
                else:
                    other = torch.zeros(numel)
                    work = dist.all_gather([other, tensor], torch.zeros(numel), async_op=True)
                tensor.data = torch.full((numel,), 5.0)
                uses = torch._C._storage_Use_Count(storage._cdata)
                assert uses >= before, f"nothing but this program holds the memory of the {what}"
                dist.distributed_c10d._get_default_store().set(f"{numel} {what}", "")
            else:
                until(
                    lambda key=f"{numel} {what}": dist.distributed_c10d._get_default_store().check(
                        [key]
                    )
                )
                tensor.fill_(2.0)
                if what == "message":
                    work = dist.isend(tensor, dst=0)
                elif what == "collective":
                    work = dist.broadcast(tensor, src=1, async_op=True)
                else:
                    other = [torch.zeros(numel) for _ in range(2)]
                    work = dist.all_gather(other, tensor, async_op=True)
            work.wait()
            if rank == 0:
                assert kept.eq(2).all() and tensor.eq(5).all()


def other_storage_behind_an_empty_part(rank: int, size: int) -> None:
    """The same for a list whose first tensor is empty: its own memory is not what moves."""
    store = dist.distributed_c10d._get_default_store()
    for what in ("sent", "received"):
        tensor = torch.full((1 << 20,), 2.0)
        kept = torch.ones(0).set_(tensor.untyped_storage(), 0, tensor.shape)
        nothing = [torch.empty(0), torch.empty(0)]
        if rank == 0:
            storage = kept.untyped_storage()
            before = torch._C._storage_Use_Count(storage._cdata)
            lists = ([torch.empty(0), tensor], nothing)
            given, taken = lists if what == "sent" else lists[::-1]
            work = dist.all_to_all(taken, given, async_op=True)
            tensor.data = torch.empty(0)
            uses = torch._C._storage_Use_Count(storage._cdata)
            assert uses >= before, f"nothing but this program holds the memory that is {what}"
            store.set(f"empty {what}", "")
        else:
            until(lambda key=f"empty {what}": store.check([key]))
            tensor.fill_(5.0)
            lists = (nothing, [tensor, torch.empty(0)])
            given, taken = lists if what == "sent" else lists[::-1]
            work = dist.all_to_all(taken, given, async_op=True)
        work.wait()
        assert kept.eq(2 if what == "sent" else 5).all(), what


def too_small_storage(rank: int, size: int) -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(rank * 400)
    for call in (dist.all_reduce, lambda each: dist.send(each, 1 - rank)):
        with pytest.raises(Exception, match="storage has") as caught:
            call(tensor)
        assert type(caught.value).__name__ == "InvalidArgumentError"
    dist.barrier()


def tied_tensors(rank: int, size: int) -> None:
    for numel in (1_000, 100_000, 1_048_576):
        tensor = torch.full((numel,), rank + 1.0)
        dist.all_reduce_coalesced([tensor, tensor])
        assert tensor.eq(3).all()
        tensor.fill_(rank + 1.0)
        other = torch.full((5,), rank + 1.0)
        with dist._coalescing_manager():
            dist.all_reduce(tensor)
            dist.all_reduce(other)
            dist.all_reduce(tensor.view(-1))
        assert tensor.eq(3).all() and other.eq(3).all()
    # Tied on one rank only: the others would sum other pairs.
    for ties in (0, 1):
        group = dist.new_group([0, 1])
        tied, other = torch.ones(10), torch.ones(10)
        tensors = [tied, tied] if rank == ties else [tied, other]
        with pytest.raises(Exception, match="The ranks disagree about the operation #1"):
            dist.all_reduce_coalesced(tensors, group=group)
            dist.barrier(group=group)
    # Not exact twins: refused, and nothing has begun.
    whole = torch.ones(100)
    with pytest.raises(Exception, match="share memory"):
        dist.all_reduce_coalesced([whole, whole[50:]])
    with pytest.raises(Exception, match="share memory"), dist._coalescing_manager():
        dist.reduce_scatter_tensor(whole[:10], torch.ones(20))
        dist.reduce_scatter_tensor(whole[40:50], whole[30:50])
        dist.reduce_scatter_tensor(whole[60:70], whole[5:25])  # reads what the first one writes
    with pytest.raises(Exception, match="share memory"), dist._coalescing_manager():
        dist.all_gather_into_tensor(whole[:20], torch.ones(10))
        dist.all_gather_into_tensor(whole[10:30], torch.ones(10))
    cpu = torch.device("cpu")
    dist.group.WORLD._start_coalescing(cpu)  # type: ignore[union-attr]
    dist.all_reduce(whole)
    for again in (whole[:50], whole):  # an exact twin, too: the first one has begun
        with pytest.raises(Exception, match="share memory"):
            dist.all_reduce(again)
    twin = torch.ones(10)
    with pytest.raises(Exception, match="share memory"):
        dist.all_reduce_coalesced([twin, twin])
    with pytest.raises(Exception, match="without startCoalescing"):  # torch would not call it
        dist.group.WORLD._end_coalescing(cpu)  # type: ignore[union-attr]
    assert whole.eq(2).all() and twin.eq(1).all()
    dist.barrier()


def exits_of_managers_that_are_refused(rank: int, size: int) -> None:
    """Calls behind one are in no manager any more, and those that began within go on."""
    whole = torch.ones(100)

    def reduce() -> None:
        dist.all_reduce(whole[:5])
        dist.all_reduce(whole[:5])

    def gather() -> None:
        dist.all_gather_into_tensor(whole[:20], torch.ones(10))
        dist.all_gather_into_tensor(whole[10:30], torch.ones(10))

    def scatter() -> None:
        dist.reduce_scatter_tensor(whole[:10], torch.ones(20))
        dist.reduce_scatter_tensor(whole[60:70], whole[5:25])

    for refused in (reduce, gather, scatter):
        begun = torch.full((30, 40), rank + 1.0).t()
        with (
            pytest.raises(Exception, match="share memory"),
            dist._coalescing_manager(device=torch.device("cpu")),
        ):
            dist.broadcast(begun, 1, async_op=True)
            refused()
        assert whole.eq(1).all()
        tensor = torch.full((10,), rank + 1.0)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
        assert tensor.eq(6).all()
        until(lambda begun=begun: begun.eq(2).all())
        dist.barrier()


def sources_that_are_no_ranks(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    for peer in (-1, -2, size, -(2**31)):
        for call in (backend.recv, backend.send):
            with pytest.raises(Exception, match=r"not in \[0, 2\)") as caught:
                call([torch.ones(2)], peer, 0)
            assert type(caught.value).__name__ == "InvalidArgumentError"
    if rank == 0:
        received = torch.zeros(2)
        assert dist.recv(received) == 1  # any source
        assert received.eq(7).all()
    else:
        dist.send(torch.full((2,), 7.0), 0)


@pytest.mark.parametrize(
    "program",
    [
        dropped,
        asked,
        not_waited_for,
        interrupted_before_wait,
        starts_processes,
        other_storage,
        other_storage_behind_an_empty_part,
        too_small_storage,
        tied_tensors,
        exits_of_managers_that_are_refused,
        sources_that_are_no_ranks,
    ],
)
def test_works_left_alone(program: Any) -> None:
    run_ranks(2, program, timeout_s=90)


def sparse(rank: int, rows: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.arange(rows)[None], torch.full((rows, 16), rank + 1.0), (rows, 16)
    )


def sparse_without_memory(rank: int, size: int) -> None:
    """A rank's own failure between two steps of a sum ends the others at once."""
    tensor = sparse(rank, 1_000_000)
    dist.all_reduce(sparse(rank, 10))
    if rank == 1:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
    begin = time.monotonic()
    with pytest.raises(Exception) as caught:
        dist.all_reduce(tensor)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert time.monotonic() - begin < LONG_S
    error: Any = caught.value
    assert type(error).__name__ == "OutOfMemoryError" and error.peer == 1, error
    assert "Rank 1 on" in str(error) and "frame #" not in str(error), error


def sparse_of_wide_unsigned(rank: int, size: int) -> None:
    tensor = torch.sparse_coo_tensor([[0]], torch.ones(1, dtype=torch.uint16), (2,))
    with pytest.raises(Exception, match="uint16") as caught:
        dist.all_reduce(tensor)
    assert type(caught.value).__name__ == "UnsupportedError"
    dist.barrier()


def futures_in_a_child(rank: int, size: int) -> None:
    done = dist.all_reduce(torch.ones(4), async_op=True)
    done.wait()
    pending = dist.irecv(torch.ones(4), src=1 - rank)
    child = os.fork()
    if child == 0:
        try:
            assert done.get_future().wait()[0].eq(2).all()
            with pytest.raises(Exception) as caught:
                pending.get_future().wait()
            assert "fork" in str(caught.value)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert exit_code(child) == 0
    dist.isend(torch.ones(4), dst=1 - rank)
    pending.wait()


def exit_code(child: int) -> int:
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid != 0:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hung")


class SlowToCopy(torch.Tensor):
    """Copying into it is Python code, which takes until somebody has asked."""

    copies = threading.Event()
    asked = threading.Event()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            cls.copies.set()
            cls.asked.wait(LONG_S)
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def asked_while_another_thread_copies(rank: int, world_size: int) -> None:
    """is_completed() waits for no thread: the one that copies may need the interpreter's lock."""
    tensor = torch.ones(64, 64).t().as_subclass(SlowToCopy)
    work: Any = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    assert SlowToCopy.copies.wait(LONG_S)
    assert not work.is_completed()
    SlowToCopy.asked.set()
    future.wait()
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert torch.equal(tensor.as_subclass(torch.Tensor), torch.full((64, 64), 2.0))


def part_of_a_manager_that_failed(rank: int, world_size: int) -> None:
    """The manager has raised, so the program may use its tensors again: no part is written."""
    SlowToCopy.asked.set()
    parts = [torch.full((50, 60), rank + 1.0).t() for _ in range(2)]
    last = torch.ones(5)
    if rank == 1:
        for part in [*parts, last]:
            dist.broadcast(part, 1)
        with pytest.raises(Exception, match="disagree"):
            dist.broadcast(last, 1)
        return
    parts = [part.as_subclass(SlowToCopy) for part in parts]
    works: list[Any] = []
    with (
        pytest.raises(Exception, match="disagree"),
        dist._coalescing_manager(device=torch.device("cpu")),
    ):
        works += [dist.broadcast(part, 1, async_op=True) for part in parts]
        dist.broadcast(last, 1, async_op=True).wait()  # type: ignore[union-attr]
        dist.broadcast(torch.ones(9), 1, async_op=True)
    kept = works.pop()
    del works
    gc.collect()
    assert not SlowToCopy.copies.wait(1)
    with pytest.raises(Exception, match="disagree"):
        kept.wait()
    assert not SlowToCopy.copies.is_set()


@pytest.mark.parametrize(
    "program",
    [
        asked_while_another_thread_copies,
        part_of_a_manager_that_failed,
        sparse_without_memory,
        sparse_of_wide_unsigned,
        futures_in_a_child,
    ],
)
def test_works_in_trouble(program: Any) -> None:
    run_ranks(2, program, timeout_s=90)


def sum_of_a_list(rank: int) -> None:
    dist.all_reduce_coalesced([torch.ones(100_000), torch.ones(1000)])


def sparse_sum(rank: int) -> None:
    dist.all_reduce(sparse(rank, 1000))


def sparse_sum_in_a_callback(rank: int) -> None:
    """Where a Work counts among those of its callback, and its constructor may throw."""
    caught: list[BaseException] = []

    def again(_: Any) -> None:
        try:
            sparse_sum(rank)
        except BaseException as error:
            caught.append(error)

    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(again).wait()
    if caught:
        raise caught[0]


def without_memory_for(rank: int, size: int, store: str, point: str, program: Any) -> None:
    """Rank 1 has none behind the first operation of a call: the others raise at once, and what is
    under way ends before its memory is freed.
    """
    fault_ranks.use_fault_build()
    dist.init_process_group("pycomm", init_method=store, rank=rank, world_size=size)
    from pycomm._native import loader

    native: Any = loader.load()
    dist.barrier()
    if rank == 1:
        native.arm_fault_points(f"{point}:nomem")
    begin = time.monotonic()
    with pytest.raises(Exception) as caught:
        program(rank)
    assert time.monotonic() - begin < LONG_S
    if rank == 1:
        ((_, _, strikes),) = native.fault_points()
        assert strikes == 1
        native.arm_fault_points("")
    error: Any = caught.value
    assert type(error).__name__ == "OutOfMemoryError", repr(error)
    assert rank == 1 or error.peer == 1, error
    del caught, error
    gc.collect()
    kept = [torch.full((100_000,), 7.0) for _ in range(20)]  # where the call's memory was
    with pytest.raises(Exception, match="memory"):
        dist.all_reduce(torch.ones(4))
    assert all(each.eq(7).all() for each in kept)


@pytest.mark.ci
@pytest.mark.faults
@pytest.mark.usefixtures("fault_build")
@pytest.mark.parametrize(
    ("point", "program"),
    [
        ("group.start:2", sum_of_a_list),
        ("group.start:2", sparse_sum),
        ("group.start:3", sparse_sum),
        ("issue.index:2", sparse_sum_in_a_callback),
    ],
    ids=["second of a list", "first gather", "second gather", "the Work's constructor"],
)
def test_a_call_that_fails_behind_its_first_start(point: str, program: Any, tmp_path: Path) -> None:
    args = (f"file://{tmp_path}/store", point, program)
    run_ranks(2, without_memory_for, args=args, init="none", timeout_s=90)


def second_of_a_list_in_other_orders(rank: int, size: int, store: str) -> None:
    """The call has raised, so the program may use its tensors again: nothing copies into them."""
    fault_ranks.use_fault_build()
    dist.init_process_group("pycomm", init_method=store, rank=rank, world_size=size)
    from pycomm._native import loader

    native: Any = loader.load()
    SlowToCopy.asked.set()
    tensors = [torch.ones(64, 64).t().as_subclass(SlowToCopy) for _ in range(2)]
    native.arm_fault_points("group.start:2:nomem")
    with pytest.raises(Exception, match="memory"):
        dist.all_reduce_coalesced(tensors)
    native.arm_fault_points("")
    assert not SlowToCopy.copies.wait(1)


@pytest.mark.ci
@pytest.mark.faults
@pytest.mark.usefixtures("fault_build")
def test_the_outputs_of_a_call_that_failed_are_not_written(tmp_path: Path) -> None:
    args = (f"file://{tmp_path}/store",)
    run_ranks(1, second_of_a_list_in_other_orders, args=args, init="none", timeout_s=90)


AT_EXIT = """
import atexit, torch, torch.distributed as dist

def late():
    for program in (
        lambda: dist.all_reduce(torch.ones(4), async_op=True).get_future().wait(),
        lambda: dist.all_reduce(torch.eye(3).to_sparse()),
    ):
        try:
            program()
        except Exception as error:
            print(type(error).__name__, flush=True)
    print(done.get_future().wait()[0].tolist(), flush=True)

atexit.register(late)  # runs after pycomm's own handler, which comes later
dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
done = dist.all_reduce(torch.ones(2), async_op=True)
done.wait()
"""


def test_futures_after_the_shutdown() -> None:
    """No future of a handler that runs after pycomm's own waits for a thread that has ended."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split("\n")[:3] == ["ShutDownError", "ShutDownError", "[1.0, 1.0]"], done
    assert done.returncode == 0, done

"""Callbacks of futures that issue collectives: every operation has one id on all ranks.

csrc/c10d/named_future.h has the rule. The ranks sleep at random, each in other places.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from callback_programs import LINES, RANKS, random_program, run_programs, text
from ranks import run_ranks, start_ranks

import pycomm

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]

TIMES = 12
ROWS = {
    "in the same group": """
        f1 = sum(world)
        f2 = then f1:
            f3 = sum(world)
            wait f3
        f4 = sum(world)
    """,
    "in another group": """
        f1 = sum(row)
        f2 = then f1:
            f3 = sum(col)
            wait f3
        f4 = sum(row)
        f5 = then f4:
            f6 = sum(col)
            wait f6
        f7 = sum(row)
        f8 = then f7:
            f9 = sum(col)
    """,
    "in the world": """
        f1 = sum(row)
        f2 = then f1:
            f3 = sum(world)
            wait f3
        f4 = sum(col)
        f5 = then f4:
            f6 = sum(world)
    """,
    "of leaders, then of all": """
        f1 = sum(row)
        f2 = then f1:
            f3 = leaders()
            wait f3
        f4 = sum(row)
        f5 = then f4:
            f6 = leaders()
            f7 = sum(world)
    """,
    "three deep": """
        f1 = sum(row)
        f2 = then f1:
            f3 = sum(col)
            f4 = then f3:
                f5 = sum(world)
                f6 = then f5:
                    f7 = sum(row)
                    wait f7
                wait f6
            wait f4
        f8 = sum(row)
    """,
    "of collected futures": """
        f1 = sum(row)
        f2 = sum(col)
        f3 = all f1 f2
        f4 = then f3:
            f5 = sum(world)
            wait f5
        f6 = all f2 f1
        f7 = then f6:
            f8 = sum(col)
        f9 = all f1 f2
        f10 = then f9:
            f11 = sum(world)
    """,
    "one after another": """
        f1 = sum(row)
        f2 = then f1:
            f3 = sum(col)
            f4 = then f1:
                f5 = sum(world)
        f6 = then f2:
            f7 = sum(col)
            wait f7
        f8 = then f1:
            f9 = sum(world)
        f10 = then f6:
            f11 = sum(row)
    """,
    "two at once in a chain": """
        chain:
            f1 = sum(world)
            f2 = then f1:
                f3 = sum(world)
                wait f3
            f4 = sum(world)
            f5 = then f4:
                f6 = sum(world)
                wait f6
    """,
    "of messages in a ring": """
        f1 = ring()
        f2 = then f1:
            f3 = sum(world)
            wait f3
        f4 = ring()
        f5 = then f4:
            f6 = ring()
            f7 = then f6:
                f8 = sum(col)
                wait f8
    """,
}


@pytest.mark.parametrize("transport", rings.first_of(["shm", "tcp"]))
def test_each_way_of_issuing(transport: str) -> None:
    programs = [program for program in ROWS.values() for _ in range(TIMES)]
    run_ranks(RANKS, run_programs, args=(programs, 0.01), pg_options={"transport": transport})


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_random_programs(transport: str, request: pytest.FixtureRequest) -> None:
    """`--callbacks 5000` runs so many, half of them here; `--callbacks 7:8` runs one alone."""
    first, _, last = request.config.getoption("--callbacks").rpartition(":")
    every = range(int(first or 0), int(last))
    seeds = [seed for seed in every if len(every) == 1 or seed % 2 == (transport == "tcp")]
    pause_s = 0.004 if len(every) <= 500 else 0.02
    run_ranks(
        RANKS,
        run_programs,
        args=(seeds, pause_s),
        pg_options={"transport": transport},
        timeout_s=60 + 0.5 * len(seeds),
    )


def test_a_random_program_is_short() -> None:
    lines = [len(text(random_program(seed)).splitlines()) for seed in range(500)]
    assert max(lines) <= LINES
    assert sum(lines) > 5 * len(lines)


def late_then(rank: int, world_size: int) -> None:
    """Rank 0 adds its callback when the future is complete, rank 1 before."""
    for _ in range(TIMES):
        future = dist.all_reduce(torch.ones(1000), async_op=True).get_future()
        if rank == 0:
            wait_until_done(future)

        def again(done: Any) -> torch.Tensor:
            dist.all_reduce(done.value()[0])
            return done.value()[0]

        result = future.then(again)
        counted = torch.ones(2)
        dist.all_reduce(counted)
        assert counted.eq(world_size).all()
        assert result.wait().eq(world_size**2).all()


def wait_until_done(future: Any) -> None:
    """Without saying so: Future.wait() lets later callbacks run in place."""
    end_s = time.monotonic() + 60
    while not future.done():
        assert time.monotonic() < end_s
        time.sleep(0.0005)


@pytest.mark.parametrize("transport", rings.first_of(["shm", "tcp"]))
def test_a_callback_that_one_rank_adds_late(transport: str) -> None:
    run_ranks(2, late_then, pg_options={"transport": transport})


def threads_of_callbacks(rank: int, world_size: int) -> None:
    def thread_of(future: Any, add: str) -> int:
        ran: list[int] = []
        ended = threading.Event()

        def callback(_: Any) -> None:
            ran.append(threading.get_ident())
            ended.set()

        getattr(future, add)(callback)
        assert ended.wait(60)
        return ran[0]

    here = threading.get_ident()
    for add in ("then", "add_done_callback"):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        future = work.get_future()
        wait_until_done(future)
        assert thread_of(future, add) != here  # complete, but nobody has waited
        result = future.then(lambda done: done.value())
        wait_until_done(result)
        assert thread_of(result, add) != here
        result.wait()  # so what it follows is complete, too
        assert thread_of(future, add) == thread_of(result, add) == here
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        assert thread_of(work.get_future(), add) == here
        collected = torch.futures.collect_all([work.get_future(), future])
        collected.wait()
        assert thread_of(collected, add) == here


def test_a_callback_runs_in_place_only_if_the_program_has_waited() -> None:
    run_ranks(2, threads_of_callbacks)


def send_behind_a_callback(rank: int, world_size: int) -> None:
    """The callback blocks for a sum that the other rank enters only when this one has sent."""
    other = 1 - rank
    for _ in range(TIMES):
        came = torch.zeros(3)
        if rank == 1:  # its message is there before the callback is added
            dist.send(torch.ones(3), other)
        future = dist.irecv(came, other).get_future()
        if rank == 0:
            wait_until_done(future)

        def total(done: Any) -> torch.Tensor:
            dist.all_reduce(done.value()[0])
            return done.value()[0]

        result = future.then(total)
        if rank == 0:
            dist.send(torch.ones(3), other)
        assert result.wait().eq(2).all()


def test_a_callback_that_blocks_does_not_hold_the_thread_that_adds_it() -> None:
    run_ranks(2, send_behind_a_callback)


def sparse_sums_in_a_chain(rank: int, world_size: int) -> None:
    from pycomm._native import loader

    def sparse(value: float) -> torch.Tensor:
        return torch.sparse_coo_tensor([[rank, 2]], [value, 10 * value], (4,))

    def again(future: Any) -> torch.Tensor:
        total = future.value()[0].to_dense()
        time.sleep(0.002 * torch.rand(1).item())
        dist.all_reduce(total)
        return total

    for step in range(TIMES):
        with loader.native.IssueChain(7, step):
            results = [
                dist.all_reduce(sparse(value), async_op=True).get_future().then(again)
                for value in (1.0, 100.0)
            ]
            for value, result in zip((1.0, 100.0), results, strict=True):
                wanted = torch.tensor([2 * value, 2 * value, 40 * value, 0.0])
                assert torch.equal(result.wait(), wanted), (step, result.value())


@pytest.mark.parametrize("transport", rings.first_of(["shm", "tcp"]))
def test_two_sparse_sums_in_a_chain(transport: str) -> None:
    run_ranks(2, sparse_sums_in_a_chain, pg_options={"transport": transport})


def no_common_name(rank: int, world_size: int) -> None:
    rows = [dist.new_group([0]), dist.new_group([1]), dist.new_group([0, 1])]
    future = dist.all_reduce(torch.ones(5), group=rows[2], async_op=True).get_future()

    def again(done: Any) -> torch.Tensor:
        dist.all_reduce(done.value()[0])
        return done.value()[0]

    if rank == 0:
        future.then(lambda done: done.value())
        future.then(again).wait()
    else:
        future.wait()
        again(future)


def other_numbers_of_callbacks(rank: int, world_size: int) -> None:
    def again(done: Any) -> torch.Tensor:
        dist.all_reduce(done.value()[0])
        return done.value()[0]

    future = dist.all_reduce(torch.ones(5), async_op=True).get_future()
    if rank == 0:
        future.then(lambda done: done.value())
    future.then(again).wait()


def half_of(text: str, rank: int) -> str:
    """How the error calls that rank's operation."""
    mine, theirs = text.split("[code=")[0].split("; that one waits in ")
    first = int(mine.split("Rank ")[1].split()[0])
    return mine.split(" waits in ")[1] if first == rank else theirs


def test_an_error_names_the_callbacks_of_both_sides() -> None:
    """Two jobs at once, as the error takes 10 s to be certain."""
    shm, tcp = {"transport": "shm"}, {"transport": "tcp"}
    with (
        start_ranks(2, no_common_name, pg_options=shm) as one,
        start_ranks(2, other_numbers_of_callbacks, pg_options=tcp) as other,
    ):
        in_callback_or_not, other_numbers = one.collect(60), other.collect(60)
    text = in_callback_or_not.errors()[0].text
    assert "code=COLLECTIVE_MISMATCH" in text, in_callback_or_not.describe()
    assert "issued in callback 2 of all_reduce #1 in group 3" in half_of(text, 0), text
    assert " #1" in half_of(text, 1) and "callback" not in half_of(text, 1), text

    text = other_numbers.errors()[0].text
    assert "issued in callback 2 of all_reduce #1 in group 1" in half_of(text, 0), text
    assert "issued in callback 1 of all_reduce #1 in group 1" in half_of(text, 1), text


def roles(rank: int, world_size: int) -> None:
    """Ranks that were in other groups before still agree about what follows in one group."""
    dist.new_group([0])  # rank 1 makes no group here
    both = dist.new_group([0, 1], group_desc="both")

    def again(future: Any) -> torch.Tensor:
        return dist.all_reduce(future.value()[0], group=both, async_op=True).get_future().wait()[0]

    future = dist.all_reduce(torch.ones(3), group=both, async_op=True).get_future()
    assert future.then(again).then(lambda done: done.value()).wait().eq(4).all()


def test_ranks_with_other_groups_before_agree_within_a_group() -> None:
    run_ranks(2, roles)


def second_world(rank: int, world_size: int, folder: str) -> None:
    """Rank 0 has been in a job before; rank 1 has not."""
    for job in range(2):
        if job == 0 and rank != 0:
            continue
        size = 1 if job == 0 else 2
        dist.init_process_group(
            "pycomm", f"file://{folder}/{job}", rank=rank if job else 0, world_size=size
        )
        row = dist.new_group([rank] if job else [0], use_local_synchronization=True)
        future = dist.all_reduce(torch.ones(3), group=row, async_op=True).get_future()

        def again(done: Any) -> torch.Tensor:
            dist.all_reduce(done.value()[0])
            return done.value()[0]

        promise: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        promise.then(lambda _: None)
        assert future.then(again).wait().eq(size).all()
        dist.destroy_process_group()


def test_a_process_that_joins_counts_its_groups_from_there(tmp_path: Any) -> None:
    run_ranks(2, second_world, args=(str(tmp_path),), init="none")


def second_world_of_changing_members(rank: int, world_size: int, folder: str) -> None:
    """As before, and the default group of the new job has no members yet."""
    if rank == 0:
        dist.init_process_group("pycomm", f"file://{folder}/0", rank=0, world_size=1)
        dist.destroy_process_group()
    dist.init_process_group(
        "pycomm",
        f"file://{folder}/1",
        rank=rank,
        world_size=world_size,
        pg_options=pycomm.Reconfigurable(timeout=20.0),
    )
    group = dist.new_group()
    future = dist.irecv(torch.zeros(3), 1 - rank, group=group).get_future()

    def total(done: Any) -> torch.Tensor:
        dist.all_reduce(done.value()[0], group=group)
        return done.value()[0]

    result = future.then(total)
    dist.send(torch.ones(3), 1 - rank, group=group)
    assert result.wait().eq(2).all()


def test_a_default_group_without_members_counts_groups_anew(tmp_path: Any) -> None:
    run_ranks(2, second_world_of_changing_members, args=(str(tmp_path),), init="none")


def promises(rank: int, world_size: int) -> None:
    """Futures that the program completes: in callbacks that end in another order on each rank."""
    for step in range(TIMES):
        made = [torch.futures.Future() for _ in range(3)]
        works = [dist.all_reduce(torch.full((3,), 10.0**k), async_op=True) for k in range(3)]

        def pass_on(future: Any, to: Any) -> None:
            time.sleep(0.004 * torch.rand(1).item())
            to.set_result(future.value()[0])

        for work, promise in zip(works, made, strict=True):
            work.get_future().add_done_callback(
                lambda future, promise=promise: pass_on(future, promise)
            )

        def again(future: Any) -> torch.Tensor:
            return dist.all_reduce(future.value(), async_op=True).get_future().wait()[0]

        results = [promise.then(again) for promise in made]
        for k, result in enumerate(results):
            assert result.wait().eq(4 * 10.0**k).all(), (step, k)


def test_a_promise_is_named_by_the_strand_that_adds() -> None:
    run_ranks(2, promises)


def sum_later(filled: float) -> Any:
    """A callback that sums on the default group, without waiting for the sum."""
    return lambda _: dist.all_reduce(torch.full((3,), filled), async_op=True)


def promises_elsewhere(rank: int, world_size: int) -> None:
    """Threads that issue nothing add callbacks to futures of their own, rank 1 more of them."""

    def elsewhere() -> None:
        for _ in range(1 + rank):
            promise: torch.futures.Future[int] = torch.futures.Future()
            child = promise.then(lambda done: done.value() + 1)
            promise.set_result(1)
            assert child.wait() == 2

    for step in range(3):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        promise: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        result = promise.then(lambda done: dist.all_reduce(done.value())).then(
            lambda _, step=step: dist.all_reduce(torch.full((2,), 5.0 + step), async_op=True)
        )
        tensor = torch.full((3,), 1.0 + step)
        promise.set_result(tensor)
        assert tensor.eq(2.0 + 2 * step).all()
        (fives,) = result.wait().get_future().wait()
        assert fives.eq(10.0 + 2 * step).all()


def test_promises_of_threads_that_issue_nothing_refuse_nothing() -> None:
    run_ranks(2, promises_elsewhere)


def one_promise_more(rank: int, world_size: int) -> None:
    """Rank 0 adds a callback that issues nothing before those that do."""
    count = 3 if rank == 0 else 2
    made: list[Any] = [torch.futures.Future() for _ in range(count)]
    quiet = [lambda _: None] if rank == 0 else []
    results = [
        promise.then(callback)
        for promise, callback in zip(made, [*quiet, sum_later(1.0), sum_later(10.0)], strict=True)
    ]
    for promise in made:
        promise.set_result(0)
    sums = [result.wait().get_future().wait()[0].tolist() for result in results[-2:]]
    assert sums == [[2.0] * 3, [20.0] * 3], sums
    # Two callbacks of one future, likewise.
    one: Any = torch.futures.Future()
    for callback in quiet:
        one.add_done_callback(callback)
    results = [one.then(sum_later(100.0)), one.then(sum_later(1000.0))]
    one.set_result(0)
    sums = [result.wait().get_future().wait()[0].tolist() for result in results]
    assert sums == [[200.0] * 3, [2000.0] * 3], sums


def test_a_promise_more_on_one_rank_shifts_nothing() -> None:
    run_ranks(2, one_promise_more)


def completed_in_a_callback(rank: int, world_size: int, more: str) -> list[str]:
    """As above, but a callback completes them; `more`: what rank 0 has one more of."""
    add = [sum_later(1.0), sum_later(10.0)]
    if rank == 0:
        add.insert(0, lambda _: None)
    one: Any = torch.futures.Future()
    made = [one for _ in add] if more == "callbacks" else [torch.futures.Future() for _ in add]
    results = [promise.then(callback) for promise, callback in zip(made, add, strict=True)]

    def complete(_: Any) -> None:
        for promise in dict.fromkeys(made):
            promise.set_result(0)

    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(complete).wait()
    said = []
    for result in results[-2:]:
        try:
            work = result.wait()
        except RuntimeError as error:
            said.append(str(error))
            continue
        dist.barrier()  # what has a partner has ended
        said.append("summed" if work.is_completed() else "waits")
    for _ in range(2 - sum(each in ("summed", "waits") for each in said)):
        dist.barrier()
    if "waits" in said:  # for the first callback of rank 0, which issues nothing
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()
    return said


@pytest.mark.parametrize("more", ["callbacks", "futures"])
def test_of_several_promises_that_a_callback_completes_one_may_issue(more: str) -> None:
    found = run_ranks(2, completed_in_a_callback, args=(more,), check=False)
    first, second = (found[rank].value for rank in range(2))
    refusal = "no other rank can tell which callback this is"
    assert all(refusal in each for each in first), found.describe()
    assert second[0] == "waits", found.describe()
    assert refusal in second[1], found.describe()


def completed_on_another_thread(rank: int, world_size: int) -> str:
    promise: torch.futures.Future[int] = torch.futures.Future()
    result = promise.then(lambda _: dist.all_reduce(torch.ones(3)))
    thread = threading.Thread(target=lambda: promise.set_result(1))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError) as raised:
        result.wait()
    return str(raised.value)


def test_a_promise_that_another_thread_completes_is_refused_if_it_issues() -> None:
    for said in run_ranks(2, completed_on_another_thread).values():
        assert "no other rank can tell which callback this is" in said


def collected_promises(rank: int, world_size: int) -> None:
    """Of promises alone, and of one beside an operation's future."""
    for step in range(TIMES):
        works = [dist.all_reduce(torch.full((3,), 10.0**k), async_op=True) for k in range(3)]
        made: list[Any] = [torch.futures.Future() for _ in range(2)]

        def pass_on(future: Any, to: Any) -> None:
            time.sleep(0.004 * torch.rand(1).item())
            to.set_result(future.value()[0])

        for work, promise in zip(works, made, strict=False):
            work.get_future().add_done_callback(
                lambda future, promise=promise: pass_on(future, promise)
            )

        def again(done: Any) -> torch.Tensor:
            tensors = [part.value() for part in done.value()]
            flat = [each[0] if isinstance(each, list) else each for each in tensors]
            return dist.all_reduce(sum(flat), async_op=True).get_future().wait()[0]

        both = torch.futures.collect_all(made).then(again)
        beside = torch.futures.collect_all([made[1], works[2].get_future()]).then(again)
        assert both.wait().eq(4 * 11.0).all(), step
        assert beside.wait().eq(4 * 110.0).all(), step


def test_collected_promises() -> None:
    run_ranks(2, collected_promises)


def messages_of_two_threads(rank: int, world_size: int) -> str:
    """Each thread has its own tag; which of them asks first is chance."""
    futures: list[Any] = []

    def receive(tag: int) -> None:
        future = dist.irecv(torch.zeros(3), 1 - rank, tag=tag).get_future()
        futures.append(future.then(lambda _: dist.all_reduce(torch.ones(3))))

    first, second = (1, 2) if rank == 0 else (2, 1)
    receive(first)
    thread = threading.Thread(target=receive, args=[second])
    thread.start()
    thread.join()
    for tag in (1, 2):
        dist.send(torch.ones(3), 1 - rank, tag=tag)
    futures[0].wait()
    with pytest.raises(RuntimeError) as raised:
        futures[1].wait()
    return str(raised.value)


def test_messages_that_two_threads_ask_for_are_refused() -> None:
    for said in run_ranks(2, messages_of_two_threads).values():
        assert "two threads of this process" in said


def locals_are_freed(rank: int, world_size: int) -> None:
    """A future that is pending keeps nothing of the function that asked for it."""

    def post() -> tuple[Any, Any]:
        scratch = torch.ones(1000)
        return dist.irecv(torch.zeros(3), 1 - rank, tag=5).get_future(), weakref.ref(scratch)

    future, scratch = post()
    assert scratch() is None
    dist.send(torch.ones(3), 1 - rank, tag=5)
    future.wait()
    value = weakref.ref(future.value()[0])
    kept = dist.all_reduce(torch.ones(3), async_op=True)
    tensor = weakref.ref(kept.get_future().wait()[0])
    del future, kept
    dist.barrier()
    end_s = time.monotonic() + 30
    while value() is not None or tensor() is not None:
        assert time.monotonic() < end_s, "a future that is gone keeps its tensors"
        time.sleep(0.001)


def test_futures_keep_nothing_alive() -> None:
    run_ranks(2, locals_are_freed)


def counted(group: Any) -> int:
    from pycomm import flight_record

    return sum(each.sequence is not None for each in flight_record(group).operations)


def gloo_and_plain_futures(rank: int, world_size: int) -> None:
    ours = dist.new_group(backend="pycomm")
    dist.all_reduce(torch.ones(1), group=ours)  # the wrapping is done
    here = threading.get_ident()

    # gloo's: in place when complete, and what a callback issues has the group's next number.
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    wait_until_done(future)
    ran: list[int] = []

    def issue(done: Any) -> torch.Tensor:
        ran.append(threading.get_ident())
        total = done.value()[0].clone()
        dist.all_reduce(total, group=ours)
        return total

    assert counted(ours) == 1
    assert future.then(issue).wait().eq(world_size**2).all()
    assert ran == [here]
    assert counted(ours) == 2
    collected = torch.futures.collect_all([future, future.then(lambda done: done.value())])
    collected.add_done_callback(lambda _: ran.append(threading.get_ident()))
    assert ran == [here] * 2

    # The program's own: in place, also what follows; errors are torch's.
    promise: torch.futures.Future[int] = torch.futures.Future()
    order: list[str] = []
    child = promise.then(lambda done: order.append("first") or done.value() + 1)
    promise.add_done_callback(lambda _: order.append("second"))
    promise.set_result(1)
    assert child.then(lambda done: done.value() + 1).wait() == 3
    assert order == ["first", "second"]
    failed: torch.futures.Future[int] = torch.futures.Future()
    failed.set_exception(ValueError("of the program"))
    for raises in (torch.futures.wait_all, lambda parts: torch.futures.collect_all(parts).wait()):
        with pytest.raises(ValueError, match="of the program"):
            raises([failed, promise])

    def fail(_: Any) -> None:
        raise ArithmeticError("of a callback")

    for of in (
        promise,
        future,
        dist.all_reduce(torch.ones(1), group=ours, async_op=True).get_future(),
    ):
        with pytest.raises(RuntimeError, match="error when running the callback: ArithmeticError"):
            of.then(fail).wait()
        of.add_done_callback(fail)  # logged, not raised
    failed: torch.futures.Future[int] = torch.futures.Future()
    failed.set_exception(ValueError("set by hand"))
    with pytest.raises(RuntimeError, match="ValueError: set by hand"):
        failed.then(lambda done: done.wait()).wait()


def test_futures_of_gloo_and_of_the_program_behave_as_before() -> None:
    run_ranks(2, gloo_and_plain_futures, backend="gloo", only_pycomm=False)


def private_parts_of_torch(rank: int, world_size: int) -> None:
    """What pycomm/_native/callback_names.py and csrc/c10d/named_future.h rely on, by name."""
    from torch._C import Future as Base

    def in_pycomm(function: Any) -> bool:
        return function.__code__.co_filename.endswith("_native/callback_names.py")

    # Work.get_future() and then() return torch._C.Future; torch.futures.Future derives from it and
    # its methods call those of the base by name; so does collect_all of torch._C._collect_all.
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    assert type(future) is Base and type(future.then(lambda done: done.value())) is Base
    assert issubclass(torch.futures.Future, Base)
    for name in ("then", "add_done_callback", "wait", "set_result"):
        assert in_pycomm(getattr(Base, name))
        assert "super" in getattr(torch.futures.Future, name).__code__.co_names
        assert name in getattr(torch.futures.Future, name).__code__.co_names
    assert in_pycomm(torch._C._collect_all)
    assert in_pycomm(torch._C.wait)
    assert "wait" in torch.jit.wait.__code__.co_names
    assert "_collect_all" in torch.futures.collect_all.__code__.co_names
    assert "_collect_all" in torch.futures.wait_all.__code__.co_names

    # ivalue::Future keeps the very type that it was made with, which has our name in it: a complete
    # future knows it through every wrapper, and a callback's argument does.
    work = dist.all_reduce(torch.ones(3), async_op=True)
    wait_until_done(work.get_future())
    here, ran = threading.get_ident(), []
    work.get_future().then(lambda done: ran.append(threading.get_ident())).wait()
    assert ran and ran[0] != here
    inner: list[Any] = []
    work.get_future().then(lambda done: inner.append(done.then(lambda _: None))).wait()
    inner[0].wait()

    # _collect_all takes futures whose types are ours, and passes errors on.
    def fail(_: Any) -> None:
        raise ArithmeticError("of a part")

    parts = [work.get_future(), work.get_future().then(fail)]
    with pytest.raises(RuntimeError, match="of a part"):
        torch.futures.wait_all(parts)

    # torch describes a group after its backend is made, and a backend can be asked for it.
    group = dist.new_group([0, 1], group_desc="a mesh")
    assert group.group_desc == "a mesh"


def test_what_is_relied_on_in_torch() -> None:
    run_ranks(2, private_parts_of_torch)

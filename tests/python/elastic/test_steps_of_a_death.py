"""What a step leaves in which a rank dies, or has an error of its own: for those who commit it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Collection
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_rig import wrap
from elastic_rig import (
    Net,
    Scripted,
    agreeing,
    announce,
    announce_when_asleep,
    await_ranks,
    batch_of,
)
from time_bound import assert_within
from torch import nn

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(200)]


def run(target: Any, *args: Any, dead: Collection[int] = ()) -> list[Any]:
    """What the living ranks return, of three."""
    results = ranks.run_ranks(
        3, target, args=args, timeout_s=60, check=False, preload=ranks.TORCH_DDP
    )
    alive = [result for result in results if result.rank not in dead]
    assert all(result.ok for result in alive), results.describe()
    assert all(results[rank].exit_code == -signal.SIGKILL for rank in dead), results.describe()
    return [result.value for result in alive]


def die_in_backward(model: Any, when: list[bool], once: str = "") -> None:
    """``once``: ranks 0 and 2 have announced that."""

    def die(grad: torch.Tensor) -> None:
        if when[0]:
            if once:
                await_ranks(once, (0, 2))
            os.kill(os.getpid(), signal.SIGKILL)

    model.module.wide.weight.register_hook(die)


# --- the last batch of all ----------------------------------------------------------------------


def last_batch_dies(
    rank: int, world_size: int, begun: bool
) -> tuple[list[tuple[int, int, bool]], int]:
    """``begun``: the others are in the step already; else they know of the death before it."""
    import pycomm

    model = wrap(Net(), weight="samples", elastic=pycomm.Elastic())
    dies = [False]
    die_in_backward(model, dies, "waits" if begun else "")
    seen = []
    for step in range(4):
        model.zero_grad()
        if step == 2 and rank != 1:
            if begun:
                announce_when_asleep("waits", rank)
            else:
                give_up_s = time.monotonic() + 60
                while pycomm.last_error(model._own_group) is None:
                    assert time.monotonic() < give_up_s
                    time.sleep(0.01)
            model.no_batch()
        else:
            dies[0] = step == 2
            model(batch_of(rank, step)).square().mean().backward()
        has_grads = model.module.wide.weight.grad is not None
        seen.append((model.elastic.step, model.stats().steps, has_grads))
    return seen, model.stats().redone_steps


@pytest.mark.parametrize("begun", [False, True])
def test_no_rank_errs_if_the_only_batch_has_died(begun: bool) -> None:
    for seen, redone in run(last_batch_dies, begun, dead=[1]):
        assert redone == begun
        assert seen == [(1, 1, True), (2, 2, True), (3, 3, False), (4, 4, True)]


class SkipsAnEpoch(Scripted):
    """A process has joined, and is gone, before this rank begins its second step."""

    def __init__(self, group: Any) -> None:
        super().__init__(group, lambda _: 0)
        self._steps_begun = 0

    def begin(self) -> bool:
        super().begin()
        self._steps_begun += 1
        return self._steps_begun == 2

    def changes(self) -> tuple[int, int, int]:
        return (0, 1, 1) if self._steps_begun >= 2 else (0, 0, 0)


def no_batch_after_a_skipped_epoch(rank: int, world_size: int) -> tuple[int, int, int]:
    import pycomm

    with agreeing(SkipsAnEpoch):
        model = wrap(Net(), weight="samples", elastic=pycomm.Elastic())
    with pytest.raises(ValueError, match="no rank has any samples"):
        model.no_batch()
    model.no_batch()  # ranks that were a member beside the other process do not raise
    stats = model.stats()
    return stats.left_ranks, stats.lost_ranks, stats.joined_ranks


def test_a_rank_that_skips_an_epoch_knows_that_members_have_changed() -> None:
    assert run(no_batch_after_a_skipped_epoch) == [(0, 1, 1)] * 3


# --- who leads after a commit -------------------------------------------------------------------


class DiesAtCommit:
    """The native agreement of a rank that is killed once all have finished the last step."""

    def __init__(self, inner: Any, last: int) -> None:
        self._inner = inner
        self._last = last
        self._step = 0

    def begin(self) -> bool:
        began: bool = self._inner.begin()
        return began

    def end(self, error: BaseException | None) -> bool:
        if self._step == self._last:
            announce("finished", 0)
            await_ranks("waits", (1, 2))
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        self._step += 1
        again: bool = self._inner.end(error)
        return again

    def members(self) -> list[int]:
        members: list[int] = self._inner.members()
        return members

    def changes(self) -> tuple[int, int, int]:
        left, lost, joined = self._inner.changes()
        return (left, lost, joined)

    def close(self) -> None:
        self._inner.close()


def make(rank: int, last: int, elastic: Any, **options: Any) -> Any:
    """A wrapper whose rank 0 dies as step ``last`` is committed."""
    from pycomm._native import loader

    if rank != 0:
        return wrap(Net(unused=True), elastic=elastic, **options)

    native = loader.native
    inner = native.step_agreement

    def opened(group: Any) -> Any:
        from pycomm._group.creation import native_backend

        steps = inner(
            native_backend(group),
            group,
            min_ranks=1,
            accept_split_brain=False,
            quorum_wait_ms=10000,
        )
        return DiesAtCommit(steps, last)

    with agreeing(opened):
        return wrap(Net(unused=True), elastic=elastic, **options)


def leader_dies_at_commit(rank: int, world_size: int) -> tuple[Any, ...]:
    import pycomm

    options = {"wire_dtype": "int8", "find_unused_parameters": True, "broadcast_buffers": False}
    model = make(rank, 1, pycomm.Elastic(), **options)
    model(batch_of(rank, 0), "right").square().mean().backward()
    model.zero_grad()
    kept = model.communication_state_dict()["residuals"]["right.weight"]
    dist.all_reduce(kept)
    if rank != 0:
        announce_when_asleep("waits", rank, behind="finished", of=[0])
    model(batch_of(rank, 1), "left").square().mean().backward()
    left = model.communication_state_dict()["residuals"]["right.weight"]
    elastic = model.elastic
    told = (elastic.members, elastic.rank, elastic.leader, elastic.step, model.stats().redone_steps)
    return (*told, kept.clone(), left)


def test_a_step_that_counts_has_a_leader_and_loses_no_feedback() -> None:
    one, two = run(leader_dies_at_commit, dead=[0])
    assert one[:5] == ((0, 1, 2), 1, True, 2, 0)  # members change as the next step begins
    assert two[:5] == ((0, 1, 2), 2, False, 2, 0)
    kept = one[5]
    assert float(kept.abs().max()) > 0
    lost = one[6] + two[6] - kept  # of what rank 0 kept in the end
    assert float(lost.norm()) < 0.5 * float(kept.norm())


def too_few_behind_a_commit(rank: int, world_size: int) -> float:
    import pycomm

    elastic = pycomm.Elastic(min_ranks=2, quorum_wait=TOO_FEW_WAIT_S)
    model = make(rank, 1, elastic, find_unused_parameters=True)
    for step in range(2):
        model.zero_grad()
        if rank != 0 and step == 1:
            announce_when_asleep("waits", rank, behind="finished", of=[0])
        model(batch_of(rank, step), "left").square().mean().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    began_s = time.monotonic()
    with pytest.raises(pycomm.errors.QuorumLostError, match="too few ranks"):
        model(batch_of(rank, 2), "left").square().mean().backward()
    return time.monotonic() - began_s


TOO_FEW_WAIT_S = 4.0


def test_a_rank_that_is_between_two_steps_waits_for_others() -> None:
    """Also behind a step that the next members have committed: it has not begun another one."""
    (waited_s,) = run(too_few_behind_a_commit, dead=[0, 1])
    assert waited_s > TOO_FEW_WAIT_S - 1  # which begin before its next step


# --- an error of one rank alone -------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(30, 20)
        self.out = nn.Linear(20, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.table((batch[:, 0].abs() * 20).long() % 30))
        return out


WAITS_S = 8.0


def one_rank_errs(rank: int, world_size: int, how: str) -> tuple[Any, ...]:
    import pycomm

    model = wrap(Table(), elastic=pycomm.Elastic())
    took_s = 0.0
    for step in range(3):
        model.zero_grad()
        if rank == 1 and step == 1:
            if how == "the program":
                dist.destroy_process_group()
                time.sleep(WAITS_S)
                return ()
            if how == "a layout":
                model.module.table.sparse = True
            else:
                model.module.table.weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises((RuntimeError, ZeroDivisionError)):
                model(batch_of(rank, step)).square().mean().backward()
            with pytest.raises(RuntimeError):
                model(batch_of(rank, step))
            time.sleep(WAITS_S)
            return ()
        began_s = time.monotonic()
        model(batch_of(rank, step)).square().mean().backward()
        took_s = max(took_s, time.monotonic() - began_s)
    return model.elastic.members, model.elastic.step, took_s


@pytest.mark.time_bound
@pytest.mark.parametrize("how", ["a layout", "a hook", "the program"])
def test_the_others_go_on_at_once_without_a_rank_that_errs(how: str) -> None:
    zero, _, two = run(one_rank_errs, how)
    for members, step, _ in (zero, two):
        assert (members, step) == ((0, 2), 3)
    assert_within(max(zero[2], two[2]), WAITS_S / 2)


def all_err(rank: int, world_size: int, how: str) -> str:
    import pycomm

    options: dict[str, Any] = {"weight": "samples"} if how == "passes" else {}
    model = wrap(Net(), elastic=pycomm.Elastic(), **options)
    model(batch_of(rank, 0)).square().mean().backward()
    if rank == 1 and how == "passes":
        with model.no_sync():
            model(batch_of(rank, 1)).square().mean().backward()
    if how == "frozen":
        model.module.wide.weight.requires_grad_(rank != 1)
    try:
        model(batch_of(rank, 2)).square().mean().backward()
    except Exception as error:
        return str(error)
    return f"nothing raised, among {model.elastic.members}"


@pytest.mark.parametrize(
    ("how", "text"), [("passes", "backward passes"), ("frozen", "ranks disagree")]
)
def test_an_error_that_all_ranks_see_is_raised_on_all(how: str, text: str) -> None:
    for raised in run(all_err, how):
        assert text in raised


# --- a static graph -------------------------------------------------------------------------------


def only_user_dies(rank: int, world_size: int) -> tuple[list[bool], int]:
    import pycomm

    model = wrap(Net(unused=True), static_graph=True, elastic=pycomm.Elastic())
    dies = [False]
    die_in_backward(model, dies, once="in the step")
    others = [False]
    model.module.wide.weight.register_hook(
        lambda _: announce("in the step", rank) if others[0] else None
    )
    seen = []
    for step in range(4):
        model.zero_grad()
        dies[0] = rank == 1 and step == 2
        others[0] = rank != 1 and step == 2
        takes = "right" if rank == 1 else "left"
        model(batch_of(rank, step), takes).square().mean().backward()
        seen.append(model.module.right.weight.grad is not None)
    return seen, model.stats().redone_steps


def test_a_static_graph_forgets_what_only_the_dead_have_used() -> None:
    told = run(only_user_dies, dead=[1])
    assert any(redone for _, redone in told)
    for seen, _ in told:
        assert seen == [True, True, False, False]


# --- counters -------------------------------------------------------------------------------------


def counts(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    import pycomm

    model = wrap(Net(), wire_dtype="int8", elastic=pycomm.Elastic())
    dies = [False]
    die_in_backward(model, dies)
    largest = torch.finfo(torch.float32).max
    overflows = model.module.left.weight.register_hook(lambda grad: torch.full_like(grad, largest))
    seen = []
    for step in range(4):
        model.zero_grad()
        dies[0] = rank == 1 and step == 2
        model(batch_of(rank, step)).square().mean().backward()
        overflows.remove()
        stats = model.stats()
        seen.append((stats.sent_nbytes, stats.saved_nbytes, stats.codec_overflows))
    return seen


def test_counters_never_go_down() -> None:
    told = run(counts, dead=[1])
    for seen in told:
        for before, after in itertools.pairwise(seen):
            assert all(now >= then for then, now in zip(before, after, strict=True)), seen
        assert seen[-1][0] > seen[0][0] * 2.5
    assert any(seen[0][2] > 0 for seen in told)

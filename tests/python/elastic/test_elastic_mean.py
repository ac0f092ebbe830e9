"""``model.elastic.mean()`` and ``confirm()``: transactions of their own between two steps."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
from ddp_rig import wrap
from elastic_rig import Net, Scripted, agreeing, batch_of
from rank_child import mark
from ranks import TORCH_DDP, run_ranks, start_ranks

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(200)]


def means(rank: int, world_size: int) -> None:
    import pycomm

    elastic = pycomm.Elastic()
    model = wrap(Net(), elastic=elastic)
    group = model.elastic
    assert group.mean(float(rank)) == 1.0
    values = torch.tensor([[1.0, math.inf], [-3.0 * rank, 0.5]])
    found = group.mean(values)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.tensor([[1.0, math.inf], [-3.0, 0.5]]))
    half = group.mean(torch.tensor(1.5, dtype=torch.float16, requires_grad=True))
    assert (half.dtype, half.shape, half.requires_grad) == (torch.float16, (), False)
    assert group.mean(torch.zeros(0)).shape == (0,)
    assert group.mean(float(rank), weight=rank) == pytest.approx((0 + 1 + 4) / 3)
    # A rank that does not count has no say, not even with what is no number.
    assert group.mean(math.nan if rank == 1 else 2.0, weight=float(rank != 1)) == 2.0
    assert math.isnan(group.mean(1.0, weight=0))
    for wrong in (torch.tensor(3), "3", True, 1 + 2j, torch.empty(1, device="meta")):
        with pytest.raises(TypeError, match=r"mean\(\) takes a number, or a tensor of floats"):
            group.mean(wrong)
    with pytest.raises(ValueError, match="weight=-1 is neither 0"):
        group.mean(1.0, weight=-1)
    assert (group.step, group.confirm()) == (0, rank == 0)

    weighed = wrap(Net(), elastic=elastic, weight="samples")
    assert weighed.elastic.mean(float(rank)) == 1.0  # before the first step all count alike
    for step in range(3):
        samples = 2 + (rank + step) % 3
        weighed(batch_of(rank, step, samples)).square().mean().backward()
        wanted = sum(each * (2 + (each + step) % 3) for each in range(3)) / 9
        assert weighed.elastic.mean(float(rank)) == pytest.approx(wanted, rel=1e-12)
    assert weighed.elastic.step == 3

    with pytest.raises(RuntimeError, match="backward"):
        net = wrap(Net(), elastic=elastic)
        net.module.wide.weight.register_hook(lambda _: net.elastic.confirm() and None)
        net(batch_of(rank, 0)).square().mean().backward()


def test_means() -> None:
    run_ranks(3, means, timeout_s=100, preload=TORCH_DDP).check()


def summed_again(rank: int, world_size: int) -> None:
    """Steps and means that an agreement wants again have the bits of those that it does not."""
    import pycomm

    plain = wrap(Net(), elastic=pycomm.Elastic())
    with agreeing(lambda group: Scripted(group, lambda step: step % 3)):
        again = wrap(Net(), elastic=pycomm.Elastic())
    for step in range(6):
        found = []
        for model in (plain, again):
            model.zero_grad()
            loss = model(batch_of(rank, step)).square().mean()
            loss.backward()
            found.append([model.elastic.mean(loss), *(each.grad for each in model.parameters())])
        assert all(map(torch.equal, *found))
    assert again.elastic.step == 6 and again.stats().redone_steps > 3


def test_a_mean_that_is_summed_again_has_the_same_bits() -> None:
    run_ranks(2, summed_again, timeout_s=100, preload=TORCH_DDP).check()


def shapes_differ(rank: int, world_size: int, shapes: Sequence[tuple[int, ...]]) -> None:
    import pycomm

    model = wrap(Net(), elastic=pycomm.Elastic())
    with pytest.raises(pycomm.errors.CollectiveMismatchError):
        model.elastic.mean(torch.ones(shapes[rank]))
    with pytest.raises(RuntimeError, match="a mean over the members was being computed"):
        model(batch_of(rank, 0))


@pytest.mark.parametrize("shapes", [((1,), (2,)), ((2, 3), (3, 2))])
def test_shapes_that_differ_are_an_error_on_all_ranks(shapes: Sequence[tuple[int, ...]]) -> None:
    run_ranks(2, shapes_differ, args=(shapes,), timeout_s=100, preload=TORCH_DDP).check()


def rounds_differ(rank: int, world_size: int) -> str:
    """What confirm() raises if the agreement of rank 1 takes its round for one of a step."""
    import pycomm
    from pycomm._group.creation import native_backend
    from pycomm._native import loader

    def opened(group: Any) -> Any:
        """Of which Python sees steps only."""
        return loader.native.step_agreement(
            native_backend(group),
            group,
            min_ranks=1,
            accept_split_brain=False,
            quorum_wait_ms=10000,
        )

    with agreeing(opened) if rank == 1 else contextlib.nullcontext():
        model = wrap(Net(), elastic=pycomm.Elastic())
    try:
        model.elastic.confirm()
    except pycomm.errors.CollectiveMismatchError as error:
        return str(error)
    return "nothing"


def test_a_step_that_meets_a_mean_is_an_error_on_all_ranks() -> None:
    for raised in run_ranks(2, rounds_differ, timeout_s=100, preload=TORCH_DDP).check().values():
        assert "at different places of their programs" in raised


def reports(rank: int, world_size: int, dies: tuple[int, int, str] | None) -> dict[str, Any]:
    """30 steps and the mean of each; a rank dies in one of them, or beside it.

    None: it is killed from outside, and 30 steps come after that, however long it takes.
    """
    import pycomm

    model = pycomm.DistributedDataParallel(Net(), elastic=pycomm.Elastic())

    def die(step: int, where: str) -> None:
        if (rank, step, where) == dies:
            os.kill(os.getpid(), signal.SIGKILL)

    found: list[tuple[float, tuple[int, ...]]] = []
    left = 30
    while left > 0:
        step = len(found)
        model.zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        mark(f"step {step}")
        die(step, "before")
        bits = model.elastic.mean(torch.tensor([2.0**rank] * 64))
        die(step, "after")
        found.append((bits[0].item(), model.elastic.members))
        assert torch.equal(bits, bits[:1].expand(64))
        left -= dies is not None or model.elastic.size < world_size
    stats = model.stats()
    assert stats.agreeing_seconds > 0 and stats.meeting_seconds > 0
    return {"found": found, "members": model.elastic.members, "stats": stats}


@pytest.mark.faults
@pytest.mark.parametrize("dead", rings.first_of([0, 2]))
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_rank_dies_beside_a_mean(dead: int, where: str) -> None:
    with start_ranks(3, reports, args=((dead, 9, where),), preload=TORCH_DDP) as running:
        results = running.collect(60)
    values = [result.value for result in results if result.rank != dead]
    assert all(result.ok for result in results if result.rank != dead), results.describe()
    assert values[0]["found"] == values[1]["found"]
    with_it = 10 if where == "after" else 9
    means = [mean for mean, _ in values[0]["found"]]
    assert means[:with_it] == pytest.approx([7 / 3] * with_it)
    assert means[with_it:] == [(7 - 2.0**dead) / 2] * (30 - with_it)
    assert [members for _, members in values[0]["found"]].count((0, 1, 2)) == 10


@pytest.mark.faults
@pytest.mark.parametrize("turn", rings.first_of(range(4)))
def test_a_rank_is_killed_at_any_moment(turn: int) -> None:
    with start_ranks(3, reports, args=(None,), preload=TORCH_DDP) as running:
        running.wait_for_mark(1, "step 5")
        time.sleep(0.004 * turn)
        running.kill(1)
        results = running.collect(60)
    values = [results[rank].value for rank in (0, 2)]
    assert all(results[rank].ok for rank in (0, 2)), results.describe()
    assert values[0]["found"] == values[1]["found"]
    assert values[0]["members"] == (0, 2)


def saves(rank: int, world_size: int, folder: str) -> Any:
    """All save as the leader says; the first one is stopped meanwhile."""
    import pycomm

    model = pycomm.DistributedDataParallel(Net(), elastic=pycomm.Elastic())
    step = 0
    try:
        while model.elastic.size == 3 or step < 40:
            model.zero_grad()
            model(batch_of(rank, step)).square().mean().backward()
            step += 1
            mark(f"step {step}")
            if rank == 0 and step == 10:
                os.kill(os.getpid(), signal.SIGSTOP)
                assert model.elastic.leader  # as it believes
            if model.elastic.confirm():
                Path(folder, "checkpoint").write_text(f"{rank} {step}")
                mark(f"saved {step}")
    except pycomm.errors.LeftBehindError as error:
        return str(error)
    return step


@pytest.mark.faults
def test_a_leader_that_was_left_behind_does_not_save(tmp_path: Path) -> None:
    with start_ranks(3, saves, args=(str(tmp_path),), preload=TORCH_DDP) as running:
        for rank in (1, 2):
            running.wait_for_mark(rank, "step 40")
        running.kill(0, signal.SIGCONT)
        results = running.collect(60)
    assert all(result.ok for result in results), results.describe()
    assert "went on without this rank" in results[0].value
    assert results[1].value == results[2].value == 40
    assert (tmp_path / "checkpoint").read_text() == "1 40"

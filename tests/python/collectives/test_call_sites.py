"""Equal calls that one rank has swapped: told apart by their lines, or by their bucket's names."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TORCH_DDP, describe_exception, run_ranks
from time_bound import assert_within

import pycomm

pytestmark = pytest.mark.needs_native

ON = {"PYCOMM_CHECK_CALL_SITES": "1"}


def reduce_losses(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def reduce_counts(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def dense(value: float) -> torch.Tensor:
    return torch.full((10,), value)


def sparse(value: float) -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 2]], [value, value], (10,))


def swap_on_rank_1(rank: int, world_size: int, make: Any = dense) -> Any:
    """Two equal sums; rank 1 takes the second first."""
    losses, counts = make(1.0), make(100.0)
    for _ in range(3):  # the same lines in the same order are no mistake
        reduce_losses(losses)
        reduce_counts(counts)
    steps = [lambda: reduce_losses(losses), lambda: reduce_counts(counts)]
    try:
        for step in reversed(steps) if rank == 1 else steps:
            step()
    except pycomm.errors.PycommError as error:
        return describe_exception(error)
    return float(losses[0])


@pytest.mark.ci
@pytest.mark.parametrize("make", [dense, sparse])
def test_swapped_equal_calls_end_as_a_mismatch_that_names_both_lines(make: Any) -> None:
    results = run_ranks(3, swap_on_rank_1, args=(make,), env=ON)
    for result in results:
        error = result.value
        assert not isinstance(error, float), "swapped, and nobody noticed"
        assert error.code == "COLLECTIVE_MISMATCH", error.text
        # Which of the two is called the peer is voted on; a rank that loses its core chooses alone.
        assert "rank 1 (" in error.record["summary"], error.text
        for function in ("reduce_losses", "reduce_counts"):
            assert f" in {function}, from test_call_sites.py:" in error.text, error.text
        assert "called at test_call_sites.py:" in error.text


def test_off_by_default_and_said_to_be_so() -> None:
    values = run_ranks(3, swap_on_rank_1).values()
    assert all(isinstance(value, float) for value in values)
    assert len(set(values)) > 1, "without the check the sums are silently wrong: docs say so"


def reduce_in_helpers_and_callbacks(rank: int, world_size: int) -> list[float]:
    """All the ways to call that are right stay so."""
    seen = []
    group = dist.new_group()
    for step in range(3):
        tensor = torch.full((4,), rank + 1.0)
        for reduce in (reduce_losses, reduce_counts):
            reduce(tensor)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        future = work.get_future().then(lambda done: dist.all_reduce(done.value()[0]) or 1)
        future.wait()
        dist.broadcast(tensor, src=step)
        gathered = [None] * world_size
        dist.all_gather_object(gathered, float(tensor[0]))
        assert len(set(gathered)) == 1
        dist.barrier()
        if rank == 0:  # messages have no tag of ours, and are issued from wherever it suits
            dist.send(tensor, dst=1, tag=5)
        if rank == 1:
            dist.recv(tensor, src=0, tag=5)
        seen.append(float(tensor[0]))
    dist.destroy_process_group(group)
    model = torch.nn.Linear(3, 3)
    for wrapper in (pycomm.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel):
        wrapper(model)(torch.ones(2, 3)).sum().backward()
    return seen


@pytest.mark.ci
def test_what_is_right_stays_right_with_the_check() -> None:
    results = run_ranks(3, reduce_in_helpers_and_callbacks, env=ON, preload=TORCH_DDP)
    first, *others = results.values()
    assert all(seen == first for seen in others)


def join_with(rank: int, world_size: int, path: str) -> str:
    options = pycomm.Options(check_call_sites=rank == 0)
    try:
        dist.init_process_group(
            "pycomm",
            init_method=f"file://{path}",
            rank=rank,
            world_size=world_size,
            pg_options=options,
        )
    except pycomm.errors.PycommError as error:
        return f"{error.code} {error}"
    return "joined"


def test_all_ranks_check_or_none(tmp_path: Any) -> None:
    for text in run_ranks(2, join_with, args=(str(tmp_path / "store"),), init="none").values():
        assert text.startswith("CONFIG_MISMATCH") and "check_call_sites=1" in text


class Two(torch.nn.Module):
    """Two models of equal shapes whose parameters have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(8, 8, bias=False)
        self.decoder = torch.nn.Linear(8, 8, bias=False)


def swap_models(rank: int, world_size: int) -> Any:
    both = Two()
    models = [
        pycomm.DistributedDataParallel(torch.nn.ModuleDict({name: module}))
        for name, module in both.named_children()
    ]
    losses = [
        model.module[name](torch.ones(8)).sum()
        for model, name in zip(models, ("encoder", "decoder"), strict=True)
    ]
    for model in models:
        model.reducer.prepare_for_backward([])
    try:
        for loss in reversed(losses) if rank == 1 else losses:
            loss.backward()
    except Exception as error:
        return describe_exception(error)
    return None


def test_two_equal_models_in_another_order_are_a_mismatch_without_any_option() -> None:
    for result in run_ranks(2, swap_models, preload=TORCH_DDP):
        error = result.value
        assert error is not None, "one model's gradients were averaged with the other's"
        assert "disagree" in error.text and "tag" in error.text, error.text


def time_both(rank: int, world_size: int, rounds: int) -> dict[str, float]:
    """Microseconds of a small sum, with the check and without, in turns; the best of each.

    Other work on the machine makes any of them slower, and none faster.
    """
    groups = {
        name: dist.new_group(pg_options=pycomm.Options(check_call_sites=name == "on"))
        for name in ("off", "on")
    }
    tensor = torch.ones(1)
    spent: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(rounds):
        for name, group in groups.items():
            began_s = time.perf_counter()
            for _ in range(10):
                dist.all_reduce(tensor.fill_(1.0), group=group)
            spent[name].append((time.perf_counter() - began_s) / 10)
    return {name: 1e6 * min(times) for name, times in spent.items()}


@pytest.mark.alone
@pytest.mark.time_bound
def test_the_check_costs_microseconds() -> None:
    for cost in run_ranks(2, time_both, args=(100,)).values():
        assert_within(1e-6 * (cost["on"] - cost["off"]), 500e-6, str(cost))

"""Our wrapper beyond a plain step: unfreezing, uneven data, patterns, hooks that fail."""

from __future__ import annotations

import time
import weakref
from datetime import timedelta
from typing import Any

import ddp_models
import pytest
import ranks
import rings
import torch
import torch.distributed as dist
from ddp_rig import Layers, all_ranks, wrap
from time_bound import assert_within
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]


def loss_of(model: nn.Module, name: str, rank: int, step: int) -> torch.Tensor:
    output = model(ddp_models.batch_of(name, rank, step))
    tensor = output["out"] if isinstance(output, dict) else output
    loss: torch.Tensor = tensor.float().square().mean()
    return loss


def mean_gradients(model: Any, name: str, rank: int, step: int) -> list[torch.Tensor]:
    """What one process with all batches would have, at the parameters that `model` has now."""
    import copy

    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    for other in range(dist.get_world_size()):
        (loss_of(alone, name, other, step) / dist.get_world_size()).backward()
    return [each.grad for each in alone.parameters() if each.grad is not None]


def unfrozen(rank: int, world_size: int) -> None:
    """Frozen at first, trained, frozen again: each step is that of one process."""
    ours = wrap(ddp_models.make("frozen"))
    frozen = ours.module.layers[0].weight
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for step in range(6):
        frozen.requires_grad_(step in (2, 3, 5))
        expected = mean_gradients(ours, "frozen", rank, step)
        optimizer.zero_grad()
        loss_of(ours, "frozen", rank, step).backward()
        found = [each.grad for each in ours.parameters() if each.grad is not None]
        assert len(found) == len(expected) == (4 if frozen.requires_grad else 3)
        for mine, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)
        optimizer.step()
    assert ours.stats().steps == 6


class Reversed(nn.Module):
    """Registered in the order in which backward comes to them, which no wrapper expects."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(6):
            setattr(self, f"layer{number}", nn.Linear(300, 300, bias=False))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for number in reversed(range(6)):
            batch = getattr(self, f"layer{number}")(batch)
        return batch


def rebuilt(rank: int, world_size: int) -> list[Any]:
    ours = wrap(Reversed(), bucket_cap_mb=1)
    before = ours.reducer.bucket_names()
    for _ in range(2):
        ours(torch.ones(2, 300)).square().mean().backward()
    return [before, ours.reducer.bucket_names()]


class Crossed(nn.Module):
    """Two branches, whose gradients come in another order on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.left, self.right = (nn.Linear(600, 600, bias=False) for _ in range(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        branches = [self.left, self.right]
        if self.rank == 1:
            branches.reverse()
        return sum(torch.tanh(branch(batch)) for branch in branches)


def crossed(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(1)
    ours = wrap(Crossed(rank), bucket_cap_mb=1)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        batch = torch.randn(2, 600, generator=generator)
        ours.zero_grad()
        ours(batch).square().mean().backward()
        mine = torch.stack([each.grad for each in ours.parameters()])
        with ours.no_sync():
            ours.zero_grad()
            ours(batch).square().mean().backward()
        local = torch.stack([each.grad for each in ours.parameters()])
        torch.testing.assert_close(mine, torch.stack(all_ranks(local)).mean(dim=0))
    return ours.reducer.bucket_names()


def uneven(rank: int, world_size: int) -> list[float]:
    """Rank 1 has fewer batches, and ends inside join()."""
    found = []
    for wire, divide in ((None, True), (None, False), ("fp16", True), ("fp16", False)):
        ours = wrap(ddp_models.make("mlp"), wire_dtype=wire)
        theirs = TorchDDP(ddp_models.make("mlp"))
        for model in (ours, theirs):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with model.join(divide_by_initial_world_size=divide):
                for step in range(5 if rank == 0 else 3):
                    optimizer.zero_grad()
                    loss_of(model, "mlp", rank, step).backward()
                    optimizer.step()
        for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
            tolerance = 0.0 if wire is None else 1e-3
            torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)
        found.append(sum(float(each.detach().sum()) for each in ours.parameters()))
    return found


def rest_of(rank: int, world_size: int, options: dict[str, Any], by_all: bool) -> list[Any]:
    """Rank 1 runs out of data between two reductions, in two epochs; each rank's averages, and
    what is left of the gradients of an epoch.
    """
    every = options["accumulate"]
    model = wrap(Layers(), bucket_cap_mb=0.004, **options)
    found = []
    for _ in range(2):
        with model.join(divide_by_initial_world_size=by_all):
            for batch in range(2 * every if rank == 0 else every + 1):
                model(torch.full((1,), 1.0 + batch + 10 * rank)).backward()
                if batch % every == every - 1:
                    found.append([float(each.grad[0]) for each in model.parameters()])
                    model.zero_grad()
        found.append([each.grad for each in model.parameters() if each.grad is not None])
    return found


@pytest.mark.ci
@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        *({"accumulate": 2}, {"accumulate": 3, "wire_dtype": "fp16"}),
        rings.nightly({"accumulate": 2, "gradient_as_bucket_view": False}),
        rings.nightly({"accumulate": 3, "find_unused_parameters": True}),
        rings.nightly({"accumulate": 2, "static_graph": True}),
    ],
    ids=["own", "fp16", "no-views", "unused", "static_graph"],
)
def test_what_a_rank_has_accumulated_before_its_data_end_is_in_the_next_average(
    options: dict[str, Any], by_all: bool
) -> None:
    found = ranks.run_ranks(
        2, rest_of, args=(options, by_all), timeout_s=100, preload=ranks.TORCH_DDP
    )
    every = options["accumulate"]
    first = sum(range(1, every + 1)) + sum(range(11, every + 11))
    rest = sum(range(every + 1, 2 * every + 1))
    averages = [first / 2, (rest + 11 + every) / 2 if by_all else rest]
    for rank in range(2):
        wanted = [[each] * 2 for each in averages[: 2 - rank]]
        assert found[rank].value == [*wanted, [], *wanted, []]


def rest_of_a_second_loss(rank: int, world_size: int) -> list[float]:
    """Two forwards before the backward of either: the second one is what rank 1 has left."""
    model = wrap(Layers(), accumulate=2)
    batches = [torch.full((1,), 1.0 + 10 * rank + batch) for batch in range(4)]
    found = []
    with model.join(divide_by_initial_world_size=False):
        model(batches[0]).backward()
        losses = [model(batch) for batch in batches[1:3]]
        losses[0].backward()
        found.append(float(model.module.first.grad[0]))
        model.zero_grad()
        losses[1].backward()
        if rank == 0:
            model(batches[3]).backward()
            found.append(float(model.module.first.grad[0]))
    return found


@pytest.mark.ci
def test_the_rest_is_dropped_if_others_divide_without_this_rank() -> None:
    found = ranks.run_ranks(2, rest_of_a_second_loss, timeout_s=100, preload=ranks.TORCH_DDP)
    first = (1 + 2 + 11 + 12) / 2
    assert found.values() == [[first, 3 + 4], [first]]


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.rare = (nn.Parameter(torch.zeros(3)) for _ in range(2))

    def forward(self, rare: bool) -> torch.Tensor:
        return (self.rare if rare else self.each).sum()


def cleared_rest(rank: int, world_size: int) -> list[bool]:
    """Rank 1 alone uses a parameter, and its zero_grad() takes that back before its data end."""
    model = wrap(Either(), accumulate=2, find_unused_parameters=True)
    with model.join():
        model(rank == 1).backward()
        if rank == 1:
            model.zero_grad()
        else:
            model(False).backward()
    return [each.grad is None for each in model.parameters()]


@pytest.mark.ci
def test_a_rest_that_was_cleared_uses_no_parameter() -> None:
    found = ranks.run_ranks(2, cleared_rest, timeout_s=100, preload=ranks.TORCH_DDP)
    assert found.values() == [[False, True], [True, True]]


def by_pattern(rank: int, world_size: int) -> None:
    patterns = {"scale": "fp32", "layers.0.*": "fp16", "layers.2.bias": None}
    ours = wrap(ddp_models.make("mlp"), wire_dtype=patterns)
    for step in range(3):
        expected = mean_gradients(ours, "mlp", rank, step)
        ours.zero_grad()
        loss_of(ours, "mlp", rank, step).backward()
        names = [name for name, _ in ours.module.named_parameters()]
        for name, mine, reference in zip(
            names, [each.grad for each in ours.parameters()], expected, strict=True
        ):
            rounded = name.startswith("layers.0")
            largest = float(reference.abs().max()) if reference.numel() else 0.0
            atol = largest * (3 * 2.0**-11 if rounded else 1e-6)
            torch.testing.assert_close(mine, reference, rtol=0.0, atol=atol)
            if rounded and step == 2:  # it did travel as fp16
                assert not torch.equal(mine, reference)
    halves = [names for names in ours.reducer.bucket_names() if "layers.0.weight" in names]
    assert [sorted(names) for names in halves] == [["layers.0.bias", "layers.0.weight"]]


def states(rank: int, world_size: int) -> None:
    ours, theirs = wrap(ddp_models.make("conv")), TorchDDP(ddp_models.make("conv", seed=3))
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())


def in_turn(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    return {name: globals()[name](rank, world_size) for name in names}


def test_unfreezing_order_uneven_data_and_patterns() -> None:
    names = ["unfrozen", "rebuilt", "crossed", "uneven", "by_pattern", "states"]
    first, second = ranks.run_ranks(
        2, in_turn, args=(names,), timeout_s=200, preload=ranks.TORCH_DDP
    ).values()
    assert first == second
    before, after = first["rebuilt"]
    layers = [f"layer{number}.weight" for number in range(6)]
    assert [name for names in before for name in names] == layers[::-1]
    assert [name for names in after for name in names] == layers
    assert len(after[-1]) == 2  # 0.72 MB: the last bucket holds less than 1 MiB


def failing_hook(rank: int, world_size: int) -> tuple[float, str, str]:
    def hook(state, bucket):  # torch wants real classes as annotations, or none
        if rank == 1:
            raise ValueError("this hook is broken")
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model = wrap(ddp_models.make("mlp"))
    model.register_comm_hook(None, hook)
    begin = time.monotonic()
    try:
        loss_of(model, "mlp", rank, 0).backward()
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return time.monotonic() - begin, str(error), notes
    raise AssertionError("backward did not raise")


@pytest.mark.time_bound
def test_a_hook_that_raises_on_one_rank_ends_all() -> None:
    results = ranks.run_ranks(2, failing_hook, timeout_s=100, preload=ranks.TORCH_DDP, check=False)
    first_s, first, _ = results[0].value
    second_s, second, notes = results[1].value
    assert "this hook is broken" in second
    assert "in the comm hook of rank 1, bucket 0 with 'layers.2.bias', " in notes
    assert "Rank 1 failed in backward" in first
    assert_within(max(first_s, second_s), 20)


def unfrozen_alone(rank: int, world_size: int) -> tuple[str, str, str]:
    model = wrap(ddp_models.make("frozen"))
    loss_of(model, "frozen", rank, 0).backward()
    loss_of(model, "frozen", rank, 1).backward()
    if rank == 1:
        model.module.layers[0].weight.requires_grad_(True)
    try:
        loss_of(model, "frozen", rank, 2).backward()
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        try:
            model(ddp_models.batch_of("frozen", rank, 3))
        except RuntimeError as later:
            return str(error), notes, str(later)
    raise AssertionError("backward did not raise")


def test_a_parameter_that_one_rank_alone_unfreezes_is_named() -> None:
    results = ranks.run_ranks(
        2, unfrozen_alone, timeout_s=100, preload=ranks.TORCH_DDP, check=False
    )
    why = "parameter 'layers.0.weight' is trained on rank 1 and frozen on rank 0"
    for rank in range(2):
        error, notes, later = results[rank].value
        assert "COLLECTIVE_MISMATCH" in error
        assert why in notes
        assert why in later


def deserted(rank: int, world_size: int) -> str:
    model = wrap(ddp_models.make("mlp"))
    store = dist.PrefixStore("deserted", dist.distributed_c10d._get_default_store())
    try:
        for step in range(3 if rank == 0 else 2):
            loss_of(model, "mlp", rank, step).backward()
    except Exception as error:
        store.set("seen", "1")
        return str(error)
    store.wait(["seen"], timedelta(seconds=60))  # out of data, and alive
    return ""


@pytest.mark.ci
def test_without_join_who_waits_hears_who_did_not_come() -> None:
    results = ranks.run_ranks(
        2,
        deserted,
        timeout_s=100,
        preload=ranks.TORCH_DDP,
        init_timeout_s=15.0,
        check=False,
    )
    assert "rank 1" in results[0].value


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.ci
def test_a_pass_that_accumulates_waits_for_the_buffers_of_all_forwards(alone: None) -> None:
    """The first forward's hook fails, and the second one's does not."""
    begun: list[torch.futures.Future[Any]] = []

    def fail(done: Any) -> None:
        raise ArithmeticError("the buffers of the first forward")

    def hook(state: object, buffers: dict[str, torch.Tensor]) -> list[Any]:
        begun.append(torch.futures.Future())
        return [begun[-1].then(fail) if len(begun) == 1 else begun[-1]]

    model = wrap(nn.BatchNorm1d(3), accumulate=3)
    model._register_buffer_comm_hook(None, hook)
    losses = [model(torch.randn(4, 3)).sum() for _ in range(2)]
    for each in begun:
        each.set_result(None)
    with pytest.raises(RuntimeError, match="the buffers of the first forward"):
        losses[0].backward()


class Buffers:
    """What a buffer hook's future gives."""


@pytest.mark.ci
@pytest.mark.parametrize("devices", [None, ["meta:0"]], ids=["host", "device"])
def test_an_evaluation_keeps_no_futures_of_buffer_hooks(
    devices: list[str] | None, alone: None
) -> None:
    kept: list[weakref.ref[Buffers]] = []

    def hook(state: object, buffers: dict[str, torch.Tensor]) -> list[Any]:
        value, future = Buffers(), torch.futures.Future(devices=devices)
        kept.append(weakref.ref(value))
        future.set_result(value)
        return [future]

    model = wrap(nn.BatchNorm1d(3))
    model._register_buffer_comm_hook(None, hook)
    model.eval()
    for _ in range(5):
        model(torch.randn(4, 3))
    assert len(kept) == 5
    assert [each() for each in kept[:-1]] == [None] * 4


@pytest.mark.ci
def test_torch_compile_has_as_many_graphs_as_with_torchs_wrapper(alone: None) -> None:
    counts = []
    for wrapper in (wrap, TorchDDP):
        graphs: list[int] = []

        def count(graph: Any, inputs: Any, into: list[int] = graphs) -> Any:
            into.append(1)
            return graph.forward

        torch._dynamo.reset()
        # A class of our own: Dynamo does not look into torch's.
        model = wrapper(Reversed(), bucket_cap_mb=1)
        compiled = torch.compile(model, backend=count)
        compiled(torch.ones(2, 300)).sum().backward()
        counts.append(len(graphs))
    assert counts[0] == counts[1] >= 2


@pytest.mark.ci
def test_torch_compile_has_one_graph_with_the_python_reducer(alone: None) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = wrap(nn.Linear(3, 2))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(4, 3)), model(torch.ones(4, 3)))

"""Whether a backward pass reduces follows from the graph that it goes through."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_rig import wrap
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]

SYNCED, LOCAL = "synced", "no_sync"


class Slopes(nn.Module):
    """The gradient of every element is the batch's value; only negative ones use `late`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.late = (nn.Parameter(torch.zeros(300)) for _ in range(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        weights = self.first + self.last
        if batch < 0:
            weights = weights + self.late
        return (weights * batch).sum()


def forward(model: Any, value: float, mode: str) -> torch.Tensor:
    with model.no_sync() if mode == LOCAL else contextlib.nullcontext():
        return model(torch.full((1,), value))


def backward(a: torch.Tensor, b: torch.Tensor, how: str) -> None:
    if how == "joined":
        (a + b).backward()
        return
    for loss in (b, a) if how == "second first" else (a, b):
        loss.backward()


def gradient(model: Any) -> float:
    return float(model.module.first.grad[0])


HOWS = ("joined", "first first", "second first")
MODES = tuple(itertools.product((SYNCED, LOCAL), repeat=2))


def eight_sequences(
    rank: int, world_size: int, options: dict[str, Any]
) -> dict[tuple[str, str, str], tuple[float, float]]:
    """For each sequence this rank's gradient, and the same with torch's wrapper."""
    found = {}
    for how, modes in itertools.product(HOWS, MODES):
        results = []
        for make in (wrap, nn.parallel.DistributedDataParallel):
            model = make(Slopes(), find_unused_parameters=True, **options)
            a, b = (
                forward(model, value * (1 + rank), mode)
                for value, mode in zip((1.0, 10.0), modes, strict=True)
            )
            backward(a, b, how)
            results.append(gradient(model))
        found[(how, *modes)] = (results[0], results[1])
    return found


def wanted(rank: int, how: str, modes: tuple[str, ...]) -> float:
    """A pass through a synced graph averages `.grad` over the two ranks, with what was there."""
    given = [1.0, 10.0]
    if how == "joined":
        order = [(sum(given), SYNCED if SYNCED in modes else LOCAL)]
    else:
        order = list(zip(given, modes, strict=True))
        if how == "second first":
            order.reverse()
    mine = [0.0, 0.0]
    for value, mode in order:
        mine = [each + value * (1 + number) for number, each in enumerate(mine)]
        if mode == SYNCED:
            mine = [sum(mine) / 2] * 2
    return mine[rank]


def torch_is_an_oracle(how: str, modes: tuple[str, ...]) -> bool:
    """torch's reducer reduces one backward pass after a synced forward: the next one."""
    if how == "joined" or modes == (LOCAL, LOCAL):
        return True
    order = modes if how == "first first" else modes[::-1]
    return order == (SYNCED, LOCAL)


def test_two_forwards_and_their_backwards_in_every_order() -> None:
    found = ranks.run_ranks(2, eight_sequences, args=({},), timeout_s=100, preload=ranks.TORCH_DDP)
    for rank in range(2):
        for (how, *modes), (ours, torchs) in found[rank].value.items():
            case = (rank, how, modes)
            assert ours == wanted(rank, how, tuple(modes)), case
            if torch_is_an_oracle(how, tuple(modes)):
                assert ours == torchs, case


def unused_forward(rank: int, world_size: int) -> dict[int, float]:
    """A forward without backward, then a pass in no_sync(), then those that are reduced."""
    found = {}
    for accumulate in (1, 2, 3):
        model = wrap(Slopes(), accumulate=accumulate, find_unused_parameters=True)
        forward(model, 1.0, SYNCED)
        forward(model, float(rank), LOCAL).backward()
        assert gradient(model) == rank
        for _ in range(accumulate):
            forward(model, float(rank), SYNCED).backward()
        found[accumulate] = gradient(model)
    return found


def test_a_forward_without_backward_does_not_make_a_pass_in_no_sync_reduce() -> None:
    found = ranks.run_ranks(2, unused_forward, timeout_s=100, preload=ranks.TORCH_DDP)
    assert [found[rank].value for rank in range(2)] == [{1: 1.0, 2: 1.5, 3: 2.0}] * 2


class HandedOut(Slopes):
    """Hands its loss out as an attribute, too; unless `visible`, no output leads to its graph."""

    visible = True

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.loss = super().forward(batch)
        return self.loss if self.visible else self.loss.detach()


def after_a_call_that_a_thread_keeps(rank: int, world_size: int) -> list[float]:
    """A thread is still in the last callback of its backward call, whose gradients have come."""
    model = wrap(HandedOut(), bucket_cap_mb=0.001)
    ended, go_on = threading.Event(), threading.Event()

    def local_pass() -> None:
        with model.no_sync():
            loss = model(torch.full((1,), -1.0 - rank))
        engine = torch.autograd.Variable._execution_engine

        def last() -> None:
            ended.set()
            assert go_on.wait(30)

        # Queued in a callback, so it comes after the wrapper's own.
        def queue(_: torch.Tensor) -> None:
            if not hooked:
                hooked.append(engine.queue_callback(lambda: engine.queue_callback(last)))

        model.module.first.register_post_accumulate_grad_hook(queue)
        loss.backward()

    hooked: list[Any] = []
    model.module.visible = False
    model(torch.full((1,), -1.0 - rank))
    hidden = model.module.loss
    model.module.visible = True
    thread = threading.Thread(target=local_pass)
    thread.start()
    assert ended.wait(30)
    try:
        model.zero_grad()
        hidden.backward()
        return [gradient(model)]
    finally:
        go_on.set()
        thread.join()


def test_a_backward_call_that_a_thread_keeps_decides_nothing_for_the_next_one() -> None:
    found = ranks.run_ranks(
        2, after_a_call_that_a_thread_keeps, timeout_s=100, preload=ranks.TORCH_DDP
    )
    assert [found[rank].value for rank in range(2)] == [[-1.5]] * 2


class Penalised(Slopes):
    """`penalty` takes part in no forward pass: the program adds a term of its own on it."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty = nn.Parameter(torch.zeros(300))


def penalty_in_no_sync(rank: int, world_size: int) -> list[float]:
    """A forward without backward, then a pass in no_sync() that begins beside its graph."""
    model = wrap(Penalised(), find_unused_parameters=True)
    forward(model, 1.0, SYNCED)
    output = forward(model, 1.0 + rank, LOCAL)
    # The later an operator was recorded, the sooner its backward runs.
    (output + (model.module.penalty * (1.0 + rank)).sum()).backward()
    found = [float(model.module.penalty.grad[0]), gradient(model)]
    forward(model, 1.0, SYNCED).backward()
    return [*found, gradient(model)]


def test_a_forward_without_backward_lets_no_penalty_reduce_in_no_sync() -> None:
    found = ranks.run_ranks(2, penalty_in_no_sync, timeout_s=100, preload=ranks.TORCH_DDP)
    assert [found[rank].value for rank in range(2)] == [[1.0, 1.0, 2.5], [2.0, 2.0, 2.5]]


def accumulated_pairs(rank: int, world_size: int) -> list[float]:
    """Two forwards, then two backwards, with a reduction every second pass; a graph used twice."""
    model = wrap(Slopes(), accumulate=2, find_unused_parameters=True)
    found = []
    for _ in range(2):
        model.zero_grad()
        a, b = forward(model, 1.0 + rank, SYNCED), forward(model, 10.0 * rank, SYNCED)
        a.backward()
        assert gradient(model) == 1.0 + rank
        b.backward()
        found.append(gradient(model))
    model.zero_grad()
    a = forward(model, 2.0 * rank, SYNCED)
    a.backward(retain_graph=True)
    a.backward()
    return [*found, gradient(model)]


def test_each_pass_through_a_synced_graph_is_counted_once() -> None:
    found = ranks.run_ranks(2, accumulated_pairs, timeout_s=100, preload=ranks.TORCH_DDP)
    assert [found[rank].value for rank in range(2)] == [[6.5, 6.5, 2.0]] * 2


def late_parameter(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """A loss of a synced forward and of one in no_sync(), which alone uses a parameter."""
    model = wrap(Slopes(), find_unused_parameters=True)
    a = forward(model, 1.0 + rank, SYNCED)
    b = forward(model, -1.0 - rank, LOCAL)
    (a + 3 * b).backward()
    late = model.module.late.grad
    return [float(late[0])] if late is not None else [], [gradient(model)]


def test_a_parameter_whose_gradient_comes_before_the_synced_graph_is_reduced() -> None:
    found = ranks.run_ranks(2, late_parameter, timeout_s=100, preload=ranks.TORCH_DDP)
    assert [found[rank].value for rank in range(2)] == [([-4.5], [-3.0])] * 2


class Hidden(nn.Module):
    """Its loss is not what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, batch: torch.Tensor) -> Any:
        self.loss = (self.weight * batch).sum()
        return self.returned()

    def returned(self) -> Any:
        return None


class ReturnsAnObject(Hidden):
    def returned(self) -> Any:
        return type("Result", (), {"loss": self.loss})()


class ReturnsAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.weight * batch).view(2, 2)


def hidden_losses(rank: int, world_size: int) -> list[float]:
    found = []
    for module in (Hidden(), ReturnsAnObject()):
        model = wrap(module)
        for _ in range(2):
            model.zero_grad()
            model(torch.tensor(2.0 * rank))
            module.loss.backward()
            found.append(float(module.weight.grad[0]))
    model = wrap(ReturnsAView())
    outputs = [model(torch.tensor(2.0 * rank)) for _ in range(2)]
    for output in outputs:
        output += 1  # a write into a view gives it another node
        output.sum().backward()
    found.append(float(model.module.weight.grad[0]))
    return found


def test_losses_that_are_no_output_reduce_as_with_torchs_wrapper() -> None:
    found = ranks.run_ranks(2, hidden_losses, timeout_s=100, preload=ranks.TORCH_DDP)
    assert [found[rank].value for rank in range(2)] == [[1.0, 1.0, 1.0, 1.0, 2.0]] * 2


def pipeline(rank: int, world_size: int) -> float:
    """As pipelines and accelerate do it: forwards in no_sync(), and the reducer told afterwards."""
    model = wrap(Slopes(), find_unused_parameters=True)
    losses = [forward(model, 2.0 * rank, LOCAL) for _ in range(2)]
    losses[0].backward()
    model.reducer.prepare_for_backward([losses[1]])
    losses[1].backward()
    return gradient(model)


def test_a_pass_may_be_made_to_reduce_after_its_forward() -> None:
    found = ranks.run_ranks(2, pipeline, timeout_s=100, preload=ranks.TORCH_DDP)
    assert [found[rank].value for rank in range(2)] == [2.0] * 2


def repeated_pipeline(rank: int, world_size: int) -> float:
    """Backward repeats the forward pass, all of it, outside no_sync()."""
    model = wrap(Slopes())
    batch = torch.tensor(-1.0 - 2.0 * rank)
    with set_checkpoint_early_stop(False), model.no_sync():
        loss = checkpoint(model, batch, use_reentrant=False, preserve_rng_state=False)
    model.reducer.prepare_for_backward([])
    loss.backward()
    return gradient(model)


def test_so_may_one_that_a_checkpoint_repeats() -> None:
    found = ranks.run_ranks(2, repeated_pipeline, timeout_s=100, preload=ranks.TORCH_DDP)
    assert [found[rank].value for rank in range(2)] == [-2.0] * 2


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory, say")


class TwoLayers(nn.Module):
    cut_off = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.zeros(4)) for _ in range(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first * batch
        if self.cut_off:
            hidden = Raises.apply(hidden)
        return (hidden + self.last * batch).sum()


def cut_off(rank: int, world_size: int) -> tuple[list[float], str, str]:
    module = TwoLayers()
    old = wrap(module)
    older_graph = old(torch.tensor(1.0))
    module.cut_off = True
    with pytest.raises(RuntimeError, match="out of memory") as kept:
        old(torch.tensor(1.0)).backward()
    module.cut_off = False
    with pytest.raises(RuntimeError, match="gave no gradient to 'first'") as graph:
        older_graph.backward()
    found = []
    new = wrap(module)
    for _ in range(3):
        new.zero_grad()
        new(torch.tensor(2.0 * rank)).backward()
        found += [float(each.grad[0]) for each in module.parameters()]
    with pytest.raises(RuntimeError, match="gave no gradient to 'first'") as caught:
        old(torch.tensor(1.0))
    assert kept.value is not None
    return found, str(graph.value), str(caught.value)


def test_a_wrapper_whose_pass_was_cut_off_is_no_hindrance_to_the_next_one() -> None:
    found = ranks.run_ranks(2, cut_off, timeout_s=100, preload=ranks.TORCH_DDP)
    assert [found[rank].value[0] for rank in range(2)] == [[1.0] * 6] * 2


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.zeros(300)) for _ in range(2))

    def forward(self, batch: torch.Tensor, both: bool) -> torch.Tensor:
        return ((self.left + self.right if both else self.left) * batch).sum()


def unfrozen_before_no_sync(rank: int, world_size: int) -> list[float]:
    """The first pass of a parameter is one in no_sync(), and the reduction comes with another."""
    model = wrap(Sides(), find_unused_parameters=True)
    batch = torch.full((1,), 1.0 + rank)
    model.module.right.requires_grad_(False)
    model(batch, both=False).backward()
    model.zero_grad()
    model.module.right.requires_grad_(True)
    with model.no_sync():
        model(batch, both=True).backward()
    model(batch, both=False).backward()
    return [float(each.grad[0]) for each in model.parameters()]


def test_a_parameter_that_is_unfrozen_before_a_pass_in_no_sync_is_reduced() -> None:
    found = ranks.run_ranks(2, unfrozen_before_no_sync, timeout_s=60, preload=ranks.TORCH_DDP)
    assert found.values() == [[3.0, 1.5]] * 2


class NamesNoOutput(TwoLayers):
    """Its loss is in an object. The error comes behind the last gradient, or before the first."""

    raises_first = names_output = False

    def forward(self, batch: torch.Tensor) -> Any:
        loss = super().forward(batch)
        if self.raises_first:
            loss = Raises.apply(loss)
        return loss if self.names_output else type("Result", (), {"loss": loss})()


def hidden_and_cut_off(rank: int, world_size: int) -> list[float]:
    found = []
    for name in ("cut_off", "raises_first"):
        module = NamesNoOutput()
        old = wrap(module, process_group=dist.new_group())
        setattr(module, name, True)
        with pytest.raises(RuntimeError, match="out of memory"):
            old(torch.tensor(1.0)).loss.backward()
        setattr(module, name, False)
        new, beside = (wrap(module, process_group=dist.new_group()) for _ in range(2))
        for mode in (SYNCED, LOCAL, "none", "none", "a pass in no_sync"):
            new.zero_grad()
            if mode == "a pass in no_sync":
                with new.no_sync():
                    new(torch.tensor(4.0 * rank)).loss.backward()
            result = new(torch.tensor(2.0 * rank))
            if mode in (SYNCED, LOCAL):  # of another wrapper, which is marked and unused
                module.names_output = True
                forward(beside, 1.0, mode)
                module.names_output = False
            result.loss.backward()
            found += [float(each.grad[0]) for each in module.parameters()]
    return found


def test_an_old_wrapper_takes_no_part_in_passes_that_nothing_marks() -> None:
    found = ranks.run_ranks(2, hidden_and_cut_off, timeout_s=60, preload=ranks.TORCH_DDP)
    assert found.values() == [([1.0] * 8 + [3.0] * 2) * 2] * 2


def force_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1, bias=False)).double()


def force_batch(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def force_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Of the derivative alone: no output of forward is between the loss and a parameter."""
    batch = batch.clone().requires_grad_()
    (force,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    return force.square().mean()


def curvature_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    batch = batch.clone().requires_grad_()
    (force,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    (curvature,) = torch.autograd.grad(force.sum(), batch, create_graph=True)
    return curvature.square().mean()


def product_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """The gradient that comes from outside has a graph of its own."""
    batch = batch.clone().requires_grad_()
    out = model(batch)
    seed = torch.ones_like(out).requires_grad_()
    (force,) = torch.autograd.grad(out, batch, seed, create_graph=True)
    (along,) = torch.autograd.grad(force.sum(), seed, create_graph=True)
    return along.square().mean() + force.square().mean()


def jacobian_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    each = torch.autograd.functional.jacobian(model, batch, create_graph=True, vectorize=True)
    return each.square().mean()


LOSSES = (force_loss, curvature_loss, product_loss, jacobian_loss)


def gradients(module: nn.Module) -> torch.Tensor:
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return torch.cat([each.flatten() for each in found])


def force_means(world_size: int, loss: Any, *numbers: int) -> torch.Tensor:
    net = force_net()
    for rank in range(world_size):
        for number in numbers:
            (loss(net, force_batch(rank, number)) / world_size).backward()
    return gradients(net)


def derivatives(rank: int, world_size: int) -> dict[tuple[str, str], float]:
    found = {}
    for options in (False, True):
        for loss in LOSSES:
            net = force_net()
            model = wrap(net, find_unused_parameters=options)
            for number in range(2):
                model.zero_grad()
                loss(model, force_batch(rank, number)).backward()
                off = (gradients(net) - force_means(world_size, loss, number)).abs().max()
                found[str(options), f"{loss.__name__} {number}"] = float(off)
    model = wrap(force_net())
    pair = [force_loss(model, force_batch(rank, number)) for number in range(2)]
    for each in pair:
        each.backward()
    off = (gradients(model) - force_means(world_size, force_loss, 0, 1)).abs().max()
    found["two forwards", "then two backwards"] = float(off)
    model.zero_grad()
    first = force_loss(model, force_batch(rank, 2))
    with model.no_sync():
        local = force_loss(model, force_batch(rank, 3))
    first.backward()
    off = (gradients(model) - force_means(world_size, force_loss, 2)).abs().max()
    found["a forward in no_sync between", "and its own backward"] = float(off)
    before = gradients(model)
    local.backward()
    plain = force_net()
    force_loss(plain, force_batch(rank, 3)).backward()
    off = (gradients(model) - before - gradients(plain)).abs().max()
    found["a forward in no_sync", "and its backward"] = float(off)
    return found


def test_a_loss_of_derivatives_goes_through_the_output_that_they_are_of() -> None:
    for found in ranks.run_ranks(2, derivatives, timeout_s=100, preload=ranks.TORCH_DDP).values():
        for case, off in found.items():
            assert off < 1e-12, (case, off)


def derivatives_of_a_static_graph(rank: int, world_size: int) -> dict[tuple[str, str], str]:
    """Passes up to the reduction, beginning with a loss of derivatives."""
    found = {}
    how: dict[str, dict[str, Any]] = {
        "": {},
        "accumulated": {"accumulate": 2},
        "in no_sync": {},
        "weighed": {"weight": "samples"},
    }
    for loss, (name, options) in itertools.product(LOSSES[:3], how.items()):
        group = dist.new_group()
        model = wrap(force_net(), static_graph=True, process_group=group, **options)
        try:
            if name == "in no_sync":
                with model.no_sync():
                    loss(model, force_batch(rank, 0)).backward()
            for number in range(options.get("accumulate", 1)):
                loss(model, force_batch(rank, number)).backward()
            found[loss.__name__, name] = "no error"
        except RuntimeError as error:
            found[loss.__name__, name] = str(error)
    return found


def test_a_loss_of_derivatives_of_a_static_graph_is_an_error_that_says_so() -> None:
    found = ranks.run_ranks(
        2, derivatives_of_a_static_graph, timeout_s=100, preload=ranks.TORCH_DDP
    )
    for values in found.values():
        for case, text in values.items():
            assert "leave static_graph=True out" in text, (case, text)


def two_wrappers(rank: int, world_size: int) -> list[float]:
    """Of one module, in turn, the one's forward without a backward before the other's step."""
    module = TwoLayers()
    models = [wrap(module, bucket_cap_mb=cap) for cap in (1, 1e-5)]
    found = []
    for number in range(4):
        this, other = models[number % 2], models[1 - number % 2]
        this.zero_grad()
        other(torch.tensor(1.0))
        this(torch.tensor(2.0 * rank)).backward()
        found += [float(each.grad[0]) for each in module.parameters()]
    assert [each.stats().steps for each in models] == [2, 2]
    return found


def test_two_wrappers_of_one_module_reduce_their_own_passes() -> None:
    found = ranks.run_ranks(2, two_wrappers, timeout_s=100, preload=ranks.TORCH_DDP)
    assert [found[rank].value for rank in range(2)] == [[1.0] * 8] * 2


def random_sequence(rank: int, world_size: int, seed: int) -> None:
    """Forwards of all kinds, and backwards of some of them, against a plain model."""
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    accumulate = 1 + pick(3)
    options: dict[str, Any] = {"static_graph": True} if pick(3) == 0 else {}
    model = wrap(
        TwoLayers(), accumulate=accumulate, gradient_as_bucket_view=pick(2) == 0, **options
    )
    plain, counted = [0.0] * world_size, 0
    waiting: list[tuple[torch.Tensor, float, bool]] = []
    for number in range(24):
        scale = 1.0 + number
        kind = pick(6)
        if kind < 2:
            mode = (SYNCED, LOCAL)[kind]
            waiting.append((forward(model, scale * (1 + rank), mode), scale, mode == SYNCED))
        elif kind == 2:
            with torch.no_grad():
                model(torch.tensor(1.0))
        elif kind == 3:
            model.eval() if pick(2) else model.train()
        elif waiting:
            several = pick(3) == 0 and len(waiting) > 1
            taken = [waiting.pop(pick(len(waiting))) for _ in range(2 if several else 1)]
            torch.stack([loss for loss, _, _ in taken]).sum().backward()
            given = sum(value for _, value, _ in taken)
            plain = [each + given * (1 + place) for place, each in enumerate(plain)]
            counted += any(synced for _, _, synced in taken)
            if any(synced for _, _, synced in taken) and counted % accumulate == 0:
                plain = [sum(plain) / world_size] * world_size
            for each in model.parameters():
                assert float(each.grad[0]) == pytest.approx(plain[rank], rel=1e-5), (seed, number)


def random_sequences(rank: int, world_size: int, seeds: range) -> None:
    for seed in seeds:
        random_sequence(rank, world_size, seed)
    dist.barrier()


def test_random_sequences_of_forwards_and_backwards() -> None:
    ranks.run_ranks(2, random_sequences, args=(range(40),), timeout_s=200, preload=ranks.TORCH_DDP)

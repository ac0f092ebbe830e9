"""Gradients that come before backward reaches an output of forward.

They are those of parameters that the loss uses beside it. They are of the same pass, which is
counted once, and weighed once.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from typing import Any

import pytest
import ranks
import torch
from ddp_rig import wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]

OUTSIDE, RETURNED = "outside forward", "a bare leaf that forward returns"
NESTED, INNER = "outside and in a nested call", "in a nested call only"
UNDEFINED = "a gradient of None"
CASES = (OUTSIDE, RETURNED, NESTED, INNER, UNDEFINED)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:  # type: ignore[override]
        return None


class Scaled(nn.Module):
    """A learned noise that only the loss uses, and a head that a checkpoint of the loss does."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        self.log_sigma = nn.Parameter(torch.full((), 0.25, dtype=torch.float64))
        if where in (NESTED, INNER):
            self.head = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
        if where == INNER:
            del self.log_sigma
        self.where = where

    def forward(self, batch: torch.Tensor) -> Any:
        return (self.layers(batch), self.log_sigma if self.where == RETURNED else None)


def loss_of(model: Any, net: Scaled, number: int, rank: int, factor: float = 1.0) -> torch.Tensor:
    """``log_sigma`` is added last, so its gradient comes first."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    batch = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    output, returned = model(batch)
    if net.where in (NESTED, INNER):
        loss: torch.Tensor = checkpoint(
            lambda it: (it @ net.head.T).square().mean(), output, use_reentrant=True
        )
    else:
        loss = output.square().mean()
    if net.where == UNDEFINED:
        loss = loss + NoGradient.apply(net.log_sigma)
    elif net.where != INNER:
        log_sigma = net.log_sigma if returned is None else returned
        loss = loss * torch.exp(-log_sigma) + log_sigma * (1 + rank)
    return loss * factor


def share_of(net: Scaled, number: int, rank: int) -> torch.Tensor:
    """The gradients of a plain copy."""
    single = copy.deepcopy(net)
    single.zero_grad()
    loss_of(single, single, number, rank).backward()
    return gradients(single)


def gradients(net: nn.Module) -> torch.Tensor:
    each = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    return torch.cat([grad.flatten() for grad in each])


def off_by(found: torch.Tensor, right: torch.Tensor) -> float:
    off = float((found - right).abs().max() / right.abs().max())
    return off if math.isfinite(off) else math.inf


def counted(rank: int, world_size: int) -> dict[Any, Any]:
    """Two reductions of each case: how far .grad is from that by hand, after every pass."""
    found: dict[Any, Any] = {}
    options = itertools.product((1, 2, 3), (False, True), (None, "samples"), CASES)
    for case in options:
        accumulate, find_unused, weight, where = case
        net = Scaled(where)
        model = wrap(net, accumulate=accumulate, find_unused_parameters=find_unused, weight=weight)
        worst = 0.0
        for reduction in range(2):
            model.zero_grad()
            mine = torch.zeros(())
            numbers = [reduction * accumulate + each for each in range(accumulate)]
            for number in numbers:
                loss_of(model, net, number, rank).backward()
                mine = mine + share_of(net, number, rank)
                if number != numbers[-1]:
                    worst = max(worst, off_by(gradients(net), mine))
            everyones = [
                share_of(net, number, each) for each in range(world_size) for number in numbers
            ]
            worst = max(worst, off_by(gradients(net), sum(everyones) / world_size))
        found[case] = (worst, model.stats().steps, model.stats().passes)
    return found


def test_a_pass_with_an_early_gradient_is_counted_once() -> None:
    found = ranks.run_ranks(2, counted, timeout_s=100, preload=ranks.TORCH_DDP)
    for rank in range(2):
        for case, (off, steps, passes) in found[rank].value.items():
            assert off < 1e-12, (rank, case, off)
            assert (steps, passes) == (2, 2 * case[0]), (rank, case)


LOCALLY, ACCUMULATED = "no_sync", "accumulate"
ZERO = "zero_grad"
WEIGHTS: dict[str, tuple[tuple[float, float], ...]] = {
    "unequal": ((32.0, 1.0), (8.0, 5.0), (8.0, 7.0)),
    "falling on one rank": ((32.0, 3.0), (8.0, 3.0)),
    "none at first": ((0.0, 3.0), (8.0, 2.0)),
    "none at last": ((8.0, 3.0), (0.0, 2.0)),
    "far apart": ((1e9, 1e9), (1.0, 2.0)),
    "equal": ((4.0, 4.0), (4.0, 4.0)),
}


def weighed(rank: int, world_size: int) -> dict[Any, float]:
    """Passes whose weights differ; those without weight have gradients of NaN."""
    found: dict[Any, float] = {}
    cases = itertools.product(WEIGHTS, (LOCALLY, ACCUMULATED), CASES, ("", ZERO))
    for case in cases:
        name, how, where, between = case
        weights = WEIGHTS[name]
        net = Scaled(where)
        options = {"accumulate": len(weights)} if how == ACCUMULATED else {}
        model = wrap(net, weight="samples", **options)
        if between == ZERO:
            with model.no_sync() if how == LOCALLY else contextlib.nullcontext():
                for number in range(len(weights) if how == ACCUMULATED else 2):
                    add_pass(model, net, 50 + number, rank, 3.0 + number + rank)
            model.zero_grad()
        for number, of_ranks in enumerate(weights):
            local = how == LOCALLY and number + 1 < len(weights)
            with model.no_sync() if local else contextlib.nullcontext():
                add_pass(model, net, number, rank, of_ranks[rank])
        total = sum(map(sum, weights))
        right = sum(
            len(weights) * weight / total * share_of(net, number, each)
            for number, of_ranks in enumerate(weights)
            for each, weight in enumerate(of_ranks)
        )
        assert isinstance(right, torch.Tensor)
        found[case] = off_by(gradients(net), right)
    return found


def add_pass(model: Any, net: Scaled, number: int, rank: int, weight: float) -> None:
    model.samples = weight
    loss_of(model, net, number, rank, factor=1.0 if weight else math.nan).backward()


def test_an_early_gradient_counts_with_the_weight_of_its_pass() -> None:
    found = ranks.run_ranks(2, weighed, timeout_s=100, preload=ranks.TORCH_DDP)
    for rank in range(2):
        for case, off in found[rank].value.items():
            assert off < 1e-11, (rank, case, off)


def decayed(rank: int, world_size: int) -> float:
    """The loss uses all parameters, and no output of forward. Returns how far .grad is off."""
    net = Scaled(OUTSIDE)
    model = wrap(net, find_unused_parameters=True)
    worst = 0.0
    for number in range(2):
        model.zero_grad()
        model(torch.ones(2, 6, dtype=torch.float64) * number)
        sum(p.square().sum() * (1 + rank) for p in net.parameters()).backward()
        right = torch.cat([2 * p.detach().flatten() for p in net.parameters()])
        worst = max(worst, off_by(gradients(net), right * (1 + world_size) / 2))
    return worst


def test_a_loss_of_parameters_alone_with_find_unused_parameters() -> None:
    found = ranks.run_ranks(2, decayed, timeout_s=60, preload=ranks.TORCH_DDP)
    assert max(found[rank].value for rank in range(2)) < 1e-12


def left_in_a_nested_call(rank: int, world_size: int) -> str:
    net = Scaled(NESTED)
    model = wrap(net)
    batch = torch.ones(2, 6, dtype=torch.float64)
    model(batch)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    checkpoint(lambda by: (net.head * by).sum(), scale, use_reentrant=True).backward()
    with pytest.raises(RuntimeError) as raised:
        model(batch)
    loss_of(model, net, 0, rank).backward()  # it goes on
    return str(raised.value)


def test_gradients_of_a_nested_call_alone_raise_in_the_next_forward() -> None:
    found = ranks.run_ranks(2, left_in_a_nested_call, timeout_s=60, preload=ranks.TORCH_DDP)
    for rank in range(2):
        assert "a backward call inside another one" in found[rank].value


class Result:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Hidden(nn.Module):
    """The gradient of `first` and `second` is the batch; both may come in a nested call."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.first, self.second = (nn.Parameter(torch.zeros(2)) for _ in range(2))

    def forward(self, batch: torch.Tensor) -> Result:
        def loss_of(each: torch.Tensor) -> torch.Tensor:
            return ((self.first + self.second) * each).sum()

        if self.how == NESTED:
            return Result(checkpoint(loss_of, batch, use_reentrant=True))
        return Result(loss_of(batch))


def left_by_one_of_two(rank: int, world_size: int) -> str:
    """The other wrapper of the module has had a forward pass without a backward."""
    net = Hidden(NESTED)
    models = [wrap(net), wrap(net)]
    batch = torch.ones(2, requires_grad=True)
    models[1](batch)
    models[0](batch).value.backward()
    with pytest.raises(RuntimeError) as raised:
        models[0](batch)
    return str(raised.value)


def test_so_they_do_if_another_wrapper_of_the_module_may_have_had_them() -> None:
    found = ranks.run_ranks(2, left_by_one_of_two, timeout_s=60, preload=ranks.TORCH_DDP)
    for rank in range(2):
        assert "a backward call inside another one" in found[rank].value


def two_nested(rank: int, world_size: int) -> tuple[float, int]:
    """Each forward pass runs again in a nested call of its own, and is a pass of its own."""
    net = Scaled(INNER)
    del net.head
    model = wrap(net, accumulate=2)
    batches = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(8)).double()

    def loss_with(module: Any, of: int) -> torch.Tensor:
        each = [(batch * (1 + of)).requires_grad_() for batch in batches]
        first, second = (checkpoint(lambda it: module(it)[0], x, use_reentrant=True) for x in each)
        loss: torch.Tensor = first.square().mean() + second.square().mean()
        return loss

    loss_with(model, rank).backward()
    single = copy.deepcopy(net)
    single.zero_grad()
    for of in range(world_size):
        (loss_with(single, of) / world_size).backward()
    return off_by(gradients(net), gradients(single)), model.stats().steps


def test_two_checkpointed_forwards_in_one_backward_are_two_passes() -> None:
    found = ranks.run_ranks(2, two_nested, timeout_s=60, preload=ranks.TORCH_DDP)
    for rank in range(2):
        off, steps = found[rank].value
        assert off < 1e-12, (rank, off)
        assert steps == 1


def late_with_find_unused(rank: int, world_size: int) -> str:
    net = Scaled(OUTSIDE)
    model = wrap(net, find_unused_parameters=True)
    scale = net.log_sigma.exp()
    output, _ = model(torch.ones(2, 6, dtype=torch.float64))
    with pytest.raises(RuntimeError) as raised:
        (output * scale).sum().backward()
    return str(raised.value)


def test_a_gradient_after_the_outputs_with_find_unused_parameters_raises() -> None:
    found = ranks.run_ranks(2, late_with_find_unused, timeout_s=60, preload=ranks.TORCH_DDP)
    for rank in range(2):
        assert "parameter 'log_sigma' got a second gradient" in found[rank].value


def penalised_around_a_checkpoint(rank: int, world_size: int) -> float:
    """The penalty's gradients come first, in the call around the one that runs the forward pass."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    model = wrap(net)

    def loss_with(module: nn.Module, whose: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(whose)
        batch = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        loss: torch.Tensor = checkpoint(module, batch, use_reentrant=True).square().mean()
        for param in module.parameters():
            loss = loss + param.square().sum() * (1 + whose)
        return loss

    worst = 0.0
    for _ in range(2):
        model.zero_grad()
        loss_with(model, rank).backward()
        single = copy.deepcopy(net)
        single.zero_grad()
        for whose in range(world_size):
            (loss_with(single, whose) / world_size).backward()
        worst = max(worst, off_by(gradients(net), gradients(single)))
    return worst


def test_a_penalty_around_a_checkpointed_forward_is_of_its_pass() -> None:
    found = ranks.run_ranks(2, penalised_around_a_checkpoint, timeout_s=60, preload=ranks.TORCH_DDP)
    assert max(found[rank].value for rank in range(2)) < 1e-12


class Headed(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(5, 2).double()

    def forward(self, batch: torch.Tensor) -> Any:
        return self.head(checkpoint(self.trunk, batch, use_reentrant=True))


def shared_trunk(rank: int, world_size: int) -> float:
    """Two wrappers with a trunk that runs in a nested call; backward takes one, then the other."""
    torch.manual_seed(3)
    trunk = nn.Sequential(nn.Linear(6, 5), nn.Tanh()).double()
    nets = [Headed(trunk), Headed(trunk)]
    models = [wrap(net) for net in nets]

    def losses_with(modules: list[Any], whose: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(whose)
        batch = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        return [module(batch).square().mean() for module in modules]

    worst = 0.0
    for order in ((1, 0), (0, 1)):
        for model in models:
            model.zero_grad()
        losses = losses_with(models, rank)
        for which in order:
            losses[which].backward()
        singles = copy.deepcopy(nets)
        for single in singles:
            single.zero_grad()
        for whose in range(world_size):
            for loss in losses_with(singles, whose):
                (loss / world_size).backward()
        for net, single in zip(nets, singles, strict=True):
            worst = max(worst, off_by(gradients(net), gradients(single)))
    return worst


def test_a_checkpointed_trunk_of_two_wrappers_is_reduced_by_each() -> None:
    found = ranks.run_ranks(2, shared_trunk, timeout_s=60, preload=ranks.TORCH_DDP)
    assert max(found[rank].value for rank in range(2)) < 1e-12


BEFORE, AFTER, PENALTY = "before the checkpoint", "behind it", "a penalty before it"


def beside_checkpointed_wrapper(model: Any, net: Scaled, whose: int, where: str) -> torch.Tensor:
    """The wrapper itself runs in a checkpoint, and the loss uses a parameter beside it."""
    generator = torch.Generator().manual_seed(whose)
    batch = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    scale = net.log_sigma * (1 + whose)
    beside = net.layers[0].weight.square().sum() * (1 + whose)
    out = checkpoint(lambda it: model(it)[0], batch, use_reentrant=REENTRANT[0]).square().mean()
    if where == PENALTY:
        return out + beside + scale.exp()
    loss: torch.Tensor = out * (scale if where == BEFORE else net.log_sigma * (1 + whose)).exp()
    return loss


REENTRANT = [False]


def checkpointed_wrapper(
    rank: int, world_size: int, reentrant: bool
) -> dict[tuple[str, int, str | None], tuple[float, int, int] | str]:
    REENTRANT[0] = reentrant
    found: dict[tuple[str, int, str | None], tuple[float, int, int] | str] = {}
    for case in itertools.product((BEFORE, AFTER, PENALTY), (1, 2), (None, "samples")):
        where, accumulate, weight = case
        net = Scaled(OUTSIDE)
        model = wrap(
            net, accumulate=accumulate, weight=weight, process_group=torch.distributed.new_group()
        )
        worst = 0.0
        try:
            for _ in range(2):
                model.zero_grad()
                for _ in range(accumulate):
                    beside_checkpointed_wrapper(model, net, rank, where).backward()
                single = copy.deepcopy(net)
                single.zero_grad()
                for whose in range(world_size):
                    loss = beside_checkpointed_wrapper(single, single, whose, where)
                    (loss * accumulate / world_size).backward()
                worst = max(worst, off_by(gradients(net), gradients(single)))
            found[case] = (worst, model.stats().steps, model.stats().passes)
        except RuntimeError as error:
            found[case] = str(error)
    return found


def test_a_checkpointed_wrapper_beside_a_parameter_of_the_loss() -> None:
    found = ranks.run_ranks(
        2, checkpointed_wrapper, args=(False,), timeout_s=100, preload=ranks.TORCH_DDP
    )
    for rank in range(2):
        for case, result in found[rank].value.items():
            assert not isinstance(result, str), (case, result)
            off, steps, passes = result
            assert off < 1e-12 and (steps, passes) == (2, 2 * case[1]), (case, result)


def test_a_reentrant_one_is_right_if_the_parameters_gradient_comes_before_it() -> None:
    """Else an error names the parameter and use_reentrant."""
    found = ranks.run_ranks(
        2, checkpointed_wrapper, args=(True,), timeout_s=100, preload=ranks.TORCH_DDP
    )
    for rank in range(2):
        for case, result in found[rank].value.items():
            where, accumulate, _ = case
            if where == BEFORE:
                assert not isinstance(result, str), (case, result)
                off, steps, passes = result
                assert off < 1e-12 and (steps, passes) == (2, 2 * accumulate), (case, result)
                continue
            assert isinstance(result, str), (case, result)
            name = "log_sigma" if where == AFTER else "layers.0.weight"
            assert f"parameter '{name}' got a " in result, (case, result)
            assert "use torch.utils.checkpoint with use_reentrant=false" in result.lower(), case


def halved(rank: int, world_size: int) -> float:
    """A hook of the program's changes what an early gradient has made of .grad."""
    net = Scaled(OUTSIDE)
    model = wrap(net, weight="samples", accumulate=2)

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    net.log_sigma.register_post_accumulate_grad_hook(halve)
    for number in range(2):
        loss_of(model, net, number, rank).backward()
    right = 0.0
    for whose in range(world_size):
        sums = 0.0
        for number in range(2):
            sums = 0.5 * (sums + float(share_of(net, number, whose)[0]))
        right += sums / world_size
    assert net.log_sigma.grad is not None
    return abs(float(net.log_sigma.grad) - right)


def test_what_a_hook_makes_of_an_early_gradient_stays() -> None:
    found = ranks.run_ranks(2, halved, timeout_s=60, preload=ranks.TORCH_DDP)
    assert max(found[rank].value for rank in range(2)) < 1e-12


def clamped(rank: int, world_size: int) -> list[float]:
    """A hook of each parameter, in a pass that begins without a mark."""
    net = Hidden()
    model = wrap(net, weight="samples")

    def clamp(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-1, 1)

    for each in net.parameters():
        each.register_post_accumulate_grad_hook(clamp)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        model(torch.full((2,), 10.0)).value.backward()
    return [float(each.grad.abs().max()) for each in net.parameters() if each.grad is not None]


def test_what_a_hook_makes_of_the_gradient_that_begins_a_pass_stays() -> None:
    found = ranks.run_ranks(2, clamped, timeout_s=60, preload=ranks.TORCH_DDP)
    for rank in range(2):
        assert found[rank].value == [1.0, 1.0]

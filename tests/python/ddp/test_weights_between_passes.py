"""``weight="samples"`` between passes that accumulate: added, forgotten, frozen or saved."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import operator
import random
import time
from typing import Any

import pytest
import ranks
import rings
import torch
import torch.distributed as dist
from ddp_rig import wrap
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(400)]


def make_net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(9, 16, dtype=dtype), nn.Tanh(), nn.Linear(16, 2, dtype=dtype))


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 9, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - batch[:, :2]).square().mean()
    return loss


def penalty_of(model: nn.Module) -> torch.Tensor:
    return torch.stack([each.square().sum() for each in model.parameters()]).sum()


def gradients(model: nn.Module) -> torch.Tensor:
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([each.flatten().double() for each in found])


def share_of(net: nn.Module, loss: Any, *args: Any) -> torch.Tensor:
    """The gradients of one process."""
    single = copy.deepcopy(net)
    single.zero_grad()
    loss(single, *args).backward()
    return gradients(single)


def mean_of(net: nn.Module, weights: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """k * sum(w g) / sum(w), by pass and rank, of a float64 net whose batches were rounded."""
    total = sum(map(sum, weights))
    return sum(
        len(weights) * weight / total * share_of(net, loss_of, batch_of(rank, step, dtype).double())
        for step, of_ranks in enumerate(weights)
        for rank, weight in enumerate(of_ranks)
    )


def off_by(mine: torch.Tensor, right: torch.Tensor) -> float:
    off = float((mine - right).abs().max() / right.abs().max())
    return off if math.isfinite(off) else math.inf


def add_pass(model: Any, rank: int, step: int, weight: float, *, empty: bool = False) -> None:
    """One pass. ``empty``: one without weight has no batch; else its gradients are NaN."""
    if weight == 0 and empty:
        model.no_batch()
        return
    model.samples = weight
    (loss_of(model, batch_of(rank, step)) * (1.0 if weight else math.nan)).backward()


# A backward past the wrapper between two passes


def penalties(rank: int, world_size: int) -> dict[str, float]:
    """A penalty between two passes counts with the first one's weight, if it had any."""
    found = {}
    for first, how in itertools.product((0.0, 2.0), ("no_sync", "accumulate", "no batch")):
        net = make_net()
        options = {"accumulate": 2} if how == "accumulate" else {}
        model = wrap(copy.deepcopy(net), weight="samples", **options)
        weights = ((first, 3.0), (4.0, 1.0))
        if how == "accumulate":
            add_pass(model, rank, 0, weights[0][rank])
        else:
            with model.no_sync():
                add_pass(model, rank, 0, weights[0][rank], empty=how == "no batch")
        penalty_of(model.module).backward()
        add_pass(model, rank, 1, weights[1][rank])
        right = mean_of(net, weights)
        for r in range(world_size):
            weight = weights[0][r] or weights[1][r]
            right = right + 2 * weight / sum(map(sum, weights)) * share_of(net, penalty_of)
        found[f"{how}, after a pass of {first}"] = off_by(gradients(model), right)
    return found


def test_a_penalty_between_passes_is_kept() -> None:
    found = ranks.run_ranks(2, penalties, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert {name: off for name, off in results.items() if not off < 1e-12} == {}


def entered_only(rank: int, world_size: int) -> float:
    """autograd.grad() goes through a graph, and no parameter gets a gradient: it is no pass."""
    net = make_net()
    model = wrap(copy.deepcopy(net), weight="samples")
    batch = batch_of(rank, 0).requires_grad_()
    with model.no_sync():
        torch.autograd.grad(loss_of(model, batch), [batch])
    penalty_of(model.module).backward()
    add_pass(model, rank, 1, 3.0 + rank)
    right = share_of(net, penalty_of)
    for r in range(world_size):
        right = right + (3.0 + r) / 7.0 * share_of(net, loss_of, batch_of(r, 1))
    return off_by(gradients(model), right)


def test_a_graph_that_gives_no_gradient_is_no_pass() -> None:
    found = ranks.run_ranks(2, entered_only, timeout_s=60, preload=ranks.TORCH_DDP)
    assert max(found.values()) < 1e-12


# Passes that are forgotten


def slopes_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss of derivatives of the output alone."""
    batch = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    return slope.square().mean()


def of_derivatives(rank: int, world_size: int, accumulate: int) -> float:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 1, bias=False)).double()
    model = wrap(net, weight="samples", accumulate=accumulate)
    weights = ((8.0, 4.0), (2.0, 6.0))
    for step, of_ranks in enumerate(weights):
        local = accumulate == 1 and step == 0
        with model.no_sync() if local else contextlib.nullcontext():
            model.samples = of_ranks[rank]
            loss = slopes_of(model, batch_of(rank, step))
        loss.backward()
    total = sum(map(sum, weights))
    right = sum(
        2 * weight / total * share_of(net, slopes_of, batch_of(whose, step))
        for step, of_ranks in enumerate(weights)
        for whose, weight in enumerate(of_ranks)
    )
    assert isinstance(right, torch.Tensor)
    return off_by(gradients(net), right)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_of_derivatives_has_the_weight_of_its_forward(accumulate: int) -> None:
    found = ranks.run_ranks(
        2, of_derivatives, args=(accumulate,), timeout_s=60, preload=ranks.TORCH_DDP
    )
    assert max(found.values()) < 1e-12


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.branch = make_net(), nn.Linear(9, 2, dtype=torch.float64)

    def forward(self, batch: torch.Tensor, both: bool) -> torch.Tensor:
        out: torch.Tensor = self.net(batch)
        return out + self.branch(batch) if both else out


MIXED = list(itertools.product((False, True), (False, True), ((2.0, 2.0), (0.0, 2.0))))
"""Whether the forward in no_sync() is the last one and whether it alone has the branch; the weights
of the first forward."""
LAST_WEIGHTS = (8.0, 4.0)


def mixed(rank: int, world_size: int) -> dict[Any, tuple[float, int]]:
    """A loss of a forward in no_sync() and of one outside: one pass, of the last one's weight."""
    found = {}
    for case in MIXED:
        local_last, branches, first_weights = case
        net = Branched()
        model = wrap(net, weight="samples")

        def loss_with(
            module: Any,
            whose: int,
            local_last: bool = local_last,
            branches: bool = branches,
            first_weights: tuple[float, ...] = first_weights,
        ) -> torch.Tensor:
            losses = []
            for place, weights in enumerate((first_weights, LAST_WEIGHTS)):
                local = local_last == (place == 1)
                alone = module.no_sync() if local and hasattr(module, "no_sync") else None
                module.samples = weights[whose]
                with alone or contextlib.nullcontext():
                    both = local if branches else place == 1
                    losses.append(module(batch_of(whose, place), both).square().mean())
            return torch.stack(losses).sum()

        loss_with(model, rank).backward()
        right = sum(
            weight / sum(LAST_WEIGHTS) * share_of(net, loss_with, whose)
            for whose, weight in enumerate(LAST_WEIGHTS)
        )
        assert isinstance(right, torch.Tensor)
        found[case] = (off_by(gradients(net), right), model.stats().steps)
    return found


def test_a_loss_of_a_forward_in_no_sync_and_of_one_outside_is_one_pass() -> None:
    for found in ranks.run_ranks(2, mixed, timeout_s=60, preload=ranks.TORCH_DDP).values():
        for case, (off, steps) in found.items():
            assert off < 1e-12 and steps == 1, (case, off, steps)


def forgotten(rank: int, world_size: int) -> dict[str, float]:
    """Passes of which no rank had any weight, and zero_grad(): only those after it count."""
    found = {}
    for empty, unused in itertools.product((False, True), repeat=2):
        for forgets in (False, True):
            net = make_net()
            model = wrap(copy.deepcopy(net), weight="samples", find_unused_parameters=unused)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with model.no_sync():
                for step in range(2):
                    add_pass(model, rank, step, 0.0, empty=empty)
            if forgets:
                optimizer.zero_grad()
            weights: Any = ((0.0, 0.0), (0.0, 0.0), (3.0, 4.0))
            add_pass(model, rank, 2, weights[2][rank])
            right = mean_of(net, weights) / (3 if forgets else 1)
            found[f"{empty=} {unused=} {forgets=}"] = off_by(gradients(model), right)
    return found


def test_passes_without_weight_on_any_rank_are_forgotten_by_zero_grad() -> None:
    found = ranks.run_ranks(2, forgotten, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert {name: off for name, off in results.items() if not off < 1e-12} == {}


class Sides(nn.Module):
    """Two layers, of which a pass may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = make_net(), make_net()

    def forward(self, batch: torch.Tensor, sides: str = "both") -> torch.Tensor:
        found = [
            getattr(self, side)(batch) for side in ("left", "right") if sides in (side, "both")
        ]
        return torch.stack(found).sum(dim=0)


def unused(rank: int, world_size: int) -> list[bool]:
    """A parameter that no rank has used has no gradient, on ranks without a batch either."""
    found = []
    for empty in (False, True):
        model = wrap(Sides(), weight="samples", find_unused_parameters=True)
        with model.no_sync():
            model.samples = float(rank)
            if empty and rank == 0:
                model.no_batch()
            else:
                model(batch_of(rank, 0), "left").square().mean().backward()
        model.samples = 2.0
        model(batch_of(rank, 1), "left").square().mean().backward()
        found += [each.grad is None for each in model.module.right.parameters()]
        found += [each.grad is not None for each in model.module.left.parameters()]
    return found


def test_parameters_that_no_rank_has_used_have_no_gradient() -> None:
    found = ranks.run_ranks(2, unused, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert all(results)


def kept_and_unused(rank: int, world_size: int) -> list[bool]:
    """A gradient kept from a reduction stays, bit by bit, if no rank uses its parameter."""
    found = []
    for options in ({}, {"gradient_as_bucket_view": False}, {"wire_dtype": "fp16"}):
        model = wrap(Sides().float(), weight="samples", find_unused_parameters=True, **options)
        model(batch_of(rank, 0, torch.float32)).square().mean().backward()
        before = gradients(model.module.right)
        model.module.left.zero_grad()
        with model.no_sync():
            model.samples = 3.0 + rank
            model(batch_of(rank, 1, torch.float32), "left").square().mean().backward()
        model.samples = 0.7
        model(batch_of(rank, 2, torch.float32), "left").square().mean().backward()
        found.append(torch.equal(before, gradients(model.module.right)))
    return found


def test_a_kept_gradient_that_no_rank_uses_stays() -> None:
    found = ranks.run_ranks(2, kept_and_unused, timeout_s=60, preload=ranks.TORCH_DDP)
    assert list(found.values()) == [[True] * 3] * 2


# Parameters that are frozen and unfrozen


def frozen_between(rank: int, world_size: int) -> dict[str, float]:
    """The first layer takes part in the passes in which it is not frozen."""
    found = {}
    plans = {"in the second": (1, 0, 1), "in the first": (0, 1, 1), "each in turn": (1, 0, 0)}
    for (name, takes_part), local in itertools.product(plans.items(), (False, True)):
        net = Sides()
        model = wrap(copy.deepcopy(net), weight="samples", accumulate=1 if local else 3)
        weights = ((3.0, 4.0), (5.0, 1.0), (5.0, 7.0))
        right: Any = dict.fromkeys(("left", "right"), 0.0)
        for step, of_ranks in enumerate(weights):
            trained = {"left": bool(takes_part[step]), "right": True}
            if name == "each in turn":
                trained["right"] = not trained["left"]
            for side, is_trained in trained.items():
                getattr(model.module, side).requires_grad_(is_trained)
            model.samples = of_ranks[rank]
            with model.no_sync() if local and step < 2 else contextlib.nullcontext():
                model(batch_of(rank, step)).square().mean().backward()
            single = copy.deepcopy(net)
            for r, weight in enumerate(of_ranks):
                single.zero_grad()
                single(batch_of(r, step)).square().mean().backward()
                for side, is_trained in trained.items():
                    if is_trained:
                        right[side] = right[side] + weight * gradients(getattr(single, side))
        total = sum(map(sum, weights))
        for side in ("right",) if name == "each in turn" else ("left", "right"):
            mine = gradients(getattr(model.module, side))
            found[f"{name} {local=}: {side}"] = off_by(mine, 3 * right[side] / total)
    return found


def test_a_layer_that_is_frozen_between_passes() -> None:
    found = ranks.run_ranks(2, frozen_between, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert {name: off for name, off in results.items() if not off < 1e-12} == {}


def kept_while_frozen(rank: int, world_size: int) -> bool:
    """The gradient of a layer that takes part in no pass is the program's."""
    model = wrap(Sides(), weight="samples", accumulate=2)
    model.module.left.requires_grad_(False)
    for each in model.module.left.parameters():
        each.grad = torch.full_like(each, 3.0)
    for weight in (2.0, 7.0):
        model.samples = weight
        model(batch_of(rank, 0)).square().mean().backward()
    return all(bool((each.grad == 3.0).all()) for each in model.module.left.parameters())


def test_the_gradient_of_a_frozen_layer_stays() -> None:
    found = ranks.run_ranks(2, kept_while_frozen, timeout_s=60, preload=ranks.TORCH_DDP)
    assert all(found.values())


# Dtypes beside fp16


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.narrow = nn.Linear(9, 3, dtype=torch.float16)
        self.wide = nn.Linear(9, 3, dtype=torch.float64)
        self.phase = nn.Parameter(torch.randn(9, dtype=torch.complex128))
        self.table = nn.Embedding(20, 3, sparse=True, dtype=torch.float64)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        losses = [
            self.narrow(batch.half()).double().square().mean(),
            self.wide(batch).square().mean(),
            (self.phase * batch + 1j).abs().pow(3).mean(),
            self.table((batch.abs() * 10).long() % 20).square().mean(),
        ]
        return torch.stack(losses).sum()


def beside_fp16(rank: int, world_size: int) -> dict[str, float]:
    """fp16 parameters make passes take their share of the largest weight; others stay exact."""
    net = Mixed()
    model = wrap(copy.deepcopy(net), weight="samples", accumulate=3)
    weights = ((9.0, 8.0), (2.0, 5.0), (3.0, 1.0))
    right: dict[str, torch.Tensor] = {}
    for step, of_ranks in enumerate(weights):
        model.samples = of_ranks[rank]
        model(batch_of(rank, step)).backward()
        for r, weight in enumerate(of_ranks):
            single = copy.deepcopy(net)
            single(batch_of(r, step)).backward()
            for name, each in single.named_parameters():
                assert each.grad is not None
                part = 3 * weight / sum(map(sum, weights)) * wide(each.grad)
                right[name] = right[name] + part if name in right else part
    mine = {name: wide(each.grad) for name, each in model.module.named_parameters()}
    return {name: off_by(each, right[name]) for name, each in mine.items()}


def wide(grad: torch.Tensor) -> torch.Tensor:
    dense = grad.to_dense()
    return dense if dense.is_complex() else dense.double()


def test_other_dtypes_beside_fp16_keep_theirs() -> None:
    found = ranks.run_ranks(2, beside_fp16, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert len(results) == 6
        for name, off in results.items():
            assert off < (5e-3 if name.startswith("narrow") else 1e-13), name


FALLING = (tuple(1e20 / 1e5**step for step in range(9)), tuple(1e20 / 9e5**i for i in range(7)))
"""A pass weighs little less than the one before, and far less than the first one."""


def weights_at_random(sequences: int) -> list[Any]:
    """By pass and rank: independent of each other, or falling in small steps."""
    source = random.Random(8)
    found = []
    for number in range(sequences):
        falls = number % 2 == 1
        passes = source.randint(*((10, 16) if falls else (2, 10)))
        columns = []
        for _ in range(2):
            size, column = source.uniform(19, 20), []
            for _ in range(passes):
                step = source.uniform(-5.9, 1) if falls else source.uniform(-40, 40)
                size = min(max(size + step, -20.0), 20.0)
                column.append(0.0 if source.random() < 0.1 else 10**size)
            columns.append(column)
        columns[0][0] = columns[0][0] or 1.0
        found.append(tuple(zip(*columns, strict=True)))
    return found


def far_apart(rank: int, world_size: int) -> dict[str, float]:
    """.grad in the unit of the smaller weight would be infinite."""
    found = {}
    alike: Any = ((1e20, 1e-20), (1e-20, 1e20), (1e20, 1e-20, 1e20), *FALLING)
    by_pass = [tuple((each, each) for each in weights) for weights in alike]
    cases = [
        *itertools.product((torch.float32, torch.bfloat16), by_pass),
        *((torch.float32, weights) for weights in weights_at_random(40)),
    ]
    for dtype, weights in cases:
        net = make_net(dtype)
        model = wrap(copy.deepcopy(net), weight="samples", accumulate=len(weights))
        for step, of_ranks in enumerate(weights):
            model.samples = of_ranks[rank]
            loss_of(model, batch_of(rank, step, dtype)).backward()
        right = mean_of(net.double(), weights, dtype)
        found[f"{dtype} {weights}"] = off_by(gradients(model), right)
    return found


def test_passes_whose_weights_are_as_far_apart_as_may_be() -> None:
    found = ranks.run_ranks(2, far_apart, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        bounds = {name: 5e-2 if "bfloat16" in name else 1e-5 for name in results}
        assert {name: off for name, off in results.items() if not off < bounds[name]} == {}


def too_far(rank: int, world_size: int) -> list[str]:
    """Sums of such weights would overflow, or be rounded to nothing."""
    model = wrap(make_net(), weight="samples")
    found = []
    for bad in (1.7e308, 1e21, 1e-21, 5e-324):
        try:
            model.samples = bad
        except ValueError as error:
            found.append(str(error))
        with pytest.raises(ValueError, match="a weight is 0 or from 1e-20 to 1e20"):
            model.reducer.set_weight(bad)
    return found


def test_a_weight_whose_sums_overflow_is_refused() -> None:
    (found, *_) = ranks.run_ranks(2, too_far, timeout_s=60, preload=ranks.TORCH_DDP).values()
    assert [text.partition(" ")[0] for text in found] == [
        f"model.samples={bad!r}" for bad in (1.7e308, 1e21, 1e-21, 5e-324)
    ]
    assert all("is neither 0 nor a number from 1e-20 to 1e+20" in text for text in found)


# Checkpoints


UNUSED = {"find_unused_parameters": True, "gradient_as_bucket_view": False}


def resumed(rank: int, world_size: int) -> list[str]:
    """A run that is cut after each of its passes has the bits of one that is not."""
    wrong = []
    runs: dict[str, tuple[tuple[float, float], ...]] = {
        "of one weight": ((0.1, 0.1),) * 7,
        "first without weight": ((0.0, 3.0), (0.0, 0.0), (5.0, 2.0), (0.3, 0.7), (0.0, 2.0)),
        "all without weight": ((0.0, 0.0), (0.0, 0.0), (1.0, 2.0)),
        "of all sizes": ((1e9, 3.0), (1e-9, 5.0), (0.1, 0.3), (7.0, 0.0)),
    }
    for (name, weights), forgets, dtype in itertools.product(
        runs.items(), (False, True), (torch.float32, torch.float16)
    ):
        for cut in range(len(weights)):
            seen = []
            for cuts in (False, True):
                model = wrap(Sides().to(dtype), weight="samples", **UNUSED)
                for step, of_ranks in enumerate(weights):
                    if cuts and step == cut:
                        model = loaded(model, dtype)
                    if forgets and step == max(1, cut):
                        model.zero_grad()
                    one_pass(model, rank, step, of_ranks[rank], last=step == len(weights) - 1)
                seen.append([each.grad for each in model.parameters()])
            if not all(map(equal, *seen)):
                wrong.append(f"{name} {forgets=} {dtype} {cut=}")
    return wrong


def one_pass(model: Any, rank: int, step: int, weight: float, *, last: bool) -> None:
    sync, model.require_backward_grad_sync = model.require_backward_grad_sync, last
    batch = batch_of(rank, step, next(model.parameters()).dtype)
    if weight == 0 and step % 2 == 0:
        model.no_batch()
    else:
        model.samples = weight
        side = "right" if step == 1 else "left"  # no other pass uses it
        model(batch, side).square().mean().backward()
    model.require_backward_grad_sync = sync


def loaded(model: Any, dtype: torch.dtype) -> Any:
    new = wrap(Sides().to(dtype), weight="samples", **UNUSED)
    new.load_communication_state_dict(copy.deepcopy(model.communication_state_dict()))
    for one, other in zip(new.parameters(), model.parameters(), strict=True):
        one.grad = None if other.grad is None else other.grad.clone()
    return new


def equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def test_a_run_that_is_loaded_between_passes_has_the_same_bits() -> None:
    found = ranks.run_ranks(2, resumed, timeout_s=200, preload=ranks.TORCH_DDP)
    assert list(found.values()) == [[]] * 2


def unlike(rank: int, world_size: int) -> dict[str, str]:
    """A state between passes, of a wrapper with weights, goes into one with weights, and back."""
    found = {}
    for mine, theirs in ((None, "samples"), ("samples", None)):
        saved = wrap(make_net(), weight=theirs, accumulate=2)
        loss_of(saved, batch_of(rank, 0)).backward()
        try:
            new = wrap(make_net(), weight=mine, accumulate=2)
            new.load_communication_state_dict(saved.communication_state_dict())
        except ValueError as error:
            found[f"{mine} {theirs}"] = str(error)
        loss_of(saved, batch_of(rank, 1)).backward()
        new.load_communication_state_dict(saved.communication_state_dict())  # between reductions
    return found


def test_a_state_between_passes_with_other_weights_is_refused() -> None:
    found = ranks.run_ranks(2, unlike, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert 'was saved with weight="samples"' in results["None samples"]
        assert 'was saved without weight="samples"' in results["samples None"]


def of_unmarked(rank: int, world_size: int, loads: bool) -> str:
    """A pass in no_sync() whose graph is not marked is noted in a checkpoint."""
    model = wrap(Hidden(), weight="samples")
    with model.no_sync():
        model(batch_of(rank, 0)).value.backward()
    if loads:
        state = copy.deepcopy(model.communication_state_dict())
        grads = [each.grad for each in model.parameters()]
        model = wrap(Hidden(), weight="samples")
        model.load_communication_state_dict(state)
        for each, grad in zip(model.parameters(), grads, strict=True):
            each.grad = grad
    try:
        model(batch_of(rank, 1)).value.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


class Hidden(nn.Module):
    """Hands its loss out in an object that is no tensor, list or dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, batch: torch.Tensor) -> Any:
        return Loss((self.net(batch) - batch[:, :2]).square().mean())


class Loss:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("loads", [False, True])
def test_a_pass_without_a_mark_is_in_a_checkpoint(loads: bool) -> None:
    found = ranks.run_ranks(2, of_unmarked, args=(loads,), timeout_s=60, preload=ranks.TORCH_DDP)
    for text in found.values():
        assert "cannot tell which forward pass" in text


# Passes without weight whose graph is not marked


def unmarked(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = wrap(Hidden(), weight="samples")
    model(batch_of(rank, 0)).value.backward()
    before = gradients(model)
    model.samples = 0
    loss = model(batch_of(rank, 1)).value
    try:
        loss.backward()
    except ValueError as error:
        found["error"] = str(error).partition(":")[0]
    found["kept"] = off_by(gradients(model), before)

    model.zero_grad()
    model.samples = 0
    with pytest.raises(ValueError, match="no rank has any samples"):
        model(batch_of(rank, 1)).value.backward()
    found["none before"] = all(each.grad is None for each in model.parameters())

    model = wrap(Hidden(), weight="samples", accumulate=2)
    model.samples = 0
    model(batch_of(rank, 0)).value.backward()
    found["dropped"] = not any(bool(each.grad.any()) for each in model.parameters())
    model = wrap(Hidden(), weight="samples", accumulate=2)
    for step in range(2):
        model.samples = 3
        model(batch_of(rank, step)).value.backward()
    found["averaged"] = off_by(gradients(model), mean_of(model.module.net, [[3, 3], [3, 3]]))
    model = wrap(Hidden(), weight="samples", accumulate=2)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    model.samples = 0
    model(batch_of(rank, 2)).value.backward()
    found["accumulated"] = all(bool((each.grad == 1).all()) for each in model.parameters())
    model.samples = 3
    with pytest.raises(RuntimeError, match=r"whose weights differ \(0 and 3\)|Rank . failed in"):
        model(batch_of(rank, 1)).value.backward()
    return found


def test_a_pass_without_weight_or_mark_loses_no_gradient() -> None:
    found = ranks.run_ranks(2, unmarked, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert results["error"] == "no rank has any samples in this step"
        assert results["kept"] < 1e-12
        assert results["none before"] and results["dropped"]
        assert results["averaged"] < 1e-12
        assert results["accumulated"]


# zero_grad() of a part of the parameters


def partly(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for forgets in ("left", "right", "both", "frozen"):
        model = wrap(Sides(), weight="samples")
        with model.no_sync():
            model(batch_of(rank, 0)).square().mean().backward()
        if forgets == "frozen":  # and its gradient let go of, as is usual
            model.module.left.requires_grad_(False)
            model.module.left.zero_grad()
        elif forgets == "both":
            model.zero_grad()
        else:
            getattr(model.module, forgets).zero_grad()
        try:
            model(batch_of(rank, 1)).square().mean().backward()
            found[forgets] = ""
        except RuntimeError as error:
            found[forgets] = str(error)
    return found


def test_zero_grad_of_a_part_is_an_error_that_names_two_parameters() -> None:
    found = ranks.run_ranks(2, partly, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert results["both"] == results["frozen"] == ""
        for forgets, other in (("left", "right"), ("right", "left")):
            assert f".grad of '{forgets}." in results[forgets]
            assert f"that of '{other}." in results[forgets]
            assert "Call model.zero_grad()" in results[forgets]


# A checkpoint that repeats the whole wrapper's forward


class Repeated(nn.Module):
    """It is slow only when the program calls it. The gradient of `last` comes before backward
    repeats anything, and the one of `first` after that."""

    SLOW_S = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.ones(9)) for _ in range(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() < 0:
            time.sleep(self.SLOW_S)
        out = batch * self.first
        return out + self.last if self.last.requires_grad else out


REPEATS = tuple(itertools.product((True, False), repeat=2))


def backward_repeats(model: Any, batch: torch.Tensor, *, whole: bool) -> None:
    with set_checkpoint_early_stop(not whole):
        checkpoint(model, batch, use_reentrant=False).mean().backward()


def repeated_times(rank: int, world_size: int) -> list[float]:
    """Of a step of two passes, in seconds."""
    found = []
    for whole, early in REPEATS:
        model = wrap(Repeated(), weight="samples")
        model.module.last.requires_grad_(early)
        with model.no_sync():
            backward_repeats(model, torch.ones(3, 9), whole=whole)
        backward_repeats(model, torch.ones(3, 9), whole=whole)
        found.append(model.reducer.last_compute_ns() / 1e9)
    return found


def test_the_time_of_a_checkpointed_wrapper_has_the_forward_that_was_called() -> None:
    found = ranks.run_ranks(2, repeated_times, timeout_s=60, preload=ranks.TORCH_DDP)
    for seconds in itertools.chain(*found.values()):
        assert seconds > 2 * Repeated.SLOW_S


def repeated_without_share(rank: int, world_size: int) -> list[list[float]]:
    """Rank 1 has a share of a BalancedSampler from the second step on."""
    found = []
    for (whole, early), said in itertools.product(REPEATS, (True, False)):
        model = wrap(Repeated(), weight="samples")
        model.module.last.requires_grad_(early)
        for step in range(2):
            has_share = rank == 0 or step > 0
            model._has_share = lambda has_share=has_share: has_share
            if said:
                model.samples = 3 + rank
            backward_repeats(model, torch.ones(3 + rank, 9), whole=whole)
            ((_, rows, _),) = model.reducer.step_rows(step)
            found.append([samples for samples, *_ in rows])
    return found


def test_a_checkpointed_wrapper_without_a_share_counts_from_its_first_share_on() -> None:
    found = ranks.run_ranks(2, repeated_without_share, timeout_s=60, preload=ranks.TORCH_DDP)
    assert found.values() == [[[3.0, 0.0], [3.0, 4.0]] * 8] * 2


# Compute times


def times(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Of rank 0, by step, of which each has something else in it; and what a clock has of all but
    the validations."""
    model = wrap(make_net(), weight="samples")
    clock_s = []
    for step in range(12):
        began_s = time.monotonic()
        model.zero_grad()
        if rank == 0 and step == 1:
            model.no_batch()
        else:
            loss_of(model, batch_of(rank, step)).backward()
        if rank == 0 and step == 2:
            model(batch_of(rank, step))  # its graph is dropped
        clock_s.append(time.monotonic() - began_s)
        time.sleep(0.5 if step in (3, 6) else 0.0)  # a validation now and then
        if step == 4:
            with model.no_sync():
                loss_of(model, batch_of(rank, step)).backward()
            penalty_of(model.module).backward()
            clock_s[-1] = time.monotonic() - began_s
    return [record.last_seconds[0] for record in model.step_log.records(1)], clock_s


def test_what_happens_now_and_then_is_no_compute_time() -> None:
    found = ranks.run_ranks(2, times, timeout_s=60, preload=ranks.TORCH_DDP).values()
    _, clock_s = found[0]
    for seconds, _ in found:
        for step, each in enumerate(seconds):  # the pass in no_sync() counts in the next step
            assert each < sum(clock_s[max(0, step - 1) : step + 1]) + 0.3, (step, seconds, clock_s)


class Sleeps(nn.Module):
    """And computes so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.net, self.seconds = make_net(), seconds

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.net(batch)


FORWARDS = ("one", "two", "chained", "two, then two of backward", "one after a dropped one", "one")


def several_forwards(rank: int, world_size: int) -> list[float]:
    """The seconds of rank 0's steps, of which a forward pass takes 0.2."""
    model = wrap(Sleeps(0.2 if rank == 0 else 0.0), weight="samples")
    for step, what in enumerate([*FORWARDS, "one"]):
        model.zero_grad()
        outputs = [model(batch_of(rank, step))]
        if what == "chained":
            outputs = [model(torch.cat([batch_of(rank, step)[:, 2:], outputs[0]], 1))]
        elif what == "one after a dropped one":
            outputs[0] = model(batch_of(rank, step))
        elif what.startswith("two"):
            outputs.append(model(batch_of(rank, step)))
        losses = [output.square().mean() for output in outputs]
        if what != "two, then two of backward":
            losses = [sum(losses[1:], losses[0])]
        for loss in losses:
            loss.backward()
    return [record.last_seconds[0] for record in model.step_log.records(1)]


def test_all_forward_passes_of_a_step_are_in_its_time() -> None:
    found = ranks.run_ranks(2, several_forwards, timeout_s=60, preload=ranks.TORCH_DDP).values()
    for seconds in found:
        counts = [1, 2, 2, 2, 0, 1, 1]  # two of backward are two steps
        assert all(map(operator.ge, seconds, (0.19 * count for count in counts))), seconds
        assert seconds[4] < 0.19 and seconds[5] < 0.39, seconds  # none twice, and none dropped


class Waits(nn.Module):
    """Computes so long; both ranks average something in forward, and so wait for each other."""

    def __init__(self, seconds: float, *, normed: bool = False) -> None:
        import pycomm

        super().__init__()
        self.net, self.seconds = make_net(), seconds
        self.norm = pycomm.SyncBatchNorm(9).double() if normed else None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        if self.norm is not None:
            return self.net(self.norm(batch))
        dist.all_reduce(torch.ones(1))
        return self.net(batch)


def with_waits(rank: int, world_size: int, normed: bool) -> list[list[float]]:
    model = wrap(Waits(0.1 if rank == 0 else 0.0, normed=normed), weight="samples")
    for step in range(12):
        model.zero_grad()
        loss = loss_of(model, batch_of(rank, step))
        dist.all_reduce(loss.detach().clone())
        if rank == 0:
            time.sleep(0.02)  # what is made of the loss
        loss.backward()
        if rank == 0:
            time.sleep(0.1)  # the optimizer
        dist.barrier()
    return [list(record.last_seconds) for record in model.step_log.records(3)]


@pytest.mark.parametrize("normed", rings.first_of([True, False]))
def test_compute_times_have_the_optimizer_in_them_and_no_waits(normed: bool) -> None:
    """Whatever waits: the wrapper, SyncBatchNorm, or a collective of the program's.

    Each step has the same waits. A thread that loses its core takes longer in some steps.
    """
    found = ranks.run_ranks(2, with_waits, args=(normed,), timeout_s=60, preload=ranks.TORCH_DDP)
    for steps in found.values():
        assert len(steps) == 9
        slow, fast = zip(*steps, strict=True)
        assert 0.22 <= min(slow) < 0.33, steps
        assert min(fast) < 0.06, steps


class WaitsElsewhere(Waits):
    """In a way that pycomm's clock of waits does not see."""

    def __init__(self, seconds: float, how: str) -> None:
        super().__init__(seconds)
        self.how = how
        self.group = dist.new_group(backend="gloo") if how == "gloo" else None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        work = dist.all_reduce(torch.ones(1), group=self.group, async_op=True)
        assert work is not None
        work.wait() if self.how == "gloo" else work.get_future().wait()
        return self.net(batch)


def with_other_waits(rank: int, world_size: int, how: str) -> list[float]:
    model = wrap(WaitsElsewhere(0.1 if rank == 0 else 0.0, how), weight="samples")
    for step in range(6):
        model.zero_grad()
        loss_of(model, batch_of(rank, step)).backward()
    return [record.last_seconds[1] for record in model.step_log.records(3)]


@pytest.mark.parametrize("how", ["gloo", "future"])
def test_waits_that_are_not_known_count_as_computing(how: str) -> None:
    found = ranks.run_ranks(
        2,
        with_other_waits,
        args=(how,),
        timeout_s=60,
        only_pycomm=how != "gloo",
        preload=ranks.TORCH_DDP,
    )
    for seconds in found.values():
        assert min(seconds) > 0.08, seconds


def over_a_load(rank: int, world_size: int) -> tuple[float, float]:
    """A pass that accumulates, and that another wrapper goes on after. Its seconds; a clock's."""
    model = wrap(Waits(0.5 if rank == 0 else 0.0), weight="samples")
    began_s = time.monotonic()
    with model.no_sync():
        loss_of(model, batch_of(rank, 0)).backward()
    clock_s = time.monotonic() - began_s
    state = copy.deepcopy(model.communication_state_dict())
    grads = [each.grad for each in model.parameters()]
    model = wrap(Waits(0.0), weight="samples")
    model.load_communication_state_dict(state)
    for each, grad in zip(model.parameters(), grads, strict=True):
        each.grad = grad
    for step in (1, 2):
        began_s = time.monotonic()
        loss_of(model, batch_of(rank, step)).backward()
        clock_s += time.monotonic() - began_s if step == 1 else 0.0
        model.zero_grad()
    return float(model.step_log.records(1)[0].last_seconds[0]), clock_s


def test_the_time_of_a_pass_that_accumulates_is_in_a_checkpoint() -> None:
    found = ranks.run_ranks(2, over_a_load, timeout_s=60, preload=ranks.TORCH_DDP).values()
    _, clock_s = found[0]
    for seconds, _ in found:
        assert 0.5 <= seconds < clock_s + 0.3

"""Error feedback keeps nothing of a dropped step, and can be scaled with the gradients."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_rig import wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]

NUMEL = 8192


class Slopes(nn.Module):
    """The gradient of each parameter is what is passed for it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.zeros(NUMEL, dtype=dtype)) for _ in range(2))

    def forward(self, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (self.weight * weight).sum() + (self.other * other).sum()


def slopes_of(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (1e-3 * torch.randn(NUMEL, generator=generator)).to(dtype)


def diverged(
    rank: int, world_size: int, dtype: torch.dtype, wire: str, other: str | None, bad: str
) -> tuple[float, int, float]:
    """A batch of 1e25 whose step is dropped, since one element of `bad` is not finite.

    The last value: what steps of `weight` after it, and the residuals, lack of the averages. The
    loss scale changes after every step, and the residuals with it.
    """
    model = wrap(Slopes(dtype), wire_dtype={"weight": wire, "other": other})
    weight = model.module.weight
    missing = torch.zeros(NUMEL, dtype=torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(4):
        slopes = {name: slopes_of(rank, step, dtype) for name in ("weight", "other")}
        if step == 1:
            slopes = {name: each * 1e28 for name, each in slopes.items()}
            slopes[bad][5] = float("inf" if rank == 0 else 1.0)
        optimizer.zero_grad()
        scaler.scale(model(**slopes)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        model.scale_residuals(scaler.get_scale() / before)
        average = slopes["weight"].double() / world_size
        dist.all_reduce(average)
        missing = weight.detach().double() if step == 1 else missing - average
    kept = model.communication_state_dict().get("residuals", {}).get("weight", torch.zeros(NUMEL))
    dist.all_reduce(kept)
    missing -= weight.detach().double() - kept.double() / scaler.get_scale()
    largest = max(float(each.detach().abs().max()) for each in model.parameters())
    return largest, model.stats().forgotten_residuals, float(missing.abs().max())


CASES = [
    (torch.float32, "int8", None, "weight"),
    (torch.float32, "int8", None, "other"),
    (torch.float32, "int8", "fp16", "other"),
    (torch.bfloat16, "int8", None, "other"),
    (torch.float32, "fp16", None, "weight"),
    (torch.float32, "bf16", None, "weight"),
]


def all_diverged(rank: int, world_size: int) -> list[tuple[float, int, float]]:
    return [diverged(rank, world_size, *case) for case in CASES]


def test_a_batch_that_diverged_and_was_skipped_leaves_nothing() -> None:
    found = ranks.run_ranks(2, all_diverged, timeout_s=100, preload=ranks.TORCH_DDP)
    for results in found.values():
        for case, (largest, forgotten, missing) in zip(CASES, results, strict=True):
            assert largest < 0.02, case
            assert forgotten == (case[1] == "int8"), case
            if case[:2] == (torch.float32, "int8"):  # no rounding but that of the wire
                assert missing < 1e-7, case  # one of int8's steps is some 3e-5


def of_two_wrappers(
    rank: int, world_size: int, other: str | None, nested: tuple[int, ...]
) -> list[tuple[float, int]]:
    """The same under one GradScaler and optimizer; only the second one's averages have the Inf.

    `nested`: those whose passes end in backward calls of their own, within the one here.
    """
    models = [
        wrap(Slopes(torch.float32), wire_dtype=wire, process_group=dist.new_group())
        for wire in ("int8", other)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameters = [each for model in models for each in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for step in range(4):
        slopes = slopes_of(rank, step, torch.float32) * (1e28 if step == 1 else 1.0)
        infinite = slopes.clone()
        infinite[5] = float("inf") if step == 1 and rank == 0 else 0.0
        optimizer.zero_grad()
        given = [(slopes, slopes), (infinite, slopes)]
        losses = [
            checkpoint(model, *(each.clone().requires_grad_() for each in args), use_reentrant=True)
            if which in nested
            else model(*args)
            for which, (model, args) in enumerate(zip(models, given, strict=True))
        ]
        scaler.scale(sum(losses)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [
        (
            max(float(each.detach().abs().max()) for each in model.parameters()),
            model.stats().forgotten_residuals,
        )
        for model in models
    ]


@pytest.mark.parametrize("nested", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("other", ["int8", None])
def test_a_step_that_another_wrapper_of_the_same_backward_spoils_leaves_nothing(
    other: str | None, nested: tuple[int, ...]
) -> None:
    found = ranks.run_ranks(
        2, of_two_wrappers, args=(other, nested), timeout_s=100, preload=ranks.TORCH_DDP
    )
    for results in found.values():
        for (largest, forgotten), kept in zip(results, (True, other is not None), strict=True):
            assert largest < 0.02 and forgotten == kept, results


class Ended(nn.Module):
    """Hands its loss out in an object, and its whole body is a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Slopes(torch.float32)

    def forward(self, slopes: torch.Tensor) -> Any:
        return SimpleNamespace(loss=checkpoint(self.body, slopes, slopes, use_reentrant=True))


OBJECT, CHECKPOINTS, OUTER = "an object", "checkpoint in checkpoint", "the outer call"


def ends_within(
    rank: int, world_size: int, kinds: tuple[str, str], spoiled: int
) -> tuple[float, float]:
    """What one wrapper keeps of a step, and of one that another's Inf, without a codec, spoils.

    `kinds`: in which call each of the two ends.
    """
    models = [
        wrap(
            Ended() if kind == OBJECT else Slopes(torch.float32),
            wire_dtype=None if which == spoiled else "int8",
            process_group=dist.new_group(),
        )
        for which, kind in enumerate(kinds)
    ]

    def loss_of(which: int, slopes: torch.Tensor) -> Any:
        if kinds[which] == OBJECT:
            return models[which](slopes).loss
        if kinds[which] == OUTER:
            return models[which](slopes, slopes)

        def middle(given: torch.Tensor) -> Any:
            return checkpoint(models[which], given, given, use_reentrant=True)

        return checkpoint(middle, slopes, use_reentrant=True)

    largest = []
    for bad in (0.0, float("inf")):
        slopes = [slopes_of(rank, 0, torch.float32) for _ in models]
        slopes[spoiled][5] = bad if rank == 0 else 0.0
        sum(loss_of(which, each.requires_grad_()) for which, each in enumerate(slopes)).backward()
        kept = models[1 - spoiled].communication_state_dict()["residuals"]
        largest.append(max(float(each.abs().max()) for each in kept.values()))
    return largest[0], largest[1]


@pytest.mark.parametrize("spoiled", [0, 1])
@pytest.mark.parametrize(
    "kinds",
    [(OBJECT, OUTER), (CHECKPOINTS, OUTER), (OBJECT, OBJECT), (CHECKPOINTS, CHECKPOINTS)],
    ids=" and ".join,
)
def test_a_pass_that_ends_in_an_inner_call_is_one_of_the_same_backward(
    kinds: tuple[str, str], spoiled: int
) -> None:
    found = ranks.run_ranks(
        2, ends_within, args=(kinds, spoiled), timeout_s=60, preload=ranks.TORCH_DDP
    )
    for right, dropped in found.values():
        assert right > 0.0 and dropped == 0.0


def apart(rank: int, world_size: int) -> float:
    """What one wrapper keeps of its own backward after another's, which an Inf has spoiled."""
    models = [
        wrap(Ended(), wire_dtype=wire, process_group=dist.new_group()) for wire in (None, "int8")
    ]
    slopes = [slopes_of(rank, 0, torch.float32) for _ in models]
    slopes[0][5] = float("inf") if rank == 0 else 0.0
    for model, each in zip(models, slopes, strict=True):
        model(each.requires_grad_()).loss.backward()
    kept = models[1].communication_state_dict()["residuals"]
    return max(float(each.abs().max()) for each in kept.values())


def test_an_inf_in_a_nested_call_of_a_backward_before_spoils_nothing() -> None:
    found = ranks.run_ranks(2, apart, timeout_s=60, preload=ranks.TORCH_DDP)
    assert min(found.values()) > 0.0


def spoiled_while_frozen(rank: int, world_size: int, by_another: bool) -> tuple[bool, int]:
    """Whether anything is left of what was kept for `weight`, which is frozen when an Inf comes."""
    model = wrap(
        Slopes(torch.float32),
        wire_dtype={"weight": "int8", "other": None},
        process_group=dist.new_group(),
    )
    another = wrap(Slopes(torch.float32), wire_dtype="int8", process_group=dist.new_group())
    slopes = slopes_of(rank, 0, torch.float32)
    model(slopes, slopes).backward()
    model.module.weight.requires_grad_(requires_grad=False)
    infinite = slopes.clone()
    infinite[5] = float("inf")
    loss = model(slopes, slopes if by_another else infinite)
    if by_another:
        loss = loss + another(slopes, infinite)
    loss.backward()
    kept = model.communication_state_dict()["residuals"]
    return bool(kept["weight"].any()), model.stats().forgotten_residuals


@pytest.mark.parametrize("by_another", [False, True])
def test_a_spoiled_step_leaves_no_residual_of_a_frozen_parameter(by_another: bool) -> None:
    found = ranks.run_ranks(
        2, spoiled_while_frozen, args=(by_another,), timeout_s=60, preload=ranks.TORCH_DDP
    )
    assert list(found.values()) == [(False, 1)] * 2


class Apart(nn.Module):
    """Two outputs, so that a loss may leave one of the parameters out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.zeros(NUMEL)) for _ in range(2))

    def forward(self, slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight * slopes, self.other * slopes


def left_out(rank: int, world_size: int) -> tuple[float, float, float]:
    """A parameter with zeros in .grad, and an undefined gradient on all ranks."""
    model = wrap(Apart(), wire_dtype="int8", find_unused_parameters=True)
    kept = []
    for outputs in (2, 1):
        model.zero_grad(set_to_none=False)
        sum(each.sum() for each in model(slopes_of(rank, 0, torch.float32))[:outputs]).backward()
        kept.append(model.communication_state_dict()["residuals"]["other"])
        dist.all_reduce(kept[-1])
    changed, largest = (kept[1] - kept[0]).abs().max(), kept[0].abs().max()
    return float(model.module.other.grad.abs().max()), float(changed), float(largest)


def test_a_parameter_whose_gradient_is_undefined_is_unused() -> None:
    for grad, changed, largest in ranks.run_ranks(
        2, left_out, timeout_s=60, preload=ranks.TORCH_DDP
    ).values():
        assert grad == 0.0
        assert changed < 1e-6 * largest


def forgotten(rank: int, world_size: int) -> tuple[bool, float, float]:
    """A pass in no_sync() has used a parameter, zero_grad() forgets it, and no other one does."""
    model = wrap(Apart(), wire_dtype="int8", find_unused_parameters=True)
    slopes = slopes_of(rank, 0, torch.float32)
    kept = []
    for outputs in (2, 1):
        with model.no_sync():
            sum(each.sum() for each in model(slopes)).backward()
        model.zero_grad()
        sum(each.sum() for each in model(slopes)[:outputs]).backward()
        kept.append(model.communication_state_dict()["residuals"]["other"])
        dist.all_reduce(kept[-1])
    changed, largest = (kept[1] - kept[0]).abs().max(), kept[0].abs().max()
    return model.module.other.grad is None, float(changed), float(largest)


def test_a_parameter_whose_gradients_are_forgotten_is_unused() -> None:
    found = ranks.run_ranks(2, forgotten, timeout_s=60, preload=ranks.TORCH_DDP)
    for none, changed, largest in found.values():
        assert none and changed < 1e-6 * largest


def all_clipped(rank: int, world_size: int) -> None:
    for wire in ("int8", "fp16", "bf16"):
        clipped(rank, world_size, wire)
    unscaled(rank, world_size)
    kept_by_choice(rank, world_size)


def clipped(rank: int, world_size: int, wire: str) -> None:
    """A spike that clipping scales by c: its loss is scaled by c as well."""
    model = wrap(Slopes(torch.float32), wire_dtype=wire)
    given, arrived = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL)
    for step in range(5):
        factor = 1e-6 if step == 1 else 1.0
        slopes = slopes_of(rank, step, torch.float32) / factor
        model.zero_grad()
        model(slopes, slopes).backward()
        for each in model.parameters():
            each.grad *= factor  # as clip_grad_norm_ does
        model.scale_residuals(factor)
        whole = slopes.double() * factor
        dist.all_reduce(whole)
        given += whole / world_size
        arrived = arrived + model.module.weight.grad
        assert (arrived - given).abs().max() < 5e-3 / 60  # within a few of int8's steps
    model.scale_residuals(0)
    state = model.communication_state_dict().get("residuals", {})
    assert len(state) == (2 if wire == "int8" else 0)
    assert all(not each.any() for each in state.values())
    with pytest.raises(ValueError, match="finite"):
        model.scale_residuals(float("nan"))


def unscaled(rank: int, world_size: int) -> None:
    """A spike without that call: averages before clipping, and residuals, are what was given."""
    model = wrap(Slopes(torch.float32), wire_dtype="int8")
    missing = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(4):
        slopes = slopes_of(rank, step, torch.float32) * (1e4 if step == 1 else 1.0)
        model.zero_grad()
        model(slopes, slopes).backward()
        given = slopes.double() / world_size
        dist.all_reduce(given)
        missing += given - model.module.weight.grad.double()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    kept = model.communication_state_dict()["residuals"]["weight"].double()
    dist.all_reduce(kept)
    assert (kept - missing).abs().max() < 1e-4  # of 40


def kept_by_choice(rank: int, world_size: int) -> None:
    """A program that repairs its gradients keeps its residuals, also in copies of the wrapper."""
    model = wrap(Slopes(torch.float32), wire_dtype="int8", drops_nonfinite_steps=False)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        slopes = slopes_of(rank, 0, torch.float32)
        slopes[5] = float("nan" if rank == 0 else 1.0)
        each(slopes, slopes).backward()
        assert each.stats().forgotten_residuals == 0
        kept = each.communication_state_dict()["residuals"]["weight"]
        assert kept.any() and kept.isfinite().all()


def test_residuals_are_scaled_with_the_gradients() -> None:
    ranks.run_ranks(2, all_clipped, timeout_s=100, preload=ranks.TORCH_DDP)


def units(rank: int, world_size: int) -> list[float]:
    """The largest residual of a model in fp32, and of the same one in bf16."""
    largest = []
    for dtype in (torch.float32, torch.bfloat16):
        model = wrap(Slopes(dtype), wire_dtype="int8")
        model(*(slopes_of(0, step, dtype) for step in range(2))).backward()
        kept = model.communication_state_dict()["residuals"]["weight"].abs().max()
        dist.all_reduce(kept)
        largest.append(float(kept))
    return largest


def test_residuals_are_in_units_of_the_average_in_every_dtype() -> None:
    fp32, bf16 = ranks.run_ranks(2, units, timeout_s=100, preload=ranks.TORCH_DDP)[0].value
    assert bf16 == pytest.approx(fp32, rel=0.3)

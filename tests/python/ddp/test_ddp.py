"""The wrapper on real ranks: torch's own wrapper and float64 are the oracles."""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
import re
from typing import Any

import ddp_models
import pytest
import ranks
import rings
import torch
import torch.distributed as dist
from ddp_rig import all_ranks, wrap
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import pycomm

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

FP16_ROUNDING = 2.0**-11
BF16_ROUNDING = 2.0**-8


def run_ranks(world_size: int, target: Any, **options: Any) -> Any:
    return ranks.run_ranks(world_size, target, timeout_s=180, preload=ranks.TORCH_DDP, **options)


def in_turn(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """Several targets in one start of the ranks: what each returned, by name."""
    return {name: globals()[name](rank, world_size) for name in names}


def local_mean_loss(output: Any) -> torch.Tensor:
    tensor = output["out"] if isinstance(output, dict) else output
    return tensor.float().square().mean()


def assert_same_on_all_ranks(module: nn.Module) -> None:
    digest = hashlib.sha256()
    for parameter in module.parameters():
        flat = parameter.detach().contiguous().view(-1)
        digest.update(bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b"")
    mine = torch.tensor([int.from_bytes(digest.digest()[:7], "little")])
    assert len({int(other) for other in all_ranks(mine)}) == 1, "ranks have different parameters"


# Parity with torch's wrapper


def parity(rank: int, world_size: int) -> None:
    for name, (view, set_to_none) in itertools.product(
        ddp_models.ALL, itertools.product((False, True), repeat=2)
    ):
        ours = wrap(ddp_models.make(name), gradient_as_bucket_view=view)
        theirs = TorchDDP(ddp_models.make(name), gradient_as_bucket_view=view)
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (ours, theirs)
        ]
        for step in range(4):
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad(set_to_none=set_to_none)
                local_mean_loss(model(ddp_models.batch_of(name, rank, step))).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            for (parameter_name, mine), reference in zip(
                ours.named_parameters(), theirs.parameters(), strict=True
            ):
                where = f"{name}, {view=}, {set_to_none=}, step {step}, {parameter_name} "
                if world_size == 2:  # two addends have one sum, in whatever order
                    assert torch.equal(mine, reference), where
                else:
                    torch.testing.assert_close(mine, reference, msg=lambda text, w=where: w + text)
        assert_same_on_all_ranks(ours)
        assert ours.stats().steps == 4


def test_every_step_is_that_of_torch() -> None:
    run_ranks(2, parity)


@pytest.mark.ci
def test_three_ranks_agree_with_torch_to_rounding() -> None:
    run_ranks(3, parity)


# Fewer bytes on the wire


def local_gradients(model: Any, batch: torch.Tensor) -> list[torch.Tensor]:
    """What this rank alone would have, at the parameters that `model` has now."""
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    local_mean_loss(alone(batch)).backward()
    return [parameter.grad.detach() for parameter in alone.parameters() if parameter.requires_grad]


def assert_mean(
    mine: torch.Tensor, local: torch.Tensor, rounding: float, where: str, floor: float = 0.0
) -> None:
    """Each rank rounds once when it packs, a sum of N takes at most N - 1 further roundings."""
    if local.numel() == 0:
        return
    gathered = torch.stack([part.double() for part in all_ranks(local)])
    mean, magnitude = gathered.mean(dim=0), gathered.abs().mean(dim=0)
    bound = magnitude * rounding * (len(gathered) + 1) + floor
    excess = (mine.double() - mean).abs() - bound
    assert bool((excess <= 0).all()), f"{where}: off by {float(excess.max())} more than rounding"


def wire_accuracy(rank: int, world_size: int) -> None:
    roundings = {"fp32": 2.0**-23, "bf16": BF16_ROUNDING, "fp16": FP16_ROUNDING}
    for name, wire_dtype, view in itertools.product(ddp_models.CASTABLE, roundings, (False, True)):
        ours = wrap(ddp_models.make(name), wire_dtype=wire_dtype, gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            batch = ddp_models.batch_of(name, rank, step)
            local = local_gradients(ours, batch)
            optimizer.zero_grad()
            local_mean_loss(ours(batch)).backward()
            trained = [p for p in ours.parameters() if p.requires_grad]
            # A value that is subnormal in fp16 has an absolute error: 2^-25 of a wire whose largest
            # element may be as small as 2^-3, in each rank's part and in the sum.
            largest = max(float(g.abs().max()) for g in local if g.numel())
            floor = 2.0**-20 * max(map(float, all_ranks(torch.tensor(largest))))
            for parameter, alone in zip(trained, local, strict=True):
                # A bf16 parameter's gradient is rounded to bf16 again when it comes back.
                own = BF16_ROUNDING if parameter.dtype == torch.bfloat16 else 0.0
                where = f"{name}, {wire_dtype}, {view=}, step {step}"
                assert_mean(parameter.grad, alone, roundings[wire_dtype] + own, where, floor)
            optimizer.step()
        assert_same_on_all_ranks(ours)


@pytest.mark.parametrize("world_size", rings.first_of([2, 3]))
@pytest.mark.ci
def test_the_mean_is_right_to_the_wires_rounding(world_size: int) -> None:
    run_ranks(world_size, wire_accuracy)


def wire_bytes(rank: int, world_size: int) -> None:
    gradient_nbytes = 4 * sum(p.numel() for p in ddp_models.make("buckets").parameters())
    for wire_dtype, factor in ((None, 1.0), ("fp16", 0.5), ("bf16", 0.5)):
        ours = wrap(ddp_models.make("buckets"), wire_dtype=wire_dtype, bucket_cap_mb=2)
        for step in range(2):
            local_mean_loss(ours(ddp_models.batch_of("buckets", rank, step))).backward()
        before = ours.stats().wire_nbytes
        local_mean_loss(ours(ddp_models.batch_of("buckets", rank, 2))).backward()
        sent = ours.stats().wire_nbytes - before
        buckets = ours.stats().buckets_reduced // 3
        tails = 2 * world_size * buckets if wire_dtype == "fp16" else 0
        assert sent == gradient_nbytes * factor + tails


# The fp16 scale


class Slopes(nn.Module):
    """The gradient of `weight` is the input itself."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, slopes: torch.Tensor) -> torch.Tensor:
        return (self.weight * slopes).sum()


def reduce_slopes(ours: Any, slopes: torch.Tensor) -> torch.Tensor:
    ours.zero_grad()
    ours(slopes).backward()
    return ours.module.weight.grad.clone()  # the next step writes into the same memory


def fp16_magnitudes(rank: int, world_size: int) -> None:
    pattern = torch.linspace(0.5, 1.0, 5000) * torch.tensor([1.0, -1.0]).repeat(2500)
    ours = wrap(Slopes(5000), wire_dtype="fp16")
    # In a random order: growth and shrinkage by any factor. On rank 1 always a tenth of it.
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1)).tolist()
    for exponent in (5 * number - 120 for number in order):
        slopes = pattern * 2.0**exponent * (1.0 if rank == 0 else 0.1)
        assert_mean(reduce_slopes(ours, slopes), slopes, FP16_ROUNDING, f"2^{exponent}")
    stats = ours.stats()
    assert stats.overflowed_buckets > 5
    assert stats.underflowed_buckets > 5
    assert stats.nonfinite_buckets == 0


def fp16_extremes(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ours = wrap(Slopes(4), wire_dtype="fp16")
    found["tiny"] = reduce_slopes(ours, torch.full((4,), 1e-6)).tolist()
    found["huge"] = reduce_slopes(ours, torch.full((4,), 1e5)).tolist()
    # Large gradients that cancel: the average says nothing about what each rank packs.
    cancelling = torch.full((4,), 6e7 if rank == 0 else -6e7)
    found["cancelling"] = reduce_slopes(ours, cancelling + 4096.0).tolist()
    found["zero"] = reduce_slopes(ours, torch.zeros(4)).tolist()
    for _ in range(2):  # the scale that suits a step comes from the step before
        found["mixed"] = reduce_slopes(ours, torch.tensor([1e5, 1.0, 0.1, 0.0])).tolist()
    before = ours.stats()
    steady = [reduce_slopes(ours, torch.full((4,), 1e5 * factor)) for factor in (1, 2, 0.5)]
    found["steady"] = [float(grad[0]) for grad in steady]
    assert ours.stats().overflowed_buckets == before.overflowed_buckets
    assert ours.stats().underflowed_buckets == before.underflowed_buckets
    return found


def fp16_non_finite(rank: int, world_size: int) -> list[Any]:
    ours = wrap(Slopes(3), wire_dtype="fp16")
    reduce_slopes(ours, torch.full((3,), 4.0))
    bad = torch.tensor([1.0, float("inf") if rank == 0 else 2.0, float("nan") if rank else 3.0])
    grad = reduce_slopes(ours, bad)
    seen = [bool(grad[0] == 1.0), bool(grad[1].isinf()), bool(grad[2].isnan())]
    after = reduce_slopes(ours, torch.full((3,), 4.0)).tolist()
    stats = ours.stats()
    return [*seen, after, stats.nonfinite_buckets, stats.overflowed_buckets]


def grad_scaler(rank: int, world_size: int) -> list[float]:
    ours = wrap(Slopes(3), wire_dtype="fp16")
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step in range(3):
        optimizer.zero_grad()
        infinite = step == 1 and rank == 1
        slopes = torch.tensor([1.0, float("inf") if infinite else 2.0, 1e-6])
        scaler.scale(ours(slopes)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same_on_all_ranks(ours)
    return [*ours.module.weight.tolist(), scaler.get_scale()]


FP16_TARGETS = ["wire_bytes", "fp16_magnitudes", "fp16_extremes", "fp16_non_finite", "grad_scaler"]


def test_fp16_on_the_wire() -> None:
    """Every magnitude arrives, no ranks differ, and what cannot arrive is counted."""
    first, second = run_ranks(2, in_turn, args=(FP16_TARGETS,)).values()
    assert first == second
    extremes = first["fp16_extremes"]
    assert extremes["tiny"] == pytest.approx([1e-6] * 4, rel=2 * FP16_ROUNDING)
    assert extremes["huge"] == pytest.approx([1e5] * 4, rel=2 * FP16_ROUNDING)
    assert extremes["cancelling"] == pytest.approx([4096.0] * 4, abs=6e7 * 2 * FP16_ROUNDING)
    assert extremes["zero"] == [0.0] * 4
    assert extremes["mixed"] == pytest.approx([1e5, 1.0, 0.1, 0.0], rel=2 * FP16_ROUNDING)
    assert extremes["steady"] == pytest.approx([1e5, 2e5, 5e4], rel=2 * FP16_ROUNDING)
    assert first["fp16_non_finite"] == [True, True, True, [4.0] * 3, 1, 0]
    scaled = [-2.0, -4.0, -2e-6, 2.0**15]  # two of three steps taken, the scale halved once
    assert first["grad_scaler"] == pytest.approx(scaled, rel=2 * FP16_ROUNDING)


def test_fp16_on_three_ranks() -> None:
    run_ranks(3, in_turn, args=(["fp16_magnitudes", "wire_bytes"],))


# While backward runs


class Probe(torch.autograd.Function):
    """Passes through; calls `seen` when backward comes by."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seen: Any) -> torch.Tensor:
        ctx.seen = seen
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.seen()
        return grad, None


class Probed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 600)
        self.second = nn.Linear(600, 600)
        self.seen: Any = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(Probe.apply(self.first(batch), self.seen))


def early_launch(rank: int, world_size: int) -> list[list[int]]:
    found = []
    for wire_dtype in (None, "fp16"):
        module = Probed()
        ours = wrap(module, wire_dtype=wire_dtype)
        launched: list[int] = []
        module.seen = lambda n=launched, ddp=ours: n.append(ddp.stats().buckets_reduced)
        for step in range(2):
            local_mean_loss(ours(ddp_models.batch_of("mlp", rank, step))).backward()
        found.append([*launched, ours.stats().buckets_reduced])
    return found


def test_buckets_leave_while_backward_runs() -> None:
    # Two buckets a step: the second layer fills the first one, long before backward is over.
    for found in run_ranks(2, early_launch).values():
        assert found == [[1, 3, 4]] * 2


# Accumulation and unused parameters


def accumulation(rank: int, world_size: int) -> None:
    for view, wire_dtype in itertools.product((False, True), (None, "fp16")):
        accumulate(rank, world_size, view, wire_dtype)


def accumulate(rank: int, world_size: int, view: bool, wire_dtype: str | None) -> None:
    ours = wrap(ddp_models.make("mlp"), gradient_as_bucket_view=view, wire_dtype=wire_dtype)
    theirs = TorchDDP(ddp_models.make("mlp"), gradient_as_bucket_view=view)
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            with model.no_sync():
                for part in range(2):
                    batch = ddp_models.batch_of("mlp", rank, 10 * step + part)
                    local_mean_loss(model(batch)).backward()
            unsynced = model.module.scale.grad.clone()
            local_mean_loss(model(ddp_models.batch_of("mlp", rank, 10 * step + 9))).backward()
        assert len({float(other) for other in all_ranks(unsynced)}) == world_size
        for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
            tolerance = {"rtol": 0.0, "atol": 0.0}
            if wire_dtype is not None:
                # Addends cancel here and there: an absolute tolerance, from the largest.
                largest = max(float(reference.grad.abs().max()) if mine.numel() else 0, 1e-3)
                tolerance = {"rtol": 0.0, "atol": 4 * FP16_ROUNDING * largest}
            torch.testing.assert_close(mine.grad, reference.grad, **tolerance)
    assert ours.stats().steps == 3


def unused(rank: int, world_size: int) -> None:
    for view in (False, True):
        leave_out(rank, world_size, view)


def leave_out(rank: int, world_size: int, view: bool) -> None:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    ours = wrap(ddp_models.Branches(), **options)
    theirs = TorchDDP(copy.deepcopy(ours.module), **options)
    # Step 0: each rank its own branch. Step 1: all of them left. Step 2: accumulated before.
    for step, takes in enumerate(("left" if rank == 0 else "right", "left", "left")):
        for model in (ours, theirs):
            model.zero_grad()
            if step == 2:
                model.module.takes = "right"
                with model.no_sync():
                    local_mean_loss(model(ddp_models.batch_of("mlp", rank, 7))).backward()
            model.module.takes = takes
            local_mean_loss(model(ddp_models.batch_of("mlp", rank, step))).backward()
        for (name, mine), reference in zip(
            ours.named_parameters(), theirs.parameters(), strict=True
        ):
            where = f"step {step}, {name}"
            assert (mine.grad is None) == (reference.grad is None), where
            assert mine.grad is None or torch.equal(mine.grad, reference.grad), where
        assert ours.module.never.weight.grad is None
        assert (ours.module.right.weight.grad is None) == (step == 1)


def partly_used_output(rank: int, world_size: int) -> None:
    """An output that does not enter the loss: its parameters get no gradient at all."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.idle = nn.Linear(9, 5), nn.Linear(5, 2), nn.Linear(5, 2)

        def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.body(batch)
            return self.head(hidden), self.idle(hidden)

    torch.manual_seed(3)
    ours = wrap(TwoHeads(), find_unused_parameters=True)
    for step in range(2):
        ours.zero_grad()
        local_mean_loss(ours(ddp_models.batch_of("mlp", rank, step))[0]).backward()
        assert ours.module.idle.weight.grad is None
        assert len({float(g) for g in all_ranks(ours.module.head.bias.grad[0])}) == 1


def memory_order(rank: int, world_size: int) -> None:
    rows = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], [0.5, 1.0, 1.5, 2.0]]
    for view, wire_dtype in itertools.product((False, True), (None, "fp16", "bf16")):
        ours = wrap(nn.Linear(4, 3), wire_dtype=wire_dtype, gradient_as_bucket_view=view)
        if rank == 1:  # accumulated into in place, so it stays in this order
            ours.module.weight.grad = torch.zeros(4, 3).t()
        out = ours(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        (out * torch.tensor([1.0, 10.0, 0.5])).sum().backward()
        assert ours.module.weight.grad.tolist() == rows


def test_accumulated_and_unused_gradients_are_those_of_torch() -> None:
    names = ["accumulation", "unused", "partly_used_output", "memory_order"]
    run_ranks(2, in_turn, args=(names,))


def missing_gradient(rank: int, world_size: int) -> None:
    ours = wrap(ddp_models.Branches())
    batch = ddp_models.batch_of("mlp", rank, 0)
    local_mean_loss(ours(batch)).backward()
    ours(batch)


def test_a_parameter_without_a_gradient_is_named() -> None:
    results = run_ranks(2, missing_gradient, check=False)
    for rank, error in enumerate(results.errors()):
        assert error.type_name == "RuntimeError"
        assert f"rank {rank}: the last backward pass gave no gradient to" in error.text
        assert "'right.weight', 'right.bias', 'never.weight', 'never.bias'" in error.text
        assert "left" not in error.text.split("so buckets")[0]
    assert len(results.errors()) == 2


# Different models


class Variant(nn.Module):
    def __init__(self, rank: int, what: str) -> None:
        super().__init__()
        odd = rank == 1
        self.body = nn.Linear(4, 5 if odd and what == "shape" else 3)
        if not (odd and what == "missing"):
            self.head = nn.Linear(4, 2, dtype=torch.float64 if odd and what == "dtype" else None)
        if odd and what == "name":
            self.tail, self.head = self.head, None
        if odd and what == "frozen":
            self.body.bias.requires_grad_(False)
        if what == "strides":
            weight = torch.zeros(6, 5).t() if odd else torch.zeros(5, 6)
            self.weight = nn.Parameter(weight)
        self.register_buffer("mean", torch.zeros(3 if odd and what == "buffer" else 2))


def different(rank: int, world_size: int, what: str) -> None:
    options = {"wire_dtype": "fp16"} if rank == 1 and what == "option" else {}
    wrap(Variant(rank, what), **options)


DIFFERENCES = {
    "shape": "parameter 'body.weight' is 3×4 torch.float32 (strides (4, 1)) on rank 0 and 5×4",
    "missing": "where rank 0 has parameter 'head.weight', rank 1 has buffer 'mean'",
    "dtype": "parameter 'head.weight' is 2×4 torch.float32 (strides (4, 1)) on rank 0 and 2×4 "
    "torch.float64",
    "name": "where rank 0 has parameter 'head.weight', rank 1 has parameter 'tail.weight'",
    "frozen": "where rank 0 has parameter 'body.bias', rank 1 has parameter 'head.weight'",
    "strides": "parameter 'weight' is 5×6 torch.float32 (strides (6, 1)) on rank 0 and 5×6 "
    "torch.float32 (strides (1, 5)) on rank 1",
    "buffer": "buffer 'mean' is 2 torch.float32 (strides (1,)) on rank 0 and 3",
    "option": "option 'wire_dtype' is 'group' on rank 0 and 'fp16' on rank 1",
}


def all_differences(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for what in DIFFERENCES:
        try:
            different(rank, world_size, what)
        except Exception as error:
            found[what] = (type(error).__name__, str(error))
    return found


def test_different_models_are_an_error_that_names_the_difference() -> None:
    results = run_ranks(3, all_differences).values()
    assert results[0] == results[1] == results[2]
    for what, text in DIFFERENCES.items():
        assert results[0][what][0] == "ConfigMismatchError"
        assert text in results[0][what][1]


# Comm hooks


def torch_hooks(rank: int, world_size: int) -> None:
    for which in ("allreduce", "fp16", "builtin", "builtin_fp16"):
        for view in (False, True):
            hooked(rank, which, view)


def hooked(rank: int, which: str, view: bool) -> None:
    theirs = TorchDDP(ddp_models.make("buckets"), gradient_as_bucket_view=view, bucket_cap_mb=2)
    ours = wrap(ddp_models.make("buckets"), gradient_as_bucket_view=view, bucket_cap_mb=2)
    exact = which in ("allreduce", "builtin")
    if which == "allreduce":
        ours.register_comm_hook(None, default_hooks.allreduce_hook)
    elif which == "fp16":
        ours.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif which == "builtin":
        ours._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        ours._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    for again in (
        lambda: ours.register_comm_hook(None, default_hooks.allreduce_hook),
        lambda: ours._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    ):
        with pytest.raises(RuntimeError, match="has been registered already"):
            again()
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            local_mean_loss(model(ddp_models.batch_of("buckets", rank, step))).backward()
        for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
            largest = float(reference.grad.abs().max())
            atol = 0.0 if exact else 8 * FP16_ROUNDING * largest
            torch.testing.assert_close(mine.grad, reference.grad, rtol=0.0, atol=atol)
    assert ours.stats().buckets_reduced >= 6


def what_a_hook_sees(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []

    def hook(state, bucket):  # torch wants real classes as annotations, or none
        names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        state.append(
            (
                bucket.index(),
                bucket.is_last(),
                [names[id(parameter)] for parameter in bucket.parameters()],
                [tuple(gradient.shape) for gradient in bucket.gradients()],
                bool(
                    torch.equal(
                        torch.cat([g.flatten() for g in bucket.gradients()]), bucket.buffer()
                    )
                ),
            )
        )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 7.0))
        return future

    model = wrap(nn.Sequential(nn.Linear(9, 600), nn.Linear(600, 600)))
    model.register_comm_hook(seen, hook)
    local_mean_loss(model(ddp_models.batch_of("mlp", rank, 0))).backward()
    assert all(bool((parameter.grad == 7.0).all()) for parameter in model.parameters())
    return seen


def test_hooks_see_torchs_buckets_and_reduce_them() -> None:
    names = ["torch_hooks", "what_a_hook_sees"]
    for found in run_ranks(2, in_turn, args=(names,)).values():
        assert found["what_a_hook_sees"] == [
            (0, False, ["1.bias", "1.weight"], [(600,), (600, 600)], True),
            (1, True, ["0.bias", "0.weight"], [(600,), (600, 9)], True),
        ]


def raising_hook(rank: int, world_size: int) -> list[str]:
    def hook(state, bucket):
        raise ValueError("this hook is broken")

    model = wrap(ddp_models.make("mlp"))
    model.register_comm_hook(None, hook)
    texts = []
    for attempt in (lambda out: local_mean_loss(out).backward(), lambda out: None):
        try:
            attempt(model(ddp_models.batch_of("mlp", rank, 0)))
        except Exception as error:
            texts.append(str(error))
    return texts


def test_what_a_hook_raises_backward_raises_and_the_next_forward_remembers() -> None:
    for texts in run_ranks(2, raising_hook).values():
        assert len(texts) == 2
        assert "this hook is broken" in texts[0]
        assert "an earlier backward pass failed" in texts[1]


# A peer that goes


def deserted(rank: int, world_size: int) -> list[str]:
    ours = wrap(ddp_models.make("buckets"))
    local_mean_loss(ours(ddp_models.batch_of("buckets", rank, 0))).backward()
    texts: list[str] = []
    if rank == 1:
        return texts
    for _ in range(2):
        try:
            local_mean_loss(ours(ddp_models.batch_of("buckets", rank, 1))).backward()
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_a_peer_that_leaves_is_an_error_in_backward_and_stays_one() -> None:
    results = run_ranks(2, deserted, check=False)
    first, second = results[0].value
    # Through shared memory the peer is missed already where rank 0 says in which order buckets go.
    if "PEER_LEFT" in first and "broadcast" in first:
        assert "PEER_LEFT" in second
    else:
        assert "rank 0: an earlier backward pass failed" in second


# The wrapper as a class: one rank, in this process


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_it_is_torchs_wrapper_with_our_reducer(alone: None) -> None:
    ours = wrap(ddp_models.make("mlp"))
    assert isinstance(ours, TorchDDP)
    assert type(ours).forward is TorchDDP.forward
    assert list(ours.state_dict()) == list(TorchDDP(ddp_models.make("mlp")).state_dict())
    ours.load_state_dict(TorchDDP(ddp_models.make("mlp", seed=5)).state_dict())
    assert ours._get_ddp_logging_data()["module_name"] == "Mlp"


def test_every_method_that_torch_calls_is_there(alone: None) -> None:
    import torch.nn.parallel.distributed as torch_source

    ours = wrap(ddp_models.make("mlp"))
    source = inspect.getsource(torch_source)
    for owner in ("reducer", "logger"):
        called = set(re.findall(rf"\b{owner}\.(\w+)\(", source)) - {"warning", "info"}
        called |= set(re.findall(rf"\b{owner}\.(_\w+)\b", source))
        called -= {name for name in called if "finaliz" in name and "manual" in name}
        called -= {"_should_finalize_after_backward"}  # the next test
        assert len(called) > 5
        missing = {name for name in called if not hasattr(getattr(ours, owner), name)}
        assert not missing


def test_a_backward_pass_that_the_user_ends_is_refused(alone: None) -> None:
    """Torch 2.15 has it; every other torch would take the attribute and do nothing."""
    ours = wrap(ddp_models.make("mlp"))
    assert ours.require_manual_backward_finalization is False
    ours.require_manual_backward_finalization = False
    with pytest.raises(NotImplementedError, match="no require_manual_backward_finalization: its"):
        ours.require_manual_backward_finalization = True
    with pytest.raises(NotImplementedError, match="no require_manual_backward_finalization: its"):
        ours.finalize_backward()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"skip_all_reduce_unused_params": True}, NotImplementedError, "skip_all_reduce"),
        ({"batched_grad_copy": True}, NotImplementedError, "batched_grad_copy"),
        ({"wire_dtpye": "fp16"}, TypeError, "no option 'wire_dtpye': did you mean 'wire_dtype'"),
        ({"wire_dtype": "fp61"}, ValueError, "did you mean 'fp16'"),
        (
            {"wire_dtype": torch.int8},
            ValueError,
            "not allowed: use 'group' or 'fp32' .* mean 'int8'",
        ),
        ({"wire_dtype": {"*": "fp61"}}, ValueError, r"wire_dtype\['\*'\]='fp61' is .* mean 'fp16'"),
        (
            {"wire_dtype": {"layer.*": "fp16"}},
            ValueError,
            r"'layer\.\*' matches no parameter; there are, for example, 'layers\.",
        ),
        (
            {"wire_dtype": {"*": "fp16", "scale": "fp32"}},
            ValueError,
            r"'scale' decides nothing, because '\*' stands before",
        ),
        ({"accumulate": 0}, ValueError, "accumulate=0 is not a whole number from 1"),
        ({"sync_every": 1.5}, ValueError, "sync_every=1.5 is not a whole number"),
        ({"device_ids": [0]}, ValueError, "device_ids"),
    ],
)
def test_what_it_cannot_do_it_says(
    alone: None, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        wrap(ddp_models.make("mlp"), **options)


def test_the_signature_has_torchs_options_with_torchs_defaults() -> None:
    ours = inspect.signature(pycomm.DistributedDataParallel.__init__).parameters
    torchs = inspect.signature(TorchDDP.__init__).parameters
    spelled = [name for name, each in ours.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert spelled == list(torchs)[: len(spelled)] and spelled[-1] == "static_graph"
    differ = {name for name in spelled if ours[name].default != torchs[name].default}
    # torch 2.13 writes None for its True.
    assert differ - {"broadcast_buffers"} == {"gradient_as_bucket_view"}


def test_options_by_position_arrive_as_in_torchs_wrapper(alone: None) -> None:
    group = dist.group.WORLD
    model = pycomm.DistributedDataParallel(
        nn.Linear(2, 2), None, None, 0, False, True, group, 3, True, False, False, False, None
    )
    assert (model.broadcast_buffers, model.find_unused_parameters) == (False, True)
    assert (model.bucket_bytes_cap, model.gradient_as_bucket_view) == (3 << 20, False)
    with pytest.raises(NotImplementedError, match="mixed_precision='half'"):
        pycomm.DistributedDataParallel(
            nn.Linear(2, 2), None, None, 0, True, True, group, 3, *[False] * 4, None, None, "half"
        )


def test_an_option_by_position_and_by_name_is_an_error(alone: None) -> None:
    positional = [None, None, 0, True, True, dist.group.WORLD, 3, *[False] * 4, None]
    name = list(inspect.signature(TorchDDP.__init__).parameters)[2 + len(positional) - 1]
    with pytest.raises(TypeError, match=f"got '{name}' both by position and by name"):
        pycomm.DistributedDataParallel(nn.Linear(2, 2), *positional, **{name: None})


def test_options_that_torch_itself_cannot_serve_on_the_cpu(alone: None) -> None:
    """Should torch learn it, ours is to learn it, too."""
    from torch.nn.parallel.distributed import _MixedPrecision

    options = {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)}
    with pytest.raises(NotImplementedError, match=r"use torch\.autocast"):
        wrap(nn.Linear(2, 2), **options)
    # A CUDA build of torch looks for a GPU first.
    says = "CUDA" if torch.version.cuda else "cpu backend doesn't support events"
    with pytest.raises(RuntimeError, match=says):
        TorchDDP(nn.Linear(2, 2), **options)(torch.ones(1, 2))


def test_modules_it_cannot_serve(alone: None) -> None:
    with pytest.raises(NotImplementedError, match=r"'layers\.0\.weight' is torch\.float64"):
        wrap(ddp_models.make("double"), wire_dtype="fp16")
    with pytest.raises(ValueError, match="its part '0' is wrapped already"):
        wrap(nn.Sequential(TorchDDP(nn.Linear(2, 2))))
    with pytest.raises(NotImplementedError, match="optimizer applied in backward"):
        wrap(nn.Linear(2, 2)).reducer._set_optimizer_in_backward()
    with pytest.raises(RuntimeError, match="wire_dtype has been given"):
        wrap(nn.Linear(2, 2), wire_dtype="bf16")._register_builtin_comm_hook(
            dist.BuiltinCommHookType.FP16_COMPRESS
        )


def test_gradients_are_views_of_the_bucket_when_asked(alone: None) -> None:
    for wire_dtype in (None, "fp16"):
        ours = wrap(ddp_models.make("mlp"), gradient_as_bucket_view=True, wire_dtype=wire_dtype)
        for step in range(2):
            ours.zero_grad()
            local_mean_loss(ours(ddp_models.batch_of("mlp", 0, step))).backward()
            grads = [parameter.grad for parameter in ours.parameters()]
            assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1


def test_hooks_go_with_the_wrapper(alone: None) -> None:
    module = ddp_models.make("mlp")
    first = wrap(module)
    local_mean_loss(first(ddp_models.batch_of("mlp", 0, 0))).backward()
    stats = first.reducer.stats
    second = wrap(module)
    first._remove_autograd_hooks()
    local_mean_loss(second(ddp_models.batch_of("mlp", 0, 1))).backward()
    assert (stats().steps, second.stats().steps) == (1, 1)
    del first, second, stats
    local_mean_loss(module(ddp_models.batch_of("mlp", 0, 2))).backward()


def test_a_copy_trains(alone: None) -> None:
    ours = wrap(ddp_models.make("mlp"), wire_dtype="fp16")
    clone = copy.deepcopy(ours)
    local_mean_loss(clone(ddp_models.batch_of("mlp", 0, 0))).backward()
    assert (ours.stats().steps, clone.stats().steps) == (0, 1)
    assert clone._get_ddp_logging_data()["wire_dtype"] == "Half"


def test_two_losses_of_one_forward(alone: None) -> None:
    ours = wrap(nn.Linear(3, 2))
    out = ours(torch.ones(1, 3))
    out[0, 0].backward(retain_graph=True)
    assert ours.stats().steps == 1
    assert ours.module.weight.grad[0].tolist() == [1.0] * 3
    out[0, 1].backward()
    assert ours.stats().steps == 2
    assert ours.module.weight.grad.tolist() == [[1.0] * 3] * 2


def test_compiled_autograd_is_refused_in_words(alone: None) -> None:
    ours = wrap(ddp_models.make("mlp"))
    loss = local_mean_loss(ours(ddp_models.batch_of("mlp", 0, 0)))
    with (
        torch._dynamo.compiled_autograd._enable(lambda graph: graph),
        pytest.raises(NotImplementedError, match="compiled autograd"),
    ):
        loss.backward()


def test_reset_state_starts_afresh(alone: None) -> None:
    ours = wrap(ddp_models.Branches(), gradient_as_bucket_view=True)
    batch = ddp_models.batch_of("mlp", 0, 0)
    local_mean_loss(ours(batch)).backward()
    with pytest.raises(RuntimeError, match="gave no gradient"):
        ours._check_reducer_finalized()
    ours._update_process_group(dist.group.WORLD)
    ours._check_reducer_finalized()
    ours(batch)

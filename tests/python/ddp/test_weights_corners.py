"""``weight="samples"`` with other uses of gradients, beside one process or by hand."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import time
from datetime import timedelta
from typing import Any

import ddp_shapes
import pytest
import ranks
import rings
import torch
import torch.distributed as dist
import weighed_means
from ddp_rig import all_ranks, wrap
from torch import nn

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(400)]


ENCODED = 400
"""The width of a net whose only bucket has 16 KiB or more, so that int8 encodes it."""


def make_net(dtype: torch.dtype = torch.float64, width: int = 16) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(9, width, dtype=dtype), nn.Tanh(), nn.Linear(width, 2, dtype=dtype)
    )


def batch_of(rank: int, step: int, samples: int, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(samples, 9, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - batch[:, :2]).square().mean()
    return loss


def gradients(model: nn.Module) -> torch.Tensor:
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([each.to_dense().flatten().double() for each in found])


def alone(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The gradients of one process."""
    single = copy.deepcopy(net)
    single.zero_grad()
    loss_of(single, batch).backward()
    return gradients(single)


def off_by(mine: torch.Tensor, right: torch.Tensor) -> float:
    """The largest error, by the largest value; infinite if something is not finite."""
    off = float((mine - right).abs().max() / right.abs().max())
    return off if math.isfinite(off) else math.inf


# Models of all shapes

BATCHES = ((4, 1, 2, 3), (1, 3, 4, 2), (2, 4, 1, 1), (3, 3, 3, 3), (0, 4, 2, 4))  # step, rank
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


UNION = {"many": 1e-5, "one_element": 5e-6, "narrow_and_deep": 3e-6, "norms": 1e-5}
"""Beside one process with all batches, by the largest gradient of the parameter: 1e-6, but for
these, where float32 rounds more as one process computes its gradients, of a rank or of all batches.
Measured: one process beside itself in float64, and ranks beside one process, on 2, 3 and 4 ranks.

- ``many``, 5.7e-6 and 6.3e-6; ``one_element``, 3.8e-6 and 2.2e-6: samples' gradients cancel, to a
  sum that is up to 55 and 46 times smaller than what ranks add;
- ``norms``, 4.3e-6 and 5.1e-6: backward of a norm subtracts means;
- ``narrow_and_deep``, 0.9e-6 and 1.6e-6: 20 layers, each of which rounds."""
COARSE = 2.0**-6
"""The same of models with bfloat16 parameters: four roundings, two of which were measured."""


def shapes_of(world_size: int) -> list[str]:
    return list(ddp_shapes.SHAPES)[:: 3 if world_size == 4 else 1]


def of_all_shapes(rank: int, world_size: int) -> dict[str, tuple[float, float, str]]:
    """How far off the mean of the ranks' own gradients, by what that may be. And how far off one
    process with all batches, by the largest gradient of the parameter; 0 for models whose
    gradients are others then. And a digest of all gradients."""
    found = {}
    for name in shapes_of(world_size):
        shape = ddp_shapes.SHAPES[name]
        net = ddp_shapes.make(name)
        normed = any(isinstance(layer, NORMS) for layer in net.modules())
        model = wrap(copy.deepcopy(net), weight="samples", **shape.options)
        digest = hashlib.sha256()
        worst = off_union = 0.0
        for step, sizes in enumerate(BATCHES):
            least = 2 if normed else 1  # of a batch of one, variances are 0
            numbers = [max(size, least) if size else 0 for size in sizes[:world_size]]
            parts = [ddp_shapes.batch_of(name, r, step)[: numbers[r]] for r in range(world_size)]
            model.zero_grad()
            if numbers[rank] == 0:
                model.no_batch()
            else:
                shape.loss(model, parts[rank]).backward()
            shares = [
                (float(len(part)), weighed_means.own_gradients(net, shape.loss, part))
                for part in parts
                if len(part)
            ]
            off = weighed_means.errors(
                model.module, weighed_means.means([shares]), ranks=world_size
            )
            worst = max(worst, *off.values())
            for each in model.parameters():
                digest.update(
                    b"-" if each.grad is None else weighed_means.wide(each.grad).tobytes()
                )
            if normed or name == "alternating":  # its graph follows from the batch's first sample
                continue
            whole = weighed_means.own_gradients(net, shape.loss, torch.cat(parts))
            for key, mine in model.module.named_parameters():
                right = whole.get(key)
                if right is None or not right.size:
                    continue
                off_union = max(
                    off_union,
                    float(abs(weighed_means.wide(mine.grad) - right).max())
                    / max(float(abs(right).max()), 1e-30),
                )
        found[name] = (worst, off_union, digest.hexdigest())
    return found


@pytest.mark.parametrize("world_size", rings.first_of([2, 3, 4]))
def test_unequal_batches_of_all_shapes_of_models(world_size: int) -> None:
    found = ranks.run_ranks(world_size, of_all_shapes, timeout_s=300, preload=ranks.TORCH_DDP)
    assert len(ddp_shapes.SHAPES) >= 38
    bf16 = {"mixed", "three_dtypes", "all_bf16"}
    for results in found.values():
        assert list(results) == shapes_of(world_size)
        assert {name: off for name, (off, _, _) in results.items() if not off <= 1} == {}
        bounds = {name: COARSE if name in bf16 else UNION.get(name, 1e-6) for name in results}
        assert {n: off for n, (_, off, _) in results.items() if not off <= bounds[n]} == {}
    (first, *others) = (
        {name: digest for name, (_, _, digest) in results.items()} for results in found.values()
    )
    assert others == [first] * (world_size - 1)


# Passes that accumulate


def passes(rank: int, world_size: int) -> dict[str, float]:
    """k * sum(w g) / sum(w), where the ranks' sums of weights are equal and passes' are not."""
    found = {}
    for name, weights in {
        "alike on ranks": ((24.0, 7.0, 3.0), (24.0, 7.0, 3.0)),
        "alike in sum": ((24.0, 7.0, 3.0), (3.0, 24.0, 7.0)),
        "alike but for a leading 0": ((0.0, 7.0, 7.0), (7.0, 0.0, 7.0)),
    }.items():
        net = make_net()
        model = wrap(copy.deepcopy(net), weight="samples", accumulate=3)
        right = torch.zeros(1, dtype=torch.float64)
        for step in range(3):
            model.samples = weights[rank][step]
            loss_of(model, batch_of(rank, step, 5)).backward()
            for r in range(world_size):
                right = right + weights[r][step] * alone(net, batch_of(r, step, 5))
        total = sum(map(sum, weights))
        found[name] = off_by(gradients(model), 3 * right / total)

    # By hand, without no_sync(): what was reduced is equal on all ranks, and stays as it is.
    net = make_net()
    model = wrap(copy.deepcopy(net), weight="samples")
    right = torch.zeros(1, dtype=torch.float64)
    for step in range(3):
        sizes = [(2, 5), (0, 3), (7, 1)][step]
        if sizes[rank] == 0:
            model.no_batch()
        else:
            loss_of(model, batch_of(rank, step, sizes[rank])).backward()
        union = torch.cat([batch_of(r, step, sizes[r]) for r in range(world_size)])
        right = right + alone(net, union)
    found["kept over reductions"] = off_by(gradients(model), right)
    return found


def test_passes_are_weighed_apart_even_if_the_ranks_sums_are_alike() -> None:
    found = ranks.run_ranks(2, passes, timeout_s=100, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert {name: off for name, off in results.items() if off > 1e-13} == {}


def narrow_passes(rank: int, world_size: int) -> dict[str, float]:
    """fp16 parameters: .grad in the unit of a pass that weighs a millionth would be infinite."""
    found = {}
    for weights in ((1e6, 1.0), (1.0, 1e6), (1e6, 1e-3, 1e3)):
        net = make_net(torch.float16)
        model = wrap(copy.deepcopy(net), weight="samples", accumulate=len(weights))
        right = torch.zeros(1, dtype=torch.float64)
        for step, weight in enumerate(weights):
            batch = batch_of(rank, step, 4, torch.float16)
            model.samples = weight
            loss_of(model, batch).backward()
            for r in range(world_size):
                wide = alone(
                    copy.deepcopy(net).double(), batch_of(r, step, 4, torch.float16).double()
                )
                right = right + weight * wide
        right = len(weights) * right / (world_size * sum(weights))
        found[str(weights)] = off_by(gradients(model), right)
    return found


def test_fp16_gradients_of_passes_whose_weights_are_far_apart() -> None:
    found = ranks.run_ranks(2, narrow_passes, timeout_s=100, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert {name: off for name, off in results.items() if not off < 5e-3} == {}


class Words(nn.Module):
    """An embedding with sparse gradients, and a layer that is frozen now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(40, 6, sparse=True, dtype=torch.float64)
        self.layer = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(words)).square().mean(dim=1)


def sparse_and_frozen(rank: int, world_size: int) -> list[float]:
    net = Words()
    model = wrap(copy.deepcopy(net), weight="samples", accumulate=2)
    weights = ((3, 5), (4, 1))  # by pass and rank
    found = []
    for step in range(4):
        model.zero_grad()
        model.module.layer.requires_grad_(step % 2 == 0)
        single = copy.deepcopy(net)
        single.layer.requires_grad_(step % 2 == 0)
        total = sum(map(sum, weights))
        for number, sizes in enumerate(weights):
            model(torch.arange(sizes[rank]) * (number + 2) % 40).mean().backward()
            for size in sizes:
                loss = single(torch.arange(size) * (number + 2) % 40).mean()
                (2 * size / total * loss).backward()
        found.append(off_by(gradients(model), gradients(single)))
    return found


def test_sparse_gradients_and_frozen_parameters_over_passes() -> None:
    found = ranks.run_ranks(2, sparse_and_frozen, timeout_s=100, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert max(results) < 1e-13


def resumed(rank: int, world_size: int) -> list[bool]:
    """A run that is cut after each of its passes continues with the bits of the other one."""
    sizes = ((3, 0), (5, 2), (4, 4), (1, 7), (2, 2), (6, 1))
    same = []
    for cut, wire in itertools.product(range(1, 6), (None, "int8", "fp16")):
        models = []
        for cuts in (False, True):
            options = {"weight": "samples", "accumulate": 3, "wire_dtype": wire}
            model = wrap(make_net(torch.float32, ENCODED), **options)
            for number, each in enumerate(sizes):
                if number % 3 == 0:
                    model.zero_grad()
                if cuts and number == cut:
                    state, grads = model.communication_state_dict(), gradients_of(model)
                    if wire == "int8" and cut >= 3:
                        assert any(each.any() for each in state["residuals"].values())
                    model = wrap(make_net(torch.float32, ENCODED), **options)
                    model.load_communication_state_dict(state)
                    for one, grad in zip(model.parameters(), grads, strict=True):
                        one.grad = grad
                if each[rank] == 0:
                    model.no_batch()
                else:
                    loss_of(model, batch_of(rank, number, each[rank], torch.float32)).backward()
            models.append(model)
        same.append(torch.equal(*map(gradients, models)))
    return same


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def test_a_run_that_is_cut_between_passes_continues_bit_by_bit() -> None:
    found = ranks.run_ranks(2, resumed, timeout_s=100, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert results == [True] * 15


# Wires, hooks and scalers


def tiny_gradients(rank: int, world_size: int) -> float:
    """Of fp16 on the wire: 2^s times a ratio of 4 is beyond fp32 for s = 126."""
    net = make_net(torch.float32)
    model = wrap(copy.deepcopy(net), weight="samples", wire_dtype="fp16")
    weights = [1.0] + [0.0] * (world_size - 1)
    off = 0.0
    for step in range(3):
        model.zero_grad()
        model.samples = weights[rank]
        factor = 2.0**-121.5 / float(alone(net, batch_of(0, step, 5, torch.float32)).abs().max())
        (loss_of(model, batch_of(rank, step, 5, torch.float32)) * factor).backward()
        right = torch.zeros(1, dtype=torch.float64)
        for r in range(world_size):
            grads = alone(net, batch_of(r, step, 5, torch.float32))
            right = right + weights[r] * factor * grads / sum(weights)
        off = max(off, off_by(gradients(model), right))
    return off


def test_the_smallest_gradients_times_the_largest_ratio() -> None:
    found = ranks.run_ranks(4, tiny_gradients, timeout_s=60, preload=ranks.TORCH_DDP)
    assert max(found.values()) < 0.05  # few bits are left of such numbers in fp16


def loaded_scale(rank: int, world_size: int) -> float:
    """The largest scale of a wrapper without weights, times the largest ratio."""
    net = make_net(torch.float32)
    model = wrap(copy.deepcopy(net), weight="samples", wire_dtype="fp16")
    scales = {name: 126 for name, _ in model.module.named_parameters()}
    model.load_communication_state_dict({"accumulated": 0, "unsynced": 0, "fp16_exponents": scales})
    model.samples = float(rank == 0)
    batch = batch_of(rank, 0, 5, torch.float32)
    tiny = 2.0**-121.5 / float(alone(net, batch_of(0, 0, 5, torch.float32)).abs().max())
    (loss_of(model, batch) * tiny).backward()
    return off_by(gradients(model), tiny * alone(net, batch_of(0, 0, 5, torch.float32)))


def test_a_loaded_scale_that_is_too_large_for_weights() -> None:
    found = ranks.run_ranks(4, loaded_scale, timeout_s=60, preload=ranks.TORCH_DDP)
    assert max(found.values()) < 0.05  # few bits are left of such numbers in fp16


def hook_and_no_weight(rank: int, world_size: int) -> dict[str, float]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    found = {}
    hooks: dict[str, tuple[Any, Any, float]] = {
        "allreduce": (default_hooks.allreduce_hook, None, 1e-6),
        "fp16": (default_hooks.fp16_compress_hook, None, 2e-3),
    }
    for name, (hook, state, bound) in hooks.items():
        net = make_net(torch.float32)
        model = wrap(copy.deepcopy(net), weight="samples")
        model.register_comm_hook(state, hook)
        for step, sizes in enumerate(((3, 0, 5), (0, 4, 1), (2, 2, 0))):
            model.zero_grad()
            if sizes[rank] == 0 and step == 1:
                model.samples = 0
                (loss_of(model, batch_of(rank, step, 2, torch.float32)) * math.nan).backward()
            elif sizes[rank] == 0:
                model.no_batch()
            else:
                loss_of(model, batch_of(rank, step, sizes[rank], torch.float32)).backward()
            parts = [batch_of(r, step, sizes[r], torch.float32) for r in range(world_size)]
            off = off_by(gradients(model), alone(net, torch.cat(parts)))
            found[name] = max(found.get(name, 0.0), off / bound)
    return found


def test_comm_hooks_beside_ranks_without_weight() -> None:
    found = ranks.run_ranks(3, hook_and_no_weight, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert {name: off for name, off in results.items() if not off < 1} == {}


def powersgd(rank: int, world_size: int) -> tuple[float, float]:
    """Errors beside torch's wrapper, whose losses have the ranks' shares, and of what arrives."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    import pycomm

    net = make_net(torch.float32)
    models = [
        wrap(copy.deepcopy(net), weight="samples"),
        nn.parallel.DistributedDataParallel(copy.deepcopy(net)),
    ]
    hook = powerSGD_hook.powerSGD_hook
    for model, each in zip(models, (hook, pycomm.comm_hooks.ordered(hook)), strict=True):
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), each)
    beside = compressed = 0.0
    for step in range(10):
        sizes = ((3, 0, 5), (0, 4, 1), (2, 2, 0))[step % 3]
        for model in models:
            model.zero_grad()
        batch = batch_of(rank, step, sizes[rank], torch.float32)
        if sizes[rank] == 0:
            models[0].no_batch()
        else:
            loss_of(models[0], batch).backward()
        share = world_size * sizes[rank] / sum(sizes)
        some = batch if sizes[rank] else batch_of(rank, step, 1, torch.float32)
        (loss_of(models[1], some) * share).backward()
        parts = [batch_of(r, step, sizes[r], torch.float32) for r in range(world_size)]
        beside = max(beside, off_by(gradients(models[0]), gradients(models[1])))
        compressed = max(compressed, off_by(gradients(models[0]), alone(net, torch.cat(parts))))
    return beside, compressed


def test_powersgd_compresses_what_is_weighed() -> None:
    found = ranks.run_ranks(3, powersgd, timeout_s=60, preload=ranks.TORCH_DDP)
    for beside, compressed in found.values():
        assert beside < 1e-5 and compressed > 1e-2, (beside, compressed)


def scaled(rank: int, world_size: int, width: int, sent_as: str | None) -> dict[str, Any]:
    """A GradScaler, of which all ranks drop the step in which one rank has an Inf."""
    net = make_net(torch.float32, width)
    model = wrap(copy.deepcopy(net), weight="samples", wire_dtype="int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    worst = 0.0
    scales = []
    for step, sizes in enumerate(((3, 6), (1, 5), (4, 0), (2, 2))):
        optimizer.zero_grad()
        before = [each.detach().clone() for each in model.parameters()]
        if sizes[rank] == 0:
            model.no_batch()
        else:
            loss = loss_of(model, batch_of(rank, step, sizes[rank], torch.float32))
            scaler.scale(loss * (math.inf if step == 1 and rank == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        if step != 1:
            parts = [batch_of(r, step, sizes[r], torch.float32) for r in range(world_size)]
            shares = [
                (float(len(part)), weighed_means.own_gradients(model.module, loss_of, part))
                for part in parts
                if len(part)
            ]
            wanted = weighed_means.means([shares])
            off = weighed_means.errors(model.module, wanted, wire=sent_as, ranks=world_size)
            worst = max(worst, *off.values())
        scaler.step(optimizer)
        scaler.update()
        kept = all(map(torch.equal, before, model.parameters()))
        scales.append((kept, scaler.get_scale()))
    flat = torch.cat([each.detach().flatten() for each in model.parameters()])
    same = all(torch.equal(flat, each) for each in all_ranks(flat))
    return {"worst": worst, "steps": scales, "same": same}


@pytest.mark.parametrize(("width", "sent_as"), [(16, None), (ENCODED, "int8")])
def test_a_grad_scaler(width: int, sent_as: str | None) -> None:
    args = (width, sent_as)
    found = ranks.run_ranks(2, scaled, args=args, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert results["worst"] <= 1
        assert results["steps"] == [(False, 1024.0), (True, 512.0), (False, 512.0), (False, 512.0)]
        assert results["same"]


def compiled(rank: int, world_size: int) -> list[float]:
    net = make_net()
    model = wrap(copy.deepcopy(net), weight="samples")
    fast = torch.compile(model, backend="aot_eager", dynamic=True)
    found = []
    for step, sizes in enumerate(((3, 6), (1, 5), (4, 2), (2, 2))):
        model.zero_grad()
        loss_of(fast, batch_of(rank, step, sizes[rank])).backward()
        parts = [batch_of(r, step, sizes[r]) for r in range(world_size)]
        found.append(off_by(gradients(model), alone(net, torch.cat(parts))))
    return found


def test_a_compiled_wrapper() -> None:
    found = ranks.run_ranks(2, compiled, timeout_s=200, preload=(*ranks.TORCH_DDP, "torch._dynamo"))
    for results in found.values():
        assert max(results) < 1e-13


# When the weights come


class Order:
    """In each backward pass: the others begin after all gradients of rank 0, or rank 0 waits in the
    middle for all gradients of the others."""

    def __init__(self, rank: int, world_size: int, net: nn.Module, late: str) -> None:
        self.rank, self.late = rank, late
        self.others = [r for r in range(world_size) if r != rank]
        self.store = dist.distributed_c10d._get_default_store()
        self.step, self.count = "", len(list(net.parameters()))
        self.came_ns: list[int] = []
        for each in net.parameters():
            each.register_post_accumulate_grad_hook(self.come)

    def begin(self, step: str) -> None:
        self.step, self.came_ns = step, []
        if self.late == "the others" and self.rank != 0:
            self.wait_for([0])

    def come(self, parameter: torch.Tensor) -> None:
        self.came_ns.append(time.monotonic_ns())
        if len(self.came_ns) == self.count:
            self.store.set(f"{self.step}, all of {self.rank}", "")
        if self.late == "rank 0" and self.rank == 0 and len(self.came_ns) == self.count // 2:
            self.wait_for(self.others)

    def wait_for(self, others: list[int]) -> None:
        self.store.wait([f"{self.step}, all of {r}" for r in others], timedelta(seconds=60))

    def sent_early(self, model: Any) -> bool:
        """Whether rank 0 sent a bucket before its last gradient, so that it had the weights."""
        buckets = model.reducer.last_step()["buckets"]
        early = min(each["launched_ns"] for each in buckets) < self.came_ns[-1]
        told = torch.tensor(float(early))
        dist.broadcast(told, 0)
        return bool(told)


def trained_in_order(
    rank: int, world_size: int, late: str, dtype: torch.dtype, options: Any
) -> tuple[torch.Tensor, list[bool]]:
    """The gradients of the last of three steps; and of each step, whether rank 0 sent early."""
    torch.manual_seed(5)
    net = nn.Sequential(*(nn.Linear(9, 9, dtype=dtype) for _ in range(4)))
    for each in net.parameters():
        nn.init.normal_(each)
    group = dist.new_group()  # of one wrapper: of several, buckets wait for the end of the pass
    model = wrap(net, weight="samples", bucket_cap_mb=1e-4, process_group=group, **options)
    model.reducer.record_steps(True)
    order = Order(rank, world_size, net, late)
    steps = []
    for step in range(3):
        for repeat in range(50):  # the others' weights were sent, and may be under way
            model.zero_grad()
            model.samples = (5, 3, 11)[rank]
            loss = model(batch_of(rank, step, 4, dtype)).square().mean() / 30
            loss = loss * (1e-3 if dtype == torch.float16 else 1.0)  # subnormal ones
            order.begin(f"{dtype} {options} {late} {step} {repeat}")
            loss.backward()
            early = order.sent_early(model)
            if early or late == "the others":
                break
        steps.append(early)
    return gradients(model), steps


def at_other_times(rank: int, world_size: int) -> list[str]:
    """The others' weights come after all gradients of rank 0, or before half of them."""
    wrong = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for options in ({}, {"gradient_as_bucket_view": False}, {"wire_dtype": "fp16"}):
            if dtype != torch.float32 and "wire_dtype" in options:
                continue
            one, early = trained_in_order(rank, world_size, "rank 0", dtype, options)
            other, late = trained_in_order(rank, world_size, "the others", dtype, options)
            if not torch.equal(one, other) or not all(early) or any(late):
                wrong.append(f"{dtype} {options}, sent early: {early} and {late}")
    return wrong


@pytest.mark.parametrize("world_size", rings.first_of([2, 3]))
def test_bits_do_not_depend_on_when_the_weights_come(world_size: int) -> None:
    found = ranks.run_ranks(world_size, at_other_times, timeout_s=100, preload=ranks.TORCH_DDP)
    assert list(found.values()) == [[]] * world_size


def blocked(rank: int, world_size: int) -> float:
    """Rank 0 waits in the middle of backward until rank 1 reduces a bucket, which needs rank 0's
    weight."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    store = dist.distributed_c10d._get_default_store()
    net = make_net()
    model = wrap(copy.deepcopy(net), weight="samples")

    def reduces(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
        if rank == 1:
            store.set("rank 1 reduces", "")
        return default_hooks.allreduce_hook(None, bucket)

    model.register_comm_hook(None, reduces)
    if rank == 0:
        model.module[0].weight.register_post_accumulate_grad_hook(
            lambda _: store.wait(["rank 1 reduces"], timedelta(seconds=20))
        )
    sizes = (3, 5)
    loss_of(model, batch_of(rank, 0, sizes[rank])).backward()
    parts = [batch_of(r, 0, sizes[r]) for r in range(world_size)]
    return off_by(gradients(model), alone(net, torch.cat(parts)))


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_that_blocks_in_backward_has_sent_its_weight(transport: str) -> None:
    env = {"PYCOMM_TRANSPORT": transport}
    found = ranks.run_ranks(2, blocked, timeout_s=60, preload=ranks.TORCH_DDP, env=env)
    assert max(found.values()) < 1e-13


def kept_without_samples(rank: int, world_size: int) -> list[bool]:
    """A step without samples on any rank leaves what is in .grad, bit by bit."""
    kept = []
    for options in ({}, {"gradient_as_bucket_view": False}, {"wire_dtype": "int8"}):
        model = wrap(make_net(torch.float32), weight="samples", **options)
        loss_of(model, batch_of(rank, 0, 3, torch.float32)).backward()
        before = gradients(model)
        model.samples = 0
        with pytest.raises(ValueError, match="no rank has any samples"):
            loss_of(model, batch_of(rank, 1, 3, torch.float32)).backward()
        kept.append(torch.equal(before, gradients(model)))
    return kept


@pytest.mark.parametrize("world_size", rings.first_of([2, 3]))
def test_a_step_without_samples_leaves_gradients_as_they_were(world_size: int) -> None:
    found = ranks.run_ranks(world_size, kept_without_samples, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert results == [True] * 3

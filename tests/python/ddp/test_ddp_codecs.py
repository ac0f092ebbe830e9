"""int8 on our wrapper's wire, by parameter name, and what error feedback is worth."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, cast

import codec_bounds
import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_rig import wrap
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

# Inside a host the backend may use shared memory, where nothing needs to be encoded.
OVER_TCP = {"PYCOMM_TRANSPORT": "tcp"}
NUMEL = 8192


class Slopes(nn.Module):
    """The gradients of `weight` and `bias` are the inputs themselves."""

    def __init__(self, numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, slopes: torch.Tensor) -> torch.Tensor:
        return (self.weight * slopes).sum() + (self.bias * slopes).sum()


def reduced(model: Any, slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    model(slopes).backward()
    # Copies: the next step writes into the same memory.
    return model.module.weight.grad.clone(), model.module.bias.grad.clone()


def rows(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Every rank's, in float64."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return np.stack([each.double().numpy() for each in gathered])


def slopes_of(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(NUMEL, generator=generator) * torch.logspace(-6, 0, NUMEL)


def by_pattern(rank: int, world_size: int) -> None:
    """What matches travels encoded, within the codec's bound; what does not is exact."""
    codec = "int8"
    model = wrap(Slopes(), wire_dtype={"bias": "fp32", "*": codec}, error_feedback=False)
    exact = wrap(Slopes())
    for step in range(3):
        slopes = slopes_of(rank, step)
        weight, bias = reduced(model, slopes)
        expected, plain = reduced(exact, slopes)
        torch.testing.assert_close(bias, plain, rtol=1e-6, atol=1e-6)
        assert not torch.equal(weight, expected)
        assert (rows(weight) == rows(weight)[0]).all()
        every = rows(slopes)
        wrong = np.abs(weight.double().numpy() - every.mean(0))
        assert (wrong <= codec_bounds.sum_bound(codec, every / world_size) + 1e-12).all()
    stats = model.stats()
    nbytes = codec_bounds.BYTES_PER_BLOCK[codec] * NUMEL // codec_bounds.BLOCK + 4 * NUMEL
    assert stats.wire_nbytes == 3 * nbytes
    assert stats.saved_nbytes == 3 * (8 * NUMEL - nbytes) * 2 * (world_size - 1) // world_size
    assert stats.codec_overflows == 0
    assert len(model.reducer.bucket_names()) == 2


def small_and_large(rank: int) -> torch.Tensor:
    """In each block one large entry and many that are far below int8's step."""
    slopes = torch.full((NUMEL,), 5e-4 * (1 + rank))
    slopes[::256] = 1.0 if rank == 0 else -0.5
    return slopes


def feedback(rank: int, world_size: int) -> None:
    """Small entries arrive late instead of never; what is late stays within a few steps of int8."""
    slopes = small_and_large(rank)
    mean = rows(slopes).mean(0)
    totals = {}
    for on in (True, False):
        model = wrap(Slopes(), wire_dtype="int8", error_feedback=on)
        total = np.zeros(NUMEL)
        for _ in range(60):
            weight, _ = reduced(model, slopes)
            assert (rows(weight) == rows(weight)[0]).all()
            total += weight.double().numpy()
        totals[on] = total
    small = np.arange(NUMEL) % 256 != 0
    assert (totals[False][small] == 0).all()
    late = np.abs(totals[True] - 60 * mean)
    # Two ranks' contributions and one sum, each less than one step of 1/125 behind.
    assert late.max() < 3 * 1.5 / 125, late.max()
    assert (totals[True][small] > 0.5 * 60 * mean[small]).all()


def sums_are_conserved(rank: int, world_size: int) -> None:
    """Arrived and kept values add up to the given ones, also over a rebuild and an unfreezing."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 128), nn.Linear(128, 64))
    model = wrap(layers, wire_dtype="int8", bucket_cap_mb=0.05)
    frozen = layers[0].weight
    given = {name: np.zeros(each.shape) for name, each in layers.named_parameters()}
    arrived = copy.deepcopy(given)
    for step in range(6):
        frozen.requires_grad_(step >= 3)
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        alone = copy.deepcopy(layers)
        alone.zero_grad()
        alone(batch).square().mean().backward()
        for name, each in alone.named_parameters():
            if each.grad is not None:
                sent = each.grad.double() / world_size
                dist.all_reduce(sent)
                given[name] += sent.numpy()
        model.zero_grad()
        model(batch).square().mean().backward()
        for name, each in layers.named_parameters():
            if each.grad is not None:
                arrived[name] += each.grad.double().numpy()
    assert len(model.reducer.bucket_names()) > 2
    residual = model.communication_state_dict()["residuals"]
    assert set(residual) == set(given)
    for name, kept in residual.items():
        everywhere = kept.double()
        dist.all_reduce(everywhere)
        largest = np.abs(given[name]).max()
        assert np.abs(arrived[name] + everywhere.numpy() - given[name]).max() < 1e-5 * largest, name
    name = "0.weight"
    assert np.abs(arrived[name] - given[name]).max() > 1e-3 * np.abs(given[name]).max()


class _Branches(nn.Module):
    """The gradient of each branch that is used is what is passed."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(NUMEL, dtype=dtype)) for _ in range(2))

    def forward(self, slopes: torch.Tensor, uses_a: bool) -> torch.Tensor:
        loss = (self.b * slopes).sum()
        return loss + (self.a * slopes).sum() if uses_a else loss


def _kept(model: Any) -> np.ndarray[Any, Any]:
    """What error feedback keeps of `a` on all ranks."""
    found: np.ndarray[Any, Any] = rows(model.communication_state_dict()["residuals"]["a"]).sum(0)
    return found


def _zero(model: Any, how: str) -> None:
    for each in (model.module.a, model.module.b):
        if each.grad is not None and how == "to zeros":
            each.grad.zero_()
        elif how == "to none" or each is model.module.b:
            each.grad = None


def unused(rank: int, world_size: int) -> None:
    """A branch that no rank uses keeps its .grad to the bit, and error feedback what it had."""
    for how in ("to none", "to zeros", "never"):
        for views, feedback_on in ((True, True), (False, True), (True, False)):
            options = {"gradient_as_bucket_view": views, "error_feedback": feedback_on}
            model = wrap(_Branches(), wire_dtype="int8", find_unused_parameters=True, **options)
            missing = np.zeros(NUMEL)
            for step, uses_a in enumerate((True, True, False, False, True, False)):
                _zero(model, "to none" if uses_a and how == "never" else how)
                before = None if model.module.a.grad is None else model.module.a.grad.clone()
                slopes = slopes_of(rank, step)
                model(slopes, uses_a).backward()
                grad = model.module.a.grad
                if uses_a:
                    missing += rows(slopes).mean(0) - grad.double().numpy()
                elif before is None:
                    assert grad is None
                else:
                    assert torch.equal(grad, before), (how, options)
                if feedback_on:
                    assert np.abs(_kept(model) - missing).max() < 1e-5, (how, options, step)


def unused_in_join(rank: int, world_size: int) -> None:
    """The same if rank 0 has run out of data."""
    for how in ("to none", "to zeros", "never"):
        model = wrap(_Branches(), wire_dtype="int8", find_unused_parameters=True)
        missing = np.zeros(NUMEL)
        with model.join(divide_by_initial_world_size=False):
            for step in range(1 if rank == 0 else 3):
                _zero(model, how)
                model(slopes_of(rank, step), step == 0).backward()
                if step == 0:
                    missing -= model.module.a.grad.double().numpy()
        missing += rows(slopes_of(rank, 0)).mean(0)
        assert np.abs(_kept(model) - missing).max() < 1e-5, how


def checkpoint(rank: int, world_size: int) -> None:
    """Continued from a checkpoint, every bit is that of a run without a break."""
    through = wrap(Slopes(), wire_dtype="int8")
    for step in range(3):
        reduced(through, slopes_of(rank, step))
    state = copy.deepcopy(through.communication_state_dict())
    assert set(state["residuals"]) == {"weight", "bias"}
    resumed = wrap(Slopes(), wire_dtype="int8")
    resumed.load_communication_state_dict(state)
    again = resumed.communication_state_dict()["residuals"]
    assert all(torch.equal(again[name], kept) for name, kept in state["residuals"].items())
    for step in range(3, 6):
        # Buckets are cut once after the first step, here of one size: blocks stay the same.
        first, second = (reduced(each, slopes_of(rank, step)) for each in (through, resumed))
        assert torch.equal(first[0], second[0])
    with pytest.raises(ValueError, match="another shape"):
        resumed.load_communication_state_dict({**state, "residuals": {"weight": torch.zeros(3)}})
    with pytest.raises(ValueError, match="'other' has error feedback"):
        resumed.load_communication_state_dict({**state, "residuals": {"other": torch.zeros(3)}})


def half_parameters(rank: int, world_size: int) -> None:
    """Parameters of another dtype are encoded from fp32 and come back in their own."""
    model = wrap(Slopes(dtype=torch.bfloat16), wire_dtype="int8")
    slopes = slopes_of(rank).bfloat16()
    weight, _ = reduced(model, slopes)
    assert weight.dtype == torch.bfloat16
    every = rows(slopes)
    wrong = np.abs(weight.double().numpy() - every.mean(0))
    bound = codec_bounds.sum_bound("int8", every / world_size)
    assert (wrong <= bound + (np.abs(every.mean(0)) + bound) * 2.0**-8).all()


def uneven(rank: int, world_size: int) -> None:
    """A rank that has run out of data sends what it had kept back, with zeros."""
    model = wrap(Slopes(), wire_dtype="int8")

    def kept() -> np.ndarray[Any, Any]:
        residuals = model.communication_state_dict()["residuals"]
        return np.stack([residuals[name].double().numpy() for name in ("weight", "bias")])

    slopes = small_and_large(rank)
    arrived = np.zeros((2, NUMEL))
    with model.join():
        for _ in range(2 + rank):
            arrived += np.stack([each.double().numpy() for each in reduced(model, slopes)])
        before = kept()
    after = kept()
    everywhere = rows(torch.from_numpy(after)).sum(0)
    given = sum((2 + each) * row for each, row in enumerate(rows(slopes))) / world_size
    if rank == world_size - 1:
        assert np.abs(arrived + everywhere - given).max() < 1e-5
    if rank == 0:
        # It keeps what sums lose in its part of the bucket, a half, and nothing in the other one.
        late = np.abs(before) > 1e-4
        assert late.mean() > 0.9
        assert (np.abs(after[late]) < 0.1 * np.abs(before[late])).mean() > 0.4


def infinite(rank: int, world_size: int) -> None:
    model = wrap(Slopes(), wire_dtype="int8")
    slopes = torch.ones(NUMEL)
    slopes[7] = float("inf")  # before it is packed: passes on, and does not count
    weight, _ = reduced(model, slopes)
    assert torch.isinf(weight[7])
    assert model.stats().codec_overflows == 0
    weight, _ = reduced(model, torch.ones(NUMEL))
    assert torch.isfinite(weight).all()  # nothing infinite has been kept


def hooked(rank: int, world_size: int) -> None:
    """A hook's sums travel as wire_dtype says, also those that its callbacks issue."""
    import pycomm

    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().dtype)
        first = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return first.then(again)

    def again(done):
        tensor = done.value()[0] / world_size
        second = dist.all_reduce(tensor, async_op=True).get_future()
        return second.then(lambda ended: ended.value()[0] / world_size).wait()

    model = wrap(Slopes(), wire_dtype={"bias": "fp32", "*": "int8"})
    model.register_comm_hook(None, hook)
    before = pycomm.codec_stats()
    slopes = slopes_of(rank)
    weight, bias = reduced(model, slopes)
    after = pycomm.codec_stats()
    every = rows(slopes)
    assert seen == [torch.float32] * 2
    assert (rows(weight) == rows(weight)[0]).all()
    assert np.abs(bias.double().numpy() - every.mean(0)).max() < 1e-5
    wrong = np.abs(weight.double().numpy() - every.mean(0))
    assert wrong.max() > 1e-5
    assert (wrong <= 3 * codec_bounds.sum_bound("int8", every)).all()
    sent = after.elements_sent - before.elements_sent
    assert sent == 2 * 2 * (world_size - 1) * NUMEL // world_size  # two sums of `weight` alone


def ordered_before(rank: int, world_size: int) -> None:
    """Sums of a hook that is ordered already travel as our wrapper's wire_dtype says, too."""
    import pycomm

    hook = pycomm.comm_hooks.ordered(default_hooks.allreduce_hook)
    encoded = dist.new_group(pg_options=pycomm.Options(wire_dtype="int8"))
    slopes = slopes_of(rank)
    mean = rows(slopes).mean(0)
    for group, wire, exact in (
        (encoded, None, True),
        (encoded, "group", False),
        (None, "bf16", False),
        (None, "group", True),
    ):
        model = wrap(Slopes(), wire_dtype=wire, process_group=group)
        model.register_comm_hook(group, hook)
        weight, _ = reduced(model, slopes)
        off = float(np.abs(weight.double().numpy() - mean).max())
        assert off < 1e-6 if exact else 1e-4 < off < 0.05, (wire, off)


def one_operation(rank: int, world_size: int) -> None:
    """codecs.all_reduce: this operation only, and what it lost adds up on all ranks."""
    from pycomm import codecs
    from pycomm.errors import InvalidArgumentError

    values, residual = slopes_of(rank), torch.zeros(NUMEL)
    result = values.clone()
    codecs.all_reduce(result, "int8", residual=residual)
    missing = residual.double()
    dist.all_reduce(missing)
    exact = rows(values).sum(0)
    assert np.abs(result.double().numpy() - exact).max() > 1e-5
    assert np.abs(result.double().numpy() + missing.numpy() - exact).max() < 5e-6
    own, _ = _alone("int8", values)
    shares = (
        rows(residual - own) != 0
    )  # the rest is of the sums that a rank makes: each has its own
    assert (shares.sum(0) <= 1).all()
    assert shares.any(1).all()
    kept, again, added = residual.clone(), values.clone(), values + residual
    codecs.all_reduce(again, "int8", residual=residual)
    anew = torch.zeros(NUMEL)
    codecs.all_reduce(added, "int8", residual=anew)
    assert torch.equal(again, added)
    assert torch.equal(residual, anew)
    few, late = values[:8].clone(), kept[:8].clone()  # too few to be encoded
    expected = values[:8] + kept[:8]
    dist.all_reduce(expected)
    codecs.all_reduce(few, "int8", residual=late)
    assert torch.equal(few, expected)
    assert not late.any()
    plain = values.clone()
    dist.all_reduce(plain)
    assert np.abs(plain.double().numpy() - exact).max() < 5e-6
    work = codecs.all_reduce(plain, "fp32", async_op=True)
    assert work is not None
    work.wait()
    with pytest.raises(InvalidArgumentError, match="sum of float32"):
        codecs.all_reduce(values, "int8", residual=torch.zeros(3))


class _Between(torch.autograd.Function):
    """Does something when backward passes by."""

    @staticmethod
    def forward(context: Any, batch: torch.Tensor, passing: Callable[[], None]) -> torch.Tensor:
        context.passing = passing
        return batch.clone()

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> Any:
        context.passing()
        return grads[0], None


class _Watched(nn.Module):
    """Between its layers backward waits for the network, and then looks at the last gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(3))
        self.seen: torch.Tensor | None = None

    def look(self) -> None:
        grad = self.layers[2].weight.grad
        assert grad is not None
        self.seen = grad.clone()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = _Between.apply(self.layers[0](batch), self.look)  # type: ignore[no-untyped-call]
        batch = self.layers[1](batch)
        batch = _Between.apply(batch, lambda: time.sleep(0.2))  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, self.layers[2](batch))


def averages_are_written_early(rank: int, world_size: int) -> None:
    """An average that has come is in .grad before the next gradient, not only after backward."""
    torch.manual_seed(0)
    model = wrap(_Watched(), wire_dtype="fp16", bucket_cap_mb=0.05)
    torch.manual_seed(1 + rank)
    early = 0
    for _ in range(8):  # the first ones find the scale; and a core may be lost for a while
        model.zero_grad()
        model(torch.randn(4, 128)).square().mean().backward()
        early += torch.equal(model.module.seen, model.module.layers[2].weight.grad)
    assert early > 0


def _alone(codec: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from pycomm import codecs

    error = torch.empty_like(values)
    return error, codecs.encode(codec, values, error=error)


def in_turn(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        globals()[name](rank, world_size)


def test_encoded_gradients_on_two_ranks() -> None:
    names = ["by_pattern", "feedback", "sums_are_conserved", "checkpoint", "half_parameters"]
    names += ["unused", "unused_in_join"]
    names += ["uneven", "infinite", "hooked", "ordered_before", "one_operation"]
    names += ["averages_are_written_early"]
    options: dict[str, Any] = {"env": OVER_TCP, "preload": ranks.TORCH_DDP, "timeout_s": 200}
    ranks.run_ranks(2, in_turn, args=(names,), **options)


def test_encoded_gradients_on_three_ranks() -> None:
    names = ["by_pattern", "feedback", "sums_are_conserved", "one_operation", "unused"]
    options: dict[str, Any] = {"env": OVER_TCP, "preload": ranks.TORCH_DDP, "timeout_s": 200}
    ranks.run_ranks(3, in_turn, args=(names,), **options)


def on_one_host(rank: int, world_size: int) -> None:
    """Whatever way the bytes go there: right, and the same on all ranks."""
    model = wrap(Slopes(), wire_dtype="int8")
    slopes = slopes_of(rank)
    every = rows(slopes)
    for step in range(1, 4):
        weight, _ = reduced(model, slopes)
        assert (rows(weight) == rows(weight)[0]).all()
        wrong = np.abs(weight.double().numpy() - every.mean(0))
        assert (wrong <= 4 * codec_bounds.sum_bound("int8", every)).all(), step


def test_on_one_host() -> None:
    ranks.run_ranks(2, on_one_host, preload=ranks.TORCH_DDP)


def refused(rank: int, world_size: int) -> list[str]:
    from pycomm.errors import UnsupportedError

    said = []
    for options in ({"wire_dtype": {"bias": "int8"}}, {"wire_dtype": "int8"}):
        with pytest.raises(UnsupportedError) as caught:
            wrap(Slopes(), **options)
        said.append(str(caught.value))
    model = wrap(Slopes(), wire_dtype="bf16")
    with pytest.raises(UnsupportedError) as caught:
        model.register_comm_hook(None, lambda state, bucket: None)
    return [*said, str(caught.value)]


def refused_for_a_hook(rank: int, world_size: int) -> list[str]:
    """What decides is the group of the hook's sums, and not the wrapper's."""
    from pycomm.errors import UnsupportedError

    ours = dist.new_group([0], backend="pycomm")
    powers = powerSGD_hook.PowerSGDState(None)  # this, too, means the default group
    said = []
    for state, hook in (
        (dist.group.WORLD, default_hooks.allreduce_hook),
        (None, default_hooks.allreduce_hook),
        (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        (powers, powerSGD_hook.powerSGD_hook),
        (powers, lambda state, bucket: powerSGD_hook.powerSGD_hook(state, bucket)),
    ):
        model = wrap(Slopes(), process_group=ours, wire_dtype="int8")
        with pytest.raises(UnsupportedError) as caught:
            model.register_comm_hook(state, hook)
        said.append(str(caught.value))
    wrap(Slopes(), wire_dtype="bf16").register_comm_hook(ours, default_hooks.allreduce_hook)
    # A hook of the user's, without a group in its state, uses the wrapper's.
    for users in (lambda state, bucket: None, default_hooks.fp16_compress_wrapper(users_hook)):
        model = wrap(Slopes(), process_group=ours, wire_dtype="int8")
        model.register_comm_hook(None, users)
    return said


def users_hook(state, bucket):  # torch wants real classes as annotations, or none
    raise AssertionError("nothing is reduced here")


def test_a_hook_with_sums_of_another_backend_is_refused() -> None:
    (said,) = ranks.run_ranks(
        1, refused_for_a_hook, backend="gloo", preload=ranks.TORCH_DDP
    ).values()
    for text in said:
        assert "together with a comm hook needs a process group of pycomm" in text
        assert "backend is 'gloo'" in text
    assert len(said) == 5


def test_another_backend_is_refused_in_words() -> None:
    (said,) = ranks.run_ranks(1, refused, backend="gloo", preload=ranks.TORCH_DDP).values()
    assert "'int8' needs a process group of pycomm" in said[0]
    assert "backend is 'gloo'" in said[1]
    assert "together with a comm hook needs a process group of pycomm" in said[2]

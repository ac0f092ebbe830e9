"""Corners of the wrapper: torch's Python reducer, lazy negations, unusual dtypes."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from typing import Any

import pytest
import ranks
import rings
import torch
import torch.distributed as dist
from ddp_rig import all_ranks, wrap
from thread_state import wait_until_asleep
from time_bound import assert_within
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from training_models import Broken

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]


def run_ranks(world_size: int, target: Any, **options: Any) -> Any:
    options.setdefault("timeout_s", 120)
    return ranks.run_ranks(world_size, target, preload=ranks.TORCH_DDP, **options)


def without_annotations(hook: Any) -> Any:
    """torch compares a hook's annotations, and here they are strings."""
    hook.__annotations__.clear()
    return hook


def layers(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))


# torch's Python reducer


@contextlib.contextmanager
def python_reducer() -> Any:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        yield


def trains_as_torchs(rank: int, world_size: int) -> None:
    with python_reducer():
        ours, theirs = wrap(layers()), TorchDDP(layers())
    assert ours.reducer.bucket_names() == []
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            with model.no_sync() if step == 1 else contextlib.nullcontext():
                model(batch(rank, step)).square().mean().backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad), step
    reference = layers()
    for each in range(world_size):  # step 2 was reduced: the mean over ranks
        (reference(batch(each, 2)).square().mean() / world_size).backward()
    for mine, wanted in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


def test_the_python_reducer_trains_as_with_torchs_wrapper() -> None:
    run_ranks(2, trains_as_torchs)


REFUSED = {
    "wire_dtype": "bf16",
    "error_feedback": False,
    "accumulate": 2,
    "sync_every": 2,
}


def refused_options(rank: int, world_size: int) -> dict[str, str]:
    import pycomm

    said = {}
    with python_reducer():
        for name, value in REFUSED.items():
            with pytest.raises(pycomm.errors.UnsupportedError) as caught:
                wrap(layers(), **{name: value})
            said[name] = str(caught.value)
        model = wrap(layers())
    calls = {
        "stats": model.stats,
        "join": model.join,
        "FP16_COMPRESS": lambda: model._register_builtin_comm_hook(
            dist.BuiltinCommHookType.FP16_COMPRESS
        ),
    }
    for name, call in calls.items():
        with pytest.raises(pycomm.errors.UnsupportedError) as caught:
            call()
        said[name] = str(caught.value)
    return said


def test_the_python_reducer_refuses_what_it_would_ignore() -> None:
    for said in run_ranks(2, refused_options).values():
        for name, value in REFUSED.items():
            assert f"{name}={value!r}" in said[name]
        for name in ("stats", "join", "FP16_COMPRESS"):
            assert name in said[name]
        assert all('optimize_ddp = "python_reducer"' in text for text in said.values()), said


# Gradients whose memory holds the opposite sign


class Phase(nn.Module):
    """Its gradient is the imaginary part of a lazily conjugated complex number."""

    def __init__(self) -> None:
        super().__init__()
        self.imaginary = nn.Parameter(torch.tensor([0.5]))

    def forward(self, real: torch.Tensor) -> torch.Tensor:
        conjugate = torch.complex(real, self.imaginary).conj()
        return (conjugate * conjugate).real.sum()


def negative_bit(rank: int, world_size: int) -> None:
    alone = Phase()
    alone(torch.ones(1)).backward()
    grad = alone.imaginary.grad
    assert grad is not None and grad.is_neg(), "autograd makes no such gradient any more"
    for wire_dtype in (None, "fp32", "bf16", "fp16", "int8"):
        for view in (True, False):
            ours = wrap(Phase(), wire_dtype=wire_dtype, gradient_as_bucket_view=view)
            theirs = TorchDDP(Phase(), gradient_as_bucket_view=view)
            for step in range(3):
                for model in (ours, theirs):
                    model.zero_grad(set_to_none=step != 2)
                    model(torch.tensor([float(rank + step)])).backward()
                mine, wanted = ours.module.imaginary.grad, theirs.module.imaginary.grad
                assert torch.equal(mine, wanted), (wire_dtype, view, step, mine, wanted)


def negated_hook_result(rank: int, world_size: int) -> None:
    @without_annotations
    def negate(state: object, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(torch._neg_view(bucket.buffer()))
        return future

    model = wrap(nn.Linear(3, 2, bias=False))
    model.register_comm_hook(None, negate)
    model(torch.ones(1, 3)).sum().backward()
    assert model.module.weight.grad.tolist() == [[-1.0] * 3] * 2


def test_gradients_with_a_pending_negation_keep_their_sign() -> None:
    run_ranks(2, negative_bit)
    run_ranks(1, negated_hook_result)


# Dtypes of FP16_COMPRESS


def compressed(rank: int, world_size: int) -> list[str]:
    import pycomm

    said = []
    for dtype in (torch.float64, torch.complex64):
        model = wrap(nn.Linear(3, 2).to(dtype))
        with pytest.raises(pycomm.errors.UnsupportedError) as caught:
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        said.append(str(caught.value))
        model(torch.ones(1, 3, dtype=dtype)).abs().sum().backward()  # it still trains without
        assert model.stats().steps == 1
    fine = wrap(nn.Linear(3, 2))
    fine._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    fine(torch.ones(1, 3)).sum().backward()
    assert fine.module.weight.grad.tolist() == [[1.0] * 3] * 2
    return said


def test_fp16_compression_of_other_dtypes_is_refused_when_registered() -> None:
    for said in run_ranks(2, compressed).values():
        for text, dtype in zip(said, ("torch.float64", "torch.complex64"), strict=True):
            assert "FP16_COMPRESS" in text and "'weight'" in text and dtype in text


# Python's lock


def installs_while_backward_waits(rank: int, world_size: int) -> float:
    future: Any = torch.futures.Future()
    launched, installing = threading.Event(), threading.Event()
    buffers = []

    @without_annotations
    def held(state: object, bucket: Any) -> Any:
        buffers.append(bucket.buffer())
        launched.set()
        return future

    model = wrap(nn.Linear(3, 2))
    model.register_comm_hook(None, held)
    loss = model(torch.ones(1, 3)).sum()
    backward = threading.Thread(target=loss.backward)

    def complete() -> None:
        installing.wait()
        time.sleep(0.2)  # the main thread is inside the call below, or about to make it
        future.set_result(buffers[0])

    threads = [backward, threading.Thread(target=complete)]
    for thread in threads:
        thread.start()
    assert launched.wait(30) and backward.native_id is not None
    wait_until_asleep(backward.native_id)
    began_s = time.monotonic()
    installing.set()
    model.reducer._install_post_backward_futures([])  # blocks until backward has ended
    for thread in threads:
        thread.join()
    return time.monotonic() - began_s


@pytest.mark.time_bound
def test_futures_can_be_installed_while_backward_waits_for_python() -> None:
    (took_s,) = run_ranks(1, installs_while_backward_waits, timeout_s=60).values()
    assert took_s >= 0.2
    assert_within(took_s, 20)


# SyncBatchNorm beside a hook: its collectives come from backward, the hook's from another thread


def normed(norm: type[nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential()
    for index in range(4):
        model.append(nn.Linear(40 if index else 20, 40))
        model.append(norm(40))
        model.append(nn.Tanh())
    return model.append(nn.Linear(40, 5)).double()


def sync_batch_norm_and_hooks(rank: int, world_size: int) -> None:
    import pycomm

    @without_annotations
    def twice(group: Any, bucket: Any) -> Any:
        """Issues a second collective from a callback of the first."""
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)

        def again(future: Any) -> torch.Tensor:
            total = future.value()[0]
            dist.all_reduce(total, group=group)
            return total.div_(dist.get_world_size(group) ** 2)

        return work.get_future().then(again)

    for hook in (default_hooks.allreduce_hook, twice):
        reference = normed(nn.BatchNorm1d)
        ours = wrap(normed(pycomm.SyncBatchNorm), bucket_cap_mb=0.005)
        ours.register_comm_hook(None, hook)
        for step in range(4):
            parts = [batch(each, step).double() for each in range(world_size)]
            ours.zero_grad()
            ours(parts[rank]).square().mean().backward()
            reference.zero_grad()
            reference(torch.cat(parts)).square().mean().backward()
            for mine, wanted in zip(ours.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-9, atol=1e-11)
        assert len(ours.reducer.bucket_names()) >= 3


@pytest.mark.parametrize("world_size", rings.first_of([3, 2]))
def test_sync_batch_norm_beside_a_hook_is_one_process_with_the_whole_batch(world_size: int) -> None:
    run_ranks(world_size, sync_batch_norm_and_hooks)


# Parameters that a wrapper cannot follow, and results that it can


def converted(rank: int, world_size: int) -> None:
    model = wrap(layers())
    model(batch(rank, 0)).sum().backward()
    model.double().float()  # autograd forgets its accumulators, and with them hooks on them
    model.zero_grad()
    model(batch(rank, 1)).sum().backward()
    reference = layers()
    for each in range(world_size):
        (reference(batch(each, 1)).sum() / world_size).backward()
    for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)
    model.double()
    with pytest.raises(RuntimeError, match=r"'0.weight' is Double on cpu now, and was Float"):
        model(batch(rank, 2).double())


def replaced(rank: int, world_size: int) -> None:
    """Other parameters in the places of those that were wrapped: their gradients stay local."""
    model = wrap(layers())
    model(batch(rank, 0)).sum().backward()
    # Values that follow from the parameters are no other parameters: theirs get the gradients.
    model.zero_grad()
    doubled = {f"module.{name}": 2 * each for name, each in model.module.named_parameters()}
    torch.func.functional_call(model, doubled, (batch(rank, 1),)).sum().backward()
    for each in model.parameters():
        first, second = all_ranks(each.grad)
        assert torch.equal(first, second)
        assert first.any()
    state = copy.deepcopy(model.module.state_dict())
    model.module.load_state_dict(state, assign=True)
    with torch.no_grad():
        model(batch(rank, 2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'0.weight'.*assign=True.*wrap"):
            model(batch(rank, 2))
    again = copy.deepcopy(wrap(layers()))
    again(batch(rank, 3)).sum().backward()


def wide_gradients(rank: int, world_size: int) -> None:
    net = nn.Linear(3, 2, dtype=torch.bfloat16)
    for each in net.parameters():
        each.grad_dtype = torch.float32
    model = wrap(net)
    with pytest.raises(RuntimeError, match=r"has a gradient of Float.*grad_dtype"):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()


def complex_result(rank: int, world_size: int) -> None:
    model = wrap(nn.Linear(3, 2, dtype=torch.complex64))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    batches = [torch.full((1, 3), complex(each, 1 + each)) for each in range(world_size)]
    for _ in range(2):
        model.zero_grad()
        model(batches[rank]).sum().abs().backward()
    reference = copy.deepcopy(model.module)
    reference.zero_grad()
    for each in batches:
        (reference(each).sum().abs() / world_size).backward()
    for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


def cut_off(rank: int, world_size: int) -> str:
    model = wrap(layers())
    before = Broken.apply(batch(rank, 0).requires_grad_())  # type: ignore[no-untyped-call]
    with pytest.raises(ArithmeticError):
        model(before).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model(batch(rank, 1))
    return str(caught.value)


def test_a_converted_model_is_reduced_or_refused() -> None:
    run_ranks(2, converted)


def test_parameters_that_were_replaced_are_refused() -> None:
    run_ranks(2, replaced)


def test_gradients_of_another_dtype_are_refused() -> None:
    run_ranks(2, wide_gradients)


def test_torchs_hook_averages_complex_gradients() -> None:
    run_ranks(2, complex_result)


def test_an_error_behind_the_last_gradient_is_named() -> None:
    for text in run_ranks(2, cut_off).values():
        assert "ended with an error after the last gradient" in text
        assert "find_unused_parameters" not in text


# Over a group of another backend


def over_gloo(rank: int, world_size: int) -> None:
    from pycomm._group.queries import wrapper_store

    group = dist.group.WORLD
    first, second = wrapper_store(group), wrapper_store(group)
    first.set(str(rank), f"of rank {rank}")
    dist.barrier()
    assert first.get(str(1 - rank)) == f"of rank {1 - rank}".encode()
    assert not second.check([str(rank)])  # another wrapper's
    net, reference = layers(), layers()
    model = wrap(net)
    for step in range(3):
        net[0].requires_grad_(step != 1)  # published through the store
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        reference.zero_grad()
        for each in range(world_size):
            (reference(batch(each, step)).square().mean() / world_size).backward()
        for mine, wanted in zip(net.parameters(), reference.parameters(), strict=True):
            if mine.requires_grad:
                torch.testing.assert_close(mine.grad, wanted.grad)


def test_wrappers_over_gloo_have_a_store_each() -> None:
    run_ranks(2, over_gloo, backend="gloo")

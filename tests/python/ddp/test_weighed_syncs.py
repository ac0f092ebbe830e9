"""``weight="samples"`` of LocalSGD, DiLoCo and the others, beside one process in float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import ranks
import torch
from ddp_rig import all_ranks
from torch import nn

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]

EVERY, STEPS = 4, 16
# By step and rank. In the first round the third rank has none; in the third, weights are far apart.
SAMPLES = (
    *((5, 3, 0), (1, 7, 0), (0, 6, 0), (2, 0, 0)),
    *((0, 6, 1), (32, 1, 3), (4, 4, 4), (1, 1, 9)),
    *((1000, 1, 2), (1, 1, 0), (900, 0, 1), (1, 1, 1)),
    *((2, 3, 4), (2, 3, 4), (2, 3, 4), (2, 3, 4)),
)


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    kind = torch.float64
    return nn.Sequential(nn.Linear(9, 6, dtype=kind), nn.Tanh(), nn.Linear(6, 2, dtype=kind))


def train(net: nn.Module, rank: int, step: int, samples: int) -> None:
    """A step of SGD by hand; without samples there is none."""
    if samples == 0:
        return
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch = torch.randn(samples, 9, generator=generator, dtype=torch.float64)
    net.zero_grad()
    net(batch).square().mean().backward()
    with torch.no_grad():
        for each in net.parameters():
            assert each.grad is not None
            each -= 0.1 * each.grad


class Simulated:
    """All workers in one process: the equations of docs/fewer-syncs.md, with weights."""

    def __init__(
        self, world_size: int, fragments: list[list[int]], delay: int, alpha: float, outer: Any
    ) -> None:
        self.workers = [make_net() for _ in range(world_size)]
        self.fragments, self.delay, self.alpha = fragments, delay, alpha
        self.lr, self.momentum = outer
        self.anchor = [each.detach().clone() for each in self.workers[0].parameters()]
        self.velocity = [torch.zeros_like(each) for each in self.anchor]
        self.samples = [[0.0] * world_size for _ in fragments]  # since the fragment's launch
        self.flying: Any = None

    def step(self, step: int) -> None:
        for rank, worker in enumerate(self.workers):
            train(worker, rank, step, SAMPLES[step][rank])
            for of_ranks in self.samples:
                of_ranks[rank] += SAMPLES[step][rank]
        if self.flying is not None:
            self.flying[1] -= 1
            self.land_if_due()
        stride = EVERY // len(self.fragments)
        if (step + 1) % stride == 0:
            which = step // stride % len(self.fragments)
            ends = [[each.detach().clone() for each in w.parameters()] for w in self.workers]
            self.flying = [which, self.delay, ends, self.samples[which]]
            self.samples[which] = [0.0] * len(self.workers)
            self.land_if_due()

    def land_if_due(self) -> None:
        which, left, ends, weights = self.flying
        if left > 0:
            return
        self.flying = None
        for index in self.fragments[which]:
            moved = sum(
                weight * (self.anchor[index] - end[index])
                for weight, end in zip(weights, ends, strict=True)
                if weight
            ) / sum(weights)
            self.velocity[index] = self.momentum * self.velocity[index] + moved
            ahead = moved + self.momentum * self.velocity[index]
            self.anchor[index] = self.anchor[index] - self.lr * ahead
            for worker, weight in zip(self.workers, weights, strict=True):
                mine, alpha = list(worker.parameters())[index].data, self.alpha if weight else 0.0
                mine.copy_(alpha * mine + (1 - alpha) * self.anchor[index])
        for rank, weight in enumerate(weights):
            if not (self.alpha and weight):  # the steps since the launch are gone
                self.samples[which][rank] = 0.0


ALL = [[0, 1, 2, 3]]
METHODS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "LocalSGD": ({}, (ALL, 0, 0.0, (1.0, 0.0))),
    "DiLoCo": ({}, (ALL, 0, 0.0, (0.7, 0.9))),
    "StreamingDiLoCo": (
        {"fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.25},
        ([[0, 1], [2, 3]], 1, 0.25, (0.7, 0.9)),
    ),
}


def beside_one_process(rank: int, world_size: int, method: str) -> dict[str, Any]:
    import pycomm

    options, world = METHODS[method]
    expected = Simulated(world_size, *world)
    kind = getattr(pycomm, method)

    def made(net: nn.Module) -> Any:
        return kind(net, sync_every=EVERY, weight="samples", **options)

    net = make_net()
    local = made(net)
    worst = 0.0
    for step in range(STEPS):
        samples = SAMPLES[step][rank]
        train(net, rank, step, samples)
        expected.step(step)
        local.step(samples)
        for mine, right in zip(net.parameters(), expected.workers[rank].parameters(), strict=True):
            worst = max(worst, float((mine - right).abs().max()))
        if step % 3 == 1:  # in the middle of a round, and with a fragment in flight
            states = copy.deepcopy([net.state_dict(), local.state_dict()])
            net = make_net()
            local = made(net)
            net.load_state_dict(states[0])
            local.load_state_dict(states[1])
    local.sync()
    flat = torch.cat([each.detach().flatten() for each in net.parameters()])
    same = all(torch.equal(flat, each) for each in all_ranks(flat))
    local.sync()  # no samples, and nothing moves
    again = torch.cat([each.detach().flatten() for each in net.parameters()])
    return {"off": worst, "same": same, "again": torch.equal(flat, again)}


@pytest.mark.parametrize("method", METHODS)
def test_averages_count_by_samples_since_the_last_one(method: str) -> None:
    found = ranks.run_ranks(
        3, beside_one_process, args=(method,), timeout_s=100, preload=ranks.TORCH_DDP
    )
    for results in found.values():
        assert results["off"] < 1e-13
        assert results["same"]
        assert results["again"]


def sparse_rounds(rank: int, world_size: int) -> float:
    """What each rank has sent is the selection's; the mean of it, by hand."""
    import torch.distributed as dist

    import pycomm
    from pycomm.fewer_syncs.sparse_rows import ROW, pack, select, unpack

    net = make_net().float()
    local = pycomm.SparseLoCo(net, sync_every=EVERY, top_k=32, error_decay=0.9, weight="samples")
    worst = 0.0
    before, since = local.state_dict(), [0.0] * world_size
    for step in range(STEPS):
        of_step = SAMPLES[(step + STEPS - EVERY) % STEPS]  # so that a rank has no samples later
        samples = of_step[rank]
        with torch.no_grad():
            for each in net.parameters():
                generator = torch.Generator().manual_seed(100 * step + rank)
                each += (samples > 0) * 0.01 * torch.randn(each.shape, generator=generator)
        since = [old + of_step[r] for r, old in enumerate(since)]
        moved = {
            name: before["anchor"][name] - each.detach() for name, each in net.named_parameters()
        }
        if not local.step(samples):
            continue
        summed, sent = {}, {}
        for name, each in moved.items():
            rows = torch.zeros(-(-each.numel() // ROW), ROW)
            rows.view(-1)[: each.numel()] = 0.9 * before["error"][name] + each.flatten()
            at, values = unpack(pack(*select(rows, 32)), 32)
            decoded = torch.zeros_like(rows).scatter_add_(1, at, values).view(-1)[: each.numel()]
            summed[name], sent[name] = rows.view(-1)[: each.numel()], decoded
        of_all: list[Any] = [None] * world_size
        dist.all_gather_object(of_all, sent)
        after = local.state_dict()
        for name, mine in sent.items():
            mean = sum(w * each[name].double() for w, each in zip(since, of_all, strict=True))
            right = before["anchor"][name].double().flatten() - mean / sum(since)
            worst = max(worst, float((after["anchor"][name].flatten() - right).abs().max()))
            kept = summed[name] - (mine if since[rank] else 0.0)  # else it went nowhere
            worst = max(worst, float((after["error"][name].flatten() - kept).abs().max()))
        before, since = after, [0.0] * world_size
    return worst


def test_sparse_entries_count_by_samples_since_the_last_sync() -> None:
    found = ranks.run_ranks(3, sparse_rounds, timeout_s=100, preload=ranks.TORCH_DDP)
    assert max(found.values()) < 1e-6


def equal_samples(rank: int, world_size: int) -> list[str]:
    import pycomm

    wrong = []
    for method in ("LocalSGD", "DiLoCo", "SparseLoCo"):
        seen = []
        for weight in (None, "samples"):
            net = make_net()
            local = getattr(pycomm, method)(net, sync_every=2, weight=weight)
            for step in range(6):
                train(net, rank, step, 5)
                local.step(*(() if weight is None else (0.1,)))  # which binary cannot hold
            seen.append(torch.cat([each.detach().flatten() for each in net.parameters()]))
        if not torch.equal(*seen):
            wrong.append(method)
    return wrong


def test_equal_samples_have_the_bits_of_no_weights() -> None:
    found = ranks.run_ranks(3, equal_samples, timeout_s=100, preload=ranks.TORCH_DDP)
    assert list(found.values()) == [[]] * 3


def without_weight(rank: int, world_size: int) -> dict[str, bool]:
    """A rank without samples has NaN, in parameters that it did not train."""
    import pycomm

    found = {}
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("LocalSGD", 1, {}),
        ("DiLoCo", 1, {}),
        ("StreamingDiLoCo", 1, {"wire_dtype": "int8"}),
        ("StreamingDiLoCo", 2, {"fragment_sync_delay": 1}),
        ("SparseLoCo", 1, {"top_k": 16}),
    ]
    for method, every, options in cases:
        net = nn.Linear(100, 100)
        local = getattr(pycomm, method)(net, sync_every=every, weight="samples", **options)
        with torch.no_grad():
            for each in net.parameters():
                each += math.nan if rank == 1 else 1.0
        for _ in range(every):
            local.step(0 if rank == 1 else 3)
        local.step(2)  # and nothing of it is left for the next round
        found[f"{method} {every}"] = all(bool(each.isfinite().all()) for each in net.parameters())
    return found


def idle_at_launch(rank: int, world_size: int) -> float:
    """Rank 1 trains in flight alone, and drops it at the landing; how far the next sync is off."""
    import pycomm

    net = make_net()
    local = pycomm.StreamingDiLoCo(
        net, sync_every=4, fragment_sync_delay=1, weight="samples", outer_optimizer=plain
    )
    for step in range(4):
        move(nn.Sequential(net), rank, step)
        local.step(0.0 if rank == 1 else 1.0)
    local.step(100.0 if rank == 1 else 0.0)
    move(nn.Sequential(net), rank, 5)
    ends = all_ranks(flat(net))
    local.step(float(rank != 1))
    local.sync()
    return float((flat(net) - mean_of(ends, [1.0, 0.0, 1.0])).abs().max())


def test_samples_of_steps_that_a_landing_drops_do_not_count() -> None:
    found = ranks.run_ranks(3, idle_at_launch, timeout_s=60, preload=ranks.TORCH_DDP)
    assert max(found.values()) < 1e-12


def test_a_rank_without_samples_counts_nothing_not_even_its_nan() -> None:
    found = ranks.run_ranks(3, without_weight, timeout_s=100, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert len(results) == 5 and all(results.values()), results


# After an error


def failing_once(owner: Any, name: str, *, runs: bool = False) -> None:
    """The next call raises, on all ranks alike; those after it are as before."""
    original = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        if runs:
            original(*args, **kwargs)
        raise ArithmeticError("of the test's own")

    setattr(owner, name, failing)


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def mean_of(ends: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    return sum(w * each for w, each in zip(weights, ends, strict=True)) / sum(weights)


AFTER = (2.0, 5.0, 4.0)
"""Samples of each rank in the step after the error."""


def after_an_error(rank: int, world_size: int) -> dict[str, float]:
    """A sync fails before or after it has averaged; how far the next one is off."""
    import torch.distributed as dist

    import pycomm
    from pycomm.fewer_syncs import local_sgd, streaming_diloco

    found = {}
    for method, where in (
        *(("LocalSGD", where) for where in ("average_", "buffers", "no buffers")),
        *(("DiLoCo", where) for where in ("average_", "buffers")),
        *(("StreamingDiLoCo", where) for where in ("launch", "wait")),
    ):
        options = {} if method == "LocalSGD" else {"outer_optimizer": plain}
        net = nn.Sequential(make_net(), nn.BatchNorm1d(2).double())
        net[1].requires_grad_(False)
        local = getattr(pycomm, method)(net, sync_every=2, weight="samples", **options)
        owner, name = {
            "average_": (local_sgd, "average_"),
            "buffers": (dist, "_broadcast_coalesced"),
            "no buffers": (local_sgd, "sent_buffers"),
            "launch": (streaming_diloco.Flight, "launch"),
            "wait": (streaming_diloco.Flight, "_wait_for_sums"),
        }[where]
        move(net, rank, 1)
        local.step(1000.0 * (rank + 1))
        failing_once(owner, name, runs=where == "wait")  # its operations use memory
        move(net, rank, 2)
        with pytest.raises(ArithmeticError):
            local.step(1.0)
        averaged = "buffers" in where
        began = flat(net)
        move(net, rank, 3)
        ends = all_ranks(flat(net))
        weights = [AFTER[r] + (0 if averaged else 1000.0 * (r + 1) + 1) for r in range(world_size)]
        local.step(AFTER[rank])
        local.sync()
        right = mean_of(ends, weights)
        found[f"{method}, {where}"] = float((flat(net) - right).abs().max())
        if averaged:
            assert all(torch.equal(began, each) for each in all_ranks(began))
    return found


def plain(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=1.0)


def move(net: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    with torch.no_grad():
        for each in net[0].parameters():
            each += torch.randn(each.shape, generator=generator, dtype=each.dtype)


def test_after_an_error_the_next_sync_is_right() -> None:
    found = ranks.run_ranks(3, after_an_error, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert len(results) == 7
        assert {name: off for name, off in results.items() if not off < 1e-12} == {}


def wrapper_after_an_error(rank: int, world_size: int) -> float:
    import torch.distributed as dist

    import pycomm.ddp.wrapper
    from pycomm.ddp import between_steps

    pycomm.ddp.wrapper.host_group = lambda group: dist.new_group(
        [dist.get_rank()], use_local_synchronization=True
    )
    net = make_net()
    model = pycomm.DistributedDataParallel(net, weight="samples", sync_every=2)
    for _ in range(2):
        model.samples = 1000.0 * (rank + 1)
        model(torch.ones(3, 9, dtype=torch.float64)).square().mean().backward()
    with torch.no_grad():
        for each in net.parameters():
            each += rank
    right = mean_of(all_ranks(flat(net)), [1.0, 2.0, 3.0])
    failing_once(between_steps, "average_")
    with pytest.raises(ArithmeticError):
        model.sync()
    model.sync()
    return float((flat(net) - right).abs().max())


def test_after_an_error_the_wrappers_next_sync_is_right() -> None:
    found = ranks.run_ranks(3, wrapper_after_an_error, timeout_s=60, preload=ranks.TORCH_DDP)
    assert max(found.values()) < 1e-12


class FailsOnce(torch.optim.SGD):
    """An outer step that ends with an error on rank 0, once it has changed something."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        if FailsOnce.fails:
            FailsOnce.fails = False
            raise ArithmeticError("of the test's own")
        return found


def interrupted(rank: int, world_size: int) -> str:
    import pycomm
    from pycomm import errors

    net = make_net()
    local = pycomm.DiLoCo(
        net, sync_every=1, weight="samples", outer_optimizer=lambda each: FailsOnce(each, lr=0.5)
    )
    saved = copy.deepcopy([net.state_dict(), local.state_dict()])
    move(nn.Sequential(net), rank, 1)
    FailsOnce.fails = rank == 0
    try:
        local.step(1.0)
    except ArithmeticError:
        assert rank == 0
    move(nn.Sequential(net), rank, 2)
    text = ""
    try:
        local.step(1.0)
    except errors.CollectiveMismatchError as error:
        text = str(error)
    net.load_state_dict(saved[0])
    local.load_state_dict(saved[1])
    local.step(1.0)
    assert all(torch.equal(flat(net), each) for each in all_ranks(flat(net)))
    return text


def test_an_outer_step_that_failed_on_one_rank_is_named_by_the_next_sync() -> None:
    found = ranks.run_ranks(2, interrupted, timeout_s=60, preload=ranks.TORCH_DDP)
    for text in found.values():
        assert "The outer step of rank 0 ended with an error" in text


def saved_without(rank: int, world_size: int) -> dict[str, str]:
    """A state without samples, into one that counts by them; and back, which is none's loss."""
    import pycomm

    found = {}
    for method in ("LocalSGD", "DiLoCo", "StreamingDiLoCo", "SparseLoCo"):
        plain_one, weighed = (
            getattr(pycomm, method)(make_net().float(), sync_every=4, weight=weight)
            for weight in (None, "samples")
        )
        plain_one.step()
        weighed.step(3.0)
        before = copy.deepcopy(weighed.state_dict())
        try:
            weighed.load_state_dict(plain_one.state_dict())
        except ValueError as error:
            found[method] = str(error)
        assert str(weighed.state_dict()) == str(before)
        plain_one.load_state_dict(before)
        plain_one.load_state_dict(plain_one.state_dict())
    return found


def test_a_state_saved_without_samples_is_refused_by_name() -> None:
    found = ranks.run_ranks(2, saved_without, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert list(results) == ["LocalSGD", "DiLoCo", "StreamingDiLoCo", "SparseLoCo"]
        for method, text in results.items():
            key = "samples_of" if method == "StreamingDiLoCo" else "samples"
            assert text.startswith(f"the state has no {key!r}: it was saved without weight=")


def unfrozen(rank: int, world_size: int) -> dict[str, Any]:
    """A step that is refused counts nothing."""
    import pycomm
    from pycomm import errors

    found = {}
    for method in ("DiLoCo", "StreamingDiLoCo"):
        net = make_net()
        net[2].requires_grad_(False)
        local = getattr(pycomm, method)(net, sync_every=4, weight="samples")
        net[2].requires_grad_(True)
        with pytest.raises(errors.UnsupportedError, match="is trained now and was frozen"):
            local.step(7.0)
        net[2].requires_grad_(False)
        local.step(2.0)
        state = local.state_dict()
        found[method] = state.get("samples_of", [state["samples"]])
    return found


def test_a_step_that_is_refused_counts_nothing() -> None:
    found = ranks.run_ranks(2, unfrozen, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert results == {"DiLoCo": [2.0], "StreamingDiLoCo": [2.0]}


def landing(rank: int, world_size: int) -> dict[int, list[float]]:
    """Ctrl-C in each line of a landing's wait: what each launch counts."""
    import sys

    import pycomm
    from pycomm.fewer_syncs.streaming_diloco import Flight

    launch, code = Flight.launch, pycomm.StreamingDiLoCo._wait.__code__
    found: dict[int, list[float]] = {}
    for at in sorted({line for _, _, line in code.co_lines() if line is not None}):
        weights = found[at] = []

        def recorded(*args: Any, weights: Any = weights) -> int:
            weights.append(args[-1])
            return launch(*args)

        def trace(frame: Any, event: str, arg: Any, at: int = at, left: Any = [1]) -> Any:  # noqa: B006
            if frame.f_code is not code:
                return trace
            if event == "line" and frame.f_lineno == at and left[0]:
                left[0] = 0
                raise KeyboardInterrupt
            return trace

        Flight.launch = recorded  # type: ignore[method-assign]
        net = make_net()
        local = pycomm.StreamingDiLoCo(
            net, sync_every=2, fragment_sync_delay=1, weight="samples", outer_optimizer=plain
        )
        for step in range(2):
            move(nn.Sequential(net), rank, step)
            local.step(4.0)
        sys.settrace(trace)
        try:
            local.step(16.0)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        local.step(32.0)  # lands what is in flight, and launches again
        local.sync()
    return found


def test_ctrl_c_in_a_landing_counts_samples_once() -> None:
    found = ranks.run_ranks(2, landing, timeout_s=60, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert len(results) > 4
        assert all(weights == [8.0, 48.0] for weights in results.values()), results


def refusals(rank: int, world_size: int) -> dict[str, str]:
    import pycomm

    found: dict[str, str] = {}

    def tried(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    for method in ("LocalSGD", "StreamingDiLoCo"):
        kind = getattr(pycomm, method)
        plain = kind(nn.Linear(2, 2), sync_every=2)
        weighed = kind(nn.Linear(2, 2), sync_every=2, weight="samples")
        tried(f"{method} not weighed", lambda plain=plain: plain.step(3))
        tried(f"{method} missing", weighed.step)
        tried(f"{method} bad", lambda weighed=weighed: weighed.step(-1))
        found[f"{method} counted"] = str(weighed.stats().steps)
    tried("weight", lambda: pycomm.DiLoCo(nn.Linear(2, 2), sync_every=2, weight="tokens"))
    tried(
        "fp16",
        lambda: pycomm.StreamingDiLoCo(
            nn.Linear(2, 2), sync_every=2, weight="samples", wire_dtype="fp16"
        ),
    )
    weight = "samples" if rank == 0 else None
    tried("differs", lambda: pycomm.DiLoCo(nn.Linear(2, 2), sync_every=2, weight=weight))
    return found


def test_what_cannot_be_is_refused_by_name() -> None:
    found, other = ranks.run_ranks(2, refusals, timeout_s=60, preload=ranks.TORCH_DDP).values()
    assert found == other
    for method in ("LocalSGD", "StreamingDiLoCo"):
        assert f'needs {method}(…, weight="samples")' in found[f"{method} not weighed"]
        assert "step(samples=len(batch))" in found[f"{method} missing"]
        text = "ValueError: samples=-1 is neither 0 nor a number from 1e-20 to 1e+20"
        assert found[f"{method} bad"] == text
        assert found[f"{method} counted"] == "0"
    assert found["weight"].startswith("ValueError: weight='tokens'")
    assert 'wire_dtype="fp16" does not go with' in found["fp16"]
    assert "weight" in found["differs"] and "samples" in found["differs"]

"""StreamingDiLoCo beside DiLoCo, beside its equations in float64, and when things go wrong."""

from __future__ import annotations

import copy
import io
import itertools
import re
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import ddp_models
import numpy as np
import pytest
import ranks
import rings
import torch
import torch.distributed as dist
from codec_bounds import BYTES_PER_BLOCK, sum_bound
from documents import read
from ranks import describe_exception, mark, run_ranks, start_ranks
from time_bound import assert_within
from torch import nn
from torch.overrides import TorchFunctionMode

DOCUMENT = "docs/fewer-syncs.md"

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]


def make_model(name: str) -> nn.Module:
    """Also "buckets in double": large enough to be encoded."""
    model = ddp_models.make(name.partition(" ")[0])
    return model.double() if name.endswith("double") else model


def loss_of(model: nn.Module, rank: int, step: int, name: str = "mlp") -> torch.Tensor:
    batch = ddp_models.batch_of(name.partition(" ")[0], rank, step)
    if name.endswith("double"):
        batch = batch.double()
    loss: torch.Tensor = model(batch).float().square().mean()
    return loss


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, name: str = "mlp"
) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step, name).backward()
    optimizer.step()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def assert_equal(first: Any, second: Any) -> None:
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


def assert_equal_on_all_ranks(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        gathered = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(gathered, parameter.detach().contiguous())
        assert all(torch.equal(gathered[0], other) for other in gathered)


# Beside DiLoCo


def beside_diloco(rank: int, world_size: int, name: str, options: dict[str, Any]) -> bool:
    import pycomm

    kinds = (pycomm.DiLoCo, pycomm.StreamingDiLoCo)
    trained = []
    for kind in kinds:
        model = ddp_models.make(name)
        optimizer = inner(model)
        local = kind(model, sync_every=3, **(options if kind is kinds[1] else {}))
        seen = []
        for step in range(8):
            train_step(model, optimizer, rank, step, name)
            assert local.step() == (step % 3 == 2)
            seen += [parameter.detach().clone() for parameter in model.parameters()]
        local.sync()  # in the middle of a round
        assert local.step() is False
        stats = local.stats()
        assert (stats.steps, stats.syncs) == (9, 3)
        trained.append((seen, stats.sent_nbytes, list(model.parameters()), local.state_dict()))
    (first, sent, last, state), (second, other_sent, other_last, other_state) = trained
    assert sent == other_sent
    same = all(torch.equal(a, b) for a, b in zip(first + last, second + other_last, strict=True))
    for key, anchor in state["anchor"].items():
        same = same and torch.equal(anchor, other_state["anchor"][key])
    return same


@pytest.mark.parametrize(
    ("name", "world_size"),
    rings.ends(
        [
            ("buckets", 3),
            ("mixed", 2),
            ("strided", 2),
            ("tied", 2),
            ("frozen", 2),
            ("double", 2),
            ("complex", 2),
        ]
    ),
)
@pytest.mark.ci
def test_one_fragment_without_delay_is_diloco_bit_by_bit(name: str, world_size: int) -> None:
    # Of three ranks the ring adds each value up in an order that its place in the buffer decides.
    found = run_ranks(world_size, beside_diloco, args=(name, {}), preload=ranks.TORCH_DDP)
    assert found.values() == [True] * world_size


def test_the_comparison_sees_another_outer_optimizer() -> None:
    found = run_ranks(2, beside_other_momentum, preload=ranks.TORCH_DDP)
    assert found.values() == [False, False]


def slower(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9 - 1e-7, nesterov=True)


def beside_other_momentum(rank: int, world_size: int) -> bool:
    return beside_diloco(rank, world_size, "mlp", {"outer_optimizer": slower})


# Beside the equations


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def fragments_of(names: list[str], count: int) -> list[list[int]]:
    """The mlp's: its Sequential has two layers with parameters; the rest goes to the lighter."""
    if "scale" not in names:
        assert count == 1
        return [list(range(len(names)))]
    layers = [f"layers.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    assert names == ["scale", "nothing", *layers]
    return {1: [[0, 1, 2, 3, 4, 5]], 2: [[2, 3], [0, 1, 4, 5]]}[count]


class Simulated:
    """All workers in one process, in float64, as docs/fewer-syncs.md has the equations."""

    def __init__(
        self,
        world_size: int,
        fragments: int,
        delay: int,
        alpha: float,
        every: int,
        name: str = "mlp",
    ) -> None:
        self.name = name
        self.workers = [make_model(name) for _ in range(world_size)]
        self.optimizers = [inner(worker) for worker in self.workers]
        named = self.workers[0].named_parameters()
        names = [each for each, parameter in named if parameter.requires_grad]
        self.fragments = fragments_of(names, fragments)
        self.anchor = [wide(each) for each in trained(self.workers[0])]
        self.velocity = [torch.zeros_like(each) for each in self.anchor]
        self.every, self.delay, self.alpha = every, delay, alpha
        self.flying: tuple[int, int, list[list[torch.Tensor]]] | None = None
        self.count = 0

    def values(self, index: int) -> list[torch.Tensor]:
        return [wide(trained(worker)[index]) for worker in self.workers]

    def step(self, number: int) -> int | None:
        """The fragment that has landed."""
        for rank, (worker, optimizer) in enumerate(zip(self.workers, self.optimizers, strict=True)):
            train_step(worker, optimizer, rank, number, self.name)
        self.count += 1
        stride = self.every // len(self.fragments)
        if self.count % stride == 0:
            which = (self.count // stride - 1) % len(self.fragments)
            self.flying = (which, self.delay, [self.values(i) for i in self.fragments[which]])
        if self.flying is None:
            return None
        which, left, starts = self.flying
        if left:
            self.flying = (which, left - 1, starts)
            return None
        self.flying = None
        self.land(which, starts, self.alpha)
        return which

    def land(self, which: int, starts: list[list[torch.Tensor]], alpha: float) -> None:
        for index, start in zip(self.fragments[which], starts, strict=True):
            moved = torch.stack([self.anchor[index] - each for each in start]).mean(0)
            self.velocity[index] = 0.9 * self.velocity[index] + moved
            self.anchor[index] = self.anchor[index] - 0.7 * (moved + 0.9 * self.velocity[index])
            for worker, now in zip(self.workers, self.values(index), strict=True):
                new = alpha * now + (1 - alpha) * self.anchor[index]
                trained(worker)[index].data.copy_(new)

    def sync(self) -> int:
        """How many fragments it has sent: not those that were not trained since they were sent."""
        sent = 0
        fresh = None
        if self.flying is not None:
            which, left, starts = self.flying
            fresh = which if left == self.delay - 1 else None  # launched in the last step
            self.land(which, starts, 0.0 if which == fresh else self.alpha)
        for which, indices in enumerate(self.fragments):
            if which == fresh or self.is_at_anchor(indices):
                continue
            self.land(which, [self.values(index) for index in indices], 0.0)
            sent += 1
        return sent

    def is_at_anchor(self, indices: list[int]) -> bool:
        """As the last landing left it, in the dtype of the parameters."""
        dtypes = [parameter.dtype for parameter in trained(self.workers[0])]
        return all(
            torch.equal(value.to(dtypes[index]), self.anchor[index].to(dtypes[index]))
            for index in indices
            for value in self.values(index)
        )


def equations(
    rank: int, world_size: int, fragments: int, delay: int, alpha: float | None, steps: int
) -> list[int]:
    import pycomm

    default = 0.5 if delay else 0.0
    expected = Simulated(world_size, fragments, delay, default if alpha is None else alpha, 6)
    torch.manual_seed(rank)
    model = ddp_models.make("mlp") if rank == 0 else ddp_models.make("mlp", seed=7)
    optimizer = inner(model)
    options = {"fragments": fragments, "fragment_sync_delay": delay, "sync_every": 6}
    local = pycomm.StreamingDiLoCo(model, fragment_update_alpha=alpha, **options)
    landed = []
    for step in range(steps):
        which = expected.step(step)
        train_step(model, optimizer, rank, step)
        assert local.step() == (which is not None)
        if which is not None:
            landed.append(step)
        for mine, worker in zip(
            model.parameters(), expected.workers[rank].parameters(), strict=True
        ):
            torch.testing.assert_close(mine, worker, rtol=1e-4, atol=1e-5)
    sent = expected.sync()
    local.sync()
    for mine, anchor in zip(model.parameters(), expected.anchor, strict=True):
        torch.testing.assert_close(mine.detach().double(), anchor, rtol=1e-4, atol=1e-5)
    assert_equal_on_all_ranks(model, world_size)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    stats = local.stats()
    launches = steps // 6 * fragments + (steps % 6) * fragments // 6
    assert stats.syncs == launches + sent
    assert stats.steps * nbytes == stats.sent_nbytes + stats.saved_nbytes  # 2 ranks: factor 1
    return landed


@pytest.mark.parametrize(
    ("fragments", "delay", "alpha", "steps", "landed"),
    rings.first_of(
        [
            (2, 1, None, 14, [3, 6, 9, 12]),
            (2, 2, 0.25, 14, [4, 7, 10, 13]),
            (2, 0, None, 14, [2, 5, 8, 11]),
            (2, 0, 0.25, 14, [2, 5, 8, 11]),
            (2, 2, 0.0, 14, [4, 7, 10, 13]),  # sync() comes right after a landing
            (2, 2, 0.0, 13, [4, 7, 10]),  # a step before it, which drops what was trained
            (2, 2, 0.25, 12, [4, 7, 10]),  # and here right after a launch
            (2, 0, None, 12, [2, 5, 8, 11]),
            (1, 5, None, 14, [10]),
        ],
        2,
    ),
)
@pytest.mark.ci
def test_the_equations(
    fragments: int, delay: int, alpha: float | None, steps: int, landed: list[int]
) -> None:
    arguments = (fragments, delay, alpha, steps)
    found = run_ranks(2, equations, args=arguments, preload=ranks.TORCH_DDP).values()
    assert found == [landed, landed]


def other_models(
    rank: int, world_size: int, name: str, alpha: float | None, wire: str | None, close: float
) -> None:
    import pycomm

    expected = Simulated(world_size, 1, 1, 0.5 if alpha is None else alpha, 3, name)
    model = make_model(name)
    optimizer = inner(model)
    local = pycomm.StreamingDiLoCo(
        model,
        sync_every=3,
        fragment_sync_delay=1,
        fragment_update_alpha=alpha,
        wire_dtype=wire,
    )
    frozen = [each.detach().clone() for each in model.parameters() if not each.requires_grad]
    for step in range(8):
        which = expected.step(step)
        train_step(model, optimizer, rank, step, name)
        assert local.step() == (which is not None)
    expected.sync()
    local.sync()
    for mine, anchor in zip(trained(model), expected.anchor, strict=True):
        torch.testing.assert_close(wide(mine), anchor, rtol=close, atol=close)
    assert_equal([each for each in model.parameters() if not each.requires_grad], frozen)
    assert_equal_on_all_ranks(model, world_size)


@pytest.mark.parametrize(
    ("name", "alpha", "wire", "close"),
    rings.ends(
        [
            ("mixed", 0.25, None, 1e-2),  # bfloat16 has 8 bits
            ("mixed", None, "fp16", 1e-2),
            ("tied", 0.25, None, 1e-4),
            ("frozen", 0.0, None, 1e-4),
            ("complex", 0.25, None, 1e-4),
            ("double", None, None, 1e-9),
            ("buckets in double", 0.25, "fp16", 2e-3),
        ]
    ),
)
@pytest.mark.ci
def test_the_equations_of_other_models(
    name: str, alpha: float | None, wire: str | None, close: float
) -> None:
    run_ranks(2, other_models, args=(name, alpha, wire, close), preload=ranks.TORCH_DDP)


def plain(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=1.0)


def int8_fragments(rank: int, world_size: int) -> None:
    """With a plain outer step of 1 the new anchor is the old one less the mean of what moved."""
    import pycomm

    model = ddp_models.make("buckets")
    optimizer = inner(model)
    local = pycomm.StreamingDiLoCo(
        model,
        sync_every=8,
        fragments=4,
        fragment_sync_delay=1,
        wire_dtype="int8",
        outer_optimizer=plain,
    )
    assert local.fragments == [[f"layers.{n}.weight", f"layers.{n}.bias"] for n in range(4)]
    parameters = dict(model.named_parameters())
    saved: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for step in range(8):
        train_step(model, optimizer, rank, step, "buckets")
        if step % 2 == 1:  # launches
            before = local.state_dict()["anchor"]
            for name in local.fragments[step // 2]:
                moved = [torch.empty_like(before[name]) for _ in range(world_size)]
                dist.all_gather(moved, before[name] - parameters[name].detach())
                saved[name] = (before[name], moved)
        landed = local.step()
        assert landed == (step % 2 == 0 and step > 0)
        if landed:
            names = local.fragments[step // 2 - 1]
            anchor = local.state_dict()["anchor"]
            rows = torch.stack(
                [torch.cat([saved[n][1][r].flatten() for n in names]) for r in range(world_size)]
            )
            old = torch.cat([saved[name][0].flatten() for name in names]).double().numpy()
            new = torch.cat([anchor[name].flatten() for name in names]).double().numpy()
            values = rows.double().numpy()
            error = np.abs(old - values.mean(0) - new)
            encoded = values.shape[1] * 4 >= 16 << 10
            allowed = sum_bound("int8", values, world_size) if encoded else 0.0
            assert np.all(error <= allowed + 1e-6 * (np.abs(old) + np.abs(values).max()))
            if encoded:
                assert error.max() > 1e-5 * np.abs(values).max(), "nothing was rounded"
    local.sync()
    assert_equal_on_all_ranks(model, world_size)
    sizes = [sum(parameters[name].numel() for name in part) for part in local.fragments]
    block = BYTES_PER_BLOCK["int8"]
    once = [-(-n // 256) * block - (-n % 256) if n * 4 >= 16 << 10 else 4 * n for n in sizes]
    stats, wire = local.stats(), pycomm.codec_stats()
    # Three fragments have landed when sync() is called. In it the fourth lands, which was launched
    # in the last step, and the others are sent again.
    assert stats.syncs == 7
    assert stats.sent_nbytes == 2 * (world_size - 1) * (2 * sum(once) - once[3]) // world_size
    # The codec also counts a rank's own part of what it contributes, and what it passes on.
    assert 0.9 < wire.bytes_sent / stats.sent_nbytes < 1.1, (wire, stats)


def test_int8_is_within_the_codecs_bound_and_equal_on_all_ranks() -> None:
    run_ranks(3, int8_fragments, preload=ranks.TORCH_DDP)


# Checkpoints


def saved_and_loaded(state: Any) -> Any:
    """Through a file, as a checkpoint that may come from anywhere is read."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume(rank: int, world_size: int, options: dict[str, Any], save_after: int) -> bool:
    """Whether a fragment was in flight where the run was cut."""
    import pycomm

    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = ddp_models.make("buckets", seed=seed)
        return model, inner(model), pycomm.StreamingDiLoCo(model, sync_every=8, **options)

    whole = start(0)
    cut = start(0)
    flying = False
    for step in range(14):
        for model, optimizer, local in (whole, cut):
            train_step(model, optimizer, rank, step, "buckets")
            local.step()
        if step == save_after:
            states = saved_and_loaded([each.state_dict() for each in cut])
            flying = states[2]["flight"] is not None
            again = [copy.deepcopy(state) for state in states]
            cut = start(5)
            for each, state in zip(cut, states, strict=True):
                each.load_state_dict(state)
            now = cut[2].state_dict()
            assert_equal(now["anchor"].values(), again[2]["anchor"].values())
            assert now["flight"] is None or now["flight"]["left"] == again[2]["flight"]["left"]
        assert_equal(cut[0].parameters(), whole[0].parameters())
    for _, _, local in (whole, cut):
        local.sync()
    assert_equal(cut[0].parameters(), whole[0].parameters())
    assert_equal_on_all_ranks(cut[0], world_size)
    first, second = whole[2].state_dict(), cut[2].state_dict()
    assert_equal(first["anchor"].values(), second["anchor"].values())
    assert first["versions"] == second["versions"]
    for one, other in zip(first["outer"], second["outer"], strict=True):
        momenta = [[each["momentum_buffer"] for each in o["state"].values()] for o in (one, other)]
        assert_equal(*momenta)
    return flying


def resume_everywhere(rank: int, world_size: int, alpha: float | None) -> list[bool]:
    options = {"fragments": 2, "fragment_sync_delay": 3, "wire_dtype": "int8"}
    options["fragment_update_alpha"] = alpha
    return [resume(rank, world_size, options, save_after) for save_after in (3, 5, 6, 7)]


@pytest.mark.parametrize("alpha", rings.first_of([None, 0.0]), ids=str)
@pytest.mark.ci
def test_a_run_cut_with_a_fragment_in_flight_continues_bit_by_bit(alpha: float | None) -> None:
    found = run_ranks(2, resume_everywhere, args=(alpha,), preload=ranks.TORCH_DDP).values()
    assert found == [[True, True, False, True]] * 2


def refused_states(rank: int, world_size: int) -> list[str]:
    import pycomm

    def make(**options: Any) -> Any:
        given = {"sync_every": 8, "fragments": 2, "fragment_sync_delay": 3} | options
        return pycomm.StreamingDiLoCo(ddp_models.make("buckets"), **given)

    local = make()
    for _ in range(5):
        local.step()
    state = local.state_dict()
    flight = {"fragment": 0, "left": 2, "weight": 0.0, "to_land": local.fragments[0]}
    assert state["flight"] == flight
    name = "layers.2.weight"
    anchor = state["anchor"]
    no_anchor = {key: value for key, value in state.items() if key != "anchor"}
    one_group = [state["outer"][0], {"state": {}, "param_groups": []}]
    cases: list[tuple[Any, dict[str, Any]]] = [
        (make(fragments=4, fragment_sync_delay=1), state),
        (make(fragments=1), state),
        (make(sync_every=4, fragment_sync_delay=1), state),
        (make(fragment_sync_delay=1), state),
        (make(fragment_update_alpha=0.25), state),
        (make(wire_dtype="int8"), state),
        (pycomm.StreamingDiLoCo(ddp_models.make("mlp"), sync_every=8, fragments=2), state),
        (make(), {**state, "anchor": {**anchor, name: anchor[name][:1]}}),
        (make(), {**state, "anchor": {**anchor, name: anchor[name].double()}}),
        (make(), {**state, "outer": one_group}),
        (make(), {**state, "since_sync": 8}),
        (make(), {**state, "flight": {**flight, "left": 4}}),
        (make(), {**state, "flight": {**flight, "fragment": 2, "left": 1}}),
        (make(), {**state, "flight": {"fragment": 0, "left": 2}}),
        (make(), {**state, "flight": {**flight, "to_land": local.fragments[1]}}),
        (make(), no_anchor),
    ]
    texts = []
    for loader, given in cases:
        loader.step()
        before = loader.state_dict()
        with pytest.raises(ValueError) as caught:
            loader.load_state_dict(given)
        texts.append(str(caught.value))
        after = loader.state_dict()
        assert_equal(before["anchor"].values(), after["anchor"].values())
        for key in ("since_sync", "versions", "flight", "options", "outer"):
            assert before[key] == after[key]
    return texts


REFUSED = [
    "parameter 'layers.2.bias' is in fragment 0 of only one of the two",
    "parameter 'layers.1.bias' is in fragment 0 of only one of the two",
    "saved with sync_every=8, and this was made with sync_every=4",
    "saved with fragment_sync_delay=3, and this was made with fragment_sync_delay=1",
    "saved with fragment_update_alpha=0.5, and this was made with fragment_update_alpha=0.25",
    "saved with wire_dtype=None, and this was made with wire_dtype='int8'",
    "the state is that of another model or other fragments",
    "anchor of parameter 'layers.2.weight' has shape (1, 600) and dtype torch.float32, and "
    "(600, 600)",
    "anchor of parameter 'layers.2.weight' has shape (600, 600) and dtype torch.float64, and",
    "outer optimizer has groups of [] tensors, and this one of [4]",
    "the state is at step 8 of a round of 8",
    "has fragment 0 in flight, which lands in 4 steps; there are 2 fragments, and",
    "has fragment 2 in flight, which lands in 1 step; there are 2 fragments, and",
    "the state has no 'weight'",
    "is to land parameter 'layers.1.bias', which is not in fragment 0",
    "the state has no 'anchor'",
]


def test_the_state_of_another_run_is_refused() -> None:
    found = run_ranks(1, refused_states, preload=ranks.TORCH_DDP).values()[0]
    for text, part in zip(found, REFUSED, strict=True):
        assert part in text


# Steps during a sync


def launched_alone(rank: int, world_size: int) -> list[bool]:
    """Rank 1 launches only when rank 0 has gone three steps beyond its launch."""
    import pycomm

    store = dist.distributed_c10d._get_default_store()
    model = ddp_models.make("buckets")
    optimizer = inner(model)
    local = pycomm.StreamingDiLoCo(
        model, sync_every=8, fragments=2, fragment_sync_delay=3, wire_dtype="int8"
    )
    landed = []
    for step in range(8):
        train_step(model, optimizer, rank, step, "buckets")
        if rank == 1 and step == 3:
            store.wait(["rank 0 is ahead"], timedelta(seconds=60))
        landed.append(local.step())
        if rank == 0 and step == 5:
            store.set("rank 0 is ahead", "1")
    local.sync()
    assert_equal_on_all_ranks(model, world_size)
    return landed


def test_a_launch_does_not_wait_for_other_ranks() -> None:
    found = run_ranks(2, launched_alone, preload=ranks.TORCH_DDP).values()
    assert found == [[step == 6 for step in range(8)]] * 2


def left_in_flight(rank: int, world_size: int) -> None:
    """Rank 0 ends with a fragment in flight that rank 1 never launches."""
    import pycomm

    model = ddp_models.make("buckets")
    local = pycomm.StreamingDiLoCo(model, sync_every=4, fragment_sync_delay=3)
    if rank == 1:
        mark("ready")
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=100))
    for _ in range(4):
        local.step()
    mark("launched")
    raise SystemExit(3)


@pytest.mark.time_bound
def test_a_program_that_ends_does_not_wait_for_its_fragment() -> None:
    with start_ranks(2, left_in_flight, destroy=False, preload=ranks.TORCH_DDP) as running:
        running.wait_for_mark(1, "ready")
        running.wait_for_mark(0, "launched")
        launched_s = time.monotonic()
        running.processes[0].wait(60)
        took_s = time.monotonic() - launched_s
    assert running.processes[0].poll() == 3
    assert_within(took_s, 20, "rank 1 would be waited for")


def ends_in_a_step(rank: int, world_size: int) -> None:
    """The program ends while the thread is in the middle of torch, in an outer step."""
    import pycomm

    begun = threading.Event()

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            begun.set()
            left = torch.ones(1500, 1500)
            for _ in range(40):
                torch.mm(left, left)
            mark("stepped")

    local = pycomm.StreamingDiLoCo(
        ddp_models.make("mlp"),
        sync_every=4,
        fragment_sync_delay=3,
        outer_optimizer=lambda tensors: Slow(tensors, lr=1.0),
    )
    for _ in range(4):
        local.step()
    assert begun.wait(60)
    raise SystemExit(3)


@pytest.mark.ci
def test_a_program_may_end_in_the_middle_of_an_outer_step() -> None:
    with start_ranks(1, ends_in_a_step, destroy=False, preload=ranks.TORCH_DDP) as running:
        running.wait_for_mark(0, "stepped")
        running.processes[0].wait(60)
    assert running.processes[0].poll() == 3


# Where ranks stop at different steps


def uneven(
    rank: int, world_size: int, kind: str, steps: list[int], **options: Any
) -> list[torch.Tensor]:
    """Rank ``r`` has ``steps[r]`` batches; each kind syncs every three steps."""
    import pycomm

    model = ddp_models.make("mlp")
    optimizer = inner(model)
    local = getattr(pycomm, kind)(model, sync_every=3, **options)
    for step in range(steps[rank]):
        train_step(model, optimizer, rank, step)
        local.step()
    local.sync()
    assert_equal_on_all_ranks(model, world_size)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("steps", rings.first_of([[5, 4], [3, 4]]), ids=str)
@pytest.mark.ci
def test_ranks_that_had_more_batches_sync_at_the_end(steps: list[int]) -> None:
    found = {}
    for kind in ("DiLoCo", "StreamingDiLoCo", "SparseLoCo"):
        found[kind] = run_ranks(2, uneven, args=(kind, steps), preload=ranks.TORCH_DDP).values()[0]
    assert_equal(found["DiLoCo"], found["StreamingDiLoCo"])
    # By hand: two outer steps of DiLoCo.
    workers = [ddp_models.make("mlp") for _ in range(2)]
    optimizers = [inner(worker) for worker in workers]
    anchor = [wide(each) for each in workers[0].parameters()]
    velocity = [torch.zeros_like(each) for each in anchor]
    for first, last in (([0, 0], [3, 3]), ([3, 3], steps)):
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            for step in range(first[rank], last[rank]):
                train_step(worker, optimizer, rank, step)
        for index, start in enumerate(anchor):
            ends = [wide(list(worker.parameters())[index]) for worker in workers]
            moved = torch.stack([start - end for end in ends]).mean(0)
            velocity[index] = 0.9 * velocity[index] + moved
            anchor[index] = start - 0.7 * (moved + 0.9 * velocity[index])
            for worker in workers:
                list(worker.parameters())[index].data.copy_(anchor[index])
    for mine, expected in zip(found["DiLoCo"], anchor, strict=True):
        torch.testing.assert_close(wide(mine), expected, rtol=1e-4, atol=1e-5)


def uneven_in_flight(rank: int, world_size: int, delay: int) -> list[int]:
    """Rank 0 has launched in its last step; rank 1 has trained since, and landed if it is time."""
    for alpha in (0.0, 0.25):
        options = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        uneven(rank, world_size, "StreamingDiLoCo", [3, 4], **options)
    return [delay]


@pytest.mark.parametrize("delay", [1, 2])
def test_ranks_of_which_one_has_just_launched_decide_alike(delay: int) -> None:
    found = run_ranks(2, uneven_in_flight, args=(delay,), preload=ranks.TORCH_DDP)
    assert found.values() == [[delay]] * 2


def again_and_again(rank: int, world_size: int) -> list[str]:
    """Whether it was evaluated more often must not change a training."""
    import pycomm

    changed = []
    for kind in ("DiLoCo", "StreamingDiLoCo", "SparseLoCo"):
        model = ddp_models.make("buckets")
        optimizer = inner(model)
        local = getattr(pycomm, kind)(model, sync_every=2)
        for step in range(4):
            train_step(model, optimizer, rank, step, "buckets")
            local.step()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        syncs = local.stats().syncs
        for _ in range(2):
            local.sync()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        if not same or local.stats().syncs != syncs:
            changed.append(kind)
        train_step(model, optimizer, rank, 4, "buckets")
        local.sync()  # and one that has something to do does it, also without step()
        assert local.stats().syncs == syncs + 1
        assert_equal_on_all_ranks(model, world_size)
    return changed


def test_a_second_sync_changes_nothing() -> None:
    assert run_ranks(2, again_and_again, preload=ranks.TORCH_DDP).values() == [[], []]


# Failures


def lose_rank_2(rank: int, world_size: int, path: str, launched: bool) -> dict[str, Any]:
    """Rank 2 dies with fragment 1 in flight; the others go on as two.

    If rank 2 has ``launched`` it, rank 1 does so only after the death, so that it cannot arrive.
    """
    import pycomm

    options = {"sync_every": 8, "fragments": 2, "fragment_sync_delay": 3}
    model = ddp_models.make("buckets")
    optimizer = inner(model)
    local = pycomm.StreamingDiLoCo(model, **options)
    for step in range(7):  # fragment 0 has landed
        train_step(model, optimizer, rank, step, "buckets")
        local.step()
    before = local.state_dict()
    assert before["versions"] == [1, 0] and before["flight"] is None
    if rank == (1 if launched else 2):
        signal.signal(signal.SIGUSR1, lambda *_: None)
        mark("before the launch")
        signal.pause()
    seen: dict[str, Any] = {"steps": -1}  # since the one that launches
    try:
        for step in range(7, 30):
            train_step(model, optimizer, rank, step, "buckets")
            trained = [parameter.detach().clone() for parameter in model.parameters()]
            seen["steps"] += 1
            local.step()
            if step == 7:
                mark("launched")
                if rank == 2:
                    signal.pause()
    except pycomm.errors.PycommError as error:
        seen["error"] = describe_exception(error)
        mark("noticed")
    # As if the fragment had never been launched; and what was trained meanwhile is there.
    assert_equal(model.parameters(), trained)
    after = local.state_dict()
    assert after["flight"] is None and after["versions"] == [1, 0]
    assert_equal(after["anchor"].values(), before["anchor"].values())
    for one, other in zip(after["outer"], before["outer"], strict=True):
        assert [*one["state"]] == [*other["state"]]
        for index, kept in one["state"].items():
            assert torch.equal(kept["momentum_buffer"], other["state"][index]["momentum_buffer"])
    with pytest.raises(pycomm.errors.PeerDeadError):
        local.sync()  # the group has failed for good

    def rejoin() -> None:
        dist.init_process_group("pycomm", init_method=f"file://{path}", rank=rank, world_size=2)

    (recipe,) = re.findall(r"^```python survivors\n(.*?)^```$", read(DOCUMENT), re.M | re.S)
    names = {"local": local, "model": model, "options": options, "rejoin": rejoin}
    names |= {"dist": dist, "pycomm": pycomm, "step": step + 5 * rank}  # not noticed at one step
    exec(compile(recipe, DOCUMENT, "exec"), names)
    local, step = names["local"], names["step"]
    assert gathered_numbers(step) == [step] * 2
    moved = [
        after["anchor"][name] - parameter.detach() for name, parameter in model.named_parameters()
    ]
    gathered = [torch.stack([torch.empty_like(each)] * 2) for each in moved]
    for mine, both in zip(moved, gathered, strict=True):
        dist.all_gather_into_tensor(both.view(-1), mine.contiguous().view(-1))
    local.sync()
    assert_equal_on_all_ranks(model, 2)
    # By hand: fragment 1 (layers 1 and 3) had no outer step before, so its velocity is the mean.
    names = [name for name, _ in model.named_parameters()]
    for name, both, parameter in zip(names, gathered, model.parameters(), strict=True):
        if name.split(".")[1] in ("1", "3"):
            mean = both.double().mean(0)
            expected = after["anchor"][name].double() - 0.7 * (mean + 0.9 * mean)
            torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)
    seen["versions"] = local.state_dict()["versions"]
    for index in range(step, step + 10):
        train_step(model, optimizer, rank, index, "buckets")
        local.step()
    local.sync()
    assert_equal_on_all_ranks(model, 2)
    return seen


def gathered_numbers(number: int) -> list[int]:
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([number]))
    return [int(each) for each in found]


@pytest.mark.faults
@pytest.mark.ci
@pytest.mark.time_bound
@pytest.mark.parametrize("launched", [False, True], ids=["before", "after"])
def test_a_rank_that_dies_with_a_fragment_in_flight(launched: bool, tmp_path: Any) -> None:
    """Killed before it launches the fragment itself, or after."""
    path = str(tmp_path / "again")
    late, others = (1, (0, 2)) if launched else (2, (0, 1))
    with start_ranks(3, lose_rank_2, args=(path, launched), preload=ranks.TORCH_DDP) as running:
        running.wait_for_mark(late, "before the launch")
        for rank in others:
            running.wait_for_mark(rank, "launched")
        killed_s = running.kill(2)
        if launched:
            running.wait_for_mark(0, "noticed")
            running.wait_until_asleep(1)
            running.kill(1, signal.SIGUSR1)
        results = running.collect(100)
    for rank in (0, 1):
        assert results[rank].ok, results.describe()
        seen = results[rank].value
        error = seen["error"]
        assert error.code == "PEER_DEAD" and error.record["peer"] == 2
        assert f"ank 2 on {socket.gethostname()}" in error.text
        # Due after three; noticed before, if training was slower. The late one may see it at once.
        assert (0 if rank == late else 1) <= seen["steps"] <= 3
        assert seen["versions"] == [2, 1]
    for rank in (0, 1):
        assert_within(results[rank].value["error"].monotonic_s - killed_s, 20, "from SIGKILL")


def at_different_places(rank: int, world_size: int, how: str) -> dict[str, Any]:
    import pycomm

    model = ddp_models.make("buckets")
    local = pycomm.StreamingDiLoCo(model, sync_every=4, fragments=2, fragment_sync_delay=1)
    if how == "step" and rank == 1:
        local.load_state_dict({**local.state_dict(), "since_sync": 2})  # fragment 1 is next
    if how == "version" and rank == 2:
        local.load_state_dict({**local.state_dict(), "versions": [1, 0]})
    before = local.state_dict()["anchor"]
    with pytest.raises(pycomm.errors.CollectiveMismatchError) as caught:
        for _ in range(3):
            with torch.no_grad():
                model.layers[0].weight += 1.0
            local.step()
    after = local.state_dict()
    assert_equal(before.values(), after["anchor"].values())
    return {"text": str(caught.value), "versions": after["versions"]}


def test_ranks_that_missed_an_outer_step_are_named_by_all() -> None:
    found = run_ranks(3, at_different_places, args=("version",), preload=ranks.TORCH_DDP).values()
    assert [each["versions"] for each in found] == [[0, 0], [0, 0], [1, 0]]
    for each in found:
        assert (
            "rank 0 sent fragment 0 at step 2 after 0 outer steps; rank 2 sent fragment 0 at step 2"
            " after 1 outer step. Nothing was changed" in each["text"]
        )
        assert "load checkpoints of one step" in each["text"]


def test_ranks_at_different_steps_get_no_wrong_sum() -> None:
    """Fragments of different sizes: pycomm itself sees that two operations differ."""
    found = run_ranks(3, at_different_places, args=("step",), preload=ranks.TORCH_DDP).values()
    for each in found:
        assert (
            each["versions"] == [0, 0] and "The ranks disagree about the operation" in each["text"]
        )


def begun_apart(rank: int, world_size: int) -> dict[str, str]:
    import pycomm

    texts = {}
    for kind, how in itertools.product(
        ("DiLoCo", "StreamingDiLoCo", "SparseLoCo"), ("step", "sync", "load")
    ):
        model = ddp_models.make("mlp", seed=rank if how != "load" else 0)
        local = getattr(pycomm, kind)(model, sync_every=2, init_sync=how == "load")
        if how == "load":  # checkpoints of two runs
            other = getattr(pycomm, kind)(ddp_models.make("mlp", seed=rank), sync_every=2)
            state = other.state_dict()
            state["anchor"]["scale"] += rank
            local.load_state_dict(state)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(pycomm.errors.CollectiveMismatchError) as caught:
            if how == "step":
                local.step()
                local.step()
            else:
                local.sync()
        assert_equal(model.parameters(), before)
        texts[f"{kind} {how}"] = str(caught.value)
        same = getattr(pycomm, kind)(ddp_models.make("mlp"), sync_every=1, init_sync=False)
        same.step()
    return texts


def test_ranks_that_began_with_other_parameters_are_told() -> None:
    first, second = run_ranks(2, begun_apart, preload=ranks.TORCH_DDP).values()
    assert first == second and len(first) == 9
    for each in first.values():
        assert "with different parameters, or have loaded different states or only" in each
        assert "rank 1 is the first that differs from rank 0. Nothing was changed" in each
        assert "leave init_sync=True, or load checkpoints of one step on all ranks" in each
        assert "  " not in each


class HalfStep(torch.optim.SGD):
    """Changes the first tensor, and raises."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise ArithmeticError("of the test's own")


def half_stepped(rank: int, world_size: int) -> dict[str, str]:
    import pycomm

    texts = {}
    for how in ("step", "sync"):
        model = ddp_models.make("mlp")
        local = pycomm.StreamingDiLoCo(
            model,
            sync_every=2,
            fragment_sync_delay=1,
            outer_optimizer=lambda tensors: HalfStep(tensors, lr=1.0),
        )
        state = copy.deepcopy(local.state_dict())
        for _ in range(2):
            local.step()
        with pytest.raises(ArithmeticError):
            local.step()
        with pytest.raises(pycomm.errors.CollectiveMismatchError) as caught:
            if how == "step":
                local.step()
                local.step()
            local.sync()
        texts[how] = str(caught.value)
        local.load_state_dict(state)
        local.sync()
    return texts


def test_an_outer_step_that_failed_on_all_ranks_is_an_error_until_a_state_is_loaded() -> None:
    found = run_ranks(2, half_stepped, preload=ranks.TORCH_DDP).values()
    for each in found:
        for text in each.values():
            assert "The outer step of rank 0 ended with an error" in text
            assert "Try: load a checkpoint on all ranks" in text


def only_orders(rank: int, world_size: int) -> list[int]:
    """A sum as NCCL has them: wait() returns at once, and the device finds the group failed."""
    import pycomm
    from pycomm._group import averaging

    class Sum:
        waits = 0

        def wait(self) -> None:
            Sum.waits += 1
            if Sum.waits > 1:
                raise pycomm.errors.PeerDeadError("rank 1 died", {"code": "PEER_DEAD", "peer": 1})

    class Half:
        """The module, whose all_reduce leaves half of a sum."""

        def all_reduce(self, tensor: torch.Tensor, **options: Any) -> Sum:
            tensor.fill_(1e6)
            return Sum()

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

    model = ddp_models.make("mlp")
    local = pycomm.StreamingDiLoCo(model, sync_every=1)
    before = local.state_dict()["anchor"]
    averaging.dist = Half()  # type: ignore[assignment]
    with pytest.raises(pycomm.errors.PeerDeadError):
        local.step()
    assert_equal(local.state_dict()["anchor"].values(), before.values())
    versions: list[int] = local.state_dict()["versions"]
    # A sync that load_state_dict() drops may fail: no error is raised.
    delayed = pycomm.StreamingDiLoCo(model, sync_every=2, fragment_sync_delay=1)
    state = delayed.state_dict()
    delayed.step()
    delayed.step()
    delayed.load_state_dict(state)
    assert delayed.state_dict()["flight"] is None
    assert [delayed.step() for _ in range(2)] == [False, False]
    with pytest.raises(pycomm.errors.PeerDeadError):
        delayed.step()
    return versions


def test_a_sum_that_fails_on_the_device_is_not_applied() -> None:
    assert run_ranks(1, only_orders, preload=ranks.TORCH_DDP).values() == [[0]]


def interrupted(rank: int, world_size: int, where: str) -> dict[str, Any]:
    """Ctrl-C while rank 0 waits for rank 1, which launches its fragment only then."""
    import pycomm

    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.distributed_c10d._get_default_store()
    model = ddp_models.make("buckets")
    optimizer = inner(model)
    local = pycomm.StreamingDiLoCo(model, sync_every=4, fragment_sync_delay=2)
    calls = {"step": local.step, "state_dict": local.state_dict, "sync": local.sync}
    seen: dict[str, Any] = {"landed": []}
    for step in range(10):
        train_step(model, optimizer, rank, step, "buckets")
        if rank == 1 and step == 3:
            store.wait(["interrupted"], timedelta(seconds=100))
        try:
            if rank == 0 and step == 5:  # where it lands
                mark("waits")
                calls[where]()
            if rank == 1 or step != 5 or where != "step":
                seen["landed"].append(local.step())
        except KeyboardInterrupt:
            seen["interrupted"] = step
            store.set("interrupted", "1")
            if where != "step":
                seen["landed"].append(local.step())
    seen["versions"] = local.state_dict()["versions"]
    local.sync()
    assert_equal_on_all_ranks(model, world_size)
    return seen


@pytest.mark.parametrize("where", ["step", "state_dict", "sync"])
def test_ctrl_c_while_a_fragment_is_waited_for(where: str) -> None:
    with start_ranks(2, interrupted, args=(where,), preload=ranks.TORCH_DDP) as running:
        running.wait_for_mark(0, "waits")
        running.wait_until_asleep(0)
        running.kill(0, signal.SIGINT)
        results = running.collect(100)
    first, second = results.check().values()
    assert first["interrupted"] == 5 and first["versions"] == second["versions"] == [2]
    assert second["landed"] == [step in (5, 9) for step in range(10)]
    # Interrupted in step(), it lands in the next one.
    lands = 6 if where == "step" else 5
    steps = [step for step in range(10) if where != "step" or step != 5]
    assert first["landed"] == [step in (lands, 9) for step in steps]


class Interrupts:
    """For sys.settrace: Ctrl-C before the so-manieth bytecode of a landing."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.lands = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Interrupts | None:
        if not frame.f_code.co_filename.endswith("outer_step.py"):
            return None
        self.lands = self.lands or frame.f_code.co_name == "land"
        frame.f_trace_opcodes = True
        if event == "opcode" and self.lands:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def steps_to_its_end(local: Any, number: int) -> bool:
    """False if Ctrl-C came before that bytecode of the landing."""
    before = sys.gettrace()
    sys.settrace(Interrupts(number))
    try:
        local.step()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True


def interrupted_while_it_lands(rank: int, world_size: int) -> int:
    """Each parameter lands once, in the next step or in a run that loads what was saved then."""
    import pycomm

    def start(seed: int = 0) -> tuple[nn.Module, Any]:
        model = ddp_models.make("mlp", seed=seed)
        options = {"sync_every": 4, "fragment_sync_delay": 1, "fragment_update_alpha": 0.25}
        return model, pycomm.StreamingDiLoCo(model, **options)

    def flying() -> tuple[nn.Module, Any]:
        model, local = start()
        optimizer = inner(model)
        for step in range(5):
            train_step(model, optimizer, rank, step)
            assert step == 4 or local.step() is False
        return model, local

    whole, local = flying()
    assert local.step()
    for number in itertools.count(1):
        model, local = flying()
        if steps_to_its_end(local, number):
            assert_equal(model.parameters(), whole.parameters())
            return number
        states = copy.deepcopy(model.state_dict()), local.state_dict()
        local.step()
        assert_equal(model.parameters(), whole.parameters())
        loaded = start(5)
        for each, state in zip(loaded, saved_and_loaded(list(states)), strict=True):
            each.load_state_dict(state)
        loaded[1].step()
        assert_equal(loaded[0].parameters(), whole.parameters())
    raise AssertionError


def test_ctrl_c_anywhere_in_a_landing() -> None:
    (numbers,) = run_ranks(1, interrupted_while_it_lands, preload=ranks.TORCH_DDP).values()
    assert numbers > 50


class RaisesInLand(TorchFunctionMode):
    """Ctrl-C before the first write of a landing, in the program's own Python code."""

    raised = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "copy_" and sys._getframe(1).f_code.co_name == "land":
            self.raised = True
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def trained_after_ctrl_c_in_a_landing(rank: int, world_size: int) -> None:
    """What changes a parameter then is no landing of it."""
    import pycomm

    landed = []
    for interrupted in (False, True):
        model = ddp_models.make("mlp")
        options = {"sync_every": 4, "fragment_sync_delay": 1, "fragment_update_alpha": 0.0}
        local = pycomm.StreamingDiLoCo(model, **options)
        optimizer = inner(model)
        for step in range(5):
            train_step(model, optimizer, rank, step)
            assert step == 4 or local.step() is False
        if interrupted:
            with pytest.raises(KeyboardInterrupt), RaisesInLand() as mode:
                local.step()
            assert mode.raised
            with torch.no_grad():
                for each in model.parameters():
                    each.add_(1)
        local.step()
        landed.append(model)
    assert_equal(*(model.parameters() for model in landed))


def test_training_after_ctrl_c_in_a_landing() -> None:
    run_ranks(1, trained_after_ctrl_c_in_a_landing, preload=ranks.TORCH_DDP).check()


def synced_after_a_landing_in_part(rank: int, world_size: int) -> None:
    """Without a delay, on all ranks at once: none of them has landed whole."""
    import pycomm

    for number in itertools.count(1):
        model = ddp_models.make("mlp")
        local = pycomm.StreamingDiLoCo(model, sync_every=1, fragment_update_alpha=0.25)
        train_step(model, inner(model), rank, 0)
        if steps_to_its_end(local, number):
            return
        local.sync()
        assert_equal_on_all_ranks(model, world_size)


def test_a_sync_after_ctrl_c_in_a_landing_on_all_ranks() -> None:
    run_ranks(2, synced_after_a_landing_in_part, preload=ranks.TORCH_DDP).check()


def other_options(rank: int, world_size: int) -> list[str]:
    import pycomm

    texts = []
    for options in (
        {"fragment_sync_delay": 1 if rank else 2},
        {"fragment_update_alpha": 0.25 if rank else None},
        {"wire_dtype": "int8" if rank else "fp16"},
        {"fragments": 4 if rank else 2},
        {"outer_optimizer": plain if rank else slower},
    ):
        given = {"sync_every": 12, "fragments": 2} | options
        with pytest.raises(pycomm.errors.ConfigMismatchError) as caught:
            pycomm.StreamingDiLoCo(ddp_models.make("buckets"), **given)
        texts.append(str(caught.value))
    return texts


def test_options_that_differ_between_ranks_are_an_error_on_all() -> None:
    first, second = run_ranks(2, other_options, preload=ranks.TORCH_DDP).values()
    assert first == second
    names = ["fragment_sync_delay", "fragment_update_alpha", "wire_dtype", "fragment 0", "outer 0"]
    for text, name in zip(first, names, strict=True):
        assert f"option {name!r} is" in text and "on rank 1" in text


def bad_options(rank: int, world_size: int) -> list[tuple[str, str]]:
    import pycomm

    model = ddp_models.make("buckets")
    frozen = ddp_models.make("buckets").requires_grad_(False)
    layers = list(model.layers)
    texts = []
    for given in BAD:
        options = {"sync_every": 12, **given}
        if isinstance(options.get("fragments"), tuple):
            options["fragments"] = [layers[index] for index in options["fragments"]]
        with pytest.raises(ValueError) as caught:
            pycomm.StreamingDiLoCo(model, **options)
        texts.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        pycomm.StreamingDiLoCo(frozen, sync_every=12)
    texts.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        pycomm.StreamingDiLoCo(model, sync_every=12, fragments=[nn.Linear(2, 2)])
    texts.append(str(caught.value))
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError) as caught:
        pycomm.StreamingDiLoCo(model, sync_every=12, wire_dtype="int8", process_group=gloo)
    texts.append(str(caught.value))
    pycomm.StreamingDiLoCo(model, sync_every=1, process_group=gloo).step()
    return texts


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"sync_every": 0}, "sync_every=0 is not a whole number from 1"),
    ({"sync_every": 2.5}, "sync_every=2.5 is not a whole number from 1"),
    ({"sync_every": 10, "fragments": 3}, "sync_every=10 is not a multiple of the 3 fragments"),
    ({"fragments": 0}, "fragments=0 is not allowed: use 1 to 8, the number of trainable"),
    ({"fragments": 9}, "fragments=9 is not allowed: use 1 to 8"),
    ({"fragments": True}, "fragments=True is neither a whole number nor a list of modules"),
    ({"fragments": "4"}, "fragments='4' is neither a whole number nor a list of modules"),
    ({"fragments": (0, 1, 2)}, "no fragment has parameter 'layers.3.weight', and 1 others"),
    ({"fragments": (0, 1, 2, 3, 3)}, "parameter 'layers.3.weight' is in fragments[3] and in"),
    ({"fragments": [3]}, "fragments[0] is an int and not a module"),
    ({"fragment_sync_delay": 12}, "fragment_sync_delay=12 is not a whole number from 0 to 11"),
    ({"fragments": 4, "fragment_sync_delay": 3}, "fragment_sync_delay=3 is not a whole number"),
    ({"fragment_sync_delay": -1}, "fragment_sync_delay=-1 is not a whole number from 0 to 11"),
    ({"fragment_update_alpha": 1}, "fragment_update_alpha=1 is neither None nor a number"),
    ({"fragment_update_alpha": -0.5}, "fragment_update_alpha=-0.5 is neither None nor"),
    ({"wire_dtype": "int4"}, "wire_dtype='int4' is not allowed: use 'group' or 'fp32' or"),
    ({"wire_dtype": {"*": "int8"}}, "is not one name: all fragments travel alike"),
]
BAD = [given for given, _ in BAD_OPTIONS]


def test_every_bad_option_is_refused_with_a_sentence() -> None:
    (texts,) = run_ranks(1, bad_options, only_pycomm=False, preload=ranks.TORCH_DDP).values()
    expected = [text for _, text in BAD_OPTIONS]
    expected += ["the model has no trainable parameter"]
    expected += ["a parameter of fragments[0] is not part of the model, or is frozen there"]
    expected += ["wire_dtype='int8': group"]
    for text, part in zip(texts, expected, strict=True):
        assert part in text


# The page


def run_page(rank: int, world_size: int) -> list[str]:
    import pycomm

    found = []
    for block in re.findall(r"^```python\n(.*?)^```$", read(DOCUMENT), re.M | re.S):
        model = ddp_models.make("mlp", seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        names: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "batches": [ddp_models.batch_of("mlp", rank, step) for step in range(104)],
            "loss_of": lambda model, batch: model(batch).square().mean(),
            "pycomm": pycomm,
        }
        exec(compile(block, DOCUMENT, "exec"), names)
        if "local" in names:
            found.append(type(names["local"]).__name__)
            assert names["local"].stats().syncs > 0
            assert_equal_on_all_ranks(model, world_size)
    return found


def test_the_programs_of_the_page_run() -> None:
    found = run_ranks(2, run_page, preload=ranks.TORCH_DDP).values()
    assert found == [["DiLoCo", "StreamingDiLoCo", "SparseLoCo", "DiLoCo"]] * 2


# Fragments


def test_memory_is_of_the_device_that_it_is_taken_for() -> None:
    from pycomm.fewer_syncs.outer_step import Scratch

    scratch = Scratch()
    for name in ("cpu", "meta", "cpu"):
        device = torch.device(name)
        parts = scratch.take(torch.bfloat16, torch.float32, device, [3, 5])
        assert [(part.device, part.numel()) for part in parts] == [(device, 3), (device, 5)]


class Decoder(nn.Module):
    """An embedding whose weights the head shares, six layers, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(6)
        )
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.layers[5].requires_grad_(False)


def cut(model: nn.Module, fragments: Any) -> list[list[str]]:
    from pycomm.fewer_syncs.fragments import cut as cut_fragments

    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = cut_fragments(model, trained, fragments)
    assert sorted(itertools.chain(*found)) == sorted(trained), "each parameter once"
    return found


def modules_of(names: list[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def test_layers_are_dealt_out_in_turn_and_the_rest_goes_to_the_lightest() -> None:
    first, second = cut(Decoder(), 2)
    # Five layers are trained. The embedding makes the fragments equally heavy.
    layers = [[f"layers.{n}.{part}" for part in (0, 2)] for n in range(5)]
    assert modules_of(first) == [*layers[0], *layers[2], *layers[4], "norm"]
    assert modules_of(second) == ["embed", *layers[1], *layers[3], "norm"]
    assert (first[-1], second[-1]) == ("norm.weight", "norm.bias")


def test_without_enough_blocks_parameters_are_dealt_out_by_size() -> None:
    found = cut(Decoder(), 7)
    weights = [sum(dict(Decoder().named_parameters())[n].nbytes for n in part) for part in found]
    assert len(found) == 7 and max(weights) - min(weights) <= 160  # the largest parameter
    assert cut(Decoder(), 7) == found


def test_two_lists_of_equal_length_are_dealt_out_together() -> None:
    model = nn.Module()
    model.encoder = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.decoder = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    first, second = cut(model, 2)
    assert modules_of(first) == ["encoder.0", "encoder.2", "decoder.1"]
    assert modules_of(second) == ["encoder.1", "decoder.0", "decoder.2"]


def test_fragments_that_are_named() -> None:
    model = Decoder()
    found = cut(model, [model.layers, nn.ModuleList([model.embed, model.norm])])
    assert modules_of(found[1]) == ["embed", "norm"]

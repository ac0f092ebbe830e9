"""A run of fewer syncs that is loaded at any step continues bit by bit, whatever averages it.

Each seed is a random run: what is trained and how, how ranks meet, and at which step it is cut.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
from typing import Any

import pytest
import ranks
import rings
import torch
from ddp_rig import all_ranks, wrap
from torch import nn

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(600)]

WORLD = 3
"""Two hosts, of two ranks and one. A mean of three equal numbers is not always that number."""
STEPS = 9
LOCAL = ("LocalSGD", "DiLoCo", "SparseLoCo", "StreamingDiLoCo")
MIXED = {"parts.0.*": "fp16", "parts.1.*": "int8", "*": "bf16"}
WIRES = (None, "fp32", "fp16", "bf16", "int8", MIXED)
"""Of a wrapper with ``sync_every``."""
FRAGMENT_WIRES = (None, "fp32", "fp16", "bf16", "int8")
METHODS = [
    *(("sync_every", wire) for wire in WIRES),
    *((name, None) for name in LOCAL[:3]),
    *(("StreamingDiLoCo", wire) for wire in FRAGMENT_WIRES),
]
PER_METHOD = 4
"""Random runs of each in every test run, and 20 in nightly."""

OUTER = {
    "nesterov": None,
    "adamw": lambda tensors: torch.optim.AdamW(tensors, lr=0.01, amsgrad=True),
    "plain": lambda tensors: torch.optim.SGD(tensors, lr=1.0),
}


class Net(nn.Module):
    """Parts of some dtypes and layouts, a norm with buffers, and rows that may be encoded."""

    def __init__(self, seed: int, complex_too: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(12)
        self.parts = nn.ModuleList([nn.Linear(12, 90), nn.Linear(90, 60), nn.Linear(60, 12)])
        self.wide = nn.Linear(12, 4, dtype=torch.float64)
        self.narrow = nn.Linear(12, 4, dtype=torch.bfloat16)
        self.turned = nn.Parameter(torch.randn(12, 5).t())
        if complex_too:
            self.phase = nn.Parameter(torch.randn(12, dtype=torch.complex64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(batch)
        for part in self.parts:
            hidden = part(hidden).tanh()
        losses = [
            self.wide(hidden.double()).square().mean(),
            self.narrow(hidden.bfloat16()).double().square().mean(),
            (hidden @ self.turned.t()).double().square().mean(),
        ]
        if hasattr(self, "phase"):
            losses.append((self.phase * hidden).abs().double().mean())
        return torch.stack(losses).sum()


class Plan:
    """What a seed says, alike on all ranks and in both runs."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        self.method, wire = METHODS[seed % len(METHODS)]
        self.every = draw.choice([2, 3, 4])
        self.adam = draw.random() < 0.5
        self.complex_too = self.method != "SparseLoCo" and draw.random() < 0.5
        self.options: dict[str, Any] = {"sync_every": self.every}
        self.accumulate = 1
        if self.method == "sync_every":
            self.accumulate = draw.choice([1, 1, 2])
            if wire is not None:
                wires = wire if isinstance(wire, dict) else {"*": wire}
                own = {"wide.*": None, **({"phase": None} if self.complex_too else {})}
                wire = {**own, **wires}
            self.options |= {
                "wire_dtype": wire,
                "accumulate": self.accumulate,
                "bucket_cap_mb": draw.choice([0.005, 0.02, 1]),
                "static_graph": draw.random() < 0.3,
                "gradient_as_bucket_view": draw.random() < 0.5,
            }
        elif self.method == "SparseLoCo":
            self.options |= {
                "top_k": draw.choice([16, 64]),
                "error_decay": draw.choice([0.0, 0.9, 1.0]),
                "outer_lr": draw.choice([1.0, 0.5]),
            }
        elif self.method != "LocalSGD":
            self.options["outer_optimizer"] = OUTER[draw.choice(list(OUTER))]
        if self.method == "StreamingDiLoCo":
            fragments = draw.choice([1, 2])
            every = self.every * fragments
            self.options |= {
                "sync_every": every,
                "fragments": fragments,
                "wire_dtype": wire,
                "fragment_sync_delay": draw.randrange(self.every),
                "fragment_update_alpha": draw.choice([None, 0.0, 0.25]),
            }
        if draw.random() < 0.3:
            self.options["broadcast_buffers"] = False
        self.modes = [draw.random() < 0.6 for _ in range(STEPS)]
        if draw.random() < 0.6:
            self.modes = [draw.random() < 0.5] * STEPS
        self.looks = [draw.random() < 0.2 for _ in range(STEPS)]
        self.syncs = [draw.random() < 0.15 for _ in range(STEPS)]
        # DiLoCo and the others refuse what is unfrozen later, so only freezing for a while.
        self.frozen = [draw.random() < 0.2 for _ in range(STEPS)]
        if self.options.get("static_graph"):
            self.frozen = [False] * STEPS
        self.cut = draw.randint(0, STEPS)
        if draw.random() < 0.3:  # where the next sync is due
            self.syncs, self.cut = [False] * STEPS, 2 * self.every
        self.rewinds = draw.random() < 0.3

    def __str__(self) -> str:
        what = {key: value for key, value in vars(self).items() if key != "options"}
        return f"{what}, {self.options}"


class Run:
    def __init__(self, plan: Plan, seed: int) -> None:
        import pycomm

        self.plan = plan
        net = Net(seed, plan.complex_too)
        self.local: Any = None
        if plan.method == "sync_every":
            self.model: Any = wrap(net, **plan.options)
            self.net: Any = self.model.module
        else:
            self.model = self.net = net
            self.local = getattr(pycomm, plan.method)(net, **plan.options)
        kind = torch.optim.AdamW if plan.adam else torch.optim.SGD
        self.optimizer = kind(net.parameters(), lr=0.02)
        self.trained_alone = False

    def state(self) -> Any:
        third = self.model.communication_state_dict if self.local is None else self.local.state_dict
        file = io.BytesIO()
        torch.save([self.net.state_dict(), self.optimizer.state_dict(), third()], file)
        return file.getvalue()

    def load(self, state: Any) -> None:
        net, optimizer, third = torch.load(io.BytesIO(state), weights_only=True)
        self.net.load_state_dict(net)
        self.optimizer.load_state_dict(optimizer)
        if self.local is None:
            self.model.load_communication_state_dict(third)
        else:
            self.local.load_state_dict(third)

    def step(self, number: int) -> None:
        plan, rank = self.plan, torch.distributed.get_rank()
        self.net.parts[1].requires_grad_(not plan.frozen[number])
        generator = torch.Generator().manual_seed(100 * number + rank)
        self.model.train(plan.modes[number])
        self.optimizer.zero_grad()
        for _ in range(plan.accumulate):
            batch = torch.randn(6, 12, generator=generator) * 10.0 ** (number % 3 - 1)
            self.model(batch).backward()
        self.optimizer.step()
        if self.local is not None:
            self.local.step()
        if plan.syncs[number]:
            (self.local or self.model).sync()
        if plan.looks[number]:  # at the validation loss, without no_grad()
            self.model.eval()
            self.model(torch.ones(2, 12))

    def end(self) -> list[torch.Tensor]:
        (self.local or self.model).sync()
        return copy.deepcopy(list(self.net.state_dict().values()))


def resumed(rank: int, world_size: int, seeds: list[int]) -> list[str]:
    from pycomm._group import averaging

    torch.set_num_threads(1)
    averaging.host_identity = lambda: f"host {rank % 2}"
    wrong = []
    for seed in seeds:
        plan = Plan(seed)
        run, state = Run(plan, seed), None
        for number in range(STEPS):
            if number == plan.cut:
                state = run.state()
            run.step(number)
        if state is None:
            state = run.state()
        wanted = run.end()
        again = Run(plan, seed + 1)
        if plan.rewinds:  # what it has trained before must leave no trace
            for number in range(3):
                again.step(number)
        again.load(state)
        for number in range(plan.cut, STEPS):
            again.step(number)
        found = again.end()
        for name, one, other in zip(again.net.state_dict(), wanted, found, strict=True):
            if not torch.equal(one, other):
                wrong.append(f"{name} differs on rank {rank}: {plan}")
                break
        parameters = dict(again.net.named_parameters())
        for name, each in parameters.items():
            real = torch.view_as_real(each) if each.is_complex() else each
            first, *others = all_ranks(real.detach())
            assert all(torch.equal(first, other) for other in others), f"{name}: {plan}"
    return wrong


def check(seeds: list[int], transport: str) -> None:
    found = ranks.run_ranks(
        WORLD,
        resumed,
        args=(seeds,),
        timeout_s=500,
        preload=ranks.TORCH_DDP,
        pg_options={"transport": transport},
    )
    wrong = [text for of_rank in found.values() for text in of_rank]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("transport", rings.first_of(["shm", "tcp"]))
def test_a_run_of_fewer_syncs_that_is_cut_continues_bit_by_bit(transport: str) -> None:
    count = PER_METHOD * len(METHODS)
    first = count if transport == "tcp" else 0
    check(list(range(first, first + count)), transport)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 1020))
def test_more_runs_of_fewer_syncs(first: int) -> None:
    seeds = [len(METHODS) * first + index for index in range(len(METHODS))]
    check(seeds, "tcp" if first % 2 else "shm")


def with_frozen_part(rank: int, world_size: int) -> bool:
    """Saved with a frozen part, and loaded into a model that begins with it frozen."""
    import pycomm

    def make(frozen: bool) -> tuple[nn.ModuleList, Any]:
        torch.manual_seed(5)
        net = nn.ModuleList(nn.Linear(300, width) for width in (101, 900, 211))
        net[0].requires_grad_(not frozen)
        return net, pycomm.LocalSGD(net, sync_every=2)

    def train(net: nn.ModuleList, local: Any, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + rank)
            with torch.no_grad():
                for each in net.parameters():
                    moved = torch.randn(each.shape, generator=generator)
                    each += moved if each.requires_grad else 0.0
            local.step()

    net, local = make(frozen=False)
    train(net, local, range(3))
    net[0].requires_grad_(False)
    saved = copy.deepcopy((net.state_dict(), local.state_dict()))
    train(net, local, range(3, 8))
    again, other = make(frozen=True)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(again, other, range(3, 8))
    pairs = zip(net.parameters(), again.parameters(), strict=True)
    return all(torch.equal(one, another) for one, another in pairs)


def test_a_local_sgd_that_is_loaded_with_a_frozen_part_has_the_same_bits() -> None:
    found = ranks.run_ranks(
        WORLD,
        with_frozen_part,
        timeout_s=100,
        preload=ranks.TORCH_DDP,
        pg_options={"transport": "tcp"},
    )
    assert all(found.values())


def frozen_after_the_load(rank: int, world_size: int) -> dict[str, bool]:
    """A state with nothing to average, and a part that is frozen for the first step after it."""
    from pycomm._group import averaging

    averaging.host_identity = lambda: f"host {rank % 2}"

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        return wrap(nn.Sequential(nn.Linear(30, 90), nn.Linear(90, 5)), sync_every=4)

    model, again = make(5), make(6)
    weights, state = copy.deepcopy((model.state_dict(), model.communication_state_dict()))
    again.load_state_dict(weights)
    again.load_communication_state_dict(state)
    found = {"state": again.communication_state_dict() == state}
    for each in (model, again):
        each.module[0].requires_grad_(False)
        each(torch.full((2, 30), float(rank))).square().mean().backward()
        each.sync()
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    return {**found, "bits": all(torch.equal(one, other) for one, other in pairs)}


def test_a_wrapper_averages_nothing_that_was_not_trained_since_the_state_it_loads() -> None:
    found = ranks.run_ranks(WORLD, frozen_after_the_load, timeout_s=100, preload=ranks.TORCH_DDP)
    assert all(all(of_rank.values()) for of_rank in found.values()), found


def loaded_alone(rank: int, world_size: int) -> dict[str, str]:
    """Rank 1 alone loads a state of another step, or of another run after as many."""
    import pycomm

    def train(net: nn.Module, local: Any, steps: range) -> None:
        for step in steps:
            with torch.no_grad():
                for each in net.parameters():
                    each += torch.randn(each.shape, generator=torch.Generator().manual_seed(step))
            local.step()

    texts = {}
    for name in LOCAL[1:]:
        for how in ("another step", "another run"):
            for end in ("step", "sync"):
                nets = [nn.Linear(3, 2) for _ in range(2)]
                net, local = nets[0], getattr(pycomm, name)(nets[0], sync_every=1)
                other = getattr(pycomm, name)(nets[1], sync_every=1)
                train(net, local, range(1))
                first = copy.deepcopy((net.state_dict(), local.state_dict()))
                train(net, local, range(1, 2))
                train(nets[1], other, range(10, 12))
                good = copy.deepcopy((net.state_dict(), local.state_dict()))
                if rank == 1:
                    bad = (
                        first
                        if how == "another step"
                        else (nets[1].state_dict(), other.state_dict())
                    )
                    net.load_state_dict(bad[0])
                    local.load_state_dict(bad[1])
                begins = [each.detach().clone() for each in net.parameters()]
                with pytest.raises(pycomm.errors.CollectiveMismatchError) as caught:
                    getattr(local, end)()
                texts[f"{name}, {how}, {end}"] = str(caught.value)
                assert all(map(torch.equal, net.parameters(), begins))
                net.load_state_dict(good[0])
                local.load_state_dict(good[1])
                train(net, local, range(2, 4))
                assert_same_everywhere(net)
    return texts


def assert_same_everywhere(net: nn.Module) -> None:
    for each in net.parameters():
        of_ranks = all_ranks(each.detach())
        assert all(torch.equal(of_ranks[0], one) for one in of_ranks)


def loaded_alone_when_made(rank: int, world_size: int) -> dict[str, str]:
    """All have the model of a checkpoint, and rank 1 alone its state: the anchors are equal."""
    import pycomm

    texts = {}
    for name in LOCAL[1:]:
        net = nn.Linear(3, 2)
        local = getattr(pycomm, name)(net, sync_every=1)
        for _ in range(2):
            move(net, rank)
            local.step()
        state = copy.deepcopy(local.state_dict())
        for end in ("step", "sync"):
            again = getattr(pycomm, name)(net, sync_every=1)
            if rank == 1:
                again.load_state_dict(state)
            with pytest.raises(pycomm.errors.CollectiveMismatchError) as caught:
                getattr(again, end)()
            texts[f"{name}, {end}"] = str(caught.value)
            again.load_state_dict(state)
            move(net, rank)
            again.step()
            assert_same_everywhere(net)
            state = copy.deepcopy(again.state_dict())
    return texts


def with_other_momentum(rank: int, world_size: int, name: str) -> str:
    """All load a state, and the momentum of rank 1 differs in it."""
    import pycomm

    net = nn.Linear(3, 2)
    local = getattr(pycomm, name)(net, sync_every=1)
    move(net, rank)
    local.step()
    good = copy.deepcopy(local.state_dict())
    bad = copy.deepcopy(good)
    outer = bad["outer"] if name == "DiLoCo" else bad["outer"][0]
    outer["state"][0]["momentum_buffer"] += float(rank == 1)
    local.load_state_dict(bad)
    with pytest.raises(pycomm.errors.CollectiveMismatchError) as caught:
        local.sync()
    local.load_state_dict(good)
    move(net, rank)
    local.step()
    assert_same_everywhere(net)
    return str(caught.value)


def move(net: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for each in net.parameters():
            each += 1.0 + rank


def test_a_state_that_one_rank_loads_alone_is_an_error_on_all() -> None:
    first, *others = ranks.run_ranks(
        WORLD, loaded_alone, timeout_s=100, preload=ranks.TORCH_DDP
    ).values()
    assert all(other == first for other in others) and len(first) == 12
    for case, text in first.items():
        assert "Nothing was changed" in text and "checkpoints of one step" in text, (case, text)
        assert ("only some have loaded" in text) or ("different places" in text), (case, text)


def test_a_state_that_one_rank_loads_into_a_new_object_is_an_error_on_all() -> None:
    of_ranks = ranks.run_ranks(
        WORLD, loaded_alone_when_made, timeout_s=100, preload=ranks.TORCH_DDP
    )
    first, *others = of_ranks.values()
    assert all(other == first for other in others) and len(first) == 6
    for case, text in first.items():
        assert "different places" in text and "Nothing was changed" in text, (case, text)
    assert "rank 0 synced after 0 outer steps; rank 1 synced after 2" in first["DiLoCo, step"]


@pytest.mark.parametrize("name", ["DiLoCo", "StreamingDiLoCo"])
def test_momentum_that_differs_in_a_state_is_an_error_on_all(name: str) -> None:
    of_ranks = ranks.run_ranks(
        WORLD, with_other_momentum, args=(name,), timeout_s=100, preload=ranks.TORCH_DDP
    )
    for text in of_ranks.values():
        assert "rank 1 is the first that differs from rank 0. Nothing was changed" in text


class Counting(torch.optim.SGD):
    """It keeps a number of its own beside what it has for each parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = (self.state["steps"] or 0) + 1
        return super().step(closure)


def with_a_number(rank: int, world_size: int, name: str) -> bool:
    import pycomm

    net = nn.Linear(2, 1)
    local = getattr(pycomm, name)(
        net, sync_every=1, outer_optimizer=lambda them: Counting(them, lr=0.7)
    )
    for _ in range(2):
        move(net, rank)
        local.step()
    local.load_state_dict(local.state_dict())
    move(net, rank)
    local.sync()
    assert_same_everywhere(net)
    return True


@pytest.mark.parametrize("name", ["DiLoCo", "StreamingDiLoCo"])
def test_an_outer_optimizer_may_keep_what_is_no_tensor(name: str) -> None:
    results = ranks.run_ranks(2, with_a_number, args=(name,), preload=ranks.TORCH_DDP)
    assert results.values() == [True, True]


def planted(module: Any, what: str, *, calls: bool) -> tuple[Any, str, Any]:
    real = getattr(module, what)

    def fails(*args: Any, **options: Any) -> Any:
        if calls:
            real(*args, **options)
        raise RuntimeError("planted")

    return module, what, fails


def failed_in_between(rank: int, world_size: int, name: str) -> None:
    """Rank 0 alone learns that all are alike; with ``DiLoCo`` its average fails then."""
    import pycomm
    from pycomm.fewer_syncs import local_sgd, sparse_loco, streaming_diloco

    net = nn.Linear(3, 2)
    local = getattr(pycomm, name)(net, sync_every=100)
    compares = {
        "DiLoCo": (local_sgd, "gather_numbers"),
        "StreamingDiLoCo": (streaming_diloco, "gather_numbers"),
        "SparseLoCo": (sparse_loco, "check_stepped"),
    }[name]
    if name == "DiLoCo":
        move(net, rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank != 0:
            patch.setattr(*planted(*compares, calls=True))
        else:
            patch.setattr(*planted(local_sgd, "average_", calls=False))
        fails = rank != 0 or name == "DiLoCo"
        with pytest.raises(RuntimeError, match="planted") if fails else contextlib.nullcontext():
            local.sync()
    move(net, rank)
    local.sync()
    assert_same_everywhere(net)


@pytest.mark.parametrize("name", LOCAL[1:])
def test_ranks_of_which_some_have_failed_to_compare_sync_again(name: str) -> None:
    ranks.run_ranks(WORLD, failed_in_between, args=(name,), timeout_s=100, preload=ranks.TORCH_DDP)


def stepped_alone(rank: int, world_size: int) -> str:
    """The average arrives on rank 0 alone."""
    import pycomm
    from pycomm.fewer_syncs import local_sgd

    net = nn.Linear(3, 2)
    local = pycomm.DiLoCo(net, sync_every=100)
    move(net, rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank != 0:
            patch.setattr(*planted(local_sgd, "average_", calls=True))
        fails = rank != 0
        with pytest.raises(RuntimeError, match="planted") if fails else contextlib.nullcontext():
            local.sync()
    with pytest.raises(pycomm.errors.CollectiveMismatchError) as caught:
        local.sync()
    return str(caught.value)


def test_an_outer_step_that_only_one_rank_took_is_an_error_on_all() -> None:
    of_ranks = ranks.run_ranks(WORLD, stepped_alone, timeout_s=100, preload=ranks.TORCH_DDP)
    for text in of_ranks.values():
        assert "rank 0 synced after 1 outer step; rank 1 synced after 0 outer steps" in text

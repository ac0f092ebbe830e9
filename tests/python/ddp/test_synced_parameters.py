"""A sync leaves the same parameters on all hosts, and what is ignored alone."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from ddp_rig import all_ranks, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]


class Tower(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head, self.base = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.base.weight.requires_grad_(False)
        self.table = nn.Module()
        self.table.shard = nn.Parameter(torch.full((3 + rank,), float(rank)))
        self.table.register_buffer("own", torch.full((3,), float(rank)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(self.base(batch))).square().mean()


def on_two_hosts(rank: int, mode: bool = True) -> Any:
    from pycomm._group import averaging

    averaging.host_identity = lambda: f"host {rank}"
    net = Tower(rank)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(net, ["table.shard", "table.own"])
    return wrap(net, sync_every=4).train(mode)


def train(model: Any, rank: int, steps: int) -> None:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    batches = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 4, generator=batches)).backward()
        optimizer.step()


def same(tensor: torch.Tensor) -> bool:
    first, second = all_ranks(tensor.detach())
    return torch.equal(first, second)


def frozen(rank: int, world_size: int) -> dict[str, bool]:
    """The trunk is trained, then frozen before the next sync, also over a checkpoint."""
    model = on_two_hosts(rank)
    net = model.module
    train(model, rank, 2)
    net.trunk.weight.requires_grad_(False)
    state = model.communication_state_dict()
    train(model, rank, 2)
    model.sync()
    found = {"synced": same(net.trunk.weight) and same(net.head.weight)}
    found["own"] = bool((net.table.shard == rank).all() and (net.table.own == rank).all())
    nbytes = model.stats().wire_nbytes
    model.sync()  # only the head
    found["nothing in vain"] = model.stats().wire_nbytes - nbytes == net.head.weight.nbytes
    net.trunk.weight.data += rank  # as it was when `state` was saved: trained, and not averaged
    model.load_communication_state_dict(state)
    model.sync()
    found["resumed"] = same(net.trunk.weight)
    return found


def evaluated(rank: int, world_size: int) -> dict[str, bool]:
    """Trained in eval() mode, as fine-tuning with fixed statistics does."""
    model = on_two_hosts(rank, mode=False)
    train(model, rank, 5)
    return {"syncs": model.stats().syncs == 1}


def unfrozen(rank: int, world_size: int) -> dict[str, bool]:
    """Frozen at construction: the average takes it in, and the others refuse it by name."""
    import pycomm

    found = {}
    for name in ("LocalSGD", "DiLoCo", "StreamingDiLoCo", "SparseLoCo"):
        net = Tower(rank)
        TorchDDP._set_params_and_buffers_to_ignore_for_model(net, ["table.shard", "table.own"])
        net.trunk.weight.requires_grad_(False)
        net.register_buffer("seen", torch.full((2,), float(rank)))
        local = getattr(pycomm, name)(net, sync_every=2, broadcast_buffers=False)
        assert (net.seen == 0).all()
        net.seen += rank
        net.trunk.weight.requires_grad_(True)
        train(net, rank, 1)
        try:
            local.step()
            if name == "LocalSGD":
                state = local.state_dict()
                net.trunk.weight.requires_grad_(False)
                local.load_state_dict(state)
            local.sync()
            found[name] = same(net.trunk.weight) and same(net.head.weight) and name == "LocalSGD"
            found["buffers stay"] = bool((net.seen == rank).all())
        except pycomm.errors.UnsupportedError as error:
            found[name] = "'trunk.weight'" in str(error) and name in str(error)
        found[f"{name}'s own"] = bool((net.table.shard == rank).all())
    return found


class Names(nn.Module):
    """Buffers and parameters of a rank's own, under names of each kind.

    ``.shard`` and ``.own`` are the names that torch's recipe gives to the outermost module's own;
    ``inner`` has others of the same names. ``first`` and ``second`` are one module, ``tied.shard``
    is ``apart.shard``.
    """

    IGNORED = (".shard", ".own", "second.shard", "second.own", "tied.shard", "tied.own")

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        for module, sizes in ((self, 3 + rank), (inner := nn.Module(), 3)):
            module.shard = nn.Parameter(torch.full((sizes,), float(rank)))
            module.register_buffer("own", torch.full((sizes,), float(rank)))
        self.inner = inner
        for name in ("first", "apart"):
            setattr(self, name, nn.Module())
            module = getattr(self, name)
            module.shard = nn.Parameter(torch.full((5 + rank,), float(rank)))
            module.register_buffer("own", torch.full((5 + rank,), float(rank)))
        self.second, self.tied = self.first, nn.Module()
        self.tied.shard = self.apart.shard
        self.tied.register_buffer("own", self.apart.own)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        every = [self.inner.shard, self.shard, self.first.shard, self.tied.shard]
        return self.layer(batch).square().mean() + sum((each**2).sum() for each in every)


def names_of_ignored(rank: int, world_size: int) -> dict[str, bool]:
    """By each kind of name, with each way of averaging."""
    import pycomm
    from pycomm._group import averaging

    averaging.host_identity = lambda: f"host {rank}"
    found = {}
    for name in ("LocalSGD", "DiLoCo", "StreamingDiLoCo", "SparseLoCo", "every step", "hosts"):
        net = Names(rank)
        TorchDDP._set_params_and_buffers_to_ignore_for_model(net, list(Names.IGNORED))
        if name in ("every step", "hosts"):
            model = wrap(net, sync_every=2 if name == "hosts" else 1)
            for _ in range(2):
                model(torch.ones(2, 4)).backward()
            model.sync()
        else:
            local = getattr(pycomm, name)(net, sync_every=2)
            net(torch.ones(2, 4)).backward()
            local.sync()
        for own in (net, net.first, net.apart):
            untouched = bool((own.shard == rank).all() and (own.own == rank).all())
            found[f"{name}'s own"] = found.get(f"{name}'s own", True) and untouched
        found[name] = bool((net.inner.own == 0).all() and (net.inner.shard == 0).all())
    return found


def other_layers(rank: int, world_size: int, syncs: str) -> str:
    """Each rank has trained another layer of the same shape."""
    import pycomm

    if syncs == "hosts":
        model = on_two_hosts(rank)
        net, sync = model.module, model.sync
    else:
        net = Tower(0)
        for layer in (net.trunk, net.head):
            layer.weight.requires_grad_(False)
        sync = pycomm.LocalSGD(net, sync_every=4).sync
        model = net
    net.trunk.weight.requires_grad_(rank == 0)
    net.head.weight.requires_grad_(rank == 1)
    train(model, rank, 1)
    try:
        sync()
        return "averaged"
    except pycomm.errors.CollectiveMismatchError as error:
        return str(error)


@pytest.mark.parametrize("syncs", ["hosts", "LocalSGD"])
def test_layers_of_other_names_are_not_averaged_with_each_other(syncs: str) -> None:
    for text in ranks.run_ranks(
        2, other_layers, args=(syncs,), timeout_s=100, preload=ranks.TORCH_DDP
    ).values():
        assert "disagree" in text and "tag" in text, text


def in_turn(rank: int, world_size: int) -> dict[str, bool]:
    of_wrapper = {**frozen(rank, world_size), **evaluated(rank, world_size)}
    return {**of_wrapper, **unfrozen(rank, world_size)}


def test_a_sync_covers_what_was_trained_since_the_last_one() -> None:
    for found in ranks.run_ranks(2, in_turn, timeout_s=100, preload=ranks.TORCH_DDP).values():
        assert all(found.values()), found


def test_what_is_ignored_by_any_of_its_names_is_left_alone() -> None:
    for found in ranks.run_ranks(
        2, names_of_ignored, timeout_s=100, preload=ranks.TORCH_DDP
    ).values():
        assert all(found.values()), found


FREEZING: dict[str, tuple[str, dict[str, Any]]] = {
    "DiLoCo": ("DiLoCo", {}),
    "with decay": ("DiLoCo", {"outer_optimizer": lambda all_of: torch.optim.AdamW(all_of, lr=0.1)}),
    "at once": ("StreamingDiLoCo", {}),
    "in int8": ("StreamingDiLoCo", {"wire_dtype": "int8"}),
    "later": ("StreamingDiLoCo", {"sync_every": 2, "fragment_sync_delay": 1}),
    "in fragments": ("StreamingDiLoCo", {"sync_every": 2, "fragments": 2}),
    "SparseLoCo": ("SparseLoCo", {"top_k": 16}),
}


def frozen_later(rank: int, world_size: int) -> dict[str, Any]:
    """A layer is trained, frozen for ten rounds, and trained again; or frozen on rank 0 alone."""
    import pycomm

    def train(net: nn.Module, local: Any, steps: int) -> None:
        for _ in range(steps):
            with torch.no_grad():
                for each in net.parameters():
                    if each.requires_grad:
                        each += torch.randn(each.shape, generator=batches)
            local.step()

    batches = torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {}
    for case, (kind, options) in FREEZING.items():
        net = nn.Sequential(nn.Linear(80, 60, bias=False), nn.Linear(60, 2))
        local = getattr(pycomm, kind)(net, **{"sync_every": 1, **options})
        first, second = net[0].weight, net[1].weight
        train(net, local, 6)
        first.requires_grad_(False)
        train(net, local, 4)  # what it was trained before is averaged, and lands
        still, other = first.detach().clone(), second.detach().clone()
        train(net, local, 10)
        found[f"{case}: stands"] = torch.equal(first, still) and not torch.equal(second, other)
        local.sync()
        found[f"{case}: after sync()"] = torch.equal(first, still) and same(first)
        first.requires_grad_(True)
        train(net, local, 4)
        first.requires_grad_(rank != 0)
        train(net, local, 4)
        local.sync()
        found[f"{case}: is trained on"] = not torch.equal(first, still) and same(first)
    return found


def test_what_is_frozen_stands_still_and_is_trained_on_later() -> None:
    for found in ranks.run_ranks(2, frozen_later, timeout_s=100, preload=ranks.TORCH_DDP).values():
        assert all(found.values()), [case for case, right in found.items() if not right]


def unfrozen_again(rank: int, world_size: int) -> dict[str, float]:
    """Beside the equations in float64: a frozen scalar keeps its momentum until it moves again."""
    import pycomm

    found = {}
    for kind in ("DiLoCo", "StreamingDiLoCo"):
        net = nn.Linear(1, 1, dtype=torch.float64)
        local = getattr(pycomm, kind)(net, sync_every=1)
        anchor, velocity = float(net.weight.detach()), 0.0
        worst = 0.0
        for step in range(12):
            net.weight.requires_grad_(not 4 <= step < 8)
            moves = [0.0, 0.0] if 4 <= step < 8 else [0.5 + step, 1.0 - 3 * step]
            with torch.no_grad():
                net.weight += moves[rank]
                net.bias += 1.0
            local.step()
            if any(moves):
                moved = -sum(moves) / 2
                velocity = 0.9 * velocity + moved
                anchor -= 0.7 * (moved + 0.9 * velocity)
            worst = max(worst, abs(float(net.weight.detach()) - anchor))
        found[kind] = worst
    return found


def test_a_parameter_that_is_unfrozen_goes_on_with_its_momentum() -> None:
    for found in ranks.run_ranks(
        2, unfrozen_again, timeout_s=100, preload=ranks.TORCH_DDP
    ).values():
        assert max(found.values()) < 1e-12, found

"""Which sums of pycomm's own travel as the group's codec says, and which are exact.

Each exact case runs over an int8 group and over an fp32 group of the same ranks: same bits, and no
value is counted as sent encoded. A wrapper does as the group by default; None and "fp32" mean none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_rig import wrap
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from pycomm import errors

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

NUMEL = 8192  # 32 KiB: a codec encodes sums of 16 KiB or more


class Slopes(nn.Module):
    """The gradient of each parameter is the input itself."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(NUMEL, dtype=dtype))

    def forward(self, slopes: torch.Tensor) -> torch.Tensor:
        return (self.weight * slopes).sum() + (self.bias * slopes).sum()


def values_of(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(NUMEL, generator=generator) * torch.logspace(-6, 0, NUMEL)


def plain_group() -> Any:
    import pycomm

    return dist.new_group(backend="pycomm", pg_options=pycomm.Options(wire_dtype="fp32"))


@contextmanager
def encoded(numel: int) -> Iterator[None]:
    """How many values the default group, of int8, sends encoded meanwhile."""
    import pycomm

    before = pycomm.codec_stats().elements_sent
    yield
    assert pycomm.codec_stats().elements_sent - before == numel


def gradients(model: Any, slopes: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(slopes).backward()
    return torch.cat([each.grad.detach().clone() for each in model.parameters()])


def wrapper(rank: int, world_size: int) -> None:
    plain = plain_group()
    for dtype, wire in (
        (torch.float32, None),
        (torch.float32, "fp32"),
        (torch.float32, torch.float32),
        (torch.float32, {"bias": "fp32"}),
        (torch.float32, {"bias": None}),
        (torch.bfloat16, "fp32"),
        (torch.bfloat16, "group"),  # the codec of a group is for float32
        (torch.float64, None),
        (torch.float64, "group"),
    ):
        with encoded(0):
            found = []
            for group in (None, plain):
                model = wrap(Slopes(dtype), wire_dtype=wire, process_group=group)
                slopes = values_of(rank).to(dtype)
                found.append([gradients(model, slopes) for _ in range(2)])
        for mine, other in zip(*found, strict=True):  # step by step: buckets change once
            assert torch.equal(mine, other), (dtype, wire)
        every = torch.stack([values_of(each).to(dtype).double() for each in range(world_size)])
        wrong = (found[0][0][:NUMEL].double() - every.mean(0)).abs()
        assert (wrong <= every.abs().sum(0) * torch.finfo(dtype).eps).all(), (dtype, wire)


def as_the_group(rank: int, world_size: int) -> None:
    """By default a wrapper sends what ``wire_dtype="int8"`` sends over a group without a codec."""
    import pycomm

    each = 2 * (world_size - 1) * NUMEL // world_size  # a rank sends in an all_reduce
    plain = plain_group()
    for options in ({}, {"wire_dtype": "group"}, {"wire_dtype": {"*": "group"}}):
        model, named = wrap(Slopes(), **options), None
        with encoded(4 * each):  # two parameters, two steps
            mine = [gradients(model, values_of(rank)) for _ in range(2)]
        with encoded(0):
            named = wrap(Slopes(), wire_dtype="int8", process_group=plain)
            other = [gradients(named, values_of(rank)) for _ in range(2)]
            # A group without a codec.
            exact = gradients(wrap(Slopes(), process_group=plain, **options), values_of(rank))
        for ours, theirs in zip(mine, other, strict=True):
            assert torch.equal(ours, theirs), options
        assert not torch.equal(mine[0], exact), options

    def streaming(model: nn.Module, group: Any, **options: Any) -> Any:
        return pycomm.StreamingDiLoCo(model, sync_every=2, process_group=group, **options)

    with encoded(2 * 2 * each):  # both parameters, at steps 2 and 4
        mine = averages_of(streaming, rank, None)
    with encoded(0):
        exact = averages_of(streaming, rank, plain)

    def as_int8(model: nn.Module, group: Any) -> Any:
        return streaming(model, group, wire_dtype="int8")

    assert torch.equal(mine, averages_of(as_int8, rank, plain))
    assert not torch.equal(mine, exact)


def one_operation(rank: int, world_size: int) -> None:
    """``codecs.all_reduce``: None and "fp32" are none."""
    import pycomm

    each = 2 * (world_size - 1) * NUMEL // world_size
    for wire, sent in ((None, 0), ("fp32", 0), (torch.float32, 0), ("int8", each)):
        with encoded(sent):
            pycomm.codecs.all_reduce(values_of(rank), wire)


def still_encoded(rank: int, world_size: int) -> None:
    """The group's codec serves everything else, and the wrapper's own its gradients."""
    each = 2 * (world_size - 1) * NUMEL // world_size  # a rank sends in an all_reduce
    with encoded(2 * each):
        gradients(wrap(Slopes(), wire_dtype={"bias": "fp32", "*": "int8"}), values_of(rank))
        dist.all_reduce(values_of(rank))
    hooked = wrap(Slopes())  # the hook's own operations
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    with encoded(2 * each):
        gradients(hooked, values_of(rank))
    for wire in ("fp32", None):
        hooked = wrap(Slopes(), wire_dtype=wire)
        hooked.register_comm_hook(None, default_hooks.allreduce_hook)
        with encoded(0):
            gradients(hooked, values_of(rank))


def averages_of(make: Callable[[nn.Module, Any], Any], rank: int, group: Any) -> torch.Tensor:
    model = Slopes()
    local = make(model, group)
    for step in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += values_of(rank, step)
        local.step()
    local.sync()
    return torch.cat([parameter.detach() for parameter in model.parameters()])


def averages(rank: int, world_size: int) -> None:
    import pycomm

    plain = plain_group()
    makes: dict[str, Callable[[nn.Module, Any], Any]] = {
        "LocalSGD": lambda model, group: pycomm.LocalSGD(model, sync_every=2, process_group=group),
        "DiLoCo": lambda model, group: pycomm.DiLoCo(model, sync_every=2, process_group=group),
        "SparseLoCo": lambda model, group: pycomm.SparseLoCo(
            model, sync_every=2, process_group=group
        ),
    }
    for wire in (None, "fp32"):
        makes[f"StreamingDiLoCo {wire}"] = lambda model, group, wire=wire: pycomm.StreamingDiLoCo(
            model, sync_every=2, process_group=group, wire_dtype=wire
        )
    found = {}
    for name, make in makes.items():
        with encoded(0):
            found[name] = averages_of(make, rank, None)
        assert torch.equal(found[name], averages_of(make, rank, plain)), name
    assert torch.equal(found["DiLoCo"], found["StreamingDiLoCo None"])
    rows = torch.stack([values_of(each, 0) + values_of(each, 1) for each in range(world_size)])
    once = Slopes()
    local = pycomm.LocalSGD(once, sync_every=1)
    with torch.no_grad():
        once.weight += rows[rank]
    local.step()
    wrong = (once.weight.detach().double() - rows.double().mean(0)).abs()
    assert (wrong <= rows.double().abs().sum(0) * torch.finfo(torch.float32).eps).all()


def between_hosts(rank: int, world_size: int) -> None:
    """``sync_every``, each rank on a host of its own."""
    from pycomm._group import averaging

    averaging.host_identity = lambda: f"host {rank}"
    plain = plain_group()
    found = []
    with encoded(0):
        for group in (None, plain):
            model = wrap(Slopes(), sync_every=2, process_group=group)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += values_of(rank)
            model.sync()
            found.append(model.module.weight.detach().clone())
    assert torch.equal(*found)


def batch_norm(rank: int, world_size: int) -> None:
    """Of 2,048 channels the backward pass sums 4,096 numbers: large enough to be encoded."""
    import pycomm

    plain = plain_group()
    found = []
    with encoded(0):
        for group in (None, plain):
            layer = pycomm.SyncBatchNorm(2048, process_group=group)
            batch = torch.randn(4, 2048, generator=torch.Generator().manual_seed(rank))
            batch.requires_grad_()
            (layer(batch) * batch.detach().square()).sum().backward()
            assert batch.grad is not None
            found.append(batch.grad)
    assert torch.equal(*found)


def in_turn(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        globals()[name](rank, world_size)


@pytest.mark.parametrize("name", ["wrapper", "averages", "between_hosts", "batch_norm"])
def test_a_codec_of_the_group_does_not_reach(name: str) -> None:
    ranks.run_ranks(
        2, in_turn, args=([name],), pg_options={"wire_dtype": "int8"}, preload=ranks.TORCH_DDP
    )


def test_all_other_sums_are_encoded() -> None:
    ranks.run_ranks(
        2,
        in_turn,
        args=(["still_encoded"],),
        pg_options={"wire_dtype": "int8"},
        preload=ranks.TORCH_DDP,
    )


def test_three_ranks_over_tcp() -> None:
    ranks.run_ranks(
        3,
        in_turn,
        args=(["wrapper", "averages", "batch_norm"],),
        pg_options={"wire_dtype": "int8"},
        env={"PYCOMM_TRANSPORT": "tcp"},  # of both groups
        preload=ranks.TORCH_DDP,
        timeout_s=200,
    )


@pytest.mark.parametrize("name", ["as_the_group", "one_operation"])
@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_wrapper_does_as_its_group_by_default(name: str, by: str) -> None:
    """The options of a group that is made later come before the variable, as for any option."""
    ranks.run_ranks(
        2,
        in_turn,
        args=([name],),
        pg_options={"wire_dtype": "int8"} if by == "option" else None,
        env={"PYCOMM_WIRE_DTYPE": "int8"} if by == "variable" else None,
        preload=ranks.TORCH_DDP,
    )


def built_in_hook(rank: int, world_size: int) -> str:
    model = wrap(Slopes())
    with pytest.raises(errors.UnsupportedError) as refused:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    wrap(Slopes(), wire_dtype=None)._register_builtin_comm_hook(
        dist.BuiltinCommHookType.FP16_COMPRESS
    )
    return str(refused.value)


def test_torchs_built_in_fp16_hook_beside_a_codec_of_the_group() -> None:
    for text in ranks.run_ranks(
        2, built_in_hook, pg_options={"wire_dtype": "int8"}, preload=ranks.TORCH_DDP
    ).values():
        assert "the group's wire_dtype is 'int8', which the wrapper follows" in text

"""A rank dies in the middle of a step, and the others commit the sum over those who live."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
import signal
from typing import Any

import pytest
import ranks
import torch
from ddp_rig import wrap
from elastic_rig import Net, announce, await_ranks, batch_of

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

STEPS = 5
WIRES: dict[str, float] = {"fp32": 2e-6, "bf16": 2.0**-7, "fp16": 2.0**-9, "int8": 0.05}
"""With how much an average of this wire dtype may be wrong, of the largest gradient."""


def takes_of(member: int, step: int, doomed: int) -> str:
    """The one that dies is the only one that uses the branch to the right."""
    return "right" if member == doomed and step > 0 else "left"


def exact(module: Net, members: tuple[int, ...], step: int, doomed: int) -> dict[str, torch.Tensor]:
    """The averages over these members in float64, at the module's present parameters."""
    sums: dict[str, torch.Tensor] = {}
    for member in members:
        alone = copy.deepcopy(module).double()
        alone.zero_grad()
        batch = batch_of(member, step).double()
        alone(batch, takes_of(member, step, doomed)).square().mean().backward()
        for name, each in alone.named_parameters():
            if each.grad is not None:
                sums[name] = sums.get(name, 0) + each.grad / len(members)
    return sums


@dataclasses.dataclass
class Told:
    """What a rank saw after each step of one wrapper."""

    members: list[tuple[int, ...]]
    bits: list[str]
    stats: dict[str, Any]


def train(rank: int, world_size: int, doomed: int, dies_in: str, where: str) -> dict[str, Told]:
    """One wrapper per wire dtype, in turn. In step 2 the doomed rank kills itself in one of them.

    Those before it have finished the step; those behind it find out when their next one begins.
    """
    import pycomm

    models = {}
    optimizers = {}
    told = {wire: Told([], [], {}) for wire in WIRES}
    for wire in WIRES:
        models[wire] = wrap(
            Net(unused=True),
            wire_dtype=wire,
            find_unused_parameters=True,
            bucket_cap_mb=0.02,
            elastic=pycomm.Elastic(),
        )
        optimizers[wire] = torch.optim.SGD(models[wire].parameters(), lr=0.05)
    fatal = False
    others = [each for each in range(world_size) if each != doomed]

    def die(at: str) -> None:
        if not fatal:
            return
        if rank == doomed and where == at:
            await_ranks("in the step", others)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank != doomed and at == "in backward":
            announce("in the step", rank)

    for model in models.values():
        model.module.wide.weight.register_hook(lambda grad: die("in backward"))
        model.module.first.register_forward_hook(lambda *_: die("in forward"))
    for step in range(STEPS):
        for wire, model in models.items():
            fatal = step == 2 and wire == dies_in
            optimizers[wire].zero_grad()
            before = copy.deepcopy(model.module)
            output = model(batch_of(rank, step), takes_of(rank, step, doomed))
            output.square().mean().backward()
            members = model.elastic.members
            assert model.elastic.rank == members.index(rank)
            assert model.elastic.leader == (members[0] == rank)
            assert model.elastic.step == step + 1
            expected = exact(before, members, step, doomed)
            for name, each in model.module.named_parameters():
                assert (each.grad is None) == (name not in expected), (wire, step, name)
                if each.grad is not None:
                    largest = max(float(value.abs().max()) for value in expected.values())
                    error = float((each.grad - expected[name]).abs().max())
                    assert error <= WIRES[wire] * largest, (wire, step, name, error / largest)
            digest = hashlib.sha256()
            for tensor in (*model.parameters(), *model.buffers()):
                digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
            told[wire].members.append(members)
            told[wire].bits.append(digest.hexdigest()[:16])
            optimizers[wire].step()
    for wire, model in models.items():
        told[wire].stats = dataclasses.asdict(model.stats())
    return told


CASES = [
    (2, 1, "fp16", "in backward"),
    (2, 0, "int8", "in backward"),
    (3, 0, "bf16", "in backward"),
    (3, 2, "int8", "in forward"),
    (4, 1, "fp32", "in backward"),
]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("world_size", "doomed", "wire", "where"), CASES)
def test_survivors_go_on(
    world_size: int, doomed: int, wire: str, where: str, transport: str
) -> None:
    results = ranks.run_ranks(
        world_size,
        train,
        args=(doomed, wire, where),
        timeout_s=120,
        check=False,
        pg_options={"transport": transport},
        preload=ranks.TORCH_DDP,
    )
    everyone = tuple(range(world_size))
    alive = tuple(each for each in everyone if each != doomed)
    assert results[doomed].exit_code == -signal.SIGKILL
    assert all(results[each].ok for each in alive), results.describe()
    told = [results[each].value for each in alive]
    if where == "in backward":
        assert any(survivor[wire].stats["redone_steps"] for survivor in told)
    order = list(WIRES)
    for each in WIRES:
        first_without = 3 if order.index(each) < order.index(wire) else 2
        for survivor in told:
            assert survivor[each].bits == told[0][each].bits
            assert survivor[each].members == [
                everyone if step < first_without else alive for step in range(STEPS)
            ]
            stats = survivor[each].stats
            assert (stats["lost_ranks"], stats["epochs"]) == (1, 2)
            assert stats["redone_steps"] <= 1  # 0: it was known when the step began
            assert stats["steps"] == STEPS

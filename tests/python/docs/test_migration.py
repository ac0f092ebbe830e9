"""docs/from-*.md: every "after" runs on two ranks, in the order of the pages."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import ranks
from documents import read

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]

PAGES = [
    *("docs/from-torch.md", "docs/from-oneccl.md", "docs/from-horovod.md"),
    "docs/from-diloco.md",
]


def after_blocks() -> list[str]:
    text = "".join(map(read, PAGES))
    return re.findall(r"^```python after\n(.*?)^```$", text, re.M | re.S)


def documented_arguments(port: int) -> list[str]:
    """With which the page starts the program of its elastic chapter, at a port of this host."""
    (command,) = re.findall(r"`python -m pycomm run --elastic (.*?)`", read("docs/from-horovod.md"))
    _, _, arguments = command.partition(" train.py")
    return re.sub(r"//\S+:\d+", f"//localhost:{port}", arguments).split()


PLAIN_LOOP = """\
for batch in batches:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
"""


def batches_of(block: int, rank: int) -> list[Any]:
    import torch

    torch.manual_seed(10 * block + rank)
    return [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(4)]


def by_the_equations(
    number: int, inner: Callable[[Any], Any], fragments: list[list[int]], delay: int
) -> list[float]:
    """DiLoCo of two workers in float64: SGD with 0.7 and Nesterov 0.9 outside, N = 4, alpha = 0.

    Returns all parameters after sync().
    """
    import torch
    from torch import nn

    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    anchor = [parameter.detach().clone() for parameter in first.parameters()]
    velocity = [torch.zeros_like(each) for each in anchor]
    models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double() for _ in "ab"]
    for model in models:
        model.load_state_dict(first.state_dict())
    optimizers = [inner(model.parameters()) for model in models]
    parameters = [list(model.parameters()) for model in models]

    def now(which: int) -> dict[int, Any]:
        return {
            index: torch.stack([each[index].detach().clone() for each in parameters])
            for index in fragments[which]
        }

    def land(values: dict[int, Any]) -> None:
        for index, both in values.items():
            moved = anchor[index] - both.mean(0)
            velocity[index] = 0.9 * velocity[index] + moved
            anchor[index] = anchor[index] - 0.7 * (moved + 0.9 * velocity[index])
            for each in parameters:
                each[index].data.copy_(anchor[index])

    flying: dict[int, dict[int, Any]] = {}  # by the step of its landing
    stride = 4 // len(fragments)
    batches = zip(batches_of(number, 0), batches_of(number, 1), strict=True)
    for step, parts in enumerate(batches, 1):
        for model, optimizer, (inputs, target) in zip(models, optimizers, parts, strict=True):
            optimizer.zero_grad()
            (model(inputs.double()) - target).square().mean().backward()
            optimizer.step()
        if step % stride == 0:
            flying[step + delay] = now(step // stride - 1)
        land(flying.pop(step, {}))
    for values in flying.values():
        land(values)
    for which in range(len(fragments)):
        land({i: both for i, both in now(which).items() if not torch.equal(both[0], anchor[i])})
    return [float(each) for values in anchor for each in values.flatten()]


def run_blocks(
    rank: int, world_size: int, folder: str, arguments: list[str]
) -> list[tuple[list[float], list[float]]]:
    """Each block's parameters at the end; and, of those with the plain loop, what one process has
    that averages the loss over the batches of all ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import pycomm

    def build_model() -> nn.Module:
        torch.manual_seed(rank)  # rank 0's is what all get
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]).float() - batch[1]).square().mean()

    def flat(model: nn.Module) -> list[float]:
        return [float(each) for p in model.parameters() for each in p.detach().flatten()]

    def alone(number: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parts in zip(*(batches_of(number, each) for each in range(world_size)), strict=True):
            optimizer.zero_grad()
            torch.stack([loss_of(model, part) for part in parts]).mean().backward()
            optimizer.step()
        return flat(model)

    os.chdir(folder)  # for a checkpoint
    sys.argv[1:] = arguments
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(160, width, generator=generator) for width in (4, 1)]
    trained = []
    for number, block in enumerate(after_blocks()):
        batches = batches_of(number, rank)
        # The group is there already: one rendezvous serves all blocks.
        assert 'dist.init_process_group("pycomm")\n' in block
        block = block.replace('dist.init_process_group("pycomm")\n', "")
        names: dict[str, Any] = {
            "build_model": build_model,
            "loss_of": loss_of,
            "batches": batches,
            "torch": torch,
            "dist": dist,
            "pycomm": pycomm,
            "signal": signal,
            "os": os,
            "sys": sys,
            "dataset": torch.utils.data.TensorDataset(*samples),
            "epochs": 3,
            "print": lambda *_: None,
        }
        exec(compile(block, f"migration, after {number + 1}", "exec"), names)
        for lines in re.findall(r"^if not join and .*:\n((?:    .*\n)+)", block, re.M):
            dist.barrier()  # one member has saved it
            exec(textwrap.dedent(lines), names)
        trained.append((flat(names["model"]), alone(number) if PLAIN_LOOP in block else []))
    return trained


Trained = list[tuple[list[float], list[float]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What rank 0 has of each block; rank 1 has the same."""
    folder = tmp_path_factory.mktemp("blocks")
    assert len(after_blocks()) == 11
    args = str(folder), documented_arguments(ranks.free_port())
    options: dict[str, Any] = {"args": args, "preload": ranks.TORCH_DDP}
    first, second = ranks.run_ranks(2, run_blocks, timeout_s=200, **options).values()
    assert first == second and len(first) == 11
    assert [path.name for path in folder.glob("*.pt")] == ["checkpoint.pt"]
    return list(first)


def test_every_after_trains_all_ranks_as_one_process_would(trained: Trained) -> None:
    compared = [(mine, alone) for mine, alone in trained if alone]
    assert len(compared) == 4
    for mine, alone in compared:
        assert mine == pytest.approx(alone, rel=1e-2, abs=1e-3)  # one of them sends fp16


def test_torchfts_and_hiveminds_after_follow_the_equations(trained: Trained) -> None:
    """The model is too small for int8 to be sent, so both are close."""
    import torch

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    torchft, hivemind = (i for i, block in enumerate(after_blocks()) if "DiLoCo" in block)
    for number, expected in (
        (torchft, by_the_equations(torchft, sgd, [[0, 1], [2, 3]], delay=1)),
        (hivemind, by_the_equations(hivemind, adamw, [[0, 1, 2, 3]], delay=0)),
    ):
        assert trained[number][0] == pytest.approx(expected, rel=0.0, abs=1e-6)

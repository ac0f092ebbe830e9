"""A balanced training that is cut, also between passes that accumulate, and resumed: bit by bit the
one that was not cut. Wrapper, sampler and loaders are real; only the seconds are made up."""

from __future__ import annotations

import collections
import io
import math
from typing import Any

import pytest
import ranks
import torch
from ddp_rig import wrap
from torch import nn
from torch.utils.data import DataLoader, Dataset

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(400)]

WORKERS, PREFETCH = (0, 2), 2
GLOBAL_BATCH, BATCHES, EPOCHS = 24, 9, 6  # so that epochs end between two passes
LENGTH = GLOBAL_BATCH * BATCHES + 5
CUTS = range(1, BATCHES * EPOCHS)


class Indices(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Timed:
    """A wrapper's log whose seconds follow from the samples, and go on after a cut.

    The real ones would deal other shares in each run.
    """

    def __init__(self, model: Any, steps: int, samples: list[float]) -> None:
        self._log = model.step_log
        self._before = steps, samples
        self.step_log = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def position(self) -> tuple[int, list[float]]:
        """The steps that were made, and the samples of the last one."""
        steps, samples = self._before
        found = self._log.records(0)
        return steps + len(found), list(found[-1].samples) if found else samples

    def records(self, since: int) -> list[Any]:
        before, samples = self._before
        found = []
        for step, record in enumerate(self._log.records(0)):
            seconds = [math.nan] * 2
            if before + step > 0:
                assert all(map(math.isfinite, record.last_seconds)), "the last step's time is lost"
                seconds = self._seconds(before + step - 1, samples)
            found.append(record._replace(last_seconds=seconds))
            samples = record.samples
        return found[since:]

    def _seconds(self, step: int, samples: list[float]) -> list[float]:
        speeds = (1.0, 3.0) if step < 10 else (2.0, 1.0)
        return [
            (4.0 + speed * each) * (1.0 + 0.01 * ((7 * step + rank) % 5))
            for rank, (speed, each) in enumerate(zip(speeds, samples, strict=True))
        ]


class Deep(nn.Module):
    """Not linear, so that an error of a step grows in those after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        inputs = torch.sin(indices[:, None] * torch.tensor([0.7, 1.3, 2.9]))
        return self.layers(inputs)


def train(
    rank: int, accumulate: int, saved: dict[str, Any] | None, until: int = -1
) -> dict[str, Any]:
    """Each pass's epoch and indices, the average of each step, and a checkpoint after ``until``."""
    import pycomm

    net = Deep()
    if saved is not None:
        net.load_state_dict(saved["net"])
    model = wrap(net, weight="samples", accumulate=accumulate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    log = Timed(model, *(saved["log"] if saved else (0, [])))
    sampler = pycomm.BalancedSampler(
        Indices(),
        global_batch=GLOBAL_BATCH,
        model=log,
        lookahead=max(WORKERS) * PREFETCH + 2 * accumulate,
    )
    passes = first = 0
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
        model.load_communication_state_dict(saved["wrapper"])
        sampler.load_state_dict(saved["sampler"])
        for parameter, grad in zip(net.parameters(), saved["grads"], strict=True):
            parameter.grad = grad
        passes, first = saved["passes"], saved["epoch"]
    # Fork: an interpreter per worker would take as long as all the rest.
    more: dict[str, Any] = {"prefetch_factor": PREFETCH, "multiprocessing_context": "fork"}
    workers = WORKERS[rank]
    loader = DataLoader(
        Indices(),
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        **(more if workers else {}),
    )
    dealt: list[tuple[int, list[int]]] = []
    averages: list[torch.Tensor] = []
    state = None
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for indices in loader:
            dealt.append((epoch, indices.tolist()))
            (model(indices.float()).square().mean() / accumulate).backward()
            passes += 1
            if passes % accumulate == 0:
                averages.append(torch.cat([each.grad.flatten() for each in net.parameters()]))
                optimizer.step()
                optimizer.zero_grad()
            if passes == until:
                state = {
                    "net": net.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "wrapper": model.communication_state_dict(),
                    "sampler": sampler.state_dict(),
                    "grads": [each.grad for each in net.parameters()],
                    "log": log.position(),
                    "passes": passes,
                    "epoch": epoch,
                }
                break
        if state is not None:
            break
    weights = torch.cat([each.detach().flatten() for each in net.parameters()])
    changes = sampler.stats().changes
    return {
        "dealt": dealt,
        "averages": averages,
        "weights": weights,
        "state": state,
        "changes": changes,
    }


def cut_everywhere(rank: int, world_size: int, accumulate: int) -> dict[str, Any]:
    whole = train(rank, accumulate, None)
    wrong = []
    for cut in CUTS if accumulate == 2 else CUTS[::3]:  # at each place within a step
        before = train(rank, accumulate, None, cut)
        file = io.BytesIO()
        torch.save(before["state"], file)
        file.seek(0)
        after = train(rank, accumulate, torch.load(file))
        if before["dealt"] + after["dealt"] != whole["dealt"]:
            wrong.append((cut, "other indices"))
        averages = before["averages"] + after["averages"]
        alike = len(averages) == len(whole["averages"]) and all(
            map(torch.equal, averages, whole["averages"])
        )
        if not alike or not torch.equal(after["weights"], whole["weights"]):
            wrong.append((cut, "other bits"))
    return {"whole": whole, "wrong": wrong}


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_run_that_is_cut_after_any_pass_goes_on_as_one_that_is_not(accumulate: int) -> None:
    found = ranks.run_ranks(
        2, cut_everywhere, args=(accumulate,), timeout_s=300, preload=ranks.TORCH_DDP
    ).values()
    assert [each["wrong"] for each in found] == [[], []]
    first, second = (each["whole"] for each in found)
    assert torch.equal(first["weights"], second["weights"])
    assert first["changes"] >= 1  # shares follow the seconds, so a state has something to keep
    trained: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
    for (epoch, mine), (other, theirs) in zip(first["dealt"], second["dealt"], strict=True):
        assert epoch == other and len(mine) + len(theirs) == GLOBAL_BATCH
        trained[epoch] += mine + theirs
    for epoch in range(EPOCHS):
        assert len(set(trained[epoch])) == len(trained[epoch]) == BATCHES * GLOBAL_BATCH

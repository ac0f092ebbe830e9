"""Three ranks with 0, 2 and 4 workers deal alike, although their loaders run ahead by different
numbers of batches. Loaders and processes are real; the model is a stand-in with a store."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import ranks
from step_logs import StoreLog
from torch.distributed import FileStore
from torch.utils.data import DataLoader, Dataset

from pycomm.balance.balanced_sampler import BalancedSampler

pytestmark = pytest.mark.ci

WORKERS = (0, 2, 4)
PREFETCH = 2
LENGTH, GLOBAL_BATCH = 500, 24
STEPS = LENGTH // GLOBAL_BATCH
SPEEDS = (4.0, 1.0, 2.0)  # seconds per sample
LOOKAHEAD = max(WORKERS) * PREFETCH + 2


class Indices(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


def log_of(path: str, rank: int, world_size: int) -> StoreLog:
    return StoreLog(FileStore(path, world_size), rank, world_size)


def loader_of(
    sampler: BalancedSampler, workers: int, *, persistent: bool = False
) -> DataLoader[int]:
    # Fork: an interpreter per worker would take as long as all the rest.
    more: dict[str, Any] = {"prefetch_factor": PREFETCH, "multiprocessing_context": "fork"}
    return DataLoader(
        Indices(),
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
        **(more if workers else {}),
    )


def seconds(step: int, rank: int, samples: int) -> float:
    """Speeds change places in step 30, and no two steps take equally long."""
    speeds = SPEEDS if step < 30 else SPEEDS[::-1]
    return (5.0 + speeds[rank] * samples) * (1.0 + 0.01 * ((7 * step + rank) % 5))


def train(rank: int, world_size: int, path: str) -> tuple[list[list[list[int]]], Any]:
    log = log_of(path, rank, world_size)
    sampler = BalancedSampler(Indices(), global_batch=GLOBAL_BATCH, model=log, lookahead=LOOKAHEAD)
    loader = loader_of(sampler, WORKERS[rank], persistent=True)
    epochs, step = [], 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        dealt = []
        # The last epoch is left after five steps and begun again: workers had more.
        for most in (5, None) if epoch == 2 else (None,):
            for batch in itertools.islice(loader, most):
                dealt.append(batch.tolist())
                log.train(len(batch), seconds(step, rank, len(batch)))
                step += 1
        epochs.append(dealt)
    return epochs, sampler.stats()


def test_ranks_whose_loaders_run_ahead_differently_deal_alike(tmp_path: Path) -> None:
    results = ranks.run_ranks(3, train, args=(str(tmp_path / "store"),), init="none").check()
    epochs = [value[0] for value in results.values()]
    assert len({str(value[1]) for value in results.values()}) == 1
    sizes = set()
    for of_ranks in zip(*epochs, strict=True):
        assert [len(batches) for batches in of_ranks] == [STEPS] * 3
        steps = list(zip(*of_ranks, strict=True))
        assert all(sum(len(batch) for batch in step) == GLOBAL_BATCH for step in steps)
        dealt = [index for step in steps for batch in step for index in batch]
        assert len(set(dealt)) == len(dealt) == STEPS * GLOBAL_BATCH
        sizes |= {tuple(len(batch) for batch in step) for step in steps}
    assert (8, 8, 8) in sizes  # at the beginning
    assert any(size[0] < size[2] < size[1] for size in sizes)  # with the first speeds
    assert any(size[2] < size[0] and size[2] < size[1] for size in sizes)  # with the others


def run_ahead(rank: int, world_size: int, path: str) -> str:
    log = log_of(path, rank, world_size)
    sampler = BalancedSampler(Indices(), global_batch=GLOBAL_BATCH, model=log, lookahead=4)
    try:
        for number, _ in enumerate(loader_of(sampler, WORKERS[rank])):
            if number == 2:
                return "trained"
            # The rank that fails is gone, so the others make their steps without it.
            log._exchange = lambda numbers: [numbers] * 3  # type: ignore[method-assign]
            log.train(8, 1.0)
    except RuntimeError as error:
        return str(error)
    return "ended"


def test_a_loader_that_runs_ahead_too_far_is_named(tmp_path: Path) -> None:
    values = ranks.run_ranks(3, run_ahead, args=(str(tmp_path / "store"),), init="none").values()
    assert values[0] == "trained"  # no workers
    for rank in (1, 2):
        assert values[rank].startswith(f"rank {rank}'s loader has run 4 batches ahead of training")
        assert "lookahead=4" in values[rank] and "num_workers * prefetch_factor" in values[rank]


def max_batches(rank: int, world_size: int, path: str) -> Any:
    log = log_of(path, rank, world_size)
    most = [None, 4, 12][rank]
    sampler = BalancedSampler(Indices(), global_batch=GLOBAL_BATCH, model=log, max_batch=most)
    return sampler.stats().shares


def test_each_rank_knows_the_others_max_batch(tmp_path: Path) -> None:
    results = ranks.run_ranks(3, max_batches, args=(str(tmp_path / "store"),), init="none")
    assert results.check().values() == [(10, 4, 10)] * 3

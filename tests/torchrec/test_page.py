"""docs/torchrec.md: its programs run on two ranks, in the order in which they stand there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from ranks import run_ranks
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from pycomm.integrations.torchrec import read_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "torchrec.md"
STARTS = 'dist.init_process_group("pycomm")\n'  # the test's ranks have a group
TABLES = ["user", "page_a", "page_b", "text", "hour"]
SAMPLES = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(40, 8, name=each, feature_names=[each]) for each in TABLES]
        self.sparse = EmbeddingBagCollection(tables=tables)
        self.dense = nn.Linear(8 * len(TABLES), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        scores: torch.Tensor = self.dense(self.sparse(features).values())
        return scores


def features_of(names: list[str], largest: int) -> KeyedJaggedTensor:
    ids = torch.randint(0, largest, (len(names) * SAMPLES,))
    return KeyedJaggedTensor.from_lengths_sync(names, ids, torch.ones_like(ids))


def samples_of() -> list[tuple[list[int], float]]:
    """Raw ids, of one user more than of another, and what the user did."""
    ids = torch.randint(0, 2**63 - 1, (SAMPLES, SAMPLES)).tolist()
    return [(row[: 1 + at], float(at % 2)) for at, row in enumerate(ids)]


def run_page(rank: int, world_size: int, folder: str) -> list[int]:
    import numpy

    os.chdir(folder)
    torch.manual_seed(rank)
    losses: list[float] = []

    def loss_of(found: Any, labels: torch.Tensor) -> torch.Tensor:
        values = found.values() if hasattr(found, "keys") else found
        loss = (values.sum(1) - labels).square().mean()
        losses.append(float(loss.detach()))
        return loss

    names: dict[str, Any] = {
        "dist": dist,
        "torch": torch,
        "numpy": numpy,
        "build_model": Model,
        "loss_of": loss_of,
        "batches": [(features_of(TABLES, 40), torch.ones(SAMPLES))] * 20,
        "reader": lambda: [samples_of()] * 60,
    }
    blocks = re.findall(r"^```python( after)?\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    for number, (after, block) in enumerate(blocks):
        assert (STARTS in block) == (number == 0 or bool(after))
        code = compile(block.replace(STARTS, ""), f"{PAGE.name}, block {number + 1}", "exec")
        exec(code, names)
        if number == 0:
            assert len(losses) == 20 and losses[-1] < losses[0] / 2
        if after:
            assert float(names["loss"].detach()) < 0.2  # of 0.69 at first
            parts = {n: p for n, p in names["model"].named_parameters() if "sparse" in n}
            assert parts and not any(part.is_meta for part in parts.values())
    found = read_table(names["model"], "user")
    return [len(blocks), 0 if found is None else len(found.ids)]


@pytest.mark.needs_native
@pytest.mark.timeout(400)
def test_the_programs_of_the_page(tmp_path: Path) -> None:
    values = run_ranks(2, run_page, args=(str(tmp_path),), preload=training.PRELOAD).values()
    assert [blocks for blocks, _ in values] == [5, 5]
    assert values[0][1] > 0  # ids that the last program has learnt
    import numpy

    saved = numpy.load(tmp_path / "user.npz")
    assert saved["ids"].tolist() == list(range(40)) and saved["rows"].shape == (40, 8)
    assert (tmp_path / "saved" / ".metadata").is_file()

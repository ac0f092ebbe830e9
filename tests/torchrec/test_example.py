"""examples/train_clicks.py as a user runs it, and as good as one process without TorchRec."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_python
from sklearn.metrics import roc_auc_score
from torch import nn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_clicks.py"
LINES = 60
STEPS, SAMPLES, HELD_OUT = 400, 512, (0, 4096)
CLOSE = 0.005  # AUCs of different seeds differ by less


def run_example(ranks: int, out: Path) -> tuple[float, dict[str, Any]]:
    """The AUC that it prints, and the table that it saves."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done: subprocess.CompletedProcess[str] = run_python(
        [*launcher, str(EXAMPLE), str(out)], timeout_s=300.0
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = re.fullmatch(
        rf"AUC (0\.\d+); (\d+) ids, 8 columns in {re.escape(str(out))}\n", done.stdout
    )
    assert printed is not None, done.stdout
    saved = dict(np.load(out))
    assert int(printed[2]) == len(saved["ids"])
    return float(printed[1]), saved


def visits_of_the_example() -> Any:
    """Its function, without running what follows it."""
    source = EXAMPLE.read_text().partition("\ntables = ")[0]
    names: dict[str, Any] = {}
    exec(compile(source, str(EXAMPLE), "exec"), names)
    return names["visits"]


def auc_of_plain_torch() -> float:
    """nn.EmbeddingBag over a vocabulary that is known before, one process, Adagrad."""
    visits = visits_of_the_example()
    vocabulary = visits(10**6, 60_000)[0].values().unique()

    def rows(features: Any) -> torch.Tensor:
        return torch.searchsorted(vocabulary, features.values()).view(-1, 5)

    torch.manual_seed(0)
    bags, dense = nn.EmbeddingBag(len(vocabulary), 8, mode="sum"), nn.Linear(8, 1)
    nn.init.uniform_(bags.weight, -(4096**-0.5), 4096**-0.5)  # as TorchRec's
    optimizer = torch.optim.Adagrad([*bags.parameters(), *dense.parameters()], lr=0.1)
    for step in range(STEPS):
        features, labels = visits(1 + step, SAMPLES)
        optimizer.zero_grad()
        scores = dense(bags(rows(features))).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(scores, labels).backward()
        optimizer.step()
    features, labels = visits(*HELD_OUT)
    with torch.no_grad():
        return float(roc_auc_score(labels, dense(bags(rows(features))).squeeze(1)))


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= LINES


@pytest.mark.needs_native
@pytest.mark.timeout(900)
def test_as_good_as_one_process(tmp_path: Path) -> None:
    alone = auc_of_plain_torch()
    one, _ = run_example(1, tmp_path / "one.npz")
    two, saved = run_example(2, tmp_path / "two.npz")
    assert alone > 0.8  # 0.5 is chance
    assert one == pytest.approx(alone, abs=2 * CLOSE)
    assert two == pytest.approx(alone, abs=2 * CLOSE)
    assert two == pytest.approx(one, abs=CLOSE)
    # A server that has this file only: the sum of a user's rows, with any weights over them, has
    # the order of the clicks in it. Least squares finds such weights.
    assert saved["rows"].dtype == np.float32 and saved["unseen"].shape == (2, 8)
    features, labels = visits_of_the_example()(*HELD_OUT)
    ids = features.values().numpy().reshape(-1, 5)
    assert np.isin(ids, saved["ids"]).mean() > 0.99
    pooled = saved["rows"][np.searchsorted(saved["ids"], ids).clip(max=len(saved["ids"]) - 1)]
    pooled = pooled.sum(1)
    weights, *_ = np.linalg.lstsq(pooled[::2], labels[::2].numpy() - 0.5, rcond=None)
    assert roc_auc_score(labels[1::2], pooled[1::2] @ weights) == pytest.approx(two, abs=0.02)

"""What benchmarks/time_to_loss.py computes from its measurements; nothing here measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

STEPS, TUNE_STEPS, EVERY = 600, 144, 24  # a round is as long as the gap between evaluations
SEEDS, TUNE_SEED = (0, 1, 2), 3
TARGET_STEP = 480  # of STEPS, 80 %
BASE = "fp32"
COMPUTE_S = 1.2
FRAGMENTS, DELAY = 4, 3
NINE = tuple(5e-4 * 2 ** (k / 2) for k in range(9))  # 0.0005 to 0.008
THREE = (1e-3, 2e-3, 4e-3)
OUTER = (0.4, 0.7, 1.0)


@dataclass(frozen=True)
class Method:
    name: str
    shown: str
    rounds: bool
    """Whether it communicates once in EVERY steps, not in each."""
    outer: tuple[float, ...] = ()

    def trials(self) -> list[tuple[float, float]]:
        """Pairs of inner and outer rate; the outer is 0 if there is none. As many for each."""
        if not self.outer:
            return [(inner, 0.0) for inner in NINE]
        return [(inner, outer) for inner in THREE for outer in self.outer]


METHODS = (
    Method("fp32", "sync fp32", False),
    Method("fp16", "sync fp16", False),
    Method("int8", "sync int8", False),
    Method("local_sgd", "LocalSGD", True),
    Method("diloco", "DiLoCo", True, OUTER),
    Method("streaming", "StreamingDiLoCo int8", True, OUTER),
    Method("sparse", "SparseLoCo", True, OUTER),
)
BY_NAME = {method.name: method for method in METHODS}


@dataclass(frozen=True)
class Run:
    """One training run. It is also the name of its file."""

    method: str
    inner: float
    outer: float
    seed: int
    steps: int

    def file(self) -> str:
        rates = f"{self.inner:.6f}-{self.outer:.2f}"
        return f"{self.method}-{rates}-seed{self.seed}-steps{self.steps}.json"


def best_rates(found: Iterable[Mapping[str, Any]], method: Method) -> tuple[float, float] | None:
    """The rates of the trial with the lowest loss; None while trials are missing.

    A loss that is no number counts as the worst.
    """
    losses = {
        (run["inner"], run["outer"]): run["losses"][-1]
        for run in found
        if run["method"] == method.name and run["steps"] == TUNE_STEPS
    }
    trials = method.trials()
    if not all(trial in losses for trial in trials):
        return None
    return min(trials, key=lambda trial: float(np.nan_to_num(losses[trial], nan=np.inf)))


def next_run(found: Sequence[Mapping[str, Any]]) -> Run | None:
    """The next run that is missing, trials first; None if none is."""
    done = {
        Run(run["method"], run["inner"], run["outer"], run["seed"], run["steps"]) for run in found
    }
    trials = [
        Run(method.name, *rates, TUNE_SEED, TUNE_STEPS)
        for method in METHODS
        for rates in method.trials()
    ]
    for run in trials:
        if run not in done:
            return run
    for seed in SEEDS:
        for method in METHODS:
            rates = best_rates(found, method)
            assert rates is not None
            run = Run(method.name, *rates, seed, STEPS)
            if run not in done:
                return run
    return None


def curves(found: Iterable[Mapping[str, Any]], name: str) -> np.ndarray[Any, Any]:
    """(seeds, evaluations): held-out losses after EVERY, 2 EVERY, ... steps."""
    mine = {
        run["seed"]: run["losses"]
        for run in found
        if run["method"] == name and run["steps"] == STEPS
    }
    return np.array([mine[seed] for seed in SEEDS])


def target_of(base: np.ndarray[Any, Any]) -> float:
    return float(base.mean(0)[TARGET_STEP // EVERY - 1])


def crossing(losses: Sequence[float], target: float) -> int | None:
    """The step of the first evaluation at or below the target; None: never."""
    for number, loss in enumerate(losses):
        if loss <= target:
            return (number + 1) * EVERY
    return None


def step_seconds(exposed_s: float, rounds: bool, compute_s: float = COMPUTE_S) -> float:
    """Seconds per step, from those that one step or one round adds to its computing."""
    return compute_s + exposed_s / (EVERY if rounds else 1)


def seconds_to(
    steps: int | None, method: Method, exposed: Mapping[str, float], compute_s: float = COMPUTE_S
) -> float | None:
    """The product of the two measurements; None: never.

    Args:
        exposed: Seconds that communication adds to a step, or to a round, by method.
    """
    if steps is None:
        return None
    seconds = steps * step_seconds(exposed[method.name], method.rounds, compute_s)
    if method.name == "streaming":  # its workers differ: one more average makes them equal
        seconds += exposed["local_sgd"]
    return seconds


def ring_ratio(numel: int, compute_s: float, bits_per_s: float = 0.941e9, ranks: int = 4) -> float:
    """r: how long a ring takes for the gradients in fp32, beside computing them.

    By default on a gigabit, of which TCP leaves 941 Mbit for the data.
    """
    return 2 * (ranks - 1) / ranks * 32 * numel / bits_per_s / compute_s


def spread(values: Sequence[float], digits: int = 2) -> str:
    low, middle, high = np.quantile(np.asarray(values), [0.25, 0.5, 0.75])
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

"""Which algorithm is best at which size, measured on the ranks that are there."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from pycomm.backend import topology_text
from pycomm.cli.timing import Case, measure
from pycomm.options import Options
from pycomm.tuning import Choice, TuningTable

_ALGORITHMS = {
    "all_reduce": ("ring", "recursive_doubling", "direct", "hierarchical"),
    "broadcast": ("ring", "binomial_tree"),
    "reduce": ("ring", "binomial_tree"),
    "all_gather": ("ring", "bruck", "recursive_doubling"),
    "reduce_scatter": ("ring", "direct", "recursive_halving"),
}
_ALL_SIZES = (1 << 62) - 1
_ROUNDS = 5
_GAIN = 0.95
"""What is no faster than this, against the static table, is no reason to leave it."""


def tune(
    collectives: Sequence[str], sizes: Sequence[int], seconds: float, tell: Callable[[str], None]
) -> TuningTable:
    """Measures all algorithms by turns, and returns rank 0's choice on every rank.

    Args:
        collectives: Which ones.
        sizes: Bytes of the whole tensor. A choice holds up to half way to the next size.
        seconds: How long each algorithm is timed at each size.
        tell: Gets a line for each size, on every rank.
    """
    topology = topology_text()
    choices: list[Choice] = []
    for collective in collectives:
        groups = _groups(collective, topology)
        best: list[tuple[int, str]] = []
        for nbytes in sorted(sizes):
            case = Case(collective, nbytes, torch.float32)
            times: dict[str, list[float]] = {name: [] for name in groups}
            for turn in range(_ROUNDS):
                names = list(groups) if turn % 2 == 0 else list(groups)[::-1]
                for name in names:
                    timing = measure(case, groups[name], seconds / _ROUNDS)
                    if timing.wrong:
                        raise ValueError(f"{collective} by {name} gives wrong results")
                    times[name].append(timing.seconds)
            medians = {name: statistics.median(values) for name, values in times.items()}
            best.append((case.nbytes, _fastest(medians)))
            listed = ", ".join(f"{name} {value * 1e6:.1f} us" for name, value in medians.items())
            tell(f"{collective} of {case.nbytes} bytes: {best[-1][1]} ({listed})")
        choices += _choices(collective, best)
        for name, group in groups.items():
            if name != "auto":
                dist.destroy_process_group(group)
    agreed: list[object] = [TuningTable(topology, tuple(choices))]
    dist.broadcast_object_list(agreed, 0)  # times differ a little between ranks' clocks
    table = agreed[0]
    assert isinstance(table, TuningTable)
    return table


def _fastest(medians: dict[str, float]) -> str:
    best = min(medians, key=lambda name: medians[name])
    return best if medians[best] < _GAIN * medians["auto"] else "auto"


def _choices(collective: str, best: Sequence[tuple[int, str]]) -> list[Choice]:
    choices: list[Choice] = []
    for index, (nbytes, name) in enumerate(best):
        last = index + 1 == len(best)
        # Nothing is known between two measured sizes; half way, counted in doublings.
        limit = nbytes if last else int((nbytes * best[index + 1][0]) ** 0.5)
        if choices and choices[-1].algorithm == name:
            choices.pop()
        choices.append(Choice(collective, limit, name))
    while choices and choices[-1].algorithm == "auto":  # beyond the last one it is auto anyway
        choices.pop()
    return choices


def _groups(collective: str, topology: str) -> dict[str, dist.ProcessGroup | None]:
    """A group for each algorithm; "auto" is the static table."""
    groups: dict[str, dist.ProcessGroup | None] = {
        "auto": dist.new_group(backend="pycomm", pg_options=Options(tuning="off"))
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in _ALGORITHMS[collective]:
            path = Path(folder) / f"{name}.json"
            choice = Choice(collective, _ALL_SIZES, name)
            path.write_text(TuningTable(topology, (choice,)).to_json(), encoding="utf-8")
            groups[name] = dist.new_group(backend="pycomm", pg_options=Options(tuning=path))
    return groups

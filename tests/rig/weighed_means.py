"""Averages of ranks that count by weights, by hand: k * sum(w g) / sum(w) over k passes of all
ranks, in float64, and how far from it each element may be in a dtype and over a wire."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import codec_bounds
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Array = npt.NDArray[Any]
Gradients = dict[str, Array]
Pass = Sequence[tuple[float, Gradients]]
"""By rank: its weight, and the gradients of its own mean loss."""

UNIT = {
    torch.float64: 2.0**-53,
    torch.complex128: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.complex64: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
"""The largest relative error of one rounding."""
_TINY = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}
_SCALED = 2.0**-19
"""Of the fp16 wire: values that are so much smaller than the largest of their bucket lose bits."""


@dataclasses.dataclass(frozen=True)
class Mean:
    """Of one parameter."""

    rows: Array
    """What each rank adds to it, first dimension: those that have some weight."""
    sizes: Array
    """The magnitudes of what each pass of each rank adds, added up."""
    passes: int

    @property
    def value(self) -> Array:
        found: Array = self.rows.sum(0)
        return found


def wide(tensor: torch.Tensor) -> Array:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    found: Array = dense.to(torch.complex128 if dense.is_complex() else torch.float64).numpy()
    return found.copy()


def own_gradients(net: nn.Module, loss: Callable[..., torch.Tensor], *args: Any) -> Gradients:
    """Of one rank, in the model's own dtypes: what it has to average."""
    single = copy.deepcopy(net)
    single.zero_grad()
    loss(single, *args).backward()
    return {n: wide(p.grad) for n, p in single.named_parameters() if p.grad is not None}


def means(passes: Sequence[Pass]) -> dict[str, Mean]:
    """Of all parameters that any rank has a gradient of."""
    total = math.fsum(weight for each in passes for weight, _ in each)
    names = {name for each in passes for weight, grads in each if weight for name in grads}
    found = {}
    for name in names:
        shape = next(g[name].shape for each in passes for w, g in each if w and name in g)
        parts = [
            [
                len(passes) * (weight / total) * grads.get(name, np.zeros(shape))
                for weight, grads in of_rank
                if weight
            ]
            for of_rank in zip(*passes, strict=True)
        ]
        rows = [sum(of_rank) for of_rank in parts if of_rank]
        sizes = sum(np.abs(part) for of_rank in parts for part in of_rank)
        found[name] = Mean(np.stack(rows), np.asarray(sizes), len(passes))
    return found


def errors(
    model: nn.Module, wanted: Mapping[str, Mean], *, wire: str | None = None, ranks: int
) -> dict[str, float]:
    """Of each parameter the largest error, by what it may be; infinite for one that is not there.

    A gradient of float16 or bfloat16 may be rounded twice: as it is packed, and as the sum is. In
    float32 and wider dtypes each factor and sum is a rounding. Passes that accumulate are added up
    in the parameter's dtype, and so are the entries of a sparse gradient for one row.
    """
    parameters = dict(model.named_parameters())
    largest = max((float(np.abs(mean.rows).max(initial=0)) for mean in wanted.values()), default=0)
    found = {}
    for name, mean in wanted.items():
        parameter = parameters[name]
        if parameter.grad is None:
            found[name] = math.inf
            continue
        plain = 2 if parameter.dtype in _TINY else 4
        roundings = plain + 2 * (mean.passes - 1) + (4 if parameter.grad.is_sparse else 0)
        bound = roundings * UNIT[parameter.dtype] * mean.sizes + _TINY.get(parameter.dtype, 1e-300)
        if wire in ("fp16", "bf16"):
            unit = UNIT[torch.float16 if wire == "fp16" else torch.bfloat16]
            bound = bound + 2 * unit * mean.sizes + (_SCALED if wire == "fp16" else 0) * largest
        if wire == "int8":
            # A block may hold values of other parameters. Twice: what the step before has left.
            once = codec_bounds.bound("int8", np.array([largest]))[0]
            bound = bound + 2 * (ranks + 1) * once
        wrong = np.abs(wide(parameter.grad) - mean.value)
        worst = float((wrong / bound).max(initial=0))
        found[name] = worst if math.isfinite(worst) else math.inf
    return found

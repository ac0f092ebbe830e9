"""Checks a saved state before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

_NOTHING = "nothing was changed"


def part_of(state: Mapping[str, Any], key: str) -> Any:
    """Raises ValueError if it is missing."""
    if key not in state:
        raise ValueError(
            f"the state has no {key!r}: another class saved it, or another version; {_NOTHING}"
        )
    return state[key]


def check_options(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first option that differs."""
    for name, value in mine.items():
        if part_of(saved, name) != value:
            raise ValueError(
                f"the state was saved with {name}={saved[name]!r}, and this was made with {name}="
                f"{value!r}; {_NOTHING}. Try: make it with the options in state['options']"
            )


def check_tensors(
    kind: str, saved: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]
) -> None:
    """Raises ValueError naming the first tensor whose name, shape or dtype differs."""
    if different := sorted(set(saved) ^ set(mine)):
        where = "the model" if different[0] in mine else "the state"
        raise ValueError(
            f"the state is that of another model: parameter {different[0]!r} is only in {where}; "
            f"{_NOTHING}"
        )
    for name, tensor in mine.items():
        theirs, ours = ((tuple(each.shape), each.dtype) for each in (saved[name], tensor))
        if theirs != ours:
            raise ValueError(
                f"the state is that of another model: its {kind} of parameter {name!r} has shape "
                f"{theirs[0]} and dtype {theirs[1]}, and {ours[0]} and {ours[1]} are needed; "
                f"{_NOTHING}"
            )


def check_outer(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raises ValueError if ``optimizer.load_state_dict(saved)`` would."""
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != mine:
        raise ValueError(
            f"the state's outer optimizer has groups of {theirs} tensors, and this one of {mine}; "
            f"{_NOTHING}"
        )

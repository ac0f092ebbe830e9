"""A wrapper's access to the process group that it reduces over."""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.distributed as dist

from pycomm.backend import native_backend
from pycomm.errors import UnsupportedError

# Stores handed out, by group: the same on all ranks, which make wrappers together.
_stores: collections.Counter[str] = collections.Counter()


def pycomm_backend(group: Any) -> Any:
    """The backend object of pycomm in a group, or None."""
    try:
        return native_backend(group)
    except ValueError:
        return None


def need_pycomm(group: Any, what: str) -> Any:
    """The same; raises if there is none.

    Raises:
        UnsupportedError: The group has none.
    """
    backend = pycomm_backend(group)
    if backend is None:
        raise UnsupportedError(
            f"{what} needs a process group of pycomm, which adds up encoded gradients; this "
            f"one's backend is {dist.get_backend(group)!r}"
        )
    return backend


def wrapper_store(group: Any) -> Any:
    """A store for one wrapper's ranks, or None if the group has none. Call it on all ranks."""
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
    except KeyError:
        return None
    _stores[group.group_name] += 1
    prefix = f"pycomm/ddp/{_stores[group.group_name]}"
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sync_when_due(model: Any, args: object) -> None:
    """Before a training forward pass, averages parameters if ``sync_every`` steps are over."""
    if not torch.is_grad_enabled() or not model.module.training:
        return
    if model.reducer.stats().steps - model._steps_at_sync >= model._sync_every:
        model.sync()

"""A wrapper's access to the process group that it reduces over."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from pycomm._group import averaging
from pycomm._group.creation import (
    OwnOptions,
    group_options,
    group_timeout,
    native_backend,
    next_number,
)
from pycomm._native import loader
from pycomm._settings import OFF
from pycomm._wire_patterns import ENCODED
from pycomm.errors import UnsupportedError
from pycomm.options import Options, Reconfigurable, arguments_of

logger = logging.getLogger("pycomm")


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


def is_pycomm(group: Any, device: torch.device) -> bool:
    """Whether pycomm serves a group's tensors of a device."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # no backend does
        return False
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around every backend.
    backend = getattr(backend, "wrapped_pg", backend)
    return bool(backend.name() == "pycomm")


def by_nccl(group: Any, device: torch.device) -> bool:
    """Whether NCCL moves a group's tensors of a device.

    Call it on all ranks: a group of pycomm decides that together, in the first collective.
    """
    if device.type != "cuda":
        return False
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # it serves no such device
        return False
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around every backend.
    backend = getattr(backend, "wrapped_pg", backend)
    if loader.loaded() is not None:
        with contextlib.suppress(TypeError):  # another library's
            return loader.native.goes_by_nccl(backend, device)
    return bool(backend.name() == "nccl")


def check_group(group: Any, wires: Iterable[str | None]) -> None:
    """Whether the group serves the wire dtypes of a wrapper's parameters.

    Raises:
        UnsupportedError: int8, and the group is not pycomm's.
    """
    encoded = next((wire for wire in wires if wire in ENCODED), None)
    if encoded is not None:
        need_pycomm(group, f"wire_dtype={encoded!r}")


def members_can_change(group: Any) -> bool:
    """By ``reconfigure()``. False for another library's group."""
    backend = pycomm_backend(group)
    return backend is not None and bool(loader.native.is_reconfigurable(backend))


def wrapper_store(group: Any) -> Any:
    """A store for one wrapper's ranks, or None if the group has none. Call it on all ranks."""
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
    except KeyError:
        return None
    if members_can_change(group):
        return None  # they need not share one
    backend = pycomm_backend(group)
    # A store may outlive its ranks: what ranks of another run left is not for this group.
    run = 0 if backend is None else loader.native.group_run(backend)
    prefix = f"pycomm/ddp/{run}/{next_number(group, 'wrapper')}"
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def wrapper_number(group: Any) -> int:
    """Of a wrapper that all ranks of the group make now, from 1; 0 if its members may change."""
    if members_can_change(group):
        return 0  # a newcomer has made fewer
    return next_number(group, "wrapper made in turn")


def host_group(group: Any) -> Any:
    """A group of the ranks of ``group`` that share this rank's host. Collective over ``group``.

    It has the group's backend, options and timeout.

    Raises:
        UnsupportedError: The members of ``group`` can change.
    """
    if members_can_change(group):
        raise UnsupportedError(
            "sync_every above 1 needs a group of each host's ranks, which meet in a store, and the "
            "members of a group that can be reconfigured need not share one. Try: sync_every=1, or "
            "a group of new_group()"
        )
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, averaging.host_identity(), group=group)
    ranks: Sequence[int] = dist.get_process_group_ranks(group)
    mine = hosts[dist.get_rank(group)]
    members = [rank for rank, host in zip(ranks, hosts, strict=True) if host == mine]
    name = f"{group.group_name}_host{hosts.index(mine)}_{next_number(group, 'host group')}"
    options, timeout = _options_and_timeout(group)
    return _own_group(members, dist.get_backend(group), name, options, timeout)


def elastic_group(group: Any) -> Any:
    """A group of the same ranks, whose members can change: it has none until reconfigure().

    It has the options and the timeout of ``group``, which is pycomm's, but for ``preflight``, which
    is the default group's, and ``metrics_dir``, whose file is the process's.

    Raises:
        UnsupportedError: ``check_call_sites``.
    """
    options, timeout = _options_and_timeout(group)
    resolved = (options or Options()).resolve()
    if resolved.check_call_sites:
        raise UnsupportedError(
            f"{resolved.origins['check_call_sites']}=True does not go with elastic=: the wrapper's "
            "own group survives without a store, and lines of Python are compared in a store. Try: "
            "leave it unset"
        )
    given = arguments_of(options or Options())
    changing = Reconfigurable(
        **{**given, "check_call_sites": False, "preflight": False, "metrics_dir": OFF}
    )
    # Its members reach this process there, and may not where those of another group do.
    own = OwnOptions(changing, loader.native.group_address(native_backend(group)))
    name = f"{group.group_name}_elastic_{next_number(group, 'elastic group')}"
    return _own_group(dist.get_process_group_ranks(group), "pycomm", name, own, timeout)


def _own_group(
    members: Sequence[int], backend: str, name: str, options: Any, timeout: timedelta
) -> Any:
    """A group of these ranks of the job, all of which call this."""
    # Not new_group(): ranks that are not in the group do not call this. And with local
    # synchronization torch takes the name from the number of this rank's groups, which may be
    # another on the other ranks.
    c10d: Any = dist.distributed_c10d
    world: Any = dist.group.WORLD
    made, _ = c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        backend,
        c10d._world.pg_map[world][1],
        name,
        backend_options=options,
        timeout=timeout,
        device_id=world.bound_device_id,
    )
    c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(members)}
    return made


def _options_and_timeout(group: Any) -> tuple[Any, timedelta]:
    """The options, if pycomm is the group's only backend, and the timeout that it was made with."""
    with contextlib.suppress(ValueError):
        native_backend(group)
        config = str(dist.get_backend_config(group))
        alone = all(part.endswith("pycomm") for part in config.split(","))
        return group_options(group) if alone else None, group_timeout(group)
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return None, getattr(options, "_timeout", default_pg_timeout)

"""Groups whose members change: torch 2.14's calls, on every torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pycomm._group.creation import native_backend
from pycomm._group.queries import members_can_change
from pycomm._native import loader
from pycomm._settings import timeout_seconds
from pycomm.errors import UnsupportedError


def supports_reconfigure(group: dist.ProcessGroup | None = None) -> bool:
    """Whether a group was made so that its members can change.

    Args:
        group: Default: the default group.

    Raises:
        ValueError: The group is not pycomm's, or there is no group.
    """
    return bool(loader.native.is_reconfigurable(native_backend(group)))


def reconfigure_handle(group: dist.ProcessGroup | None = None) -> str:
    """This process's handle: what the other members pass to ``reconfigure`` for it.

    It holds the addresses of this process and nothing of a store, so it is valid for as long as
    this process has the group, whatever other process ends. It is the same before and after each
    ``reconfigure``. Exchange handles as you like: by a store, a file, a coordinator.

    Args:
        group: Default: the default group.

    Returns:
        One line of ASCII, at most 1 KiB. It is no secret. But in a job without a secret, anybody
        who has it and reaches the address can disturb the next ``reconfigure``.

    Raises:
        InvalidArgumentError: The group was not made for that.
        ForkedError: This process is a child of ``fork()``: the handle is the parent's.
        ValueError: The group is not pycomm's, or there is no group.
    """
    return str(loader.native.reconfigure_handle(native_backend(group)))


def reconfigure(
    uuid: int,
    handles: Sequence[str] | AbstractSet[str],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Gives a group new members: those of the list, in its order. All of them call this alike.

    This process leaves the members that the group has now, and meets the new ones. No member needs
    the store of ``init_process_group``, nor the former rank 0. Afterwards ``dist.get_rank(group)``
    is the place in the list, and collectives run among the new members. What ``src=`` and ``dst=``
    call the members are these places in the default group, and in any other group the ranks that
    they have in the job. A process that is not in the list just does not call this.

        handles = exchange(pycomm.reconfigure_handle())  # by a means of yours
        pycomm.reconfigure(uuid=1, handles=handles)
        ...  # rank 2 dies
        pycomm.reconfigure(uuid=2, handles=[h for h in handles if h not in dead])

    Args:
        uuid: Names this call, alike on all members. A 64-bit whole number that this group has not
            had before.
        handles: One ``reconfigure_handle()`` per member, this process's among them: a sequence in
            the order of ranks, or a set, which is sorted.
        group: Made with ``enable_reconfigure=True`` or ``pycomm.Reconfigurable``. Default: the
            default group.
        timeout: How long to wait for the other members: seconds or a timedelta. Default: the
            group's timeout.

    Raises:
        InvalidArgumentError: A handle, the list or the uuid is wrong ("already used"). The group is
            as it was.
        ConfigMismatchError: A member has another secret, another list for this uuid, or other
            options.
        ConnectFailedError: A member's handle has no address that this host could reach.
        ForkedError: This process is a child of ``fork()``. The parent's group is as it was.
        PeerDeadError: A member has ended: nobody listens at its address, or its connection broke.
        RendezvousTimeoutError: A member has not called this in time; the text names it.
        UnsupportedError: ``group`` is not the default group, and that one can be reconfigured, too.
        PycommError: Any other reason why the members did not come together. After an error that
            is neither of the arguments nor ForkedError, the group has no members: call this again,
            with a new uuid.

    Returns when every member has said that it is ready, or at most one second after the timeout.
    If a member ends just then, the first collective raises that. Blocks without the interpreter's
    lock. Call it while no collective of the group is being issued; those under way end with an
    error. Models that were wrapped for the group before, by ``DistributedDataParallel`` for
    example, have to be wrapped again. Cost: some tens of milliseconds on one host
    (docs/reconfigure.md).
    """
    group = dist.distributed_c10d._get_default_group() if group is None else group
    backend = native_backend(group)
    _refuse_wrapper(group)
    _refuse_beside_changing_ranks(group)
    ordered = sorted(handles) if isinstance(handles, AbstractSet) else list(handles)
    seconds = None if timeout is None else timeout_seconds("reconfigure: timeout", timeout)
    if hasattr(dist, "_reconfigure"):  # then torch's group, too, takes its new rank and size
        limit = None if seconds is None else timedelta(seconds=seconds)
        dist._reconfigure(uuid, ordered, group=group, timeout=limit).wait()
    else:
        limit_ms = None if seconds is None else max(1, round(seconds * 1000))
        loader.native.reconfigure(backend, group, uuid, ordered, limit_ms)
    # torch leaves its table as it was, and takes from it what src=, dst= and get_rank(group) mean.
    world: Any = dist.distributed_c10d._world
    ranks = loader.native.job_ranks(backend)
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}


def register_abort_hook(
    hook_id: int, hook: Callable[[], None], group: dist.ProcessGroup | None = None
) -> None:
    """Has a function called when a group fails or is aborted, to save what explains it.

    It runs once for each set of members, on a thread of pycomm's, or within ``abort()`` on the
    caller's. What it raises is logged. ``destroy_process_group`` forgets it.

    Args:
        hook_id: A number of yours; another hook with it is replaced.
        hook: Takes nothing. It must not wait for an operation of this group.
        group: Default: the default group.

    Raises:
        ValueError: The group is not pycomm's, or there is no group.
    """
    loader.native.register_abort_hook(native_backend(group), hook_id, hook)


def unregister_abort_hook(hook_id: int, group: dist.ProcessGroup | None = None) -> None:
    """Forgets a hook; does nothing if there is none of that number.

    Args:
        hook_id: As for ``register_abort_hook``.
        group: Default: the default group.

    Raises:
        ValueError: The group is not pycomm's, or there is no group.
    """
    loader.native.unregister_abort_hook(native_backend(group), hook_id)


def _refuse_beside_changing_ranks(group: dist.ProcessGroup) -> None:
    """What src= calls a member of ``group`` is its place in the default group, which must stay."""
    default = dist.distributed_c10d._get_default_group()
    if group is not default and members_can_change(default):
        raise UnsupportedError(
            "reconfigure(group=) of a group of new_group() beside a default group that can be "
            "reconfigured, too: src= and dst= would call its members by places that change. "
            "Try: reconfigure the default group, or make that without Reconfigurable"
        )


def _refuse_wrapper(group: dist.ProcessGroup) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a backend of torch's own, and gloo, before ours."""
    if any(hasattr(group._get_backend(device), "wrapped_pg") for device in group._device_types):
        raise ValueError(
            "reconfigure() does not work with TORCH_DISTRIBUTED_DEBUG=DETAIL: torch then checks "
            "every collective with gloo, among the former members. Try: TORCH_DISTRIBUTED_DEBUG="
            "INFO"
        )

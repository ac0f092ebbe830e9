"""What an idle group holds: nothing, but for what has a bound."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

_PATIENCE_S = 30.0
"""The last frames of a peer, which may lack a core, and what a thread has still to drop."""


def check_idle(only: dist.ProcessGroup | None = None) -> None:
    """Raises AssertionError if a group of this process, or this one, keeps anything of ended
    operations.

    Every operation of the group must have ended, and no other rank may begin one meanwhile.
    Groups that have failed are left out.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or "pycomm._group.creation" not in sys.modules:
        return
    from pycomm._group import creation
    from pycomm._native import loader

    deadline = time.monotonic() + _PATIENCE_S
    world = dist.distributed_c10d._world
    for group in list(world.pg_map) if only is None else [only]:
        if ":pycomm" not in world.pg_backend_config[group]:  # "cpu:gloo,cuda:nccl"
            continue
        backend = creation.native_backend(group)
        while held := loader.native.held_text(backend):
            if loader.native.last_error(backend) is not None:
                break
            assert time.monotonic() < deadline, f"idle group {group.group_name!r} keeps {held}"
            time.sleep(0.001)


def check_idle_together(key: str) -> None:
    """The same between operations of the default group: no rank goes on before all have looked."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    for step in ("ended", "looked"):
        if step == "looked":
            check_idle()
        store.add(f"{key}/{step}", 1)
        deadline = time.monotonic() + 60.0
        while store.add(f"{key}/{step}", 0) < dist.get_world_size():
            assert time.monotonic() < deadline, f"a rank did not come to {key}/{step}"
            time.sleep(0.001)

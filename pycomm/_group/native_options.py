"""What a group's settings are for the native part: the ``options`` of ``create_backend``."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pycomm._group import secrets
from pycomm._native import loader
from pycomm._settings import SETTINGS
from pycomm.options import ResolvedOptions, nccl_serves

_FOREIGN_FOLDERS = [
    os.path.join(folder, "")
    for folder in (
        str(Path(dist.__file__).parent.parent),
        str(Path(__file__).parent.parent),
        sysconfig.get_path("stdlib"),
    )
]
"""Where no code of the user lies: torch, pycomm, Python's library."""


def store_host(store: Any) -> str:
    """The host of the store's server, as this rank calls it; "" if there is none."""
    return str(getattr(_base_of(store), "host", "") or "")


def store_outlives_ranks(store: Any) -> bool:
    """Whether it is the one in which torchrun lets its ranks meet, before and after a restart.

    torchrun ends all ranks before it starts new ones. The store stays, and holds the records of
    ranks that could not say goodbye.
    """
    base = _base_of(store)
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and isinstance(base, dist.TCPStore)  # type: ignore[attr-defined]
        and os.environ.get("MASTER_PORT") == str(base.port)
    )


def launcher_life(store: Any) -> str:
    """Which start of the job this is, if torchrun's ranks meet in ``store``; "" if nobody knows."""
    if not store_outlives_ranks(store):
        return ""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return f"{run}.{restart}".replace("/", "_")


def _base_of(store: Any) -> Any:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def native_options(
    resolved: ResolvedOptions,
    store_host: str,
    global_ranks: list[int],
    *,
    launcher_restarts: bool = False,
    launcher_life: str = "",
    enable_reconfigure: bool = False,
    known_address: str = "",
) -> dict[str, Any]:
    """The ``options`` of ``create_backend``."""
    secret, secret_origin = secrets.find()
    serves = nccl_serves(resolved.algorithm, resolved.wire_dtype)
    return {
        # Every setting by its name, also those that the native part does not read.
        **{setting.field: getattr(resolved, setting.field) for setting in SETTINGS},
        "port_first": resolved.port_range[0],
        "port_last": resolved.port_range[1],
        "heartbeat_timeout_ms": round(resolved.heartbeat_timeout * 1000),
        "cuda_library": str(loader.CUDA_LIBRARY),
        "nccl_libraries": [str(path) for path in loader.NCCL_LIBRARIES],
        "nccl_host_id": os.environ.get("NCCL_HOSTID", ""),  # NCCL's own variable
        "why_no_nccl": loader.why_no_nccl()
        if serves
        else f"has algorithm={resolved.algorithm!r} and wire_dtype={resolved.wire_dtype!r}",
        "flight_recorder_prefix": resolved.flight_recorder_prefix,
        "store_host": store_host,
        "global_ranks": global_ranks,
        "secret": secret,
        "secret_origin": secret_origin,
        "launcher_restarts": launcher_restarts,
        "launcher_life": launcher_life,
        "enable_reconfigure": enable_reconfigure,
        "known_address": known_address,
        "skipped_folders": _FOREIGN_FOLDERS,
    }

"""pycomm: a collective-communication backend for PyTorch, for training over ordinary networks.

    torch.distributed.init_process_group("pycomm")

Importing this package registers the backend and does nothing else; its native part is loaded when a
group is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycomm import comm_hooks, errors
from pycomm._shared import empty
from pycomm._version import __version__
from pycomm.backend import (
    backend_error,
    dump_flight_record,
    flight_record,
    last_error,
    register,
)
from pycomm.barrier import monitored_barrier
from pycomm.codecs import CodecStats, codec_stats
from pycomm.options import Options

if TYPE_CHECKING:
    from pycomm import report
    from pycomm.ddp import DistributedDataParallel
    from pycomm.local_sgd import DiLoCo, LocalSGD
    from pycomm.streaming_diloco import StreamingDiLoCo
    from pycomm.sync_batch_norm import SyncBatchNorm

__all__ = [
    "CodecStats",
    "DiLoCo",
    "DistributedDataParallel",
    "LocalSGD",
    "Options",
    "StreamingDiLoCo",
    "SyncBatchNorm",
    "__version__",
    "backend_error",
    "codec_stats",
    "comm_hooks",
    "dump_flight_record",
    "empty",
    "errors",
    "flight_record",
    "last_error",
    "monitored_barrier",
    "register",
    "report",
]

register()


def __getattr__(name: str) -> Any:
    # The wrapper needs the native part; whoever wants the backend alone should not have to load it.
    if name == "DistributedDataParallel":
        from pycomm.ddp import DistributedDataParallel

        return DistributedDataParallel
    if name in ("DiLoCo", "LocalSGD"):
        from pycomm import local_sgd

        return getattr(local_sgd, name)
    if name == "StreamingDiLoCo":
        from pycomm.streaming_diloco import StreamingDiLoCo

        return StreamingDiLoCo
    if name == "report":
        import importlib

        return importlib.import_module("pycomm.report")
    if name == "SyncBatchNorm":  # torch.nn is not loaded where nobody asks for it
        from pycomm.sync_batch_norm import SyncBatchNorm

        return SyncBatchNorm
    raise AttributeError(f"module 'pycomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

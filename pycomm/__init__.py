"""pycomm: a collective-communication backend for PyTorch, for training over ordinary networks.

    torch.distributed.init_process_group("pycomm")

Importing this package registers the backend; its native part is loaded when a group is made. What
it does to a process: docs/contract.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pycomm import comm_hooks, errors
from pycomm._group.creation import (
    dump_flight_record,
    flight_record,
    last_error,
    register,
)
from pycomm._group.monitored import monitored_barrier
from pycomm._group.reconfiguring import (
    reconfigure,
    reconfigure_handle,
    register_abort_hook,
    supports_reconfigure,
    unregister_abort_hook,
)
from pycomm._native.flight_record import GroupRecord, OperationRecord
from pycomm._version import __version__
from pycomm.codecs import CodecStats, codec_stats
from pycomm.memory import empty
from pycomm.options import Options, Reconfigurable

if TYPE_CHECKING:
    from pycomm import report
    from pycomm.balance.balanced_sampler import BalancedSampler
    from pycomm.ddp import DistributedDataParallel
    from pycomm.ddp.elastic import Elastic
    from pycomm.ddp.weights import no_batch
    from pycomm.fewer_syncs.local_sgd import DiLoCo, LocalSGD
    from pycomm.fewer_syncs.sparse_loco import SparseLoCo
    from pycomm.fewer_syncs.streaming_diloco import StreamingDiLoCo
    from pycomm.service import ParameterClient, ParameterServer
    from pycomm.sync_batch_norm import SyncBatchNorm

__all__ = [
    "BalancedSampler",
    "CodecStats",
    "DiLoCo",
    "DistributedDataParallel",
    "Elastic",
    "GroupRecord",
    "LocalSGD",
    "OperationRecord",
    "Options",
    "ParameterClient",
    "ParameterServer",
    "Reconfigurable",
    "SparseLoCo",
    "StreamingDiLoCo",
    "SyncBatchNorm",
    "__version__",
    "codec_stats",
    "comm_hooks",
    "dump_flight_record",
    "empty",
    "errors",
    "flight_record",
    "last_error",
    "monitored_barrier",
    "no_batch",
    "reconfigure",
    "reconfigure_handle",
    "register",
    "register_abort_hook",
    "report",
    "supports_reconfigure",
    "unregister_abort_hook",
]

register()


# The module of each name, imported by its first use: the wrapper needs the native part, and some
# need torch.nn, which a program that uses only the backend should not load.
_LATER = {
    "BalancedSampler": "balance.balanced_sampler",
    "DiLoCo": "fewer_syncs.local_sgd",
    "DistributedDataParallel": "ddp",
    "Elastic": "ddp.elastic",
    "LocalSGD": "fewer_syncs.local_sgd",
    "ParameterClient": "service",
    "ParameterServer": "service",
    "SparseLoCo": "fewer_syncs.sparse_loco",
    "StreamingDiLoCo": "fewer_syncs.streaming_diloco",
    "SyncBatchNorm": "sync_batch_norm",
    "no_batch": "ddp.weights",
}


def __getattr__(name: str) -> Any:
    if name == "report":
        return importlib.import_module("pycomm.report")
    if name in _LATER:
        return getattr(importlib.import_module(f"pycomm.{_LATER[name]}"), name)
    raise AttributeError(f"module 'pycomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

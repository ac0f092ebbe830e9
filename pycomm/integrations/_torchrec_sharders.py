"""Imports TorchRec, and makes its sharders for the CPU."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from pycomm._settings import wire_dtype_name
from pycomm._torch_range import torch_minor

RELEASES = {"2.13": "1.8.0"}
"""By minor of torch: the release of torchrec and fbgemm-gpu-cpu that pycomm's tests run with it."""


CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def import_torchrec() -> None:
    """Imports TorchRec.

    Raises:
        ImportError: It is not installed, or its kernels do not load; the text says what to install.
    """
    installed = torch_minor(torch.__version__)
    minor = installed if installed in RELEASES else next(reversed(RELEASES))
    way = (
        f"Try, in an environment of its own: pip install 'torch=={minor}.*' --index-url "
        f"{CPU_INDEX}; pip install numpy 'setuptools>=77.0.3' ninja tensordict "
        "torchmetrics==1.0.3 pyre-extensions tqdm; pip install --no-deps "
        f"torchrec=={RELEASES[minor]} fbgemm-gpu-cpu=={RELEASES[minor]}; then pycomm, as "
        "docs/torchrec.md says"
    )
    try:
        importlib.import_module("torchrec")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"pycomm.integrations.torchrec needs {error.name}, which is not installed. {way}",
            name=error.name,
        ) from error
    except OSError as error:  # from the loader of fbgemm's libraries
        raise ImportError(
            f"TorchRec's CPU kernels (fbgemm-gpu-cpu) do not load with torch {torch.__version__}, "
            f"since each of their releases is built for one minor of torch. {way}"
        ) from error
    _register_device()


@functools.cache
def _register_device() -> None:
    """Lets a rank without a part of a table ask for the table's device, as checkpoints do.

    torch's own operator then asks CUDA, unless the backend is called gloo.
    """
    from torch.distributed._shard.sharded_tensor import custom_sharded_op_impl

    def device(_types: Any, args: Any, _kwargs: Any, _group: Any) -> torch.device:
        for part in args[0].local_shards():
            return torch.device(part.tensor.device)
        return torch.device(args[0].metadata().shards_metadata[0].placement.device())

    custom_sharded_op_impl(torch.Tensor.device.__get__)(device)  # type: ignore[no-untyped-call]


def sharders(*, wire_dtype: str | torch.dtype | None = None) -> list[Any]:
    """Return the sharders for ``DistributedModelParallel(sharders=…)`` on the CPU.

    A table with an id map needs them: when an id gets a slot, they reset the state that the
    optimizer has for its row, for which fbgemm has no CPU kernel.

    Args:
        wire_dtype: The dtype of rows and their gradients on the wire: None or "fp32", or "fp16".
            Nothing scales them: a gradient below 3e-8 becomes zero, one above 65504 infinite.

    Raises:
        ImportError: TorchRec is not installed, or its kernels do not load with this torch.
        ValueError: TorchRec does not send this dtype on the CPU.
    """
    if wire_dtype is not None:
        wire_dtype = wire_dtype_name("wire_dtype", wire_dtype)
    if wire_dtype not in (None, "fp32", "fp16"):
        raise ValueError(
            f"wire_dtype={wire_dtype!r}: on the CPU TorchRec sends 'fp32' (None) or 'fp16'"
        )
    import_torchrec()
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )

    sent = CommType.FP16 if wire_dtype == "fp16" else CommType.FP32
    codecs = get_qcomm_codecs_registry(  # None for FP32
        QCommsConfig(forward_precision=sent, backward_precision=sent), device=torch.device("cpu")
    )
    kinds = [EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, *_with_id_maps()]
    return [kind(qcomm_codecs_registry=codecs) for kind in kinds]


@functools.cache
def _with_id_maps() -> list[type[Any]]:
    """The sharders of modules with id maps, made when asked for: their bases are TorchRec's."""
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder

    class BagSharder(ManagedCollisionEmbeddingBagCollectionSharder):  # type: ignore[misc]
        def shard(self, *args: Any, **kwargs: Any) -> Any:
            return _reset_on_cpu(super().shard(*args, **kwargs))

    class SingleSharder(ManagedCollisionEmbeddingCollectionSharder):  # type: ignore[misc]
        def shard(self, *args: Any, **kwargs: Any) -> Any:
            return _reset_on_cpu(super().shard(*args, **kwargs))

    return [BagSharder, SingleSharder]


def _reset_on_cpu(sharded: Any) -> Any:
    """Replaces the call of a kernel that only GPUs have, in this module's tables."""
    for tables, _ in sharded._table_to_tbe_and_index.values():
        tables.reset_embedding_weight_momentum = functools.partial(_reset_state, tables)
    return sharded


def _reset_state(
    tables: Any,
    *,
    pruned_indices: torch.Tensor,
    logical_table_ids: torch.Tensor,
    **_: torch.Tensor,
) -> None:
    """Zeroes the optimizer's state of some rows of one table. TorchRec sets the rows themselves."""
    (table,) = logical_table_ids.tolist()
    for state in (tables.split_optimizer_states() or {table: ()})[table]:
        state[pruned_indices] = 0

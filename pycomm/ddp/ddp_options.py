"""The arguments of the wrapper's constructor, and the facts that it needs about a model."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pycomm._settings import AS_THE_GROUP
from pycomm.errors import UnsupportedError

_NAMES_SHOWN = 10
_MIB = 1024 * 1024
# Small, so that the first all-reduce starts early and backward waits little for the last one.
_EDGE_BUCKET_CAP_NBYTES = _MIB
# The default of bucket_cap_mb. At a gigabit a bucket takes 35 ms: long against an operation's own
# cost, and short against a backward pass.
_BUCKET_CAP_NBYTES = 4 * _MIB
# The same for NCCL, as torch's wrapper has it: between GPUs of one host 4 MiB take less time than
# an operation costs.
_NCCL_BUCKET_CAP_NBYTES = 25 * _MIB

_TorchDDP = nn.parallel.DistributedDataParallel

# Options of torch's constructor that the reducer does not have yet: only these values are accepted.
ONLY = {
    "mixed_precision": None,
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "skip_all_reduce_unused_params": False,
    "batched_grad_copy": False,
}
# Options that torch's wrapper has not on the CPU either: the hint is another way.
_OTHERWISE = {
    "mixed_precision": 'use torch.autocast, with wire_dtype="bf16" for the bytes (torch\'s own '
    "wrapper runs this option on an accelerator only)"
}
_OURS = {
    "wire_dtype": AS_THE_GROUP,
    "error_feedback": True,
    "drops_nonfinite_steps": True,
    "accumulate": 1,
    "sync_every": 1,
    "weight": None,
    "elastic": None,
}
"""The options that torch's constructor has not, with their defaults."""
INSTEAD = "use torch.nn.parallel.DistributedDataParallel over the pycomm backend"


# The options that the wrapper's signature spells out, with the values that need not be passed on.
_SPELLED = {
    "device_ids": None,
    "output_device": None,
    "dim": 0,
    "broadcast_buffers": True,
    "init_sync": True,
    "process_group": None,
    "bucket_cap_mb": None,
    "find_unused_parameters": False,
    "check_reduction": False,
    "static_graph": False,
}


def for_torch(
    spelled: dict[str, Any], positional: Sequence[Any], others: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of torch's constructor by name, without those that have torch's default.

    Args:
        spelled: Those of the wrapper's own signature.
        positional: Values of those that follow ``static_graph`` in torch's signature.
        others: Further ones, which depend on the version of torch.
    """
    names = list(inspect.signature(_TorchDDP.__init__).parameters)
    rest = names[names.index("static_graph") + 1 :]
    if len(positional) > len(rest):
        raise TypeError("pycomm.DistributedDataParallel takes no more positional arguments")
    if twice := others.keys() & set(rest[: len(positional)]):
        raise TypeError(
            f"pycomm.DistributedDataParallel got {min(twice)!r} both by position and by name"
        )
    unlike = {
        name: value
        for name, value in spelled.items()
        if name not in _SPELLED or (value is not _SPELLED[name] and value != _SPELLED[name])
    }
    return {**unlike, **dict(zip(rest, positional, strict=False)), **others}


def torch_options(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of torch's constructor by name, with defaults; TypeError for unknown ones."""
    signature = inspect.signature(_TorchDDP.__init__)
    known = list(signature.parameters)[2:]
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *_OURS], 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"pycomm.DistributedDataParallel has no option {name!r}{hint}")
    bound = signature.bind(None, module, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def check_options(module: nn.Module, options: dict[str, Any]) -> None:
    for name, only in ONLY.items():
        given = options.get(name, only)
        if given is not only and given != only:
            raise UnsupportedError(
                f"pycomm.DistributedDataParallel does not support {name}={given!r} yet: "
                f"leave it at {only!r}, or {_OTHERWISE.get(name, INSTEAD)}"
            )
    for name, layer in module.named_modules():
        if isinstance(layer, _TorchDDP):
            where = f"its part {name!r}" if name else "it"
            raise ValueError(f"the module cannot be wrapped: {where} is wrapped already")


def check_python_reducer(wrapper: Any, what: str | None = None) -> None:
    """UnsupportedError for ``what``, or an option of ours, if torch's Python reducer averages."""
    if not wrapper._use_python_reducer:
        return
    set_here = (f"{name}={getattr(wrapper, '_' + name)!r}" for name in _OURS)
    defaults = {f"{name}={default!r}" for name, default in _OURS.items()}
    refused = what or next((each for each in set_here if each not in defaults), None)
    if refused is not None:
        raise UnsupportedError(
            f"{refused} needs the reducer of pycomm.DistributedDataParallel, and this model was "
            'wrapped with torch._dynamo.config.optimize_ddp = "python_reducer", so that torch\'s '
            f"Python reducer averages its gradients: do without {refused}, or wrap the model with "
            "another optimize_ddp"
        )


def check_parameters(
    names: Sequence[str], parameters: Sequence[torch.Tensor], sparse: Sequence[bool]
) -> None:
    """UnsupportedError for a parameter on a device where its gradients cannot be reduced.

    ``sparse``: whether gradients are sparse, and pycomm adds them up.
    """
    for name, parameter, is_sparse in zip(names, parameters, sparse, strict=True):
        device = parameter.device
        if is_sparse and device.type != "cpu":
            raise UnsupportedError(
                f"parameter {name!r} of an embedding with sparse=True is on {device}; pycomm adds "
                "up sparse gradients on the CPU only: use sparse=False"
            )
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"parameter {name!r} is on {device}; pycomm.DistributedDataParallel "
                f"reduces gradients of the CPU and of CUDA devices: {INSTEAD}"
            )


def check_counts(**options: object) -> None:
    for name, value in options.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not a whole number from 1")


def check_switch(**options: object) -> None:
    for name, value in options.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is neither True nor False")


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def names_of(module: nn.Module, parameters: Sequence[torch.Tensor]) -> list[str]:
    """The first name of each; a shared parameter has several."""
    names: dict[torch.Tensor, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name)
    return [names[parameter] for parameter in parameters]


def expect_sparse(module: nn.Module, parameters: Sequence[torch.Tensor]) -> list[bool]:
    sparse = {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
    }
    return [id(parameter) in sparse for parameter in parameters]


class EndsByItself:
    """Refuses what torch 2.15 added: a backward pass that ends when ``finalize_backward()`` is
    called. pycomm's reducer ends each pass when its last bucket has arrived."""

    @property
    def require_manual_backward_finalization(self) -> bool:
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self.finalize_backward()

    def finalize_backward(self) -> None:
        raise NotImplementedError(
            "pycomm.DistributedDataParallel has no require_manual_backward_finalization: its "
            "backward pass ends by itself. Try: torch's own DistributedDataParallel over pycomm"
        )


def reducible(module: nn.Module, ignored: Collection[str]) -> dict[str, nn.Parameter]:
    """Parameters that have gradients, or may once they are unfrozen, by their first name.

    ``ignored``: what ``all_names()`` gives, here and in the next one.
    """
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if name not in ignored and (parameter.is_floating_point() or parameter.is_complex())
    }


def sent_buffers(module: nn.Module, ignored: Collection[str]) -> dict[str, torch.Tensor]:
    """Buffers that a sync replaces by rank 0's, all but ignored ones, by their first name."""
    return {name: each for name, each in module.named_buffers() if name not in ignored}


def ignored_names(module: nn.Module) -> frozenset[str]:
    """All names of what the model tells torch's wrapper to ignore."""
    return all_names(module, getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def all_names(module: nn.Module, listed: Iterable[str]) -> frozenset[str]:
    """The listed names, and the others of these parameters and buffers: one of them is enough.

    A tensor that two modules share, or in a module that stands in two places, has several. And
    torch's recipe calls ``weight`` of the module itself ``.weight``, which torch understands for
    parameters only.
    """
    found = frozenset(listed)
    if not found:
        return found
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    ignored = {id(tensor) for name, tensor in named if name in found or f".{name}" in found}
    names = [name for name, tensor in named if id(tensor) in ignored]
    return found.union(names, (f".{name}" for name in names if "." not in name))


def bucket_caps(listed: Sequence[int], cap: int | None, by_nccl: bool) -> dict[str, Any]:
    """Caps in bytes of the first, second … bucket, of which the last holds for all others.

    Args:
        listed: What ``bucket_cap_mb_list`` says; empty without one.
        cap: What ``bucket_cap_mb`` says; None without one.
        by_nccl: Whether NCCL moves the buckets.
    """
    if listed:
        return {"bucket_caps": list(listed), "last_bucket_cap": 0}
    default = _NCCL_BUCKET_CAP_NBYTES if by_nccl else _BUCKET_CAP_NBYTES
    inner = default if cap is None else cap
    edge = min(_EDGE_BUCKET_CAP_NBYTES, inner)
    return {"bucket_caps": [edge, inner], "last_bucket_cap": edge}

"""Data-parallel training: torch's wrapper with pycomm's reducer in it.

``DistributedDataParallel`` is a subclass of torch's and inherits its ``forward``, so whatever looks
for torch's class finds it, and torch.compile treats it alike. What differs is underneath: gradients
are packed, sent and averaged by a reducer of our own, which can put fewer bytes on the wire than
the parameters have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket, _compute_bucket_assignment_by_size

from pycomm import _extension
from pycomm._model_check import check_same_on_all_ranks
from pycomm.errors import UnsupportedError

__all__ = ["DDPStats", "DistributedDataParallel"]

_TorchDDP = nn.parallel.DistributedDataParallel
_MIB = 1024 * 1024
# The first all-reduce should start early, while most of backward is still to come.
_FIRST_BUCKET_CAP_NBYTES = _MIB

_WIRE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Options of torch's constructor that the reducer does not have yet: only these values are taken.
_ONLY = {
    "static_graph": False,
    "mixed_precision": None,
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "skip_all_reduce_unused_params": False,
    "bucket_cap_mb_list": None,
    "batched_grad_copy": False,
}
_INSTEAD = "use torch.nn.parallel.DistributedDataParallel over the pycomm backend"


@dataclasses.dataclass(frozen=True)
class DDPStats:
    """What one wrapper's reducer has done on this rank since it was made."""

    steps: int
    """Backward passes whose gradients were reduced."""
    buckets_reduced: int
    wire_nbytes: int
    """Handed to all_reduce (or to the comm hook). A ring sends 2(N-1)/N times as much."""
    exposed_seconds: float
    """Time that backward had ended and waited for the network."""
    overflowed_buckets: int
    """fp16 buckets reduced a second time because the first scale was too large for them."""
    underflowed_buckets: int
    """The same because it was too small; usual in the first step only."""
    nonfinite_buckets: int
    """fp16 buckets with Inf or NaN among some rank's gradients before they were packed."""


class DistributedDataParallel(_TorchDDP):
    """Averages gradients over the ranks of a group while backward runs.

    Takes what ``torch.nn.parallel.DistributedDataParallel`` takes, and ``wire_dtype``. Gradients
    must be dense and on the CPU. Where an option is not supported, construction says so; none is
    ignored.

    Args:
        module: The model, the same on all ranks: checked, names, shapes and strides.
        wire_dtype: What gradients travel as: None for their own dtype, "fp32", "fp16" or "bf16".
            How fp16 and bf16 sums are rounded is the backend's (pycomm: added in fp32, rounded
            once); the division by the number of ranks comes after, in fp32. fp16 is scaled by a
            power of two that follows the gradients' size, so neither 1e-6 nor 1e5 is lost; a bucket
            that its scale did not fit is reduced again, and counted in ``stats()``.

    Raises:
        ConfigMismatchError: The model or an option differs between ranks. Names the first
            difference and the ranks. Not looked for with init_sync=False.
        UnsupportedError: An option, device or parameter that the reducer cannot serve.
        TypeError, ValueError: As torch's class, for its own arguments.

    Cost: one all-reduce a bucket, launched from backward; the first bucket holds 1 MiB of
    parameters and the others ``bucket_cap_mb`` (25). The end of backward waits for those that are
    still under way. At construction an all-gather of 24 bytes a rank, and what torch's class does.
    """

    reducer: Any
    logger: Any

    def __init__(
        self, module: nn.Module, *args: Any, wire_dtype: str | None = None, **kwargs: Any
    ) -> None:
        options = _torch_options(module, args, kwargs)
        _check_options(module, options)
        # Before Module.__init__, which keeps plain attributes: torch's constructor calls back.
        self._wire_dtype_name = wire_dtype
        self._wire_dtype = _parse_wire_dtype(wire_dtype)
        self._check_ranks_agree = bool(options["init_sync"])
        super().__init__(module, *args, **kwargs)

    def stats(self) -> DDPStats:
        """Counters since construction. Blocks while another thread is in the end of backward."""
        raw = self.reducer.stats()
        return DDPStats(
            steps=raw.steps,
            buckets_reduced=raw.buckets_reduced,
            wire_nbytes=raw.wire_nbytes,
            exposed_seconds=raw.exposed_ns / 1e9,
            overflowed_buckets=raw.overflowed_buckets,
            underflowed_buckets=raw.underflowed_buckets,
            nonfinite_buckets=raw.nonfinite_buckets,
        )

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, GradBucket], torch.futures.Future[Any]]
    ) -> None:
        """Lets ``hook(state, bucket)`` reduce the buckets, as torch's method of this name has it.

        The hook runs through ``pycomm.comm_hooks.ordered``, so collectives that it issues from
        callbacks come in one order on all ranks.

        Raises:
            RuntimeError: There is a hook already, training has begun, or ``wire_dtype`` is set.
        """
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        from pycomm.comm_hooks import ordered

        self.reducer._register_comm_hook(state, ordered(hook))
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """ALLREDUCE is what happens anyway; FP16_COMPRESS is ``wire_dtype="fp16"``."""
        self.reducer._register_builtin_comm_hook(comm_hook_type)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """Not supported yet, except with ``enable=False``, which does nothing.

        Raises:
            UnsupportedError: ``enable`` is true.
        """
        if enable:
            raise UnsupportedError(
                "pycomm.DistributedDataParallel.join() is not supported yet; give every rank the "
                "same number of batches, as torch.utils.data.DistributedSampler does"
            )
        return contextlib.nullcontext()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        # torch calls this before it checks shapes itself, which it does by index, without names.
        parameters, expect_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = _names_of(self.module, parameters)
        if self._check_ranks_agree:
            self._check_ranks_agree = False  # not when unpickled, which one rank may do alone
            check_same_on_all_ranks(
                self.process_group,
                self.device,
                options={
                    "wire_dtype": self._wire_dtype_name,
                    "bucket_cap_mb": self.bucket_bytes_cap / _MIB,
                    "find_unused_parameters": self.find_unused_parameters,
                    "broadcast_buffers": self.broadcast_buffers,
                },
                parameters=zip(names, parameters, strict=True),
                buffers=self.named_module_buffers.items() if self.broadcast_buffers else (),
            )
        for name, parameter, sparse in zip(names, parameters, expect_sparse, strict=True):
            _check_parameter(name, parameter, sparse, self._wire_dtype_name)
        return parameters, expect_sparse

    def _ddp_init_helper(
        self,
        parameters: list[nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        native: Any = _extension.load()
        self.reducer = native.Reducer(
            parameters,
            _names_of(self.module, parameters),
            _bucket_indices(parameters, self._bucket_caps()),
            self.process_group,
            wire_dtype=self._wire_dtype,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            native_hooks=not self._use_python_reducer,
        )
        self.logger = native.DdpLogger(self.reducer)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            any(isinstance(layer, nn.SyncBatchNorm) for layer in self.module.modules()),
            static_graph,
        )
        self._passing_sync_batchnorm_handle(self.module)  # type: ignore[no-untyped-call]

    def _bucket_caps(self) -> list[int]:
        """Bytes of parameters in the first, second … bucket; the last holds for all that follow."""
        if self.bucket_bytes_cap_default:
            return [_FIRST_BUCKET_CAP_NBYTES, self.bucket_bytes_cap]
        return [self.bucket_bytes_cap]


def _torch_options(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Every argument of torch's constructor by name, with defaults; TypeError for unknown ones."""
    signature = inspect.signature(_TorchDDP.__init__)
    known = list(signature.parameters)[2:]
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, [*known, "wire_dtype"], 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"pycomm.DistributedDataParallel has no option {name!r}{hint}")
    bound = signature.bind(None, module, *args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _check_options(module: nn.Module, options: dict[str, Any]) -> None:
    for name, only in _ONLY.items():
        given = options.get(name, only)
        if given is not only and given != only:
            raise UnsupportedError(
                f"pycomm.DistributedDataParallel does not support {name}={given!r} yet: "
                f"leave it at {only!r}, or {_INSTEAD}"
            )
    for name, layer in module.named_modules():
        if isinstance(layer, _TorchDDP):
            where = f"its part {name!r}" if name else "it"
            raise ValueError(f"the module cannot be wrapped: {where} is wrapped already")


def _parse_wire_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if not isinstance(name, str) or name not in _WIRE_DTYPES:
        allowed = ", ".join(repr(known) for known in _WIRE_DTYPES)
        close = difflib.get_close_matches(str(name), list(_WIRE_DTYPES), 1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"wire_dtype={name!r} is not one of None, {allowed}{hint}")
    return _WIRE_DTYPES[name]


def _names_of(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[str]:
    """The first name of each; a shared parameter has several."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name)
    return [names[parameter] for parameter in parameters]


def _check_parameter(
    name: str, parameter: nn.Parameter, sparse: bool, wire_dtype: str | None
) -> None:
    if sparse:
        raise UnsupportedError(
            f"parameter {name!r} belongs to an embedding with sparse=True; "
            "pycomm.DistributedDataParallel reduces dense gradients only"
        )
    if parameter.device.type != "cpu":
        raise UnsupportedError(
            f"parameter {name!r} is on {parameter.device}; pycomm.DistributedDataParallel reduces "
            f"CPU gradients only so far: {_INSTEAD}"
        )
    if wire_dtype is not None and parameter.dtype not in _WIRE_DTYPES.values():
        raise UnsupportedError(
            f"parameter {name!r} is {parameter.dtype}; wire_dtype={wire_dtype!r} is for float32, "
            "float16 and bfloat16"
        )


def _bucket_indices(parameters: Sequence[nn.Parameter], caps: list[int]) -> list[list[int]]:
    """Which parameters share a bucket, buckets in the order in which they are reduced.

    Backward produces gradients roughly from the last registered parameter to the first, so that is
    the order. A bucket holds one dtype; its size counts in that.
    """
    backward: list[torch.Tensor] = list(reversed(parameters))
    groups, _ = _compute_bucket_assignment_by_size(backward, caps, [False] * len(backward))
    return [[len(parameters) - 1 - place for place in group] for group in groups]

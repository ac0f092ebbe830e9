"""Lossy gradient reductions with error feedback, for ``comm_hooks.top_k``.

With error feedback a rank keeps the loss of its bytes and adds it to the values that it sends next
time. So nothing is lost for good, only late (Seide et al. 2014; Karimireddy et al. 2019). A hook
runs on one thread, one bucket at a time (``comm_hooks.ordered``), so it may simply wait. Of a hook
that several wrappers share, each has a thread of its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

_INDEX_LIMIT = 2**31
_lock = threading.Lock()  # guards which residuals there are; not held while other ranks are awaited


class Residuals:
    """The values that have not been sent yet, by parameter: buckets may change, parameters stay."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._flat: dict[tuple[int, ...], torch.Tensor] = {}
        self._of: dict[int, torch.Tensor] = {}  # parts of the tensors in _flat, or loaded tensors
        self._kept: list[torch.Tensor] = []  # so that no other parameter gets their ids

    def of(self, parameters: list[torch.Tensor], numel: int) -> torch.Tensor:
        """The residual of a bucket: one float32 row of ``numel``, that of each parameter in it."""
        key = tuple(map(id, parameters))
        if key not in self._flat:
            flat = torch.zeros(numel)
            offset = 0
            for parameter in parameters:
                part = flat[offset : offset + parameter.numel()]
                offset += parameter.numel()
                if id(parameter) in self._of:
                    part.copy_(self._of[id(parameter)])
                else:
                    self._kept.append(parameter)
                self._of[id(parameter)] = part
            gone = [old for old in self._flat if not set(key).isdisjoint(old)]
            for old in gone:
                del self._flat[old]
            self._flat[key] = flat
        return self._flat[key]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            name: self._of[id(parameter)].reshape(parameter.shape).clone()
            for name, parameter in self._named().items()
            if id(parameter) in self._of
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        named = self._named()
        if unknown := sorted(state.keys() - named.keys()):
            raise KeyError(f"the module has no parameter {unknown[0]!r}, the state has")
        for name, residual in state.items():
            if residual.shape != named[name].shape:
                raise ValueError(
                    f"the residual of {name!r} has shape {tuple(residual.shape)}, the parameter "
                    f"{tuple(named[name].shape)}"
                )
        self._flat.clear()
        self._kept = [named[name] for name in state]
        self._of = {id(named[name]): state[name].reshape(-1).float().clone() for name in state}

    def forget(self) -> None:
        """Those that another thread works on go with it."""
        self._flat.clear()
        self._of = {key: torch.zeros_like(part) for key, part in self._of.items()}

    def _named(self) -> dict[str, nn.Parameter]:
        if self._module is None:
            raise RuntimeError(
                "the hook does not know the parameters' names: make it with module=<the module>, "
                "the one that is wrapped, to save or load its state"
            )
        return dict(self._module.named_parameters())


class TopK:
    """Sends the largest entries of gradient + residual, and keeps the others."""

    def __init__(self, fraction: float, module: nn.Module | None) -> None:
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"fraction={fraction!r} is not allowed: use more than 0 and up to 1")
        self.fraction = fraction
        self.residuals = Residuals(module)
        self._finite = True  # the averages of the pass, the same on all ranks

    def reduce(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.Tensor:
        gradient = _float_buffer(bucket, "top_k")
        if bucket.index() == 0:
            self.settle()  # only now: a bucket that comes late takes part in its pass's residuals
        size = dist.get_world_size(group)
        with _lock:
            residual = self.residuals.of(bucket.parameters(), gradient.numel())
        kept = residual + gradient
        count = max(1, math.ceil(self.fraction * gradient.numel()))
        able = kept.clone()
        for slope, part in zip(bucket.gradients(), torch.split(able, _numels(bucket)), strict=True):
            if not slope.any():
                part.zero_()  # perhaps no rank uses it: then nobody takes the average
        # NaN counts as the largest, then infinities: they are always sent.
        indices = able.abs().topk(count, sorted=False).indices.sort().values
        values = able[indices]
        kept[indices] -= values
        kept.nan_to_num_(0.0, 0.0, 0.0)  # one NaN has been sent; kept ones would never end
        packed = torch.cat([indices.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])
        rows = torch.empty(size * packed.numel(), dtype=torch.uint8)
        dist.all_gather_into_tensor(rows, packed, group=group)
        residual.copy_(kept)  # only now: what a gather that fails has not sent still waits
        gradient.zero_()
        for row in rows.chunk(size):  # rank by rank, the same order everywhere
            where, what = row.view(torch.int32)[:count], row.view(torch.float32)[count:]
            gradient.index_add_(0, where, what)
        gradient.div_(size)
        if not gradient.isfinite().all():
            with _lock:
                self._finite = False
        return gradient

    def settle(self) -> None:
        """Forgets the residuals if the last pass had an average that is not finite.

        A program drops such a step, as GradScaler does, and what was not sent is of its size.
        """
        with _lock:
            if not self._finite:
                self.residuals.forget()
            self._finite = True


def _numels(bucket: GradBucket) -> list[int]:
    return [parameter.numel() for parameter in bucket.parameters()]


def _float_buffer(bucket: GradBucket, name: str) -> torch.Tensor:
    buffer: torch.Tensor = bucket.buffer()
    if buffer.dtype != torch.float32 or buffer.device.type != "cpu":
        raise TypeError(
            f"{name} reduces float32 gradients on the CPU, not {buffer.dtype} on {buffer.device}"
        )
    if buffer.numel() >= _INDEX_LIMIT:
        raise ValueError(f"{name}: a bucket of {buffer.numel()} elements is too large")
    return buffer

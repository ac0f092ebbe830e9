"""Lossy gradient reductions with error feedback, for ``comm_hooks.top_k`` and ``int8``.

With error feedback a rank keeps the loss of its bytes and adds it to the values that it sends next
time. So nothing is lost for good, only late (Seide et al. 2014; Karimireddy et al. 2019). A hook
runs on one thread, one bucket at a time (``comm_hooks.ordered``), so it may simply wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from pycomm import codecs

_BLOCK = 256  # values; slices of a bucket are whole blocks of the codec
_INDEX_LIMIT = 2**31


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
        for part in self._of.values():
            part.zero_()

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
        residual = self.residuals.of(bucket.parameters(), gradient.numel())
        residual += gradient
        count = max(1, math.ceil(self.fraction * gradient.numel()))
        # NaN counts as the largest, then infinities: they are always sent.
        indices = residual.abs().topk(count, sorted=False).indices.sort().values
        values = residual[indices]
        residual[indices] = 0.0
        residual.nan_to_num_(0.0, 0.0, 0.0)  # one NaN has been sent; kept ones would never end
        packed = torch.cat([indices.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])
        rows = torch.empty(size * packed.numel(), dtype=torch.uint8)
        dist.all_gather_into_tensor(rows, packed, group=group)
        gradient.zero_()
        for row in rows.chunk(size):  # rank by rank, the same order everywhere
            where, what = row.view(torch.int32)[:count], row.view(torch.float32)[count:]
            gradient.index_add_(0, where, what)
        gradient.div_(size)
        self._finite = self._finite and bool(gradient.isfinite().all())
        return gradient

    def settle(self) -> None:
        """Forgets the residuals if the last pass had an average that is not finite.

        A program drops such a step, as GradScaler does, and what was not sent is of its size.
        """
        if not self._finite:
            self.residuals.forget()
        self._finite = True


class Int8:
    """Both halves of an all_reduce as int8, each with a residual of its own.

    A rank sends e(g + r) and keeps r = g + r - d(e(g + r)). The owner of a slice averages the
    values that it gets, adds the loss of its last average, and sends the sum's bytes to all (Tang
    et al. 2019).
    """

    def __init__(self, error_feedback: bool, module: nn.Module | None) -> None:
        self.error_feedback = error_feedback
        self.residuals = Residuals(module)
        # By parameters of a bucket: the row of `residuals`, the offset of this rank's slice in
        # it, the loss of the slice's last average, and the group's size.
        self._owned: dict[tuple[int, ...], tuple[torch.Tensor, int, torch.Tensor, int]] = {}

    def reduce(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.Tensor:
        gradient = _float_buffer(bucket, "int8")
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        numel = gradient.numel()
        share = max(1, math.ceil(numel / (_BLOCK * size))) * _BLOCK  # of one rank
        values = torch.zeros(share * size)
        values[:numel] = gradient
        residual = owned = None
        if self.error_feedback:
            residual, owned = self._feedback(bucket.parameters(), numel, share, rank, size)
            values[:numel] += residual[:numel]
        codes = codecs.encode("int8", values, error=values if residual is not None else None)
        if residual is not None:
            residual.copy_(values[:numel])
        arrived = torch.empty_like(codes)
        dist.all_to_all_single(arrived, codes, group=group)
        average = values[:share]
        codecs.decode_sum("int8", list(arrived.chunk(size)), average, divisor=size)
        if owned is not None:
            average += owned
        result = codecs.encode("int8", average, error=owned)
        dist.all_gather_into_tensor(codes, result, group=group)
        codecs.decode_sum("int8", [codes], values)
        gradient.copy_(values[:numel])
        return gradient

    def settle(self) -> None:
        """Moves the loss of averages into the residuals, which belong to parameters.

        A rank's contribution is divided by the group's size, so it counts that many times as much.
        """
        for row, begin, owned, size in self._owned.values():
            part = row[begin : begin + owned.numel()]
            part += owned[: part.numel()] * size
        self._owned.clear()

    def _feedback(
        self, parameters: list[torch.Tensor], numel: int, share: int, rank: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = tuple(map(id, parameters))
        if key not in self._owned:
            if any(not set(key).isdisjoint(old) for old in self._owned):
                self.settle()  # the buckets have changed
            row = self.residuals.of(parameters, numel)
            self._owned[key] = (row, min(rank * share, numel), torch.zeros(share), size)
        row, _, owned, _ = self._owned[key]
        return row, owned


def _float_buffer(bucket: GradBucket, name: str) -> torch.Tensor:
    buffer: torch.Tensor = bucket.buffer()
    if buffer.dtype != torch.float32 or buffer.device.type != "cpu":
        raise TypeError(
            f"{name} reduces float32 gradients on the CPU, not {buffer.dtype} on {buffer.device}"
        )
    if buffer.numel() >= _INDEX_LIMIT:
        raise ValueError(f"{name}: a bucket of {buffer.numel()} elements is too large")
    return buffer

"""Training over slow links: every few steps the workers exchange a few entries in 14 bits each.

Equations and sources are in docs/fewer-syncs.md.

    local = pycomm.SparseLoCo(model, sync_every=50)
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        local.step()
    local.sync()
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm._group.averaging import bits_of, float_of, ratios_of
from pycomm._group.model_check import check_same_on_all_ranks
from pycomm._saved_state import check_options, check_tensors, part_of
from pycomm.errors import CollectiveMismatchError
from pycomm.fewer_syncs.local_sgd import FixedParameters
from pycomm.fewer_syncs.outer_step import (
    check_origins,
    check_stepped,
    have_moved,
    idle_on_all,
    idle_words,
    origin_of,
)
from pycomm.fewer_syncs.sparse_rows import GROUP, ROW, pack, rows_of, select, unpack

__all__ = ["SparseLoCo"]

_MOST_ENTRIES = 1024


class SparseLoCo(FixedParameters):
    """Every ``sync_every`` steps workers exchange the largest entries of their movements.

    A worker adds its movement to its error, sends the ``top_k`` largest of every 4,096
    entries, and subtracts them from the error. There is no outer momentum: the error, which decays,
    has the same effect.

    Example::

        local = pycomm.SparseLoCo(model, sync_every=50, top_k=64)
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            local.step()
        local.sync()

    Args:
        model, sync_every, process_group, init_sync, broadcast_buffers, weight: As ``LocalSGD``.
            Parameters are real.
        top_k: Entries sent of each 4,096 neighbours of a parameter, a multiple of 16 from 16 to
            1024. A parameter is filled up to a multiple of 4,096: small ones are sent more densely.
        error_decay: The factor of the error before each sync, from 0 to 1; β in the paper.
        outer_lr: The factor of the mean of the workers' entries, more than 0; α in the paper.
        outer_optimizer: Always None. Here so that a call written for ``DiLoCo`` gets an error that
            explains it.

    Raises:
        ValueError: An option does not fit, or a parameter is complex.
        ConfigMismatchError: Options, or names, shapes or dtypes of parameters, differ between
            ranks.
        CollectiveMismatchError: In the first sync: parameters differ between ranks, since
            ``init_sync`` was false. In any: the one before it ended with an error on a rank while
            it applied the entries, or only some ranks have loaded a state.

    Memory: one more copy of the parameters, and the error, a copy in float32. In a sync also three
    times the largest parameter in float32, 14 bits for each entry of each rank, and, before it is
    sent, 6 more bytes twice for each entry of this rank.

    Cost of a sync: an all-gather of 14 bits for each entry, a bit for each parameter and 48 bytes;
    two passes over the parameters, and a partial sort of every 4,096 neighbours, which takes the
    most time.

    Source: Sarfi and others, arXiv 2508.15706.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sync_every: int,
        top_k: int = 64,
        error_decay: float = 0.95,
        outer_lr: float = 1.0,
        outer_optimizer: None = None,
        process_group: Any = None,
        init_sync: bool = True,
        broadcast_buffers: bool = True,
        weight: str | None = None,
    ) -> None:
        _check_options(top_k, error_decay, outer_lr, outer_optimizer)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_complex():
                raise ValueError(
                    f"parameter {name!r} is {parameter.dtype}: SparseLoCo sends real numbers only"
                )
        super().__init__(
            model,
            sync_every=sync_every,
            process_group=process_group,
            init_sync=init_sync,
            broadcast_buffers=broadcast_buffers,
            weight=weight,
        )
        self._top_k = top_k
        self._decay = float(error_decay)
        self._lr = float(outer_lr)
        self._version = 0
        self._origin: int | None = None  # as ``Fragment.origin``
        self._stepping = False  # else entries were applied here only in part
        self._anchor = {name: each.detach().clone() for name, each in self._parameters.items()}
        device = next(iter(self._parameters.values())).device
        self._error = {
            name: torch.zeros(-(-each.numel() // ROW), ROW, device=device)
            for name, each in self._parameters.items()
        }
        self._options = {
            "sync_every": sync_every,
            "top_k": top_k,
            "error_decay": self._decay,
            "outer_lr": self._lr,
        }
        check_same_on_all_ranks(
            self._group,
            device,
            options=self._options,
            parameters=self._parameters.items(),
            buffers=(),
        )

    def _average(self, due: bool) -> bool:
        """Changes nothing before all entries have arrived, so a sync that fails changes nothing.

        One that ends with an error or Ctrl-C after that is an error in the next.
        """
        chosen = [select(self._summed(name), self._top_k) for name in self._error]
        positions, values = (torch.cat(list(each)) for each in zip(*chosen, strict=True))
        payload = pack(positions, values)
        del chosen, positions, values
        arrived, ratios, idle = self._exchange(payload, due)
        if not arrived:
            return False
        counts = ratios[dist.get_rank(self._group)] != 0.0
        self._stepping = True
        end, finite = 0, []
        for name, error in self._error.items():
            begin, end = end, end + len(error)
            if name in idle:  # what it has not sent would move it
                continue
            where, what = unpack(rows_of(payload, self._top_k, begin, end), self._top_k)
            if counts:
                error.copy_(self._summed(name).scatter_add_(1, where, -what))
            else:  # what it has sent has gone nowhere, and it has trained on nothing
                error.mul_(self._decay)
            numel = self._anchor[name].numel()
            error.view(-1)[numel:] = 0.0
            mean = torch.zeros_like(error)
            # Rank by rank: the same bits on all.
            for each, ratio in zip(arrived, ratios, strict=True):
                if ratio != 0.0:  # else not even its NaN counts
                    at, values = unpack(rows_of(each, self._top_k, begin, end), self._top_k)
                    mean.scatter_add_(1, at, values if ratio == 1.0 else values * ratio)
            mean /= len(arrived)
            finite.append(mean.isfinite().all())
            anchor = self._anchor[name]
            anchor.sub_(mean.view(-1)[:numel].view(anchor.shape).to(anchor.device), alpha=self._lr)
            self._parameters[name].copy_(anchor)
        # A round that has diverged counts nowhere: its unsent rest is of its own size. The means
        # have the same bits on all ranks, which decide alike.
        if finite and not torch.stack(finite).all():
            for error in self._error.values():
                error.zero_()
        self._version += 1
        self._stepping = False
        return True

    def _summed(self, name: str) -> torch.Tensor:
        """(rows, 4096) float32: the error, plus this parameter's movement."""
        summed = self._error[name] * self._decay
        moved = (self._anchor[name] - self._parameters[name]).flatten()
        summed.view(-1)[: moved.numel()] += moved.to(summed.device, summed.dtype)
        return summed

    def _exchange(
        self, payload: torch.Tensor, due: bool
    ) -> tuple[list[torch.Tensor], list[float], set[str]]:
        """Those of all ranks, how much each counts, and what no rank trains; nothing if no rank has
        trained since the last sync.

        The ranks compare, and so decide alike.
        """
        step = self._sync_every if due else 0  # sync() is allowed to ranks that had more batches
        moved = due or have_moved(self._parameters, self._anchor)
        if self._origin is None:
            self._origin = origin_of(self._version, self._anchor.values())
        weight = bits_of(1.0 if self._weight is None else self._samples)
        idle = idle_words(self._parameters, self._anchor)
        place = [step, self._version, moved, self._origin, self._stepping, weight, *idle]
        header = torch.tensor(place, device=payload.device).view(torch.uint8)
        mine = torch.cat([header, payload])
        ranks = dist.get_world_size(self._group)
        arrived = [torch.empty_like(mine) for _ in range(ranks)]
        work = dist.all_gather(arrived, mine, group=self._group, async_op=True)
        work.wait()
        self._wire_nbytes += mine.numel()
        heads = [each[: header.numel()].clone().view(torch.int64).tolist() for each in arrived]
        work.wait()  # with NCCL the first one only orders streams, and this one raises
        numbers = dist.get_process_group_ranks(self._group)
        check_stepped([head[4] for head in heads], "all_gather", numbers)
        different = [rank for rank, head in enumerate(heads) if head[:2] != heads[0][:2]]
        if different:
            wrong = different[0]
            first, rank = numbers[0], numbers[wrong]
            raise CollectiveMismatchError(
                f"The ranks are at different places: rank {first} {_place(*heads[0][:2])}, rank "
                f"{rank} {_place(*heads[wrong][:2])}. Nothing was changed. Try: call step() "
                "equally often on all ranks, sync() on all, and load checkpoints of one step",
                {"peer": rank, "op": "all_gather"},
            )
        check_origins([head[3] for head in heads], "all_gather", numbers)
        if not any(head[2] for head in heads):
            return [], [], set()
        ratios = ratios_of([float_of(head[5]) for head in heads])
        entries = [each[header.numel() :] for each in arrived]
        return entries, ratios, idle_on_all([head[6:] for head in heads], self._anchor)

    def _sent_nbytes(self) -> int:
        return self._wire_nbytes * (dist.get_world_size(self._group) - 1)

    def state_dict(self) -> dict[str, Any]:
        """Also the parameters of the last sync and this rank's error, by name.

        Tensors, numbers and dicts: ``torch.load(weights_only=True)`` reads it. Each rank has an
        error of its own, so save the state of every rank.
        """
        error = {
            name: rows.view(-1)[: self._anchor[name].numel()].clone()
            for name, rows in self._error.items()
        }
        anchor = {name: tensor.clone() for name, tensor in self._anchor.items()}
        return {
            **super().state_dict(),
            "options": dict(self._options),
            "anchor": anchor,
            "error": error,
            "version": self._version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of ``state_dict()``. On all ranks or on none.

        Raises:
            ValueError: The state is that of another model or other options; nothing was changed.
        """
        check_tensors("anchor", part_of(state, "anchor"), self._anchor)
        check_options(part_of(state, "options"), self._options)
        errors = {
            name: self._error[name].view(-1)[: anchor.numel()]
            for name, anchor in self._anchor.items()
        }
        check_tensors("error", part_of(state, "error"), errors)
        version = int(part_of(state, "version"))
        super().load_state_dict(state)
        self._version, self._origin, self._stepping = version, None, False
        with torch.no_grad():
            for name, anchor in self._anchor.items():
                anchor.copy_(state["anchor"][name])
                errors[name].copy_(state["error"][name])


def _place(step: int, version: int) -> str:
    syncs = "sync" if version == 1 else "syncs"
    return f"{f'at step {step}' if step else 'in sync()'} after {version} {syncs}"


def _check_options(top_k: int, decay: float, lr: float, outer_optimizer: object) -> None:
    if not isinstance(top_k, int) or top_k % GROUP or not GROUP <= top_k <= _MOST_ENTRIES:
        raise ValueError(
            f"top_k={top_k!r} is not a multiple of {GROUP} from {GROUP} to {_MOST_ENTRIES}: so many"
            f" entries are sent of each {ROW}"
        )
    if not isinstance(decay, (int, float)) or not 0.0 <= decay <= 1.0:
        raise ValueError(f"error_decay={decay!r} is not a number from 0 to 1")
    if not isinstance(lr, (int, float)) or not 0.0 < lr < math.inf:
        raise ValueError(f"outer_lr={lr!r} is not a number more than 0")
    if outer_optimizer is not None:
        raise ValueError(
            "SparseLoCo takes no outer_optimizer: its error, which decays, is its momentum. Set "
            "outer_lr and error_decay, or use DiLoCo or StreamingDiLoCo"
        )

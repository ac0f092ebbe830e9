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

from pycomm._model_check import check_same_on_all_ranks
from pycomm._sparse_rows import GROUP, ROW, pack, select, unpack
from pycomm.errors import CollectiveMismatchError
from pycomm.local_sgd import LocalSGD

__all__ = ["SparseLoCo"]

_MOST_ENTRIES = 1024


class SparseLoCo(LocalSGD):
    """Every ``sync_every`` steps workers exchange the largest entries of what they have moved.

    A worker adds what it has moved to its error, sends the ``top_k`` largest entries of every 4,096
    in a row, and takes them out of the error. There is no outer momentum: the error, which decays,
    has its part.

    Args:
        model, sync_every, process_group, init_sync: As ``LocalSGD``. Parameters are real.
        top_k: Entries sent of each 4,096 neighbours of a parameter, a multiple of 16 from 16 to
            1024. A parameter is filled up to a multiple of 4,096: small ones are sent more densely.
        error_decay: What the error is multiplied by before each sync, from 0 to 1; β in the paper.
        outer_lr: What the mean of the workers' entries is multiplied by, more than 0; α in the
            paper.
        outer_optimizer: Refused: for those who come from ``DiLoCo``.

    Raises:
        ValueError: An option does not fit, or a parameter is complex.
        ConfigMismatchError: Options or parameters differ between ranks.

    Memory: one more copy of the parameters, and the error, a copy in float32; in a sync three times
    the largest parameter.

    Cost of a sync: an all-gather of 14 bits for each entry and 16 bytes; two passes over the
    parameters, and a partial sort of every 4,096 neighbours, which takes the most time.

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
    ) -> None:
        _check_options(top_k, error_decay, outer_lr, outer_optimizer)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_complex():
                raise ValueError(
                    f"parameter {name!r} is {parameter.dtype}: SparseLoCo sends real numbers only"
                )
        super().__init__(
            model, sync_every=sync_every, process_group=process_group, init_sync=init_sync
        )
        self._top_k = top_k
        self._decay = float(error_decay)
        self._lr = float(outer_lr)
        self._version = 0
        self._anchor = {name: each.detach().clone() for name, each in self._parameters.items()}
        device = next(iter(self._parameters.values())).device
        self._error = {
            name: torch.zeros(-(-each.numel() // ROW), ROW, device=device)
            for name, each in self._parameters.items()
        }
        check_same_on_all_ranks(
            self._group,
            device,
            options={
                "sync_every": sync_every,
                "top_k": top_k,
                "error_decay": self._decay,
                "outer_lr": self._lr,
            },
            parameters=self._parameters.items(),
            buffers=(),
        )

    def _average(self) -> None:
        """Nothing changes before everything has arrived, so a sync that fails has done nothing."""
        chosen = [select(self._summed(name), self._top_k) for name in self._error]
        positions, values = (torch.cat(list(each)) for each in zip(*chosen, strict=True))
        arrived = self._exchange(pack(positions, values))
        rows = [len(error) for error in self._error.values()]
        of_ranks = [
            tuple(torch.split(each, rows) for each in unpack(payload, self._top_k))
            for payload in arrived
        ]
        mine = dist.get_rank(self._group)
        for index, (name, error) in enumerate(self._error.items()):
            parts = [(where[index], what[index]) for where, what in of_ranks]
            where, what = parts[mine]
            error.copy_(self._summed(name).scatter_add_(1, where, -what))
            numel = self._anchor[name].numel()
            error.view(-1)[numel:] = 0.0
            # A NaN has been sent, and is on all ranks now; one that stayed here would never end.
            error.nan_to_num_(0.0, 0.0, 0.0)
            mean = torch.zeros_like(error)
            for where, what in parts:  # rank by rank: the same bits on all
                mean.scatter_add_(1, where, what)
            mean /= len(parts)
            anchor = self._anchor[name]
            anchor.sub_(mean.view(-1)[:numel].view(anchor.shape).to(anchor.device), alpha=self._lr)
            self._parameters[name].copy_(anchor)
        self._version += 1

    def _summed(self, name: str) -> torch.Tensor:
        """(rows, 4096) float32: the error, and what this parameter has moved."""
        summed = self._error[name] * self._decay
        moved = (self._anchor[name] - self._parameters[name]).flatten()
        summed.view(-1)[: moved.numel()] += moved.to(summed.device, summed.dtype)
        return summed

    def _exchange(self, payload: torch.Tensor) -> list[torch.Tensor]:
        place = torch.tensor([self._since_sync, self._version], device=payload.device)
        header = place.view(torch.uint8)
        mine = torch.cat([header, payload])
        ranks = dist.get_world_size(self._group)
        arrived = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(arrived, mine, group=self._group)
        self._wire_nbytes += mine.numel()
        heads = [each[: header.numel()].clone().view(torch.int64).tolist() for each in arrived]
        different = [rank for rank, head in enumerate(heads) if head != heads[0]]
        if different:
            rank = different[0]
            raise CollectiveMismatchError(
                f"The ranks are at different places: rank 0 at step {heads[0][0]} after "
                f"{heads[0][1]} syncs, rank {rank} at step {heads[rank][0]} after {heads[rank][1]}."
                " Nothing was changed. Try: call step() and sync() equally often on all ranks, and "
                "load checkpoints of one step",
                {"peer": rank, "op": "all_gather"},
            )
        return [each[header.numel() :] for each in arrived]

    def _sent_nbytes(self) -> int:
        return self._wire_nbytes * (dist.get_world_size(self._group) - 1)

    def state_dict(self) -> dict[str, Any]:
        """Also the parameters of the last sync and this rank's error, by name.

        Tensors, numbers and dicts: ``torch.load(weights_only=True)`` reads it. The error is another
        one on every rank.
        """
        error = {
            name: rows.view(-1)[: self._anchor[name].numel()].clone()
            for name, rows in self._error.items()
        }
        anchor = {name: tensor.clone() for name, tensor in self._anchor.items()}
        return {**super().state_dict(), "anchor": anchor, "error": error, "version": self._version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state_dict()`` was taken."""
        if different := sorted(set(state["anchor"]) ^ set(self._anchor)):
            raise ValueError(f"the state is that of another model: {different[0]!r} is in one only")
        super().load_state_dict(state)
        self._version = int(state["version"])
        with torch.no_grad():
            for name, anchor in self._anchor.items():
                anchor.copy_(state["anchor"][name])
                self._error[name].view(-1)[: anchor.numel()] = state["error"][name]


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

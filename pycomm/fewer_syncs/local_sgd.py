"""Training that averages parameters every few steps, and sends no gradients.

Between syncs every worker trains alone, with an optimizer and data of its own. Equations and
sources are in docs/fewer-syncs.md.

    local = pycomm.DiLoCo(model, sync_every=100)
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        local.step()
    local.sync()

A worker is a rank of ``process_group``. Ranks that share gradients every step, such as those of
one host inside a ``DistributedDataParallel`` over a group of their own, are workers with equal
parameters and count as many times as they are ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pycomm._group.averaging import average_, ring_nbytes, weight_ratio
from pycomm._group.model_check import check_same_on_all_ranks, gather_numbers
from pycomm._saved_state import check_outer, check_tensors, part_of
from pycomm.ddp.ddp_options import ignored_names, reducible, sent_buffers
from pycomm.ddp.weights import check_samples, check_weight
from pycomm.errors import UnsupportedError
from pycomm.fewer_syncs.outer_step import (
    Fragment,
    MakeOptimizer,
    Place,
    check_places,
    idle_on_all,
)

_BUFFERS_NBYTES = 32 << 20
"""Sent in one broadcast, at most."""

__all__ = ["DiLoCo", "LocalSGD", "SyncStats"]


@dataclasses.dataclass(frozen=True)
class SyncStats:
    """Counters of one ``LocalSGD``, or of a derived class, on this rank since it was made.

    Example::

        stats = local.stats()
        print(f"{stats.syncs} syncs in {stats.steps} steps, {stats.exposed_seconds:.1f} s waited")
    """

    steps: int
    syncs: int
    """Of ``StreamingDiLoCo``: fragments that have landed."""
    sent_nbytes: int
    """What a ring all-reduce sends from one rank for all syncs; ``SparseLoCo``: an all-gather."""
    saved_nbytes: int
    """What an all-reduce of the gradients in every step would have sent more than that."""
    exposed_seconds: float
    """Time in ``step()`` and ``sync()``, in which training stands still."""


class LocalSGD:
    """Averages the parameters of all workers every ``sync_every`` steps.

    Example::

        local = pycomm.LocalSGD(model, sync_every=16)
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            local.step()  # on every rank, as often on each
        local.sync()  # before the model is saved or evaluated

    Args:
        model: Its trainable parameters are averaged, also those that are unfrozen later, on all
            ranks alike. At construction, parameters and buffers become those of rank 0, unless
            ``init_sync`` is false. What the model tells torch's wrapper to ignore is left alone.
        sync_every: Steps from one sync to the next, 1 or more.
        process_group: The workers, a group of any backend; the default group if None.
        init_sync: Whether to broadcast rank 0's parameters and buffers at construction. If not,
            ``DiLoCo`` and the others need equal parameters on all ranks.
        broadcast_buffers: Whether each sync replaces buffers by those of rank 0.
        weight: "samples": a worker counts by its samples since the last sync, which ``step()``
            gets. None: all workers count alike.

    Raises:
        ValueError: ``sync_every`` is no whole number from 1, no parameter is trainable, or
            ``weight`` is neither None nor "samples".
        ConfigMismatchError: Ranks have another ``sync_every``, class or model; on all of them.

    Construction and each sync are collective and block. Not thread-safe.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sync_every: int,
        process_group: Any = None,
        init_sync: bool = True,
        broadcast_buffers: bool = True,
        weight: str | None = None,
    ) -> None:
        check_weight(weight)
        if not isinstance(sync_every, int) or sync_every < 1:
            raise ValueError(f"sync_every={sync_every!r} is not a whole number from 1")
        self._model = model
        self._group: Any = dist.group.WORLD if process_group is None else process_group
        self._broadcast_buffers = broadcast_buffers
        ignored = ignored_names(model)
        mine = reducible(model, ignored)
        self._parameters = {name: each for name, each in mine.items() if each.requires_grad}
        self._frozen = {name: each for name, each in mine.items() if not each.requires_grad}
        if not self._parameters:
            raise ValueError("the model has no trainable parameter: there is nothing to average")
        self._sync_every = sync_every
        self._since_sync = 0
        self._weight = weight
        self._samples = 0.0  # since the last sync
        self._steps = 0
        self._syncs = 0
        self._wire_nbytes = 0
        self._seconds = 0.0
        check_same_on_all_ranks(
            self._group,
            next(iter(self._parameters.values())).device,
            options={
                "class": type(self).__name__,
                "sync_every": sync_every,
                "broadcast_buffers": broadcast_buffers,
                "weight": weight,
            },
            parameters=self._parameters.items(),
            buffers=sent_buffers(model, ignored).items(),
        )
        if init_sync:
            root: int = dist.get_process_group_ranks(self._group)[0]
            with torch.no_grad():
                for tensor in [*mine.values(), *sent_buffers(model, ignored).values()]:
                    dist.broadcast(tensor.detach(), root, group=self._group)

    def step(self, samples: float | None = None) -> bool:
        """Counts one step; call it after the optimizer's, equally often on every rank.

        If a ``GradScaler`` skips the optimizer's step on one rank, still call it there.

        Args:
            samples: With ``weight="samples"``: how many this rank has trained on in this step, or
                tokens; 0, or any number from 1e-20 to 1e20. A worker that had none since the last
                sync counts nothing in the next one, and takes its result.

        Returns:
            Whether it synced. Collective when it does.

        Raises:
            ValueError: ``samples`` is missing, or no such number, or not asked for.
        """
        number = self._checked(samples)
        self._take_unfrozen()
        self._add_samples(number)
        self._steps += 1
        self._since_sync += 1
        if self._since_sync < self._sync_every:
            return False
        self._sync(due=True)
        return True

    def sync(self) -> None:
        """Averages now, at any count: before you save or evaluate the model. Collective.

        Buffers become those of rank 0 in each sync, as in ``DistributedDataParallel.sync``, unless
        ``broadcast_buffers`` is false.
        ``DiLoCo`` and ``SparseLoCo`` do nothing if no rank has trained since the last sync.

        If a sync raises, here or in ``step()``, samples and steps count for the next one, unless
        parameters have been averaged and only the buffers have failed. ``LocalSGD`` may have
        averaged some parameters: the next sync averages all again.
        """
        self._sync(due=False)

    def _checked(self, samples: float | None) -> float:
        """How many a step says; 0 if ranks are not weighed."""
        if self._weight is None and samples is not None:
            raise ValueError(
                f'step(samples={samples!r}) needs {type(self).__name__}(…, weight="samples"), and '
                "this one counts all ranks alike"
            )
        if self._weight is None:
            return 0.0
        if samples is None:
            raise ValueError(
                f'{type(self).__name__} with weight="samples" counts ranks by their samples. '
                "Say in each step: step(samples=len(batch))"
            )
        return check_samples("samples", samples)

    def _add_samples(self, samples: float) -> None:
        self._samples += samples

    def _ratio(self) -> float:
        """How much this rank counts in an average. Collective, if ranks are weighed."""
        return 1.0 if self._weight is None else weight_ratio(self._samples, self._group)

    def _take_unfrozen(self) -> None:
        """Parameters that were frozen until now, and are trained."""
        for name in [name for name, each in self._frozen.items() if each.requires_grad]:
            self._add(name)

    def _add(self, name: str) -> None:
        self._parameters[name] = self._frozen.pop(name)

    def _sync(self, *, due: bool) -> None:
        self._take_unfrozen()
        begin = time.perf_counter()
        with torch.no_grad():
            synced = self._average(due)
            self._since_sync, self._samples = 0, 0.0  # also if the buffers fail
            if synced:
                self._syncs += 1
                self._send_buffers()
        self._seconds += time.perf_counter() - begin

    def _send_buffers(self) -> None:
        buffers = list(sent_buffers(self._model, ignored_names(self._model)).values())
        if buffers and self._broadcast_buffers:
            dist._broadcast_coalesced(  # type: ignore[attr-defined]
                self._group, buffers, _BUFFERS_NBYTES, 0
            )

    def _average(self, due: bool) -> bool:
        """Syncs, always if it is ``due``. Returns whether it did. The same on all ranks."""
        self._wire_nbytes += average_(self._parameters, self._group, self._ratio())
        return True

    def stats(self) -> SyncStats:
        """Counters since construction."""
        ranks = dist.get_world_size(self._group)
        each = ring_nbytes(sum(tensor.nbytes for tensor in self._parameters.values()), ranks)
        sent = self._sent_nbytes()
        return SyncStats(
            steps=self._steps,
            syncs=self._syncs,
            sent_nbytes=sent,
            saved_nbytes=self._steps * each - sent,
            exposed_seconds=self._seconds,
        )

    def _sent_nbytes(self) -> int:
        return ring_nbytes(self._wire_nbytes, dist.get_world_size(self._group))

    def state_dict(self) -> dict[str, Any]:
        """The state of a checkpoint besides the model's and the optimizer's; save each rank's."""
        state: dict[str, Any] = {
            "since_sync": self._since_sync,
            "parameters": list(self._parameters),
        }
        return state if self._weight is None else {**state, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of ``state_dict()``.

        Raises:
            ValueError: It was saved without ``weight``, which this has; nothing was changed.
        """
        since_sync, samples = int(part_of(state, "since_sync")), self._saved(state, "samples", 0.0)
        self._since_sync, self._samples = since_sync, float(samples)
        for name in state.get("parameters", ()):
            if name in self._frozen:  # unfrozen then, and trained since the last sync
                self._add(name)
        # Averages lie in one buffer in this order, and a ring adds each place's ranks in its own.
        order = [name for name in state.get("parameters", ()) if name in self._parameters]
        self._parameters = {name: self._parameters[name] for name in order} | self._parameters

    def _saved(self, state: Mapping[str, Any], key: str, otherwise: Any) -> Any:
        """The samples in a state; ``otherwise`` if ranks are not weighed."""
        if self._weight is None:
            return otherwise
        if key not in state:
            raise ValueError(
                f'the state has no {key!r}: it was saved without weight="samples", and this '
                f"{type(self).__name__} has it; nothing was changed"
            )
        return state[key]


class FixedParameters(LocalSGD):
    """The base of those that keep a state for each parameter from construction on."""

    def _add(self, name: str) -> None:
        raise UnsupportedError(
            f"parameter {name!r} is trained now and was frozen when {type(self).__name__} was made,"
            " which keeps no state for it: it would differ between ranks. Try: unfreeze it first, "
            f"on all ranks, and make a new {type(self).__name__}"
        )


class DiLoCo(FixedParameters):
    """Every ``sync_every`` steps an outer optimizer applies the mean of the workers' movements.

    Example::

        local = pycomm.DiLoCo(model, sync_every=100)
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            local.step()
        local.sync()

    Args:
        model, sync_every, process_group, init_sync, broadcast_buffers, weight: As ``LocalSGD``.
        outer_optimizer: Makes an optimizer of a list of tensors, alike on all ranks. By default
            SGD with learning rate 0.7 and Nesterov momentum 0.9, as in the paper.

    Raises:
        ValueError: As ``LocalSGD``.
        CollectiveMismatchError: In the first sync: parameters differ between ranks, since
            ``init_sync`` was false. In any: the outer step before it ended with an error on a rank,
            one has missed it, or only some ranks have loaded a state.

    Memory: one more copy of the parameters, and the outer optimizer's state.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sync_every: int,
        outer_optimizer: MakeOptimizer | None = None,
        process_group: Any = None,
        init_sync: bool = True,
        broadcast_buffers: bool = True,
        weight: str | None = None,
    ) -> None:
        super().__init__(
            model,
            sync_every=sync_every,
            process_group=process_group,
            init_sync=init_sync,
            broadcast_buffers=broadcast_buffers,
            weight=weight,
        )
        make = nesterov if outer_optimizer is None else outer_optimizer
        self._whole = Fragment(0, self._parameters, make)

    def _average(self, due: bool) -> bool:
        idle = self._compare(due)
        if idle is None:
            return False  # an outer step would follow momentum alone
        whole = self._whole
        moved = {
            name: anchor - whole.parameters[name].detach() for name, anchor in whole.anchor.items()
        }
        self._wire_nbytes += average_(moved, self._group, self._ratio())
        whole.stepping = True
        whole.take_step(moved, idle)
        for name, anchor in whole.anchor.items():
            whole.parameters[name].copy_(anchor)
        whole.version += 1
        whole.stepping = False
        return True

    def _compare(self, due: bool) -> set[str] | None:
        """What no rank trains; None if no rank has trained since the last sync nor is this ``due``.

        The ranks compare, and so decide alike: one of them may have had more batches.
        """
        whole = self._whole
        device = next(iter(self._parameters.values())).device
        state = [whole.version, whole.origin(), whole.stepping]
        mine = [due or whole.moved(), *state, *whole.idle()]
        of_ranks = gather_numbers(mine, self._group, device)
        ranks = dist.get_process_group_ranks(self._group)
        places = [Place(0, None, n, origin, s) for _, n, origin, s, *_ in of_ranks]
        check_places(places, "all_gather", ranks)
        if not any(each[0] for each in of_ranks):
            return None
        return idle_on_all([each[4:] for each in of_ranks], whole.anchor)

    def state_dict(self) -> dict[str, Any]:
        """Also the parameters of the last sync, by name, and the outer optimizer's state.

        And the number of outer steps.
        """
        anchor = {name: tensor.clone() for name, tensor in self._whole.anchor.items()}
        outer = copy.deepcopy(self._whole.outer.state_dict())  # torch's has the live momentum in it
        version = self._whole.version
        return {**super().state_dict(), "anchor": anchor, "outer": outer, "version": version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state_dict()`` was taken. On all ranks or on none.

        Raises:
            ValueError: The state is that of another model; nothing was changed.
        """
        check_tensors("anchor", part_of(state, "anchor"), self._whole.anchor)
        check_outer(part_of(state, "outer"), self._whole.outer)
        version = int(part_of(state, "version"))
        super().load_state_dict(state)
        with torch.no_grad():
            self._whole.load(state["anchor"], state["outer"], version)


def nesterov(tensors: list[torch.Tensor]) -> Optimizer:
    """The outer optimizer of the DiLoCo paper."""
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)

"""Steps that survive the death of ranks: the settings, and what a wrapper says of its group."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn

from pycomm._group.creation import group_timeout, native_backend
from pycomm._group.model_check import gather_numbers
from pycomm._group.queries import elastic_group, members_can_change
from pycomm._group.reconfiguring import reconfigure, reconfigure_handle
from pycomm._metrics.ddp_stats import wrappers
from pycomm._native import loader
from pycomm._settings import timeout_seconds
from pycomm.ddp.peers import peers_in_force, peers_port
from pycomm.ddp.weights import check_samples
from pycomm.errors import InvalidArgumentError, UnsupportedError
from pycomm.sync_batch_norm import SYNC_BATCH_NORMS

logger = logging.getLogger("pycomm")
_warned = False
_LONGEST_PAUSE_MS = 2**31 - 1
_LONGEST_DESCRIPTION = 500_000  # characters: it travels in one message of 2 MiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elastic:
    """How a ``DistributedDataParallel`` goes on when ranks die: ``elastic=pycomm.Elastic(...)``.

    A rank that dies in a step does not end the training. The others agree on who is left, sum the
    step again without it, and go on: nothing raises, and all have the same averages. See
    docs/elastic.md for what a step is then, and what does not go with it.

    Example::

        model = pycomm.DistributedDataParallel(net, elastic=pycomm.Elastic(min_ranks=2))

    Args:
        min_ranks: No step begins with fewer ranks: after ``quorum_wait`` it raises; one that would
            have to be summed again raises at once. A floor, and no permission: a quorum is needed
            as well.
        split_brain: None: ranks go on if they are more than half of the last group, or half with
            its lowest rank; ranks of the same host whose processes have ended do not count. So at
            most one part of a group goes on. "accept": all who are left go on. If a network
            splits, both sides do, with different parameters, and nothing brings them together.
        quorum_wait: Seconds to wait for a quorum, or for ``min_ranks``, before an error. Up to
            three times that if a quorum answers, as when a rank stops while they agree; or that and
            two ``heartbeat_timeout`` if this is longer.
        peers: Where others find the members, to join them. A file: rank 0 writes the members'
            handles to it at each change, and all members name the same one. Or
            "pycomm://alpha,beta:29600": one member on each of these hosts listens at this port and
            tells them; the same text on all members. A training that begins takes neither the file
            nor the port of one that runs: all of its ranks raise ``InvalidArgumentError``, after
            rank 0 has asked the members there for 2 s at most. None: ``PYCOMM_PEERS``, and without
            that nobody can join.
        state: With ``peers``: what a process needs to go on as the others do, besides parameters,
            gradients and buffers: the optimizer, a scheduler, a GradScaler, an object of yours;
            each with ``state_dict()`` and ``load_state_dict()``, of tensors, numbers, texts, lists
            and dicts. Not a ``BalancedSampler``: its position travels by itself.
        join: True: this process joins the training that it finds by ``peers``. Making the wrapper
            then blocks until it is a member, with all of ``state`` loaded. It never begins a
            training. Its own default group is of no use to the others: a group of itself alone.
        join_pause: Seconds for which members wait, between two steps, for newcomers to get the
            state. Those that do not are refused, or tried again if they were not reached. None:
            members stop for newcomers where all of them call ``model.elastic.join_point()``, and
            nowhere else, for as long as the state takes, up to the group's ``timeout``.
        join_wait: Seconds for which a process with ``join`` waits to become a member.

    Raises:
        TypeError, ValueError: A value of another type or out of range.
    """

    min_ranks: int = 1
    split_brain: str | None = None
    quorum_wait: float = 10.0
    # Of a process, so not compared between ranks.
    peers: str | None = dataclasses.field(default=None, repr=False)
    state: Sequence[Any] = dataclasses.field(default=(), repr=False)
    join: bool = dataclasses.field(default=False, repr=False)
    join_pause: float | None = dataclasses.field(default=10.0, repr=False)
    join_wait: float = dataclasses.field(default=60.0, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.min_ranks, bool) or not isinstance(self.min_ranks, int):
            raise TypeError(f"Elastic.min_ranks={self.min_ranks!r} is not a whole number")
        if self.min_ranks < 1:
            raise ValueError(f"Elastic.min_ranks={self.min_ranks} is below 1")
        if self.split_brain not in (None, "accept"):
            raise ValueError(
                f'Elastic.split_brain={self.split_brain!r} is neither None nor "accept"'
            )
        wait = timeout_seconds("Elastic.quorum_wait", self.quorum_wait)
        object.__setattr__(self, "quorum_wait", wait)
        self._check_joining()

    def _check_joining(self) -> None:
        if self.peers is not None and not isinstance(self.peers, (str, os.PathLike)):
            raise TypeError(
                f"Elastic.peers={self.peers!r} is neither the name of a file nor an address"
            )
        object.__setattr__(self, "peers", peers_in_force(self.peers))
        if not isinstance(self.join, bool):
            raise TypeError(f"Elastic.join={self.join!r} is neither True nor False")
        if not isinstance(self.state, (list, tuple)):
            raise TypeError(f"Elastic.state={self.state!r} is not a list")
        for each in self.state:
            if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
                raise TypeError(
                    f"Elastic.state has an object of {type(each).__name__}, which has no "
                    "state_dict() and load_state_dict()"
                )
        if self.peers is None and (self.join or self.state):
            what = "join=True" if self.join else "state="
            raise ValueError(
                f"Elastic: {what} needs peers=, the file or the address by which others join, or "
                "PYCOMM_PEERS"
            )
        if self.peers is not None and not self.state:
            raise ValueError(
                "Elastic: peers= needs state=, with the optimizer and all else that a newcomer has "
                "to get from the others: state=[optimizer]"
            )
        if self.join_pause is not None:
            pause = timeout_seconds("Elastic.join_pause", self.join_pause)
            object.__setattr__(self, "join_pause", pause)
        elif self.peers is None:
            raise ValueError("Elastic: join_pause=None needs peers=: else nobody joins")
        wait = timeout_seconds("Elastic.join_wait", self.join_wait)
        object.__setattr__(self, "join_wait", wait)
        object.__setattr__(self, "state", tuple(self.state))

    @property
    def peers_port(self) -> str | None:
        """``peers`` if it is an address: the same on all members, as no file has to be."""
        return self.peers if self.peers is not None and peers_port(self.peers) else None


class ElasticGroup:
    """The ranks that train together now: ``model.elastic``. Any thread may ask.

    It changes inside ``backward()`` and ``no_batch()`` only, on the thread that calls them; but for
    ``leader``, which may change in ``mean()`` and ``confirm()``, too.

    Example::

        if model.elastic.leader:  # in place of dist.get_rank() == 0, whose process may be gone
            torch.save(model.module.state_dict(), f"step-{model.elastic.step}.pt")
    """

    def __init__(
        self,
        reducer: Any,
        *,
        weighs: bool = False,
        steps_before: int = 0,
        join_point: Callable[[], None] | None = None,
    ) -> None:
        self._reducer = reducer
        self._join_point = join_point
        self._weighs = weighs
        self._steps_before = steps_before  # of the others, before this process joined
        rank, members = reducer.members()
        self._number = members[rank]

    @property
    def rank(self) -> int:
        """This process among ``members``, from 0."""
        rank: int = self._reducer.members()[0]
        return rank

    @property
    def members(self) -> tuple[int, ...]:
        """By rank: the number that each member had when the model was wrapped.

        A process that joins gets the next number that no member has had.
        """
        return tuple(self._reducer.members()[1])

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.members)

    @property
    def leader(self) -> bool:
        """Whether this is rank 0: the one to save, to log, and whose buffers all take over.

        If rank 0 has died as the last step was committed, and this rank knows it, it leads at once,
        although ``rank`` and ``members`` change with the next step only, on all ranks alike.
        """
        leads: bool = self._reducer.leads()
        return leads

    def leave(self) -> None:
        """Asks to leave in order: with the next step that all members commit.

        Returns at once. That step has this rank's samples, nothing is summed again, and the others
        go on without it. So call it from a handler of SIGTERM, with which Slurm, Kubernetes and
        spot machines announce the end, and end the loop when ``left`` is True. Any thread or
        signal handler, at any time; a second call changes nothing.

        Example::

            signal.signal(signal.SIGTERM, lambda *_: model.elastic.leave())
            for batch, labels in loader:
                ...  # a step
                if model.elastic.left:
                    break

        Cost: none in this step; the others make a new group, some milliseconds.
        """
        self._reducer.ask_to_leave()

    @property
    def left(self) -> bool:
        """Whether this rank has left in order: no further step of its can begin.

        It becomes True inside ``backward()`` or ``no_batch()``, as the last step is committed.
        ``rank``, ``members`` and ``leader`` stay those of that step.
        """
        left: bool = self._reducer.has_left()
        return left

    @property
    def step(self) -> int:
        """Steps that all members have committed, since the training began."""
        steps: int = self._reducer.stats().steps
        return self._steps_before + steps

    @overload
    def mean(self, value: float, *, weight: float | None = None) -> float: ...

    @overload
    def mean(self, value: torch.Tensor, *, weight: float | None = None) -> torch.Tensor: ...

    def mean(
        self, value: float | torch.Tensor, *, weight: float | None = None
    ) -> float | torch.Tensor:
        """The mean of a number, or of each element of a tensor, over the members. It survives
        deaths: a member that dies meanwhile does not count.

        Takes the place of ``dist.all_reduce(loss)``. Collective: all members call it at the same
        place of the program, between two backward passes. All of them get the same bits. ::

            loss.backward()
            optimizer.step()
            print(model.elastic.mean(loss))

        Args:
            value: A number; or a tensor of floats of any shape, the same on all, on the CPU.
                It is summed in float64.
            weight: How much this member counts; 0 if its value is not to count at all. None: with
                the wrapper's ``weight="samples"`` by its samples in the last step, so that the mean
                of that step's losses is that of one process with all batches: call it after
                ``backward()``. Else all count alike.

        Returns:
            A float, or a new tensor of the same shape and dtype without a graph. NaN if no member
            counts. On a rank that has ``left``: its own value.

        Raises:
            TypeError: ``value`` is neither a number nor a tensor of floats on the CPU.
            ValueError: ``weight`` is neither 0 nor a number from 1e-20 to 1e20.
            CollectiveMismatchError: Shapes differ between members; on all of them. The wrapper has
                failed then.
            QuorumLostError, LeftBehindError: As in ``backward()``.

        Threads: that of the training. Blocks, without the interpreter's lock.

        Cost: an all-reduce of 8 bytes per element and 8 more, and a commit round.
        """
        tensor = _as_tensor(value)
        if self.left:
            return tensor.detach().clone() if isinstance(value, torch.Tensor) else float(value)
        counts = self._last_samples() if weight is None else check_samples("weight", weight)
        words = torch.zeros(tensor.numel() + 1, dtype=torch.float64)
        words[-1] = counts
        if counts:  # else it may be NaN
            words[:-1] = tensor.detach().flatten().double() * counts
        sums = self._reducer.sum_of_members(words, f"a mean of {tuple(tensor.shape)}")
        means = (sums[:-1] / sums[-1]).reshape(tensor.shape).to(tensor.dtype)
        return means if isinstance(value, torch.Tensor) else float(means)

    def confirm(self) -> bool:
        """Whether this rank leads, as the other members have just confirmed.

        A rank that was stopped or cut off does not know that the others have gone on without it,
        and ``leader`` may still be True there. So ask before you write what another leader may have
        written. Collective: all members call it at the same place, between two backward passes. ::

            if model.elastic.step % 1000 == 0 and model.elastic.confirm():
                torch.save(model.module.state_dict(), path)

        False on a rank that has ``left``. A rank that is stopped after this has returned may still
        write when it wakes: write to a name that holds the step, and rename it into place.

        Raises:
            LeftBehindError: The others have gone on without this rank.
            QuorumLostError: As in ``backward()``.

        Threads: that of the training. Blocks, without the interpreter's lock.

        Cost: a commit round, which is an all-reduce of 64 bytes.
        """
        if self.left:
            return False
        self._reducer.sum_of_members(torch.empty(0, dtype=torch.float64), "nothing")
        return self.leader

    def join_point(self) -> None:
        """With ``join_pause=None``: processes that wait to join become members here.

        All members call it behind the same step, before the next forward pass. If a process waits
        and all members reach it, they stop here until it has their state: up to the group's
        ``timeout``, 1800 s by default. If none waits, it returns at once. Give processes that join
        a ``join_wait`` in which the members come to such a place. ::

            for epoch in range(epochs):
                for batch, labels in loader:
                    ...  # a step
                model.elastic.join_point()

        A process that joins begins with the step behind this place. If it dies meanwhile, or a
        member does, the others go on, and those that still wait come in at the next one.

        Nothing on a rank that has ``left``.

        Raises:
            UnsupportedError: ``join_pause`` is not None, or there is no ``peers``.
            InvalidArgumentError: It was called between the passes of a step with ``accumulate``.
            CollectiveMismatchError: The end of the next step raises it on all members, if some have
                called this and others not. If a process waits, those who call this may raise it
                here.
            QuorumLostError, LeftBehindError: As in ``backward()``.

        Threads: that of the training. Blocks, without the interpreter's lock.

        Cost: some microseconds if no process waits.
        """
        if self._join_point is None:
            raise UnsupportedError(
                "model.elastic.join_point() needs Elastic(peers=..., join_pause=None): with a "
                "join_pause members stop for processes that join before any forward pass"
            )
        self._join_point()

    def _last_samples(self) -> float:
        if not self._weighs or (steps := self._reducer.weighed_steps()) == 0:
            return 1.0
        ((_, rows, members),) = self._reducer.step_rows(steps - 1)
        samples: float = rows[members.index(self._number)][0]
        return samples

    def __repr__(self) -> str:
        rank, members = self._reducer.members()
        return f"ElasticGroup(rank={rank}, members={tuple(members)}, step={self.step})"


def _as_tensor(value: object) -> torch.Tensor:
    """What ``mean()`` takes. TypeError: something else."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.device.type == "cpu":
            return value
        what = f"a tensor of {value.dtype} on {value.device}. Try: .float().cpu()"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(value, dtype=torch.float64)
    else:
        what = repr(value)
    raise TypeError(
        f"model.elastic.mean() takes a number, or a tensor of floats on the CPU, and got {what}"
    )


def check_elastic(
    elastic: object,
    module: nn.Module,
    *,
    sync_every: int,
    gradient_as_bucket_view: bool | None,
    static_graph: bool,
) -> None:
    """Whether the model and the other options go with it.

    Raises:
        TypeError: Not a ``pycomm.Elastic``.
        UnsupportedError: What does not go with it, by name.
    """
    if elastic is None:
        return
    if not isinstance(elastic, Elastic):
        raise TypeError(f"elastic={elastic!r} is not a pycomm.Elastic. Try: pycomm.Elastic()")
    if gradient_as_bucket_view:
        why = "sums would overwrite the gradients of a step that may have to be summed again"
        refuse("gradient_as_bucket_view=True", why, "leave it out")
    if static_graph and elastic.peers is not None:
        why = "a process that joins would count the graph's gradients when the others have"
        refuse("static_graph=True and peers=", why, "find_unused_parameters=True")
    if sync_every > 1:
        refuse(
            f"sync_every={sync_every}", "it averages parameters outside of steps", "sync_every=1"
        )
    for name, layer in module.named_modules():
        if isinstance(layer, SYNC_BATCH_NORMS):
            why = "it sums inside forward and backward, among ranks that may die there"
            refuse(f"SyncBatchNorm ({name!r})", why, "BatchNorm, or another normalization")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device.type != "cpu":
            why = "a step can be summed again only if its gradients are on the CPU"
            refuse(f"{name!r} on {tensor.device}", why, "a model on the CPU")


def check_alone(elastic: Elastic, group: Any, device: torch.device) -> None:
    """Whether a process that joins would have to join two trainings. Collective.

    Raises:
        UnsupportedError: On all ranks, if it is so on one: a training ends on some and not others.
    """
    trains = any(
        wrapper._elastic is not None
        and (elastic.peers is not None or wrapper._elastic.peers is not None)
        and not wrapper._agreement.is_over()
        for wrapper, _ in wrappers()
    )
    said = gather_numbers([trains], group, device)
    ranks = dist.get_process_group_ranks(group)
    if training := [rank for rank, (trains,) in zip(ranks, said, strict=True) if trains]:
        why = (
            "one of them has peers=, and a process that joins is a member of the first one before "
            "it asks for the second: each side would wait for the other"
        )
        what = f"a second elastic wrapper where the first still trains on ranks {training}"
        refuse(what, why, "one wrapper of both models")


def refuse(what: str, why: str, instead: str) -> None:
    """Raises an UnsupportedError for what does not go with ``elastic=``."""
    raise UnsupportedError(f"{what} does not go with elastic=: {why}. Try: {instead}")


def make_group(group: Any, elastic: Elastic) -> Any:
    """A group of the same ranks for a wrapper alone, whose members change. Collective."""
    global _warned
    if members_can_change(dist.group.WORLD):
        why = "members of the wrapper's group are called by their places in it, which change"
        refuse("a default group that can be reconfigured", why, "pycomm.Options() for that group")
    if elastic.join and dist.get_world_size(group) != 1:
        raise ValueError(
            f"Elastic.join=True, and the process group has {dist.get_world_size(group)} ranks: a "
            "process joins alone, with a group of itself (world_size=1)"
        )
    if not elastic.join and elastic.min_ranks > dist.get_world_size(group):
        raise ValueError(
            f"Elastic.min_ranks={elastic.min_ranks}, and the group has "
            f"{dist.get_world_size(group)} ranks: no step could begin"
        )
    made = elastic_group(group)
    try:
        _found(made, group, elastic)
    except BaseException:
        dist.destroy_process_group(made)  # it may listen at a port
        raise
    if not _warned and dist.get_rank() == 0:
        logger.warning(
            "elastic=: steps of the wrapped model survive the death of ranks. The process group "
            "does not: after a death its own collectives raise (dist.all_reduce, dist.barrier). "
            "Use model.elastic.leader in place of rank 0, and model.elastic.mean() in place of "
            "dist.all_reduce(); no other collectives in the training loop."
        )
    _warned = True
    return made


def _found(made: Any, group: Any, elastic: Elastic) -> None:
    """Makes these ranks the first members, unless another training has the file or port."""
    refusal, offer = "", None
    if elastic.peers is not None and not elastic.join:
        from pycomm.ddp import joining

        if dist.get_rank(group) == 0:
            refusal = joining.check_peers(made, elastic.peers)
        if elastic.peers_port is not None:
            addresses = joining.look_up(elastic.peers_port)
            offer, why = joining.offer_port(made, elastic.peers_port, addresses)
            refusal = refusal or why
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (reconfigure_handle(made), refusal, offer), group=group)
    refusal = next((refusal for _, refusal, _ in said if refusal), "")
    if not refusal and offer is not None:
        refusal = joining.port_trouble(elastic.peers_port, [offer for *_, offer in said])
    if refusal:
        raise InvalidArgumentError(refusal)
    reconfigure(1, [handle for handle, *_ in said], group=made)


def make_agreement(group: Any, elastic: Elastic, description: str = "") -> Any:
    """The native agreement of the ranks of ``make_group()`` on their steps.

    ``description``: of the model and its options; a process that joins must have the same.
    """
    began_s = time.monotonic()
    joins = None
    pause_s = elastic.join_pause
    if pause_s is None:
        pause_s = group_timeout(group).total_seconds()
    if len(description) > _LONGEST_DESCRIPTION:
        digest = hashlib.sha256(description.encode()).hexdigest()
        description = f"{description[:_LONGEST_DESCRIPTION]}\noption\tall of the model\t{digest}"
    if elastic.join:
        from pycomm.ddp.joining import find_members

        joins = find_members(group, elastic, description, began_s + elastic.join_wait)
    return loader.native.step_agreement(
        native_backend(group),
        group,
        min_ranks=elastic.min_ranks,
        accept_split_brain=elastic.split_brain == "accept",
        quorum_wait_ms=max(1, round(elastic.quorum_wait * 1000)),
        join_pause_ms=max(1, min(round(pause_s * 1000), _LONGEST_PAUSE_MS)),
        join_wait_ms=max(1, round(elastic.join_wait * 1000)),
        join_spent_ms=round((time.monotonic() - began_s) * 1000),
        description=description,
        peers_path="" if elastic.peers_port else elastic.peers or "",
        has_port=elastic.peers_port is not None,
        joins=joins,
    )

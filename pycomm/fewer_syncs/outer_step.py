"""One fragment's outer step: ranks average its movement, and an outer optimizer applies the mean.

    launch   snapshot: moved = anchor - parameters; the sum over the ranks begins
    settle   the sum has arrived: anchor, state <- outer optimizer(anchor, state, moved / ranks)
    land     the parameters take the new anchor

If ranks are weighed, moved is times the rank's weight, and the sum is divided by that of all
weights: a launch waits for no rank, so it does not know the others' weights.

Between launch and land the parameters train on. Only ``settle`` changes the state that all ranks
have alike, and only if every operation of the fragment has succeeded. If one fails, anchor and
state stay as they were before the launch. The parameters keep their movement; the next launch sends
it. If the outer optimizer itself fails or is interrupted, they may be half changed, on all ranks
alike or not: the fragment stays ``stepping``, and its next launch is an error on all ranks.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree

from pycomm import codecs
from pycomm._group.averaging import SMALL_FLOATS, bits_of, chunks, exact_all_reduce, float_of
from pycomm._group.model_check import checksum_of
from pycomm._native import loader, thread_ends
from pycomm.errors import CollectiveMismatchError

MakeOptimizer = Callable[[list[torch.Tensor]], Optimizer]

_LEAST_ENCODED_NBYTES = 16 << 10  # codecs.all_reduce sends smaller tensors as they are
_BITS = 63  # of an int64 that is not negative


def have_moved(parameters: Mapping[str, nn.Parameter], anchor: Mapping[str, torch.Tensor]) -> bool:
    """Whether a parameter is not its anchor, bit for bit."""
    return any(not torch.equal(each.detach(), anchor[name]) for name, each in parameters.items())


def idle_words(
    parameters: Mapping[str, nn.Parameter], anchor: Mapping[str, torch.Tensor]
) -> list[int]:
    """A bit for each parameter that is frozen and at its anchor: an odd number of int64.

    The anchor's order is that of all ranks.
    """
    bits = 0
    for place, (name, tensor) in enumerate(anchor.items()):
        each = parameters[name]
        bits |= (not each.requires_grad and torch.equal(each.detach(), tensor)) << place
    words = -(-len(anchor) // _BITS) | 1
    return [bits >> word * _BITS & (1 << _BITS) - 1 for word in range(words)]


def idle_on_all(of_ranks: Iterable[Sequence[int]], names: Iterable[str]) -> set[str]:
    """The names whose bit is set in the ``idle_words`` of all ranks, which so decide alike.

    An outer step leaves them alone, with their state: momentum alone would move them.
    """
    common = [functools.reduce(operator.and_, words) for words in zip(*of_ranks, strict=True)]
    return {n for place, n in enumerate(names) if common[place // _BITS] >> place % _BITS & 1}


class Fragment:
    """Some of a model's parameters, and the state of them that all ranks have alike."""

    def __init__(
        self, index: int, parameters: Mapping[str, nn.Parameter], make_outer: MakeOptimizer
    ) -> None:
        self.index = index
        self.parameters = dict(parameters)
        self.anchor = {name: each.detach().clone() for name, each in self.parameters.items()}
        """The parameters after the last outer step."""
        self.outer = make_outer(list(self.anchor.values()))
        self.version = 0
        """Outer steps so far."""
        self._origin: int | None = None
        self.stepping = False
        """An outer step has begun and not ended."""

    def moved(self) -> bool:
        return have_moved(self.parameters, self.anchor)

    def origin(self) -> int:
        """The checksum of the state that was made or loaded, before the outer steps since.

        Ranks of one origin and one version have the same anchor and outer state. Nothing that fails
        between ranks changes either, so ranks that have failed may compare again.
        """
        if self._origin is None:
            kept = _pytree.tree_leaves(self.outer.state_dict()["state"])
            tensors = [each for each in kept if torch.is_tensor(each)]
            self._origin = origin_of(self.version, [*self.anchor.values(), *tensors])
        return self._origin

    def idle(self) -> list[int]:
        return idle_words(self.parameters, self.anchor)

    def take_step(self, moved: Mapping[str, torch.Tensor], idle: Collection[str]) -> None:
        """The outer optimizer's, from the mean of all ranks' movements."""
        for name, anchor in self.anchor.items():
            part = None if name in idle else moved[name].to(anchor.device, anchor.dtype)
            anchor.grad = part  # zeros would let momentum move it
        self.outer.step()
        self.outer.zero_grad()

    def load(self, anchor: Mapping[str, torch.Tensor], outer: dict[str, Any], version: int) -> None:
        for name, mine in self.anchor.items():
            mine.copy_(anchor[name])
        self.outer.load_state_dict(copy.deepcopy(outer))  # torch keeps the tensors
        self.version, self._origin, self.stepping = version, None, False


def origin_of(version: int, tensors: Iterable[torch.Tensor]) -> int:
    """The checksum of a state that ranks have alike, after so many outer steps."""
    return checksum_of([torch.tensor(version), *tensors])


class Place(NamedTuple):
    """The numbers that ranks compare before an outer step."""

    step: int
    """Steps since the round began, 0 in a sync()."""
    fragment: int | None
    """None: the whole model, in a sync."""
    version: int
    origin: int
    stepping: int
    """Whether an outer step before has not ended."""
    weight: int = 0
    """As ``bits_of``: not compared."""
    idle: Sequence[int] = ()
    """As ``idle_words``: not compared."""

    def __str__(self) -> str:
        after = f"after {self.version} outer step{'' if self.version == 1 else 's'}"
        if self.fragment is None:
            return f"synced {after}"
        at = f"at step {self.step}" if self.step else "in sync()"
        return f"sent fragment {self.fragment} {at} {after}"


_ALONE = len(Place._fields) - 1  # numbers before those of ``idle``


def check_places(places: Sequence[Place], op: str, ranks: Sequence[int]) -> None:
    """Raises CollectiveMismatchError, on all ranks alike, unless they are at the same place.

    ``ranks`` has the numbers of the places' ranks in the job.
    """
    check_stepped([place.stepping for place in places], op, ranks)
    different = [rank for rank, place in enumerate(places) if place[:3] != places[0][:3]]
    if different:
        other = different[0]
        raise CollectiveMismatchError(
            f"The ranks are at different places: rank {ranks[0]} {places[0]}; rank {ranks[other]} "
            f"{places[other]}. Nothing was changed. Try: call step() equally often on all ranks, "
            "sync() on all, and load checkpoints of one step",
            {"peer": ranks[other], "op": op},
        )
    which = "" if places[0].fragment is None else f" fragment {places[0].fragment}"
    check_origins([place.origin for place in places], op, ranks, which)


def check_stepped(stepping: Sequence[int], op: str, ranks: Sequence[int]) -> None:
    """Raises CollectiveMismatchError, on all ranks alike, if one's last outer step has not ended.

    Args:
        stepping: Whether, of each rank.
        op: The operation that has brought it.
        ranks: Their numbers in the job.
    """
    if any(stepping):
        rank = ranks[stepping.index(True)]
        raise CollectiveMismatchError(
            f"The outer step of rank {rank} ended with an error: its anchor may be half "
            "changed. Nothing was averaged. Try: load a checkpoint on all ranks",
            {"peer": rank, "op": op},
        )


def check_origins(origins: Sequence[int], op: str, ranks: Sequence[int], which: str = "") -> None:
    """Raises CollectiveMismatchError, on all ranks alike, unless they are the same.

    Args:
        origins: Of each rank. Their versions are the same.
        op: The operation that has brought them.
        ranks: Their numbers in the job.
        which: What of the model they are.
    """
    different = [rank for rank, each in enumerate(origins) if each != origins[0]]
    if different:
        rank = ranks[different[0]]
        raise CollectiveMismatchError(
            f"The ranks began{which} with different parameters, or have loaded different states "
            f"or only some have loaded one: rank {rank} is the first that differs from rank "
            f"{ranks[0]}. Nothing was changed. Try: leave init_sync=True, or load checkpoints of "
            "one step on all ranks",
            {"peer": rank, "op": op},
        )


class Scratch:
    """Memory for one flight at a time: making it anew would cost a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def take(
        self, key: torch.dtype, dtype: torch.dtype, device: torch.device, sizes: list[int]
    ) -> list[torch.Tensor]:
        """Adjacent flat tensors of these sizes, in the memory of those taken before.

        Args:
            key: The parameters' dtype. Each dtype has memory of its own on each device.
        """
        numel = sum(sizes)
        place = (key, device)
        if place not in self._flat or self._flat[place].numel() < numel:
            self._flat[place] = torch.empty(numel, dtype=dtype, device=device)
        return list(torch.split(self._flat[place][:numel], sizes))


class _Chunk(NamedTuple):
    flat: torch.Tensor
    """The tensor that ranks sum: small floats as float32, about 32 MiB."""
    parts: dict[str, torch.Tensor]
    """Each parameter's part of it, by name, in the parameter's shape."""

    def wire(self) -> torch.Tensor:
        return torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat


class Flight:
    """One fragment from its launch to its landing.

    If Ctrl-C interrupts ``wait`` or ``land``, call it again: it goes on where it was.

    Args:
        fragment: Nothing else may change it until the flight is over.
        scratch: Belongs to this flight until then.
        to_land: As ``to_land()`` of a flight that was saved.
    """

    def __init__(
        self, fragment: Fragment, scratch: Scratch, to_land: Iterable[str] | None = None
    ) -> None:
        self.fragment = fragment
        self._scratch = scratch
        self._chunks: list[_Chunk] = []
        self._works: list[Any] = []
        self._places: list[torch.Tensor] = []
        # Set unless a thread is settling. Not Thread.join(): if Ctrl-C interrupts that, Python 3.11
        # takes a thread that still runs for one that has ended.
        self._idle = threading.Event()
        self._idle.set()
        self._lock = threading.Lock()  # guards the next two
        self._ending = False
        self._stepping = False
        self._settled = True
        self._error: BaseException | None = None
        self._weighs = False
        self.weight = 0.0
        """What it was launched with."""
        self._to_land = list(fragment.parameters if to_land is None else to_land)
        # A parameter and its version before it lands: torch counts each change with the change
        # itself, and Ctrl-C may come between that and the next line.
        self._lands: tuple[str, int] | None = None

    def launch(
        self, group: Any, wire_dtype: str | None, step: int, weight: float | None = None
    ) -> int:
        """Takes the snapshot and begins the sum. Collective; does not wait for other ranks.

        If the parameters are on the CPU, a thread takes the outer step as soon as the sum has
        arrived; otherwise ``wait`` does.

        Args:
            step: Compared between the ranks, as in ``Place``.
            weight: How much this rank counts; None: all ranks count alike.

        Returns:
            The bytes that were given to all_reduce, encoded.
        """
        self._chunks = list(self._snapshot())
        self._settled = False
        self._weighs, self.weight = weight is not None, weight or 0.0
        for chunk in self._chunks if self._weighs else ():
            if self.weight == 0.0:
                chunk.flat.zero_()  # whatever it holds
            else:
                chunk.flat.mul_(self.weight)
        device = self._chunks[0].flat.device
        fragment = self.fragment
        place = Place(
            step,
            fragment.index,
            fragment.version,
            fragment.origin(),
            fragment.stepping,
            bits_of(self.weight),
            fragment.idle(),
        )
        mine = torch.tensor([*place[:-1], *place.idle], dtype=torch.int64, device=device)
        self._places = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        self._ranks = dist.get_process_group_ranks(group)
        self._works = [dist.all_gather(self._places, mine, group=group, async_op=True)]
        for chunk in self._chunks:
            wire = chunk.wire()
            if wire_dtype is None:
                self._works.append(exact_all_reduce(wire, group, async_op=True))
            else:
                work = codecs.all_reduce(wire, wire_dtype, group=group, async_op=True)
                self._works.append(work)
        nbytes = sum(_encoded_nbytes(chunk.wire(), wire_dtype) for chunk in self._chunks)
        if all(each.device.type == "cpu" for each in fragment.parameters.values()):
            self._start()  # from here on the chunks are the thread's
        return nbytes

    @property
    def failed(self) -> bool:
        """Whether ``wait`` and ``land`` raise at once, and no operation goes on."""
        return self._error is not None

    def wait(self) -> None:
        """Waits until the outer step has been taken; raises the error of the sum."""
        self._idle.wait()
        if not self._settled and not self.failed:
            try:
                if self._stepping:
                    raise RuntimeError(
                        f"the outer step of fragment {self.fragment.index} was interrupted: its "
                        "anchor may be half changed on this rank. Try: load a checkpoint, or the "
                        "state_dict() of another rank, on all ranks"
                    )
                self._wait_for_sums()
                self._take_step()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error

    def land(self, alpha: float) -> None:
        """Waits, then moves the parameters to the new anchor; ``alpha`` is the part that stays.

        One that is frozen has nothing to keep.
        """
        self.wait()
        self._drop_landed()
        while self._to_land:
            name = self._to_land[-1]
            parameter, anchor = self.fragment.parameters[name], self.fragment.anchor[name]
            try:
                self._lands = name, parameter._version
                if alpha and parameter.requires_grad:
                    parameter.lerp_(anchor, 1.0 - alpha)
                else:
                    parameter.copy_(anchor)
                self._to_land.pop()
            except BaseException:
                self._drop_landed()  # before the program trains: that is a change, too
                raise

    def to_land(self) -> list[str]:
        """The names of the parameters that have not landed."""
        self._drop_landed()
        return list(self._to_land)

    def _drop_landed(self) -> None:
        """The parameter that was landing when an error or Ctrl-C came, if it has landed."""
        if self._lands is not None and self._to_land[-1:] == [self._lands[0]]:
            name, version = self._lands
            if self.fragment.parameters[name]._version != version:
                self._to_land.pop()
        self._lands = None

    def stop(self) -> None:
        """For ``_exit``: the thread begins no outer step any more. ``wait`` still takes it."""
        with self._lock:
            self._ending = True

    def join(self, timeout_s: float) -> bool:
        """For ``_exit``. Waits as long as it takes if the outer step, which is local, has begun."""
        self._idle.wait(timeout_s)
        if self._stepping:
            self._idle.wait()
        return self._idle.is_set()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="pycomm-outer", daemon=True)
        thread_ends.running.add(self)
        self._idle.clear()
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, or has no more threads: wait() does it
            self._idle.set()
            thread_ends.running.discard(self)

    def _run(self) -> None:
        try:
            self._wait_for_sums()
            with self._lock:
                if self._ending:
                    return
                self._stepping = True
            self._take_step()
        except BaseException as error:  # wait() raises it
            self._error = error
        finally:
            self._idle.set()
            thread_ends.running.discard(self)

    def _snapshot(self) -> Iterator[_Chunk]:
        fragment = self.fragment
        names = {id(anchor): name for name, anchor in fragment.anchor.items()}
        # The cuts are those of average_, so that a ring adds each value up in the same order.
        cut = list(chunks(fragment.anchor.values()))
        by_dtype: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        for chunk in cut:
            by_dtype.setdefault(chunk[0].dtype, []).append(chunk)
        for dtype, alike in by_dtype.items():
            sizes = [sum(each.numel() for each in chunk) for chunk in alike]
            wider = torch.float32 if dtype in SMALL_FLOATS else dtype
            flats = self._scratch.take(dtype, wider, alike[0][0].device, sizes)
            for chunk, flat in zip(alike, flats, strict=True):
                parts = torch.split(flat, [anchor.numel() for anchor in chunk])
                found = {}
                for anchor, part in zip(chunk, parts, strict=True):
                    name = names[id(anchor)]
                    found[name] = part.view(anchor.shape)
                    if dtype == wider and anchor.device == flat.device:
                        torch.sub(anchor, fragment.parameters[name], out=found[name])
                    else:
                        found[name].copy_(anchor - fragment.parameters[name])
                yield _Chunk(flat, found)

    def _wait_for_sums(self) -> None:
        """Waits for each, also after one has failed: they use memory that the next flight takes."""
        error: Exception | None = None
        for work in self._works:
            try:
                work.wait()
            except Exception as caught:
                error = error or caught
        if error is not None:
            raise error

    @torch.no_grad()
    def _take_step(self) -> None:
        places = self._check_places()
        total = math.fsum(float_of(place.weight) for place in places)
        # Where NCCL sums, wait() has only ordered streams. The operations are over now that the
        # host has waited for the stream, and wait() raises if the group has failed meanwhile.
        self._wait_for_sums()
        fragment, ranks = self.fragment, len(self._places)
        self._stepping = fragment.stepping = True
        moved: dict[str, torch.Tensor] = {}
        for chunk in self._chunks:
            chunk.flat.div_((total or 1.0) if self._weighs else ranks)
            moved.update(chunk.parts)
        if total or not self._weighs:  # else no rank has trained on any sample
            fragment.take_step(moved, idle_on_all([p.idle for p in places], fragment.anchor))
        fragment.version += 1
        fragment.stepping = False
        self._works, self._chunks = [], []
        self._settled = True

    def _check_places(self) -> list[Place]:
        """Of all ranks.

        Raises if they sent different fragments, or one of them missed an outer step.
        """
        device = self._places[0].device
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()
        numbers = [place.tolist() for place in self._places]
        places = [Place._make([*each[:_ALONE], each[_ALONE:]]) for each in numbers]
        check_places(places, "all_reduce", self._ranks)
        return places


def _encoded_nbytes(wire: torch.Tensor, wire_dtype: str | None) -> int:
    floats = wire.dtype in (torch.float32, torch.float64)
    if wire_dtype is None or not floats or wire.nbytes < _LEAST_ENCODED_NBYTES:
        return wire.nbytes
    return loader.native.encoded_nbytes(wire_dtype, wire.numel())

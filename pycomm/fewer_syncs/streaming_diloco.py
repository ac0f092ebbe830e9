"""DiLoCo in fragments that travel while the workers train.

Equations and sources are in docs/fewer-syncs.md.

    local = pycomm.StreamingDiLoCo(
        model, sync_every=100, fragments=4, fragment_sync_delay=5, wire_dtype="int8"
    )
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        local.step()
    local.sync()
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm._group.creation import group_wire_dtype, native_backend
from pycomm._group.model_check import check_same_on_all_ranks, gather_numbers
from pycomm._saved_state import check_options, check_outer, check_tensors, part_of
from pycomm._settings import AS_THE_GROUP
from pycomm._wire_patterns import WireDtype, named_wire_dtype
from pycomm.ddp.ddp_options import ignored_names, reducible
from pycomm.errors import UnsupportedError
from pycomm.fewer_syncs.fragments import cut
from pycomm.fewer_syncs.local_sgd import FixedParameters, nesterov
from pycomm.fewer_syncs.outer_step import (
    Flight,
    Fragment,
    MakeOptimizer,
    Place,
    Scratch,
    check_places,
)

__all__ = ["StreamingDiLoCo"]


class StreamingDiLoCo(FixedParameters):
    """Syncs one fragment of the model at a time, while training goes on.

    With H = ``sync_every``, P fragments and τ = ``fragment_sync_delay``, fragment p of 0 … P − 1 is
    launched at steps (p + 1) · H / P of each round of H. Its parameters take the new anchor τ steps
    later. With P = 1 and τ = 0 it is ``DiLoCo``, bit by bit.

    Example::

        local = pycomm.StreamingDiLoCo(
            model, sync_every=100, fragments=2, fragment_sync_delay=5, wire_dtype="int8"
        )
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            local.step()
        local.sync()

    Args:
        model, sync_every, process_group, init_sync, broadcast_buffers, weight: As ``LocalSGD``. A
            fragment counts by the samples since its last launch; not with ``wire_dtype="fp16"``,
            whose range the weighted sums may leave.
        fragments: Their number; the blocks of the model's longest ``ModuleList`` or ``Sequential``
            are dealt out in turn, other parameters to the lightest. Or a list of modules, one for
            each fragment, which together hold every trainable parameter once. ``sync_every`` is a
            multiple of their number.
        fragment_sync_delay: Steps from a fragment's launch to its outer step, less than
            ``sync_every`` / fragments: so one fragment travels at a time.
        fragment_update_alpha: The part of its own parameters that a worker keeps when a fragment
            lands, from 0 to less than 1; the rest is the new anchor's. 0 drops the steps that it
            took meanwhile. None is 0 without a delay and 0.5 with one. A worker that counts
            nothing keeps nothing.
        wire_dtype: The encoding of float32 and float64 differences: "fp16", "bf16" or "int8" over
            a group of pycomm; None or "fp32" for their own dtype; "group", the default: as the
            group's ``wire_dtype``.
        outer_optimizer: Makes an optimizer of a list of tensors, alike on all ranks, once for each
            fragment. By default as ``DiLoCo``'s.

    Raises:
        ValueError: An option does not fit the model, another option or the group.
        ConfigMismatchError: Options, or settings of outer optimizers, differ between ranks.
        CollectiveMismatchError: In the first launch: parameters differ between ranks, since
            ``init_sync`` was false.

    Memory: one more copy of the parameters, the outer optimizer's state, and the largest fragment,
    in float32 if its own dtype is smaller.

    Cost of a fragment: an all-gather of 48 bytes and a bit for each parameter, and all-reduces of
    some 32 MiB each; two passes over its parameters in ``step()``, one at the launch and one at the
    landing. The first launch after construction or ``load_state_dict()`` also takes a checksum of
    its parameters and of the outer optimizer's state.

    Source: Douillard and others, arXiv 2501.18512.

    Threads: parameters on the CPU get their outer step on a thread, which ends before the fragment
    lands. Call all methods from one thread.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sync_every: int,
        fragments: int | Sequence[nn.Module] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float | None = None,
        wire_dtype: str | torch.dtype | None = AS_THE_GROUP,
        outer_optimizer: MakeOptimizer | None = None,
        process_group: Any = None,
        init_sync: bool = True,
        broadcast_buffers: bool = True,
        weight: str | None = None,
    ) -> None:
        mine = reducible(model, ignored_names(model))
        trained = {name: each for name, each in mine.items() if each.requires_grad}
        parts = cut(model, trained, fragments) if trained else []
        _check_steps(sync_every, len(parts), fragment_sync_delay)
        alpha = _alpha_of(fragment_update_alpha, fragment_sync_delay)
        wire = _wire_of(wire_dtype, process_group)
        if weight is not None and wire == "fp16":
            raise UnsupportedError(
                f'wire_dtype="fp16" does not go with weight={weight!r}: sums of movements times '
                'samples may be too large for it. Try: wire_dtype="bf16"'
            )
        super().__init__(
            model,
            sync_every=sync_every,
            process_group=process_group,
            init_sync=init_sync,
            broadcast_buffers=broadcast_buffers,
            weight=weight,
        )
        make = nesterov if outer_optimizer is None else outer_optimizer
        self._fragments = [
            Fragment(index, {name: self._parameters[name] for name in names}, make)
            for index, names in enumerate(parts)
        ]
        self._delay = fragment_sync_delay
        self._alpha = alpha
        self._wire_dtype = wire
        self._options = {
            "sync_every": sync_every,
            "fragment_sync_delay": fragment_sync_delay,
            "fragment_update_alpha": alpha,
            "wire_dtype": wire,
        }
        self._scratch = Scratch()
        self._flight: Flight | None = None
        self._left = 0  # steps until it lands
        # By fragment, its samples since the last launch, and those of a launch that has not landed.
        # A pair, so that Ctrl-C comes before or after both change.
        self._samples_of = [(0.0, 0.0)] * len(parts)
        device = next(iter(self._parameters.values())).device
        check_same_on_all_ranks(
            self._group,
            device,
            options={
                **self._options,
                **{f"fragment {index}": names for index, names in enumerate(parts)},
                **{f"outer {each.index}": _settings(each.outer) for each in self._fragments},
            },
            parameters=self._parameters.items(),
            buffers=(),
        )

    @property
    def fragments(self) -> list[list[str]]:
        """The names of each fragment's parameters."""
        return [list(fragment.parameters) for fragment in self._fragments]

    def step(self, samples: float | None = None) -> bool:
        """Counts one step; call it after the optimizer's, equally often on every rank.

        Lands a fragment, or launches one, if this is its step. A launch is collective and does not
        wait; a landing waits if the fragment has not arrived.

        Args:
            samples: As ``LocalSGD.step``.

        Returns:
            Whether a fragment landed.

        Raises:
            ValueError: As ``LocalSGD.step``.
            PycommError: The fragment in flight has failed, in the first step that notices. It is
                dropped, as if it had never been launched: anchor, outer state and parameters are
                as they were, and ``state_dict()`` works.
            CollectiveMismatchError: Ranks sent different fragments, one of them has missed an
                outer step or has loaded a state alone, or an outer step before has ended with an
                error; nothing was changed. On every rank alike.
        """
        begin = time.perf_counter()
        number = self._checked(samples)
        self._take_unfrozen()
        self._add_samples(number)
        place = self._since_sync + 1
        self._steps += 1
        self._since_sync = place % self._sync_every
        syncs = self._syncs
        with torch.no_grad():
            if self._flight is not None:
                self._left = max(self._left - 1, 0)
                if self._left == 0 or self._flight.failed:
                    self._land(self._alpha)
            stride = self._sync_every // len(self._fragments)
            if place % stride == 0:
                self._launch(self._fragments[place // stride - 1], place, self._delay)
                if self._delay == 0:
                    self._land(self._alpha)
        self._seconds += time.perf_counter() - begin
        return self._syncs > syncs

    def sync(self) -> None:
        """Lands the fragment in flight, then syncs every fragment.

        All ranks have equal parameters then, and the buffers of rank 0.

        A fragment is not sent again if no rank has trained it since it was last sent, or if its
        landing has dropped that: its outer step would follow momentum alone. So a second ``sync()``
        changes nothing. Ranks may have called
        ``step()`` a different number of times since the last launch.

        Call it before you save or evaluate the model. Collective; raises as ``step``. If Ctrl-C
        interrupts it, or ``step``, a fragment in flight lands in the next call.
        """
        self._take_unfrozen()
        begin = time.perf_counter()
        with torch.no_grad():
            if self._flight is not None:
                self._wait()
            trained = self._trained_fragments()
            if self._flight is not None:
                # One that was launched in this very step takes the anchor: it has nothing to keep.
                self._land(self._alpha if self._flight.fragment in trained else 0.0)
            for fragment in trained:
                self._launch(fragment, 0, 0)
                self._land(0.0)
            self._send_buffers()
        self._since_sync = 0
        self._seconds += time.perf_counter() - begin

    def _add_samples(self, samples: float) -> None:
        self._samples_of = [(since + samples, flying) for since, flying in self._samples_of]

    def _trained_fragments(self) -> list[Fragment]:
        """Those that some rank has trained since it sent them last.

        The ranks compare, and so decide alike: one that had more batches may have trained a
        fragment that the others have not, and a launch needs all of them.
        """
        flying = None if self._flight is None else self._flight.fragment
        # Else it lands on the anchor.
        keeps = self._alpha > 0.0 and (self._left < self._delay or self._lands_partly())
        numbers: list[int] = []  # four for each fragment: a launch sends an odd number
        for fragment in self._fragments:
            trained = keeps if fragment is flying else fragment.moved()
            numbers += [trained, fragment.version, fragment.origin(), fragment.stepping]
        device = next(iter(self._parameters.values())).device
        of_ranks = gather_numbers(numbers, self._group, device)
        found = []
        for fragment in self._fragments:
            parts = [each[4 * fragment.index : 4 * fragment.index + 4] for each in of_ranks]
            places = [Place(0, fragment.index, n, o, s) for _, n, o, s in parts]
            check_places(places, "all_gather", dist.get_process_group_ranks(self._group))
            if any(trained for trained, *_ in parts):
                found.append(fragment)
        return found

    def _lands_partly(self) -> bool:
        """Whether Ctrl-C has interrupted the landing of the fragment in flight."""
        flight = self._flight
        return flight is not None and len(flight.to_land()) < len(flight.fragment.parameters)

    def _launch(self, fragment: Fragment, place: int, delay: int) -> None:
        flight = Flight(fragment, self._scratch)
        try:
            weight = sum(self._samples_of[fragment.index])  # also of one that failed
            weighed = None if self._weight is None else weight
            nbytes = flight.launch(self._group, self._wire_dtype, place, weighed)
            self._samples_of[fragment.index] = (0.0, weight)
        except BaseException:
            self._scratch = Scratch()  # operations that have begun may use the old one
            raise
        self._flight, self._left = flight, delay
        self._wire_nbytes += nbytes

    def _wait(self) -> None:
        """Waits until the flight's outer step has been taken. A flight that fails is dropped."""
        assert self._flight is not None
        try:
            self._flight.wait()
            index = self._flight.fragment.index
            self._samples_of[index] = (self._samples_of[index][0], 0.0)
        finally:
            if self._flight.failed:
                self._flight = None

    def _land(self, alpha: float) -> None:
        self._wait()
        assert self._flight is not None
        # Without samples a rank has nothing to keep, and its parameters may be NaN.
        if self._weight is not None and self._flight.weight == 0.0:
            alpha = 0.0
        if alpha == 0.0:  # the steps since the launch are dropped, and their samples with them
            self._samples_of[self._flight.fragment.index] = (0.0, 0.0)
        self._flight.land(alpha)
        self._flight = None
        self._syncs += 1

    def state_dict(self) -> dict[str, Any]:
        """The state of a checkpoint besides the model's and the optimizer's; save each rank's.

        Tensors, numbers, lists and dicts: ``torch.load(weights_only=True)`` reads it. If a fragment
        is in flight it waits until its outer step has been taken; it is not collective. A run that
        loads it continues as the one that saved it, bit by bit.

        Raises:
            PycommError: As ``step``; the fragment is dropped then, and a second call returns.
        """
        flight = None
        if self._flight is not None:
            self._wait()
            flight = {
                "fragment": self._flight.fragment.index,
                "left": self._left,
                "weight": self._flight.weight,
                "to_land": self._flight.to_land(),
            }
        return {
            **super().state_dict(),
            "anchor": {
                name: tensor.clone()
                for fragment in self._fragments
                for name, tensor in fragment.anchor.items()
            },
            "options": dict(self._options),
            "fragments": self.fragments,
            "outer": [copy.deepcopy(fragment.outer.state_dict()) for fragment in self._fragments],
            "versions": [fragment.version for fragment in self._fragments],
            "flight": flight,
            **(
                {} if self._weight is None else {"samples_of": [a + b for a, b in self._samples_of]}
            ),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of ``state_dict()``. On all ranks or on none.

        A fragment in flight here is dropped, once its operations have ended: this waits for them.

        Raises:
            ValueError: The state is that of another model, other fragments or other options;
                nothing was changed.
        """
        self._check_state(state)
        if self._flight is not None:
            with contextlib.suppress(Exception):  # the dropped flight may fail
                self._flight.wait()
            self._flight = None
        super().load_state_dict(state)
        with torch.no_grad():
            for number, fragment in enumerate(self._fragments):
                version = int(state["versions"][number])
                fragment.load(state["anchor"], state["outer"][number], version)
        samples_of = self._saved(state, "samples_of", [0.0] * len(self._fragments))
        self._samples_of = [(float(each), 0.0) for each in samples_of]
        if (flight := state["flight"]) is not None:
            fragment = self._fragments[flight["fragment"]]
            self._flight = Flight(fragment, self._scratch, flight.get("to_land"))
            self._flight.weight, self._left = float(flight["weight"]), int(flight["left"])

    def _check_state(self, state: Mapping[str, Any]) -> None:
        saved = part_of(state, "fragments")
        for number, (mine, other) in enumerate(zip(self.fragments, saved, strict=False)):
            if different := sorted(set(mine) ^ set(other)):
                raise ValueError(
                    "the state is that of another model or other fragments: parameter "
                    f"{different[0]!r} is in fragment {number} of only one of the two"
                )
        count = len(self._fragments)
        if len(saved) != count:
            raise ValueError(f"the state has {len(saved)} fragments, and this has {count}")
        check_options(part_of(state, "options"), self._options)
        anchors = {name: each for part in self._fragments for name, each in part.anchor.items()}
        check_tensors("anchor", part_of(state, "anchor"), anchors)
        outer, versions = part_of(state, "outer"), part_of(state, "versions")
        if len(self._saved(state, "samples_of", self._fragments)) != count:
            raise ValueError(f"the state has samples of other than {count} fragments")
        if len(outer) != count or len(versions) != count:
            raise ValueError(
                f"the state has {len(outer)} outer optimizers and {len(versions)} versions of "
                f"{count} fragments"
            )
        for number, fragment in enumerate(self._fragments):
            check_outer(outer[number], fragment.outer)
        if not 0 <= int(part_of(state, "since_sync")) < self._sync_every:
            raise ValueError(
                f"the state is at step {state['since_sync']} of a round of {self._sync_every}"
            )
        flight = part_of(state, "flight")
        if flight is None:
            return
        part_of(flight, "weight")
        left = int(flight["left"])
        if not 0 <= left <= self._delay or not 0 <= int(flight["fragment"]) < count:
            steps = "step" if left == 1 else "steps"
            raise ValueError(
                f"the state has fragment {flight['fragment']} in flight, which lands in {left} "
                f"{steps}; there are {count} fragments, and fragment_sync_delay is {self._delay}"
            )
        if others := set(flight.get("to_land", ())) - set(self.fragments[flight["fragment"]]):
            raise ValueError(
                f"the state is to land parameter {min(others)!r}, which is not in fragment "
                f"{flight['fragment']}"
            )


def _check_steps(sync_every: int, fragments: int, delay: int) -> None:
    if not isinstance(sync_every, int) or sync_every < 1 or fragments == 0:
        return  # LocalSGD raises the error
    if sync_every % fragments:
        raise ValueError(
            f"sync_every={sync_every} is not a multiple of the {fragments} fragments: one must be "
            "launched every sync_every / fragments steps"
        )
    if not isinstance(delay, int) or not 0 <= delay < sync_every // fragments:
        raise ValueError(
            f"fragment_sync_delay={delay!r} is not a whole number from 0 to "
            f"{sync_every // fragments - 1}: a fragment must land before the next one is launched, "
            f"sync_every / fragments = {sync_every // fragments} steps later"
        )


def _alpha_of(alpha: float | None, delay: int) -> float:
    if alpha is None:
        return 0.5 if delay else 0.0
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha < 1:
        raise ValueError(
            f"fragment_update_alpha={alpha!r} is neither None nor a number from 0 to less than 1; "
            "with 1 no worker would ever take anything from the others"
        )
    return float(alpha)


def _wire_of(wire_dtype: WireDtype, group: Any) -> str | None:
    wire = named_wire_dtype(wire_dtype)
    if isinstance(wire, dict):
        raise ValueError(f"wire_dtype={wire_dtype!r} is not one name: all fragments travel alike")
    if wire == AS_THE_GROUP:
        wire = group_wire_dtype(group or dist.distributed_c10d._get_default_group())
    if wire == "fp32":
        return None
    try:
        native_backend(group)
    except ValueError as error:
        raise ValueError(f"wire_dtype={wire!r}: {error}") from None
    return wire


def _settings(outer: torch.optim.Optimizer) -> str:
    """The class and the settings of an outer optimizer."""
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in outer.param_groups
    ]
    return f"{type(outer).__name__} {groups}"

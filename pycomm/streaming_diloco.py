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

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pycomm._fragments import cut
from pycomm._model_check import check_same_on_all_ranks
from pycomm._outer_step import Flight, Fragment, MakeOptimizer, Scratch
from pycomm._wire_patterns import check_wire_dtype
from pycomm.backend import native_backend
from pycomm.local_sgd import LocalSGD, nesterov

__all__ = ["StreamingDiLoCo"]


class StreamingDiLoCo(LocalSGD):
    """Syncs one fragment of the model at a time, while training goes on.

    With H = ``sync_every``, P fragments and τ = ``fragment_sync_delay``, fragment p of 0 … P − 1 is
    launched at steps (p + 1) · H / P of each round of H. Its outer step counts τ steps later. With
    P = 1 and τ = 0 it is ``DiLoCo``, bit by bit.

    Args:
        model, sync_every, process_group, init_sync: As ``LocalSGD``.
        fragments: How many; the blocks of the model's longest ``ModuleList`` or ``Sequential`` are
            dealt out in turn, other parameters to the lightest. Or a list of modules, one for each
            fragment, which together hold every trainable parameter once. ``sync_every`` is a
            multiple of their number.
        fragment_sync_delay: Steps from a fragment's launch to its outer step, less than
            ``sync_every`` / fragments: so one fragment travels at a time.
        fragment_update_alpha: The part of its own parameters that a worker keeps when a fragment
            lands, from 0 to less than 1; the rest is the new anchor's. 0 drops the steps that it
            took meanwhile. None is 0 without a delay and 0.5 with one.
        wire_dtype: What float32 and float64 differences travel as: None for the group's own, or
            "fp32", "fp16", "bf16", "fp8", "int8", for which the group must be pycomm's.
        outer_optimizer: Makes an optimizer of a list of tensors, alike on all ranks, once for each
            fragment. By default as ``DiLoCo``'s.

    Raises:
        ValueError: An option does not fit the model, another option or the group.
        ConfigMismatchError: Options, or what outer optimizers are set to, differ between ranks.

    Memory, in copies of the parameters: one, the outer optimizer's state, and 1/P for what travels.

    Cost of a fragment: an all-gather of 24 bytes, and all-reduces of some 32 MiB each; two passes
    over its parameters in ``step()``, one at the launch and one at the landing.

    Source: Douillard and others, arXiv 2501.18512.

    Threads: parameters on the CPU with a delay get their outer step on a thread, which ends when
    the fragment lands. All methods belong to the training thread.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sync_every: int,
        fragments: int | Sequence[nn.Module] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float | None = None,
        wire_dtype: str | None = None,
        outer_optimizer: MakeOptimizer | None = None,
        process_group: Any = None,
        init_sync: bool = True,
    ) -> None:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        parts = cut(model, trained, fragments) if trained else []
        _check_steps(sync_every, len(parts), fragment_sync_delay)
        alpha = _alpha_of(fragment_update_alpha, fragment_sync_delay)
        _check_wire(wire_dtype, process_group)
        super().__init__(
            model, sync_every=sync_every, process_group=process_group, init_sync=init_sync
        )
        make = nesterov if outer_optimizer is None else outer_optimizer
        self._fragments = [
            Fragment(index, {name: self._parameters[name] for name in names}, make)
            for index, names in enumerate(parts)
        ]
        self._delay = fragment_sync_delay
        self._alpha = alpha
        self._wire_dtype = wire_dtype
        self._scratch = Scratch()
        self._flight: Flight | None = None
        self._left = 0  # steps until it lands
        device = next(iter(self._parameters.values())).device
        check_same_on_all_ranks(
            self._group,
            device,
            options={
                "sync_every": sync_every,
                "fragment_sync_delay": fragment_sync_delay,
                "fragment_update_alpha": alpha,
                "wire_dtype": wire_dtype,
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

    def step(self) -> bool:
        """Counts one step; call it after the optimizer's, equally often on every rank.

        Launches a fragment, or lands one, if this is its step. A launch is collective and does not
        wait; a landing waits if the fragment has not arrived.

        Returns:
            Whether a fragment landed.

        Raises:
            PycommError: The fragment in flight has failed, in the first step that notices. It is
                dropped, as if it had never been launched: anchor, outer state and parameters are
                as they were, and ``state_dict()`` works.
            CollectiveMismatchError: Ranks sent different fragments, or one of them has missed an
                outer step; nothing was changed. On every rank alike.
        """
        begin = time.perf_counter()
        place = self._since_sync + 1
        self._steps += 1
        self._since_sync = place % self._sync_every
        landed = False
        with torch.no_grad():
            stride = self._sync_every // len(self._fragments)
            if place % stride == 0:
                self._launch(self._fragments[place // stride - 1], place, self._delay)
            if self._flight is not None:
                if self._left == 0 or self._flight.failed:
                    self._land(self._alpha)
                    landed = True
                else:
                    self._left -= 1
        self._seconds += time.perf_counter() - begin
        return landed

    def sync(self) -> None:
        """Lands what is in flight, then syncs every fragment: all ranks have equal parameters.

        Call it before you save or evaluate the model. Collective; raises as ``step``.
        """
        begin = time.perf_counter()
        with torch.no_grad():
            if self._flight is not None:
                self._land(self._alpha)
            for fragment in self._fragments:
                self._launch(fragment, self._since_sync, 0)
                self._land(0.0)
        self._since_sync = 0
        self._seconds += time.perf_counter() - begin

    def _launch(self, fragment: Fragment, place: int, delay: int) -> None:
        flight = Flight(fragment, self._scratch)
        self._wire_nbytes += flight.launch(self._group, self._wire_dtype, place)
        if delay > 0 and all(each.device.type == "cpu" for each in fragment.parameters.values()):
            flight.settle_in_background()
        self._flight, self._left = flight, delay

    def _land(self, alpha: float) -> None:
        assert self._flight is not None
        flight, self._flight = self._flight, None  # whatever happens, it is over
        flight.land(alpha)
        self._syncs += 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the model's and the optimizer's state, of each rank.

        Tensors, numbers, lists and dicts: ``torch.load(weights_only=True)`` reads it. If a fragment
        is in flight it waits until its outer step has been taken; it is not collective. A run that
        loads it continues as the one that saved it, bit by bit.

        Raises:
            PycommError: As ``step``; the fragment is dropped then, and a second call returns.
        """
        flight = None
        if self._flight is not None:
            try:
                self._flight.wait()
            except BaseException:
                self._flight = None
                raise
            flight = {"fragment": self._flight.fragment.index, "left": self._left}
        return {
            **super().state_dict(),
            "anchor": {
                name: tensor.clone()
                for fragment in self._fragments
                for name, tensor in fragment.anchor.items()
            },
            "fragments": self.fragments,
            "outer": [copy.deepcopy(fragment.outer.state_dict()) for fragment in self._fragments],
            "versions": [fragment.version for fragment in self._fragments],
            "flight": flight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state_dict()`` was taken. What is in flight here is dropped.

        Raises:
            ValueError: The state is that of another model, other fragments or other options;
                nothing was changed.
        """
        flight = state["flight"]
        self._check_state(state, flight)
        if self._flight is not None:
            dropped, self._flight = self._flight, None
            dropped.wait()
        super().load_state_dict(state)
        with torch.no_grad():
            for number, fragment in enumerate(self._fragments):
                for name, anchor in fragment.anchor.items():
                    anchor.copy_(state["anchor"][name])
                fragment.outer.load_state_dict(state["outer"][number])
                fragment.version = int(state["versions"][number])
            if flight is not None:
                self._flight = Flight(self._fragments[flight["fragment"]], self._scratch)
                self._left = int(flight["left"])

    def _check_state(self, state: Mapping[str, Any], flight: Mapping[str, Any] | None) -> None:
        for number, (mine, other) in enumerate(
            zip(self.fragments, state["fragments"], strict=False)
        ):
            if different := sorted(set(mine) ^ set(other)):
                raise ValueError(
                    f"the state is that of another model or other fragments: {different[0]!r} is "
                    f"in one fragment {number} only"
                )
        if len(state["fragments"]) != len(self._fragments):
            raise ValueError(
                f"the state has {len(state['fragments'])} fragments, this {len(self._fragments)}"
            )
        if not 0 <= int(state["since_sync"]) < self._sync_every:
            raise ValueError(
                f"the state is at step {state['since_sync']} of a round, and sync_every is "
                f"{self._sync_every}: it was saved with another sync_every"
            )
        if flight is not None and not 0 <= int(flight["left"]) < max(self._delay, 1):
            raise ValueError(
                f"the state has a fragment that lands in {flight['left']} steps, and "
                f"fragment_sync_delay is {self._delay}: it was saved with another one"
            )


def _check_steps(sync_every: int, fragments: int, delay: int) -> None:
    if not isinstance(sync_every, int) or sync_every < 1 or fragments == 0:
        return  # LocalSGD says what is wrong
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


def _check_wire(wire_dtype: str | None, group: Any) -> None:
    if wire_dtype is not None and not isinstance(wire_dtype, str):
        raise ValueError(f"wire_dtype={wire_dtype!r} is not one name: all fragments travel alike")
    check_wire_dtype(wire_dtype)
    if wire_dtype is None:
        return
    try:
        native_backend(group)
    except ValueError as error:
        raise ValueError(f"wire_dtype={wire_dtype!r}: {error}") from None


def _settings(outer: torch.optim.Optimizer) -> str:
    """What an outer optimizer is, and what it is set to."""
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in outer.param_groups
    ]
    return f"{type(outer).__name__} {groups}"

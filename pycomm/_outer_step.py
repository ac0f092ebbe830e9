"""One fragment's outer step: ranks average how far it has moved, an outer optimizer follows.

    launch   snapshot: moved = anchor - parameters; the sum over the ranks begins
    settle   the sum is there: anchor, state <- outer optimizer(anchor, state, moved / ranks)
    land     the parameters take the new anchor

Between launch and land the parameters train on. Only ``settle`` changes what all ranks have alike,
and only if every operation of the fragment has succeeded: a fragment whose sum fails is as if it
had never been launched. What it moved is still in the parameters, and goes with its next launch.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pycomm import _extension, codecs
from pycomm._averaging import SMALL_FLOATS, chunks
from pycomm.errors import CollectiveMismatchError

MakeOptimizer = Callable[[list[torch.Tensor]], Optimizer]

_LEAST_ENCODED_NBYTES = 16 << 10  # codecs.all_reduce sends smaller tensors as they are


class Fragment:
    """Some of a model's parameters, and what all ranks have alike of them."""

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


class Scratch:
    """Memory for one flight at a time: making it anew would cost a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def take(
        self, key: torch.dtype, dtype: torch.dtype, device: torch.device, sizes: list[int]
    ) -> list[torch.Tensor]:
        """Flat tensors of these sizes, side by side; those taken for this key before end."""
        numel = sum(sizes)
        if key not in self._flat or self._flat[key].numel() < numel:
            self._flat[key] = torch.empty(numel, dtype=dtype, device=device)
        return list(torch.split(self._flat[key][:numel], sizes))


@dataclasses.dataclass
class _Chunk:
    flat: torch.Tensor
    """What is summed: small floats as float32, about 32 MiB."""
    parts: dict[str, torch.Tensor]
    """Each parameter's part of it, by name, in the parameter's shape."""

    def wire(self) -> torch.Tensor:
        return torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat


class Flight:
    """One fragment from its launch to its landing.

    Args:
        fragment: Nothing else may change it until the flight has landed.
        scratch: Of this flight alone until then.
    """

    def __init__(self, fragment: Fragment, scratch: Scratch) -> None:
        self.fragment = fragment
        self._scratch = scratch
        self._chunks: list[_Chunk] = []
        self._works: list[Any] = []
        self._places: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def launch(self, group: Any, wire_dtype: str | None, step: int) -> int:
        """Takes the snapshot and begins the sum. Collective; does not wait for other ranks.

        Args:
            step: Steps since the last round began: compared between the ranks before ``settle``.

        Returns:
            The bytes that were handed to all_reduce, encoded.
        """
        self._chunks = list(self._snapshot())
        device = self._chunks[0].flat.device
        place = torch.tensor([step, self.fragment.index, self.fragment.version], device=device)
        self._places = [torch.empty_like(place) for _ in range(dist.get_world_size(group))]
        self._works = [dist.all_gather(self._places, place, group=group, async_op=True)]
        for chunk in self._chunks:
            wire = chunk.wire()
            if wire_dtype is None:
                self._works.append(dist.all_reduce(wire, group=group, async_op=True))
            else:
                work = codecs.all_reduce(wire, wire_dtype, group=group, async_op=True)
                self._works.append(work)
        return sum(_encoded_nbytes(chunk.wire(), wire_dtype) for chunk in self._chunks)

    def settle_in_background(self) -> None:
        """Starts ``settle`` on a thread. ``land`` and ``wait`` join it.

        It is a daemon: a program that ends in the middle does not wait for other ranks. pycomm's
        exit hook ends the operation that it waits for.
        """
        self._thread = threading.Thread(target=self._settle, name="pycomm-outer", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether ``land`` would raise at once."""
        return self._error is not None

    def wait(self) -> None:
        """Waits until the outer step has been taken; raises what the sum failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        elif self._works:
            self._settle()
        if self._error is not None:
            raise self._error

    def land(self, alpha: float) -> None:
        """Waits, then moves the parameters to the new anchor; ``alpha`` is the part that stays."""
        self.wait()
        for name, parameter in self.fragment.parameters.items():
            if alpha:
                parameter.lerp_(self.fragment.anchor[name], 1.0 - alpha)
            else:
                parameter.copy_(self.fragment.anchor[name])

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

    @torch.no_grad()
    def _settle(self) -> None:
        try:
            works, self._works = self._works, []
            _wait_for_all(works)
            self._check_places()
            self._step()
        except BaseException as error:  # raised where somebody waits
            self._error = error

    def _check_places(self) -> None:
        """A fragment of another step, or with another past, must not be mixed in."""
        places = [place.tolist() for place in self._places]
        different = [rank for rank, place in enumerate(places) if place != places[0]]
        if not different:
            return

        def said(rank: int) -> str:
            step, index, version = places[rank]
            return f"rank {rank} fragment {index} at step {step}, {version} outer steps old"

        rank = different[0]
        raise CollectiveMismatchError(
            f"The ranks are at different places: {said(0)}; {said(rank)}. Nothing was changed. "
            "Try: call step() and sync() equally often on all ranks, and load one checkpoint on "
            "all",
            {"peer": rank, "op": "all_reduce"},
        )

    def _step(self) -> None:
        fragment, ranks = self.fragment, len(self._places)
        for chunk in self._chunks:
            chunk.flat /= ranks
            for name, moved in chunk.parts.items():
                anchor = fragment.anchor[name]
                anchor.grad = moved.to(anchor.device, anchor.dtype)
        fragment.outer.step()
        fragment.outer.zero_grad()
        fragment.version += 1
        self._chunks = []


def _wait_for_all(works: Iterable[Any]) -> None:
    """Waits for each, also after one has failed: they use memory that the next flight takes."""
    error: Exception | None = None
    for work in works:
        try:
            work.wait()
        except Exception as caught:
            error = error or caught
    if error is not None:
        raise error


def _encoded_nbytes(wire: torch.Tensor, wire_dtype: str | None) -> int:
    floats = wire.dtype in (torch.float32, torch.float64)
    if wire_dtype in (None, "fp32") or not floats or wire.nbytes < _LEAST_ENCODED_NBYTES:
        return wire.nbytes
    encoded: int = _extension.load().encoded_nbytes(wire_dtype, wire.numel())
    return encoded

"""How much a rank counts in the averages of a ``DistributedDataParallel`` with ``weight=``."""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from pycomm._group.averaging import device_of, weight_ratio
from pycomm.balance.step_log import StepLog, StepReader, StepRecord
from pycomm.ddp.ddp_options import check_python_reducer
from pycomm.errors import UnsupportedError
from pycomm.sync_batch_norm import SYNC_BATCH_NORMS

_log = logging.getLogger("pycomm")

_SAY = "Say it before forward: model.samples = n"


def check_weight(weight: object) -> None:
    if weight is not None and weight != "samples":
        raise ValueError(f'weight={weight!r} is neither None nor "samples"')


_LEAST, _MOST = 1e-20, 1e20
"""So no sum of weights, and no float32 times one, overflows or loses what is small."""


def check_samples(what: str, number: object) -> float:
    """The number; ValueError unless it is 0 or from ``_LEAST`` to ``_MOST``."""
    single = isinstance(number, torch.Tensor) and number.numel() == 1
    given: Any = number.item() if single else number  # type: ignore[attr-defined]
    value = math.nan
    if not isinstance(given, bool):
        with contextlib.suppress(TypeError, OverflowError):
            real = isinstance(given, numbers.Real)
            value = float(given if real else operator.index(given))  # index: of an array, too
    if not (value == 0 or _LEAST <= value <= _MOST):
        raise ValueError(
            f"{what}={number!r} is neither 0 nor a number from {_LEAST:g} to {_MOST:g}"
        )
    return value


def count_samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, str]:
    """The size of the first dimension of the tensors that forward gets, and which tensor said so.

    Packed sequences count each as one sample.

    Raises:
        ValueError: No tensor has a dimension, or two have different first ones.
    """
    found: list[tuple[int, str]] = []
    for name, value in [*((f"argument {i}", each) for i, each in enumerate(args)), *kwargs.items()]:
        for path, leaf in _pytree.tree_flatten_with_path(value, is_leaf=_is_packed)[0]:
            place = name + _pytree.keystr(path)
            if isinstance(leaf, PackedSequence):
                number = _sequences(leaf)
                found.append((number, f"{place}, {number} packed sequences"))
            elif isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                found.append((leaf.shape[0], f"{place}, of the shape {list(leaf.shape)}"))
    if not found:
        raise ValueError(
            'weight="samples" found no tensor with a dimension among the arguments of forward, so '
            f"it cannot tell how many samples they are. {_SAY}"
        )
    samples, which = found[0]
    for number, other in found[1:]:
        if number != samples:
            raise ValueError(
                'weight="samples" cannot tell how many samples forward got: '
                f"{which}, and {other}, differ. {_SAY}"
            )
    return samples, f"by {which}"


def add_first_dimensions(value: object, found: set[int]) -> None:
    """Adds those that ``count_samples`` compares: without names, as finding these takes longer."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 0:
            found.add(value.shape[0])
    elif type(value) in (tuple, list):
        for each in value:  # type: ignore[attr-defined]
            add_first_dimensions(each, found)
    elif type(value) is dict:
        for each in value.values():
            add_first_dimensions(each, found)
    elif isinstance(value, PackedSequence):
        found.add(_sequences(value))
    elif not isinstance(value, (int, float, str)):
        for leaf in _pytree.tree_leaves(value, is_leaf=_is_packed):
            if leaf is not value:
                add_first_dimensions(leaf, found)


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedSequence)


def _sequences(packed: PackedSequence) -> int:
    """Those that have a first element."""
    return int(packed.batch_sizes[0])


def batches_alike(step: int, batches: Sequence[int], members: Sequence[int]) -> int:
    """How many batches each of the ``members`` has put through backward for a step.

    Raises:
        RuntimeError: They differ, as some ranks have dropped a pass with ``zero_grad()`` and others
            have not.
    """
    if len(set(batches)) > 1:
        other = next(each for each, count in enumerate(batches) if count != batches[0])
        raise RuntimeError(
            f"step {step} has used up {batches[0]} batches on rank {members[0]} of the model's "
            f"group and {batches[other]} on rank {members[other]}, so the batches of "
            "BalancedSampler no longer belong together. Try: drop a pass that accumulates, by "
            "zero_grad(), on all ranks or on none"
        )
    return batches[0]


_READERS: weakref.WeakKeyDictionary[Any, weakref.WeakSet[StepReader]] = weakref.WeakKeyDictionary()
"""Of a wrapper's steps."""


class _WrapperLog:
    """The steps that a wrapper's ranks have made: see ``StepLog``."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._group = wrapper.process_group
        self._ranks = dist.get_process_group_ranks(self._group)

    @property
    def rank(self) -> int:
        elastic = self._wrapper.elastic
        return dist.get_rank(self._wrapper.process_group) if elastic is None else elastic._number

    @property
    def _world_size(self) -> int:
        return dist.get_world_size(self._wrapper.process_group)

    @property
    def steps(self) -> int:
        group = self._wrapper.process_group
        if group is not self._group:
            now = dist.get_process_group_ranks(group)
            if now != self._ranks:
                raise UnsupportedError(
                    f"BalancedSampler deals to ranks {self._ranks}, and the model's group now has "
                    f"{now}: some samples would be trained twice, and others never. Try: before "
                    "_update_process_group() save the sampler's state_dict(), and after it load "
                    "that into a new BalancedSampler"
                )
            self._group = group
        steps: int = self._wrapper.reducer.weighed_steps()
        return steps

    @property
    def pending_passes(self) -> int:
        return _Accumulated(*self._wrapper.reducer.weighed()).batches

    def records(self, since: int) -> list[StepRecord]:
        found = self._wrapper.reducer.step_rows(since)
        if (not found or found[0][0] != since) and since < self.steps:
            raise LookupError(f"the record of step {since} is no longer kept")
        records = []
        for step, rows, members in found:
            samples, nanoseconds, batches, largest = zip(*rows, strict=True)
            seconds = [ns * 1e-9 if ns >= 0 else math.nan for ns in nanoseconds]
            members = members or range(len(rows))
            alike = batches_alike(step, batches, members)
            records.append(StepRecord(alike, samples, seconds, members, largest))
        return records

    def follow(self, reader: StepReader) -> None:
        readers = _READERS.setdefault(self._wrapper, weakref.WeakSet())
        if self._wrapper._may_be_joined and len(readers) > 0:
            raise UnsupportedError(
                "a second BalancedSampler of a model with Elastic(peers=): a process that joins "
                "would not know whose batches it trains. Try: one sampler, kept over all epochs"
            )
        if self._wrapper._may_be_joined and self._wrapper._elastic.join_pause is None:
            raise UnsupportedError(
                "a BalancedSampler of a model with Elastic(join_pause=None): between two epochs it "
                "has no batches in which a process that joins could get a share. Try: a join_pause "
                "in seconds, with which processes join in the middle of an epoch"
            )
        readers.add(reader)
        self._wrapper._received_sampler = None

    def allow(self, largest: int) -> None:
        self._wrapper.reducer.set_largest(largest)

    def received(self) -> Mapping[str, Any] | None:
        state: Mapping[str, Any] | None = self._wrapper._received_sampler
        elastic = self._wrapper.elastic
        if state is None and elastic is not None and elastic._number >= self._world_size:
            raise UnsupportedError(
                "this process has joined a training whose members have no BalancedSampler, or has "
                "made one already. Try: one on all members, made right after the model was "
                "wrapped, and kept over all epochs; or the members' way to deal batches"
            )
        return state

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        group, elastic = self._wrapper.process_group, self._wrapper.elastic
        if elastic is not None and elastic.members != tuple(range(self._world_size)):
            raise UnsupportedError(
                f"BalancedSampler compares its arguments over all {self._world_size} ranks of the "
                f"model's process group, and the members are now {list(elastic.members)}. Try: "
                "make it, or load its state, right after the model was wrapped, and keep it over "
                "all epochs. A process that has joined has the members' position"
            )
        slots = torch.zeros(self._world_size, len(numbers), dtype=torch.int64)
        slots[self.rank] = torch.tensor(numbers, dtype=torch.int64)
        slots = slots.to(device_of(group))
        dist.all_reduce(slots, group=group)
        gathered: list[list[int]] = slots.tolist()
        return gathered


class _Accumulated(NamedTuple):
    """``reducer.weighed()``: of the passes since the last reduction, see ``PassWeights``."""

    weight: float
    unit: float
    passes: int
    alike: bool
    held: Mapping[str, bool]
    batches: int
    """As ``passes``, with those that were forgotten."""
    compute_ns: int
    gap_ns: int
    cannot_follow: bool
    stray: bool


_NOTHING_WEIGHED = (*_Accumulated(0.0, 0.0, 0, True, {}, 0, 0, 0, False, False), -1)
"""Of a wrapper without weights, and no time of its last step."""


def weighed_of(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the reducer's ``load()`` takes."""
    return tuple(state.get("weighed", _NOTHING_WEIGHED))


class Weighed(TorchDDP):
    """The part of the wrapper that gives each backward pass its weight."""

    reducer: Any
    _sync_every: int
    _weight: str | None = None
    _hand_over_buffers: Any
    _forward_weight = 1.0
    _in_forward = False
    _counted = False
    _before_forward: Any = None
    """The hook of ``sync_every`` or ``peers``: a forward pass that does not come would have called
    it."""
    _may_be_joined = False
    _received_sampler: Mapping[str, Any] | None = None
    """What the members' ``BalancedSampler`` has sent, until one is made in this process, which has
    joined."""

    @property
    def samples(self) -> float | None:
        """With ``weight="samples"``: how much the next backward pass of this rank counts.

        Set it before ``forward()``, or at the latest before ``backward()``, for one pass: the
        number of its samples, or of its tokens if the loss is their mean; 0, or any number from
        1e-20 to 1e20. None until it is set, and again after the pass: then the first dimension of
        what ``forward()`` gets counts. Of several passes within one ``forward()`` it counts for all
        that follow. Set it to None if a batch is skipped after ``forward()``. ::

            model = pycomm.DistributedDataParallel(net, weight="samples")
            model.samples = int(mask.sum())
            loss = masked_mean(model(batch), mask)
            loss.backward()

        ValueError: not such a number. RuntimeError: set in the middle of a backward pass.
        UnsupportedError: the wrapper has no ``weight="samples"``.
        """
        pending: float | None = None if self._weight is None else self.reducer.pending_weight()
        return pending

    @samples.setter
    def samples(self, number: float | None) -> None:
        self._check_weighs("model.samples")
        checked = None if number is None else check_samples("model.samples", number)
        self.reducer.set_weight(checked if self._has_share() else 0.0)

    def no_batch(self) -> None:
        """With ``weight="samples"``: forward and backward of a rank that has no batch in this step.

        Takes the place of both, where the other ranks call them. This rank counts nothing: zeros
        travel. Its parameters get the averages in ``.grad``, so its optimizer steps with the
        others'. Inside ``no_sync()`` it is one pass that accumulates. Collective; blocks. ::

            if batch is None:
                model.no_batch()
            else:
                loss_of(model(batch)).backward()
            optimizer.step()

        With ``sync_every`` the step of a host without any samples has no averages: ``.grad`` stays
        as it was. So it does with ``elastic`` if a lost rank was the only one with a batch.

        It stands for one ``forward()`` and one ``backward()``. If the others make several forward
        passes for one backward pass: ``pycomm.no_batch()``.

        Raises:
            ValueError: No rank has any samples; without ``sync_every``, and with ``elastic`` until
                a rank is lost, as that one may have had them.
            UnsupportedError: The wrapper has no ``weight="samples"``.
        """
        no_batch(self)

    def _has_sync_batch_norm(self) -> bool:
        return any(isinstance(layer, SYNC_BATCH_NORMS) for layer in self.module.modules())

    def _check_no_batch(self) -> None:
        self._check_weighs("no_batch()")
        if not torch.is_grad_enabled():
            raise RuntimeError("no_batch() stands for a backward pass, and gradients are disabled")
        if self._has_sync_batch_norm():
            raise UnsupportedError(
                "no_batch() has no forward pass, and SyncBatchNorm of the other ranks waits for "
                "one: give every rank a batch in each step, or use another normalization"
            )

    def _forward_without_batch(self) -> None:
        """Takes part in what a forward pass of the other ranks exchanges."""
        if self._before_forward is not None:
            self._before_forward(self, ())
        self._check_sampler()
        # torch moves what forward gets to the device, and expects something.
        super()._pre_forward(torch.empty(0))  # type: ignore[no-untyped-call]
        if self._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
            self._sync_buffers()  # type: ignore[no-untyped-call]
        self.require_forward_param_sync = self.require_backward_grad_sync
        self._hand_over_buffers()
        self._forward_began(None)

    @property
    def step_log(self) -> StepLog | None:
        """The steps of all ranks, for ``BalancedSampler``; None without ``weight="samples"``.

        Raises:
            UnsupportedError: With ``sync_every``, and for parameters on a CUDA device.
        """
        if self._weight is None:
            return None
        if self._sync_every > 1:
            raise UnsupportedError(
                "BalancedSampler cannot follow a wrapper with sync_every yet, whose steps only the "
                "ranks of a host have in common"
            )
        if any(parameter.is_cuda for parameter in self.module.parameters()):
            raise UnsupportedError(
                "BalancedSampler cannot time steps of a CUDA device yet: backward() returns before "
                'the device has computed. Try: batches of chosen sizes, and weight="samples"'
            )
        return _WrapperLog(self)

    def _check_weighs(self, what: str) -> None:
        check_python_reducer(self, what)
        if self._weight is None:
            raise UnsupportedError(
                f'{what} needs pycomm.DistributedDataParallel(…, weight="samples"), and this '
                "wrapper counts all ranks alike"
            )

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if (
            self._weight is None
            or not torch.is_grad_enabled()
            or self.reducer.is_within_backward()  # as a checkpoint repeats it in backward
        ):
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        weight, how = self._weigh(inputs, kwargs)  # first: this rank alone may have to refuse
        self._forward_weight = weight
        if not self._counted:
            self._counted = True
            _log.info("weight=%r: %s samples in the first step, %s", self._weight, weight, how)
        prepared = super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._forward_began(weight)
        self._in_forward = True
        return prepared

    @contextlib.contextmanager
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def _inside_ddp_forward(self) -> Iterator[None]:
        weighed, self._in_forward = self._in_forward, False
        try:
            with super()._inside_ddp_forward():
                yield
        except BaseException:
            if weighed:
                self.reducer.forward_failed()
            raise

    def _forward_began(self, weight: float | None) -> None:
        if self.reducer.forward_began(weight):
            try:
                for reader in _READERS.get(self, ()):
                    with contextlib.suppress(UnsupportedError):  # another group: when it deals next
                        reader.read_steps()
            except BaseException:
                self.reducer.forward_failed()
                raise

    def _only_reader(self) -> StepReader | None:
        """The sampler, of a wrapper that others may join."""
        return next(iter(_READERS.get(self, ())), None) if self._may_be_joined else None

    def _can_be_joined(self) -> bool:
        """Whether the next pass trains a batch of the sampler, if there is one."""
        reader = self._only_reader()
        return reader is None or not reader.is_idle()

    def _most_ranks(self) -> int | None:
        """That a batch of the sampler has samples for; None without one."""
        reader = self._only_reader()
        return None if reader is None else reader.most_ranks()

    def _state_of_sampler(self) -> dict[str, Any] | None:
        """For processes that join; None without a sampler."""
        reader = self._only_reader()
        return None if reader is None else reader.state_for_others()

    def _has_share(self) -> bool:
        reader = self._only_reader()
        return reader is None or reader.has_share()

    def _check_sampler(self) -> None:
        if self._received_sampler is not None:
            raise RuntimeError(
                "the members of this training deal their batches with a BalancedSampler, and this "
                "process, which has joined, trains without one: others train its samples, too. "
                "Try: make the BalancedSampler as they do, before the first forward pass"
            )

    def _weigh(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, str]:
        self._check_sampler()
        if not self._has_share():
            self.reducer.set_weight(0.0)
            return 0.0, "as BalancedSampler has no share for this process yet"
        said = self.samples
        if said is not None:
            return said, "as model.samples says"
        sizes: set[int] = set()
        if self._counted:
            add_first_dimensions((inputs, kwargs), sizes)
        if len(sizes) == 1:
            return float(sizes.pop()), ""
        samples, how = count_samples(inputs, kwargs)
        return float(samples), how

    def _ratio_of_sync(self, group: Any) -> float:
        """How much this rank counts in an average of parameters: by its samples since the last."""
        if self._weight is None:
            return 1.0
        return weight_ratio(self.reducer.weight_unsynced(), group)

    def _state_of_weights(self) -> dict[str, Any]:
        """Of the passes since the last reduction, the last step's time, and the samples since the
        last sync: part of a checkpoint."""
        if self._weight is None:
            return {}
        return {
            "weighed": (*self.reducer.weighed(), self.reducer.last_compute_ns()),
            "weight_unsynced": self.reducer.weight_unsynced(),
        }

    def _weights_in(self, state: Mapping[str, Any]) -> tuple[Any, float]:
        """What such a state has of the weights, for the reducer; None without weights.

        ValueError: its passes were weighed, and these are not, or the other way round.
        """
        saved = state.get("weighed")
        weighed = saved is not None
        passes = state["accumulated"] if saved is None else _Accumulated(*saved[:-1]).passes
        if weighed != (self._weight is not None) and passes > 0:
            how, which = ("with", "without") if weighed else ("without", "with")
            raise ValueError(
                f'the state was saved {how} weight="samples" between passes that accumulate, and '
                f"this wrapper is {which} it. Try: save after a pass that reduces"
            )
        if self._weight is None:
            return None, 0.0
        return weighed_of(state), float(state.get("weight_unsynced", 0.0))


def no_batch(*wrappers: torch.nn.Module) -> None:
    """``model.no_batch()`` where one ``backward()`` goes through several forward passes.

    Give the wrapper of each ``forward()`` that the other ranks call before ``backward()``, in their
    order. Averages of all of them are in ``.grad`` then. Collective; blocks. ::

        if batch is None:
            pycomm.no_batch(generator, discriminator)
        else:
            loss_of(discriminator(generator(batch))).backward()

    Args:
        wrappers: One is named as often as its ``forward()`` is called. Over one process group the
            other ranks' backward has to reach the wrappers in the reverse order, as it does unless
            the graph is an unusual one.

    Raises:
        TypeError: Something else than a pycomm.DistributedDataParallel, or nothing, is given.
        Exception: As ``model.no_batch()``.
    """
    weighed = [each for each in wrappers if isinstance(each, Weighed)]
    if not weighed or len(weighed) < len(wrappers):
        raise TypeError("no_batch() takes the wrappers whose forward() the other ranks call")
    for each in dict.fromkeys(weighed):
        each._check_no_batch()
    for each in weighed:
        each._forward_without_batch()
    # The order in which backward reaches them on the other ranks.
    backward = dict.fromkeys(reversed(weighed))
    weighed[0].reducer.pass_without_batch(
        [(each.reducer, each.require_backward_grad_sync) for each in backward]
    )

"""Batches of different sizes for ranks of different speeds.

    sampler = pycomm.BalancedSampler(dataset, global_batch=256, model=model)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            ...

How shares are found, and what this cannot do: docs/unequal-machines.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from pycomm._saved_state import check_options, part_of
from pycomm.balance.deal import Deals, Rest, epoch_order
from pycomm.balance.share_plan import LEAST_GAIN, Change, SharePlan
from pycomm.balance.step_log import step_log_of
from pycomm.balance.whole_shares import Limits, batch_seconds, even_shares, why_leave_out
from pycomm.errors import ConfigMismatchError

__all__ = ["BalancedSampler", "SamplerStats"]

logger = logging.getLogger("pycomm")

_TOLD = 0.1
"""Shares are logged if one of them has changed by more than this part since they were last."""
_LARGEST = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class SamplerStats:
    """What a ``BalancedSampler`` deals, and why. Tuples are in the order of ``members``. Counters
    and estimates continue those of a state that was loaded, unless its ranks are others; ``epoch``
    and ``cursor`` always do.

    Example::

        stats = sampler.stats()
        print(stats.shares, stats.even_batch_seconds, stats.batch_seconds, stats.advice)
    """

    epoch: int
    cursor: int
    """Batches of this epoch that were trained: where a resumed run begins."""
    next_epoch: int
    """The epoch of the next batch: the one after ``epoch`` if that is complete."""
    batches: int
    """Batches that were trained."""
    changes: int
    """Times that shares changed."""
    members: tuple[int, ...]
    """The ranks that are left, by the numbers that they had when the model was wrapped."""
    shares: tuple[int, ...]
    """Samples per batch, as decided last: they hold at the latest ``lookahead`` batches later."""
    fixed_seconds: tuple[float, ...]
    """Of a batch's time, the part that does not depend on its samples. Empty until three batches
    were timed, as ``seconds_per_sample``."""
    seconds_per_sample: tuple[float, ...]
    batch_seconds: float | None
    """How long the slowest rank computes for a batch with these shares; None as long as that is not
    known."""
    even_batch_seconds: float | None
    """How long it would with equal shares."""
    advice: str
    """Names a rank without which the others would be faster; or ""."""


class BalancedSampler(Sampler[list[int]]):
    """Deals each rank as many samples of a batch as it can train in the time that the others take.

    A batch sampler for any ``DataLoader``: ``DataLoader(dataset, batch_sampler=sampler)``. All
    ranks have the same number of batches, and their n-th ones have ``global_batch`` samples
    together. An epoch has each index once, but for the remainder that does not fill a batch of all
    ranks. Shares begin equal. They follow from the compute time of each rank's earlier steps, which
    the model's ranks exchange anyway, and change only for a predicted gain above 2 %.

    With ``elastic`` ranks may die. From ``lookahead`` batches after that on, the others have
    ``global_batch`` samples together again. What the dead rank had been dealt and has not trained
    is dealt again, in further batches.

    With ``Elastic(peers=)`` processes may join. They get the members' position with the parameters:
    make the sampler behind the model, before its first ``forward()``, and begin the loop with the
    epoch ``sampler.stats().epoch``. From ``lookahead`` batches after the first step on, a process
    that has joined has a share. Until then its batches are ``min_batch`` samples of the others,
    which its loop puts through like any batch, and which count 0: ``model.samples`` is 0.

    Example::

        sampler = pycomm.BalancedSampler(dataset, global_batch=256, model=model)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for inputs, targets in DataLoader(dataset, batch_sampler=sampler):
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()

        # A rank with less memory than the others:
        largest = 16 if socket.gethostname() == "beta" else None
        sampler = pycomm.BalancedSampler(
            dataset, global_batch=256, model=model, max_batch=largest
        )

    Args:
        dataset: Has ``len()``, and is the same on all ranks.
        global_batch: Samples of all ranks together in one backward pass. With ``accumulate=k`` a
            step of the optimizer has k times as many.
        model: The wrapped model that trains on the batches, one backward pass for each.
        shuffle: Whether each epoch has an order of its own, from ``seed`` and ``set_epoch()``.
        seed: From 0; the same on all ranks.
        lookahead: How many batches later the numbers of a step decide shares. All ranks need the
            same, and at least ``num_workers * prefetch_factor + 2 * accumulate`` of the loader that
            runs ahead furthest, plus 1 with Lightning or Accelerate. More is slower to follow.
        min_batch: The least share of any rank. BatchNorm needs 2.
        max_batch: The largest share of *this* rank, as its memory allows: ranks may have different
            ones. None: no limit.
        multiple_of: Shares are multiples of it, so that a compiled model meets fewer shapes.

    Raises:
        TypeError: ``dataset`` is iterable or has no ``len()``; ``model`` keeps no record of steps.
        ValueError: An argument is out of range, no shares are allowed, or the dataset is shorter
            than one batch of all ranks.
        ConfigMismatchError: An argument other than ``max_batch`` differs between ranks, on all; or
            another rank has raised one of the errors above, but that of ``model``. Or it differs
            from the members', on a process that joins.
        UnsupportedError: The model has parameters on a CUDA device, or ``sync_every`` above 1; or
            it has lost ranks, with which to compare arguments, or others have joined; or with
            ``Elastic(peers=)`` it has another ``BalancedSampler``, or ``join_pause=None``.

    The loop's iterator raises RuntimeError if its loader runs ahead further than ``lookahead``, if
    the model makes more passes than batches were dealt, or if before the last batch ``set_epoch()``
    begins another epoch or ``iter(loader)`` another loop. If only some ranks drop a pass, it or the
    next ``forward()`` does. It raises UnsupportedError, when it deals next, if the model's process
    group was replaced by one of other ranks.

    Threads: use it from one, which is the loader's: workers do not call it.

    Cost: a small all-reduce at construction, and one in ``load_state_dict()``.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        model: Any,
        shuffle: bool = True,
        seed: int = 0,
        lookahead: int = 12,
        min_batch: int = 1,
        max_batch: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        self._log = step_log_of(model)
        self._rank = self._log.rank
        self._arguments: dict[str, int] = {}

        def check() -> list[int]:
            if not isinstance(shuffle, bool):
                raise ValueError(f"shuffle={shuffle!r} is neither True nor False")
            self._arguments = {
                "len(dataset)": _length_of(dataset),
                "global_batch": _whole("global_batch", global_batch, 1),
                "seed": _whole("seed", seed, 0),
                "lookahead": _whole("lookahead", lookahead, 2),
                "min_batch": _whole("min_batch", min_batch, 1),
                "multiple_of": _whole("multiple_of", multiple_of, 1),
                "shuffle": int(shuffle),
            }
            if (length := self._arguments["len(dataset)"]) < global_batch:
                raise ValueError(
                    f"the dataset has {length} samples, fewer than one batch of global_batch="
                    f"{global_batch}. Try: a smaller global_batch"
                )
            most = 0 if max_batch is None else _whole("max_batch", max_batch, 1)
            return [*self._arguments.values(), most]

        received = self._log.received()
        largest = [check()[-1]] if received is not None else self._agree(_ARGUMENTS, check)
        self._deals = Deals(self._arguments["len(dataset)"])
        self._next_step = self._log.steps
        self._epoch = 0
        self._begin: int | None = None  # which batch of all is the epoch's first; None: the next
        self._begun = 0  # epochs and loops: a loader of an earlier one is dealt no more
        self._loaded_epoch: int | None = None
        self._untouched = True  # no batch was dealt since the epoch began, or its state was loaded
        # With a state of other ranks, the step whose waiting passes may be theirs, too.
        self._step_of_others: int | None = None
        self._deal_nothing = False
        self._must_begin = False  # with the members' epoch, as this process has joined
        self._waits = False  # for its first share
        self._first_limits: Limits
        self._plan: SharePlan
        if received is not None:
            self._join(received, max_batch)
        else:
            self._first_limits = self._limits_of(largest)
            self._plan = SharePlan(self._first_limits, lookahead)
        self._told = self._plan.newest
        self._told_advice = ""
        self._log.allow(max_batch or 0)
        self._log.follow(self)

    @property
    def sampler(self) -> BalancedSampler:
        """Itself: Lightning calls ``set_epoch`` of a batch sampler's ``sampler`` in each epoch."""
        return self

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on all ranks. An epoch with a death has more."""
        return self._arguments["len(dataset)"] // self._arguments["global_batch"]

    def __iter__(self) -> Iterator[list[int]]:
        """Deals the batches of this epoch that were not trained yet, on all ranks alike.

        Batches that were pulled and not trained, by a loader that was left, are dealt again. If all
        were trained and ``set_epoch`` was not called since, the next epoch begins.
        """
        # Not in the generator: a loader without workers pulls its first batch later than others.
        now = self._now()
        waiting = self._log.pending_passes
        if waiting and self._step_of_others == self._log.steps:
            raise RuntimeError(
                f"the state of BalancedSampler is of other ranks, and the model has {waiting} "
                "backward pass(es) that wait for a reduction: the parts of ranks that are gone are "
                "not in them. Try: save after a step of the optimizer; or leave out the gradients "
                "and the wrapper's state, and those of these batches are dealt again whose epoch "
                "is the one that was saved"
            )
        self._step_of_others = None  # passes from here on are this job's
        self._check_untouched(now)
        self._begin_by(now)
        if self._catch_up(now):
            if self._deal_nothing:
                return self._nothing()  # a loader with workers calls iter() twice
            self._start(self._epoch + 1)
        if self._begin is None:
            self._begin, self._loaded_epoch = now, None
            self._deals.start(now, self._order(), self._plan.departures)
        self._begun += 1
        return self._batches(now, self._begun)

    def _nothing(self) -> Iterator[list[int]]:
        self._deal_nothing = self._untouched = False
        yield from ()

    def _batches(self, now: int, begun: int) -> Iterator[list[int]]:
        for batch in itertools.count(now):
            if begun != self._begun:
                if self._has_left_at_end(batch):
                    return
                raise RuntimeError(
                    f"BalancedSampler has begun epoch {self._epoch}, and a loader that was begun "
                    "before goes on. Try: set_epoch() and load_state_dict() before iter(loader), "
                    "and iter(loader) once per loop; with Lightning set_epoch() in "
                    "train_dataloader(), see docs/integrations.md"
                )
            change = self._shares_of(batch)
            dealt = self._deals.deal(batch, change, self._plan.departures)
            if dealt is None:
                return
            self._must_begin = self._untouched = False
            # One that has joined gets some of the others', as there are no empty batches.
            yield dealt.part(self._rank) or dealt.indices(0, self._first_limits.fewest)

    def _has_left_at_end(self, batch: int) -> bool:
        """Whether ``set_epoch`` has left an epoch that has no such batch, as its next one: at its
        last batch, and no other loader has begun since."""
        deals, plan = self._deals, self._plan
        if self._begin is not None or self._loaded_epoch is not None or batch != deals.next_batch:
            return False
        return not deals.has(batch, plan.decided(batch), plan.departures)

    def _check_untouched(self, now: int) -> None:
        """Passes of another loader are batches of an epoch that is under way. One that has begun
        and has dealt nothing on this rank may be under way on others, whose loaders pull early."""
        if not self._untouched or self._loaded_epoch is not None or self._begin is None:
            return
        if now > self._begin:
            raise RuntimeError(
                f"BalancedSampler has begun epoch {self._epoch}, and the model has made "
                f"{now - self._begin} backward passes before its first batch: ranks whose loaders "
                "have workers take them for batches of it. Try: iter(loader) behind them"
            )

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, on all ranks alike; in one that is under way it keeps the position.

        After a state of an epoch's end was loaded, the loop behind ``set_epoch`` of that epoch gets
        no batch. So one that resumes with the epoch it was saved in need not know that it was
        complete. ``iter(loader)`` once per loop: with workers a second one begins the next epoch.

        Raises:
            ValueError: ``epoch`` is not a whole number from 0.
            RuntimeError: This process has joined, and begins with another epoch than the members'.
                Or the epoch has begun, and the model has made passes before its first batch.
        """
        _whole("epoch", epoch, 0)
        if self._must_begin and epoch != self._epoch:
            raise RuntimeError(
                f"set_epoch({epoch}) of BalancedSampler in a process that has joined, and the "
                f"members are in epoch {self._epoch}: it would deal other batches than they. Try: "
                "for epoch in range(sampler.stats().epoch, epochs)"
            )
        now = self._now()
        if epoch == self._epoch:
            self._check_untouched(now)
        complete = self._catch_up(now)
        just_loaded = self._untouched and self._loaded_epoch is not None
        if epoch == self._epoch and (just_loaded or not complete):
            self._deal_nothing = complete
        else:
            if self._loaded_epoch is not None and epoch <= self._loaded_epoch:
                logger.warning(
                    "set_epoch(%d) of BalancedSampler after a state of epoch %d was loaded: it "
                    "begins epoch %d anew. Try, with Accelerate: loader.set_epoch(%d)",
                    *(epoch, self._loaded_epoch, epoch, self._loaded_epoch + complete),
                )
            self._begin_by(now)
            self._start(epoch)

    def stats(self) -> SamplerStats:
        """Counters and estimates so far, equal on ranks that are at the same step."""
        self.read_steps()
        plan = self._plan
        (_, shares, members), fits = plan.newest, plan.fits()
        even = even_shares(plan.limits)
        return SamplerStats(
            epoch=self._epoch,
            cursor=max(0, self._cursor()),
            next_epoch=self._epoch + self._catch_up(self._now()),
            batches=plan.trained,
            changes=plan.changes,
            members=members,
            shares=shares,
            fixed_seconds=tuple(fit.fixed for fit in fits),
            seconds_per_sample=tuple(fit.per_sample for fit in fits),
            batch_seconds=batch_seconds(fits, shares) if fits else None,
            even_batch_seconds=batch_seconds(fits, even) if fits else None,
            advice=self._advice(),
        )

    def state_dict(self) -> dict[str, Any]:
        """The position, counted in batches that were trained, and all that decides the next shares.

        Take it between steps. It is the same on all ranks, so one rank may save it for all.
        """
        self.read_steps()
        return {
            "options": self._options(),
            "epoch": self._epoch,
            "cursor": self._cursor(),
            # Until then the passes of another loader are not of this epoch.
            "begun": self._begin is not None and self._begin < self._now(),
            "rest": self._rest(),
            "of_others": self._step_of_others == self._log.steps,
            # Others that continue are numbered anew, and nobody knows which is which.
            "plan": self._plan.state() if self._plan.has_all else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state_dict()`` was taken. Collective: call it on all ranks.

        The position also holds for another number of ranks; then shares begin equal. So they do if
        ranks had died or joined. ``lookahead`` and limits of shares may be others than they were.

        Raises:
            ValueError: The state is of another dataset, ``global_batch``, ``seed`` or ``shuffle``;
                nothing was changed.
            ConfigMismatchError: The ranks loaded different states, on all of them; or another rank
                has raised a ValueError.
            UnsupportedError: Ranks are gone or have joined.
        """
        mine = self._options()

        def check() -> list[int]:
            check_options(part_of(state, "options"), {name: mine[name] for name in _ORDER})
            parts = ("options", "plan", "rest", "begun", "of_others")
            kept = [part_of(state, name) for name in parts]
            digest = hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8)
            position = int(part_of(state, "epoch")), int(part_of(state, "cursor"))
            return [*position, int.from_bytes(digest.digest(), "little") >> 1, 0]

        self._agree(("the loaded epoch", "the loaded cursor", "the loaded state"), check)
        saved, plan, cursor = state["options"], state["plan"], int(state["cursor"])
        first, skipped, carried = state["rest"]
        limits, lookahead = self._first_limits, self._arguments["lookahead"]
        of_others = plan is None or len(saved["most"]) != len(limits.most)
        if of_others:
            self._plan = SharePlan(limits, lookahead)
        else:
            self._plan = SharePlan.load({**plan, "most": limits.most}, limits, lookahead)
            self._plan.keep_within_limits(self._plan.trained + self._log.pending_passes)
        self._next_step = self._log.steps
        self._told = self._plan.newest
        self._start(int(state["epoch"]))
        now = self._plan.trained
        self._begin = now - cursor if state["begun"] else None
        batch = now if self._begin is None else max(now, self._begin)
        self._deals.resume(batch, self._order(), Rest(tuple(first), skipped), carried)
        # Passes that wait for a reduction may complete it: only the wrapper's state has them.
        if not self._catch_up(now):
            self._deals.resume(batch, self._order(), Rest((*carried, *first), skipped), ())
        self._loaded_epoch = self._epoch
        self._step_of_others = self._log.steps if of_others or state["of_others"] else None

    def most_ranks(self) -> int:
        """For the model, to which processes join: how many ranks a batch has samples for."""
        return self._arguments["global_batch"] // self._first_limits.fewest

    def state_for_others(self) -> dict[str, Any]:
        """For the model, to which processes join: what their samplers begin with."""
        now = self._now()
        return {
            "arguments": self._arguments,
            "most": list(self._first_limits.most),
            "epoch": self._epoch,
            "begin": self._begin,
            "plan": self._plan.state(),
            "deals": self._deals.state(now, self._plan.departures),
        }

    def _join(self, state: Mapping[str, Any], max_batch: int | None) -> None:
        """Continues as the members' samplers, from what ``state_for_others()`` returned there."""
        for name, mine in self._arguments.items():
            if mine != (theirs := part_of(state, "arguments")[name]):
                raise ConfigMismatchError(
                    f"BalancedSampler differs from the members': {name} is {theirs} there and "
                    f"{mine} in this process, which joins. Try: the same on all ranks; only "
                    "max_batch may differ"
                )
        limits = self._first_limits = self._limits_of(part_of(state, "most"))
        if max_batch is not None and max_batch // limits.unit * limits.unit < limits.fewest:
            raise ValueError(
                f"max_batch={max_batch} is below the least share, {limits.fewest}. Try: a larger "
                "one"
            )
        lookahead = self._arguments["lookahead"]
        self._plan = SharePlan.load(part_of(state, "plan"), limits, lookahead)
        self._epoch = self._loaded_epoch = int(part_of(state, "epoch"))
        self._begin = int(part_of(state, "begin"))
        self._deals.load(self._order(), part_of(state, "deals"))
        self._must_begin = self._waits = True
        self._untouched = False  # the members have dealt batches

    def is_idle(self) -> bool:
        """For the model: whether its passes train no batch of this sampler now."""
        self.read_steps()
        return self._deal_trained()

    def has_share(self) -> bool:
        """For the model: False in the first passes of a process that has joined."""
        members = self._deals.members_of(self._now()) if self._waits else None
        if members is None:  # or the pass is another loader's
            return True
        self._waits = self._rank not in members
        return not self._waits

    def _order(self) -> torch.Tensor:
        length, seed = self._arguments["len(dataset)"], self._arguments["seed"]
        shuffle = bool(self._arguments["shuffle"])
        return epoch_order(length, seed=seed, epoch=self._epoch, shuffle=shuffle)

    def _limits_of(self, most: Sequence[int]) -> Limits:
        return Limits.of(
            self._arguments["global_batch"],
            unit=self._arguments["multiple_of"],
            fewest=self._arguments["min_batch"],
            most=[each or None for each in most],
        )

    def _rest(self) -> list[Any]:
        """Of the epoch, as ``load_state_dict`` takes it: see ``Deals.rest``."""
        if self._begin is None:  # its batches follow those that wait for a reduction
            first = self._deals.next_first(self._now(), self._plan.departures)
            return [list(first), 0, []]
        batch = max(self._begin, min(self._plan.trained, self._deals.next_batch))
        (first, skipped), carried = self._deals.rest(batch, self._plan.departures)
        return [list(first), skipped, carried]

    def _start(self, epoch: int) -> None:
        self._epoch = epoch
        self._begun += 1
        self._loaded_epoch = self._begin = None
        self._untouched, self._deal_nothing = True, False

    def _begin_by(self, now: int) -> None:
        """After a state was loaded without the model, and so without the passes that waited: the
        epoch begins with the next pass if all of them were of the one before or its first ones."""
        if self._begin is None or now > self._begin:
            return
        if now < self._begin:
            self._deals.resume(now, self._order(), *self._deals.rest(self._begin, ()))
        self._begin, self._loaded_epoch = now, None

    def _now(self) -> int:
        """How many batches were put through backward, those of an unfinished step too."""
        self.read_steps()
        return self._plan.trained + self._log.pending_passes

    def _cursor(self) -> int:
        """Batches of the epoch that are on record. Below 0: as many passes of the epoch before wait
        for a reduction, and the first batch comes behind them."""
        if self._begin is None:
            return -self._log.pending_passes
        return min(self._plan.trained, self._deals.next_batch) - self._begin

    def _catch_up(self, now: int) -> bool:
        """Deals batches that were trained and that nobody pulled; whether the epoch is complete."""
        if self._begin is None:
            return False
        if now < self._deals.next_batch:
            return False  # as it was dealt
        # Passes of another loader, or of before a restart, that have trained batches nobody pulled.
        for batch in range(self._deals.next_batch, now):
            if self._deals.deal(batch, self._plan.decided(batch), self._plan.departures) is None:
                return True
        # An epoch of which ranks were lost has more batches.
        return not self._deals.has(now, self._plan.decided(now), self._plan.departures)

    def _shares_of(self, batch: int) -> Change:
        """Reads steps only if it needs them: several at once take little longer than one."""
        log, plan = self._log, self._plan
        # A step has one pass, or more.
        least = plan.trained + (log.steps - self._next_step) + log.pending_passes
        if least <= batch and (shares := plan.shares_of(batch)) is not None:
            return shares
        if (now := self._now()) > batch:
            raise RuntimeError(
                f"the model of BalancedSampler has made {now} backward passes, and its loader has "
                f"dealt {batch} batches: shares and the position follow from the passes. Try: one "
                "backward pass per batch, and no other training of this model in the epoch"
            )
        if (shares := plan.shares_of(batch)) is None:
            raise RuntimeError(
                f"rank {self._rank}'s loader has run {batch - now} batches ahead of training, "
                f"too far for lookahead={self._arguments['lookahead']} of BalancedSampler: the "
                "steps that decide the next shares are not trained yet. Try: lookahead=num_workers "
                "* prefetch_factor + 2 * accumulate of the loader that runs ahead furthest, plus 1 "
                "with Lightning or Accelerate, the same on all ranks. If the loop trains only some "
                "of the batches, as when Accelerate's prepare() cuts them among the ranks, no "
                "lookahead is enough: see docs/unequal-machines.md"
            )
        return shares

    def read_steps(self) -> None:
        """For the model, which drops the records of old steps."""
        steps, plan = self._log.steps, self._plan
        if steps == self._next_step:
            return
        idle = self._deal_trained()
        for record in () if idle else self._log.records(self._next_step):
            before = plan.newest
            plan.add(record)
            self._next_step += 1
            if plan.newest is not before and self._rank == plan.newest.members[0]:
                self._tell()
            if idle := self._deal_trained():
                break
        if idle and steps != self._next_step:
            # Another loader's, and every rank leaves out the same ones, however late it looks.
            plan.interrupt()
            self._next_step = steps
        self._deals.forget(min([plan.timed, *(each.since for each in plan.departures)]))

    def _deal_trained(self) -> bool:
        """Deals what steps on record have trained and nobody pulled; whether those behind them are
        of no epoch, as all batches of the last one are trained, and the next one has not begun."""
        return self._begin is None or self._catch_up(self._plan.trained)

    def _tell(self) -> None:
        """Logs shares that have changed by more than a tenth, whom they are of, and advice about
        another rank than the last one."""
        fits, told, now = self._plan.fits(), self._told, self._plan.newest
        if now.members != told.members:
            less = self._plan.limits.total < self._plan.limits.whole
            logger.log(
                logging.WARNING if less else logging.INFO,
                "from batch %d on ranks %s train on %s samples (before: ranks %s on %s)%s",
                now.batch,
                *(_listed(each) for each in (now.members, now.shares, told.members, told.shares)),
                ": max_batch of these ranks allows no more" if less else "",
            )
            self._told = now
        elif any(abs(a - b) > _TOLD * b for a, b in zip(now.shares, told.shares, strict=True)):
            logger.info(
                "from batch %d on the ranks train on %s samples (before: %s): a batch takes "
                "%.3g s instead of %.3g s",
                now.batch,
                _listed(now.shares),
                _listed(told.shares),
                batch_seconds(fits, now.shares),
                batch_seconds(fits, told.shares),
            )
            self._told = now
        advice = self._advice()
        about, _, _ = advice.partition(":")  # which rank; its seconds change with each step
        if about not in ("", self._told_advice):
            logger.info("%s", advice)
        self._told_advice = about

    def _advice(self) -> str:
        plan = self._plan
        return why_leave_out(plan.fits(), plan.limits, LEAST_GAIN, plan.newest.members)

    def _options(self) -> dict[str, Any]:
        return {**self._arguments, "most": list(self._first_limits.most)}

    def _agree(self, names: Sequence[str], check: Callable[[], list[int]]) -> list[int]:
        """Calls ``check``, and returns each rank's last number of it. Collective.

        Raises:
            Exception: That of ``check``.
            ConfigMismatchError: It has raised one on another rank, or the other numbers, which are
                called ``names``, are not the same on all.
        """
        error: Exception | None = None
        numbers = [0] * (len(names) + 1)
        try:
            numbers = check()
        except Exception as caught:
            error = caught
        gathered = self._log.gather([*numbers[:-1], int(error is not None), numbers[-1]])
        if error is not None:
            raise error
        for rank, theirs in enumerate(gathered):
            if theirs[-2]:
                raise ConfigMismatchError(
                    f"BalancedSampler has raised an error on rank {rank}, which says what is wrong "
                    "there"
                )
        for position, name in enumerate(names):
            first = gathered[0][position]
            for rank, theirs in enumerate(gathered):
                if theirs[position] != first:
                    raise ConfigMismatchError(
                        f"BalancedSampler differs between ranks: {name} is {first} on rank 0 and "
                        f"{theirs[position]} on rank {rank}. Try: the same on all ranks; only "
                        "max_batch may differ"
                    )
        return [theirs[-1] for theirs in gathered]


_ORDER = ("len(dataset)", "global_batch", "seed", "shuffle")
"""Options that decide in which step an index is dealt."""
_ARGUMENTS = (*_ORDER[:3], "lookahead", "min_batch", "multiple_of", "shuffle")


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _length_of(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}, which is iterable and has no indices to deal. "
            "Try: a dataset with len() and []"
        )
    try:
        return len(dataset)
    except TypeError:
        raise TypeError(
            f"dataset is of type {type(dataset).__name__}, which has no len(): BalancedSampler "
            "deals its indices"
        ) from None


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise ValueError(f"{name}={value!r} is not a whole number from {least}")
    return value

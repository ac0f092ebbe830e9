"""BalancedSampler beside its promises: each index at most once, shares alike on all ranks, and a
position that counts trained batches. The model is a stand-in, see step_logs.py."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from step_logs import Job
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pycomm.balance.balanced_sampler import BalancedSampler
from pycomm.errors import ConfigMismatchError

SPEEDS = (1.0, 2.0, 4.0)
RANKS = len(SPEEDS)


class Three:
    """Three ranks in one process, whose times follow from their shares."""

    def __init__(self, job: Job | None = None, length: int = 203, **options: Any) -> None:
        self.job = job or Job(RANKS)
        options = {"global_batch": 24, "lookahead": 4} | options
        self.samplers = [
            BalancedSampler(range(length), model=log, **options) for log in self.job.logs
        ]

    def train(self, batches: Sequence[Sequence[int]]) -> None:
        sizes = [len(batch) for batch in batches]
        self.job.train(
            sizes, [1.0 + size * speed for size, speed in zip(sizes, SPEEDS, strict=True)]
        )
        self.job.returned()

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def epoch(self, most: int | None = None) -> list[list[list[int]]]:
        """Trains it, or that many steps of it; returns the batches of each step and rank."""
        steps = []
        iterators = [iter(sampler) for sampler in self.samplers]
        for batches in itertools.islice(zip(*iterators, strict=True), most):
            self.train(batches)
            steps.append([list(batch) for batch in batches])
        return steps

    def state(self) -> Any:
        states = [json.dumps(sampler.state_dict()) for sampler in self.samplers]
        assert len(set(states)) == 1
        return json.loads(states[0])

    def restarted(self, **options: Any) -> Three:
        """The same job in new processes, which load this one's state."""
        other = Three(self.job.restarted(), **options)
        for sampler in other.samplers:
            sampler.load_state_dict(self.state())
        return other


def indices(steps: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [index for step in steps for batch in step for index in batch]


def sizes(steps: Sequence[Sequence[Sequence[int]]]) -> list[tuple[int, ...]]:
    return [tuple(len(batch) for batch in step) for step in steps]


def test_an_epoch_has_each_index_once_but_for_the_remainder() -> None:
    three = Three()
    orders = []
    for epoch in range(5):
        three.set_epoch(epoch)
        steps = three.epoch()
        assert len(steps) == len(three.samplers[0]) == 203 // 24
        assert all(sum(each) == 24 for each in sizes(steps))
        dealt = indices(steps)
        assert len(set(dealt)) == len(dealt) == 8 * 24
        assert set(dealt) <= set(range(203))
        orders.append(dealt)
    assert len({tuple(order) for order in orders}) == 5
    assert len({index for order in orders for index in order}) == 203  # remainders differ
    # Speeds of 4, 2 and 1, and 1 s that no share changes: 13.9, 6.9 and 3.5 would be equal.
    assert sizes(steps)[-1] in [(14, 7, 3), (13, 7, 4), (14, 6, 4)]


def test_without_shuffle_a_step_has_the_next_indices() -> None:
    steps = Three(shuffle=False).epoch()
    assert indices(steps) == list(range(8 * 24))
    assert all(batch == sorted(batch) for step in steps for batch in step)


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    def orders(seed: int, job: Job | None = None, **options: Any) -> list[set[int]]:
        three = Three(job, seed=seed, **options)
        return [set(itertools.chain(*step)) for step in three.epoch()]

    assert orders(3) == orders(3)
    assert orders(3) == orders(3, lookahead=9, multiple_of=4)  # other shares of the same steps
    assert orders(3) != orders(4)
    three = Three(seed=0)
    three.set_epoch(1)
    assert three.epoch(1) != Three(seed=1).epoch(1)


def test_epochs_follow_each_other_without_set_epoch() -> None:
    one, other = Three(), Three()
    epochs = [one.epoch(), one.epoch(), one.epoch()]
    for epoch, steps in enumerate(epochs):
        other.set_epoch(epoch)
        assert other.epoch() == steps
    assert one.samplers[0].stats().epoch == 2


def test_set_epoch_of_a_complete_epoch_deals_it_again() -> None:
    three = Three()
    first = [sorted(indices([step])) for step in three.epoch()]
    three.set_epoch(0)
    assert [sorted(indices([step])) for step in three.epoch()] == first


def test_batches_that_were_pulled_and_not_trained_are_dealt_again() -> None:
    three = Three()
    for sampler in three.samplers:
        peek = iter(sampler)
        next(peek), next(peek)
    begin = three.epoch(3)
    for sampler in three.samplers:
        next(iter(sampler))
    whole = begin + three.epoch()
    assert len(whole) == 8 and len(set(indices(whole))) == 8 * 24


def test_passes_of_a_step_that_is_not_complete_count_for_the_epoch_and_not_for_the_position() -> (
    None
):
    """accumulate=3, and 8 batches: two of them wait for a pass of the next epoch."""
    three = Three(lookahead=8)
    iterators = [iter(sampler) for sampler in three.samplers]
    for number in range(8):
        for iterator in iterators:
            next(iterator)
        for log in three.job.logs:
            log.pending_passes += 1
        if number % 3 == 2:
            three.job.train([24] * 3, [1.0] * 3, passes=3)
            three.job.returned()
    assert [sampler.state_dict()["cursor"] for sampler in three.samplers] == [6] * 3
    assert all(list(iterator) == [] for iterator in iterators)
    for sampler in three.samplers:
        next(iter(sampler))  # of the next epoch, and not the two again
    assert three.samplers[0].stats().epoch == 1
    resumed, fresh = three.restarted(lookahead=8), Three(lookahead=8)
    assert resumed.samplers[0].stats().cursor == 0  # it has begun
    fresh.set_epoch(1)
    assert set(indices(resumed.epoch(1))) == set(indices(fresh.epoch(1)))


@pytest.mark.parametrize("trained", [0, 1, 3, 7, 8, 11])
def test_a_resumed_run_deals_what_the_other_one_would(trained: int) -> None:
    three = Three()
    three.epoch(min(trained, 8))
    if trained > 8:
        three.epoch(trained - 8)
    for sampler in three.samplers:  # a loader has run ahead
        ahead = iter(sampler)
        list(itertools.islice(ahead, 2))
    other = three.restarted()
    for _ in range(3):
        assert other.epoch() == three.epoch()
    assert other.state()["plan"]["changes"] == three.state()["plan"]["changes"]


def test_a_resumed_run_that_lost_a_steps_seconds_deals_alike_on_all_ranks() -> None:
    """A wrapper does not know in its first step how long the last one before it took."""
    three = Three()
    three.epoch(5)
    job = Job(RANKS)
    other = Three(job)
    for sampler in other.samplers:
        sampler.load_state_dict(three.state())
    rest = other.epoch()
    wanted = three.epoch()
    assert rest[:3] == wanted[:3]  # decided before
    assert len(set(indices(rest))) == 3 * 24 and all(sum(each) == 24 for each in sizes(rest))


def test_a_state_of_an_epochs_end_needs_no_case_of_its_own() -> None:
    three = Three()
    three.epoch()
    resumed = three.restarted()
    resumed.set_epoch(0)  # a loop that begins with the epoch of the state
    assert resumed.epoch() == []
    resumed.set_epoch(1)
    three.set_epoch(1)
    assert resumed.epoch() == three.epoch()
    again = three.restarted()
    again.set_epoch(1)
    assert again.epoch() == []
    again.set_epoch(1)  # and now it is meant
    assert len(again.epoch()) == 8


def test_the_next_epoch_is_the_one_whose_batches_come() -> None:
    three = Three()

    def next_epochs(job: Three) -> set[int]:
        return {sampler.stats().next_epoch for sampler in job.samplers}

    assert next_epochs(three) == {0}
    three.epoch(7)
    assert next_epochs(three) == next_epochs(three.restarted()) == {0}
    three.epoch()
    assert next_epochs(three) == next_epochs(three.restarted()) == {1}
    three.set_epoch(1)
    assert next_epochs(three) == next_epochs(three.restarted()) == {1}


def test_an_epoch_before_the_loaded_one_is_begun_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As by a library that counts epochs from 0 in each process."""
    three = Three()
    three.set_epoch(3)
    three.epoch(2)
    resumed = three.restarted()
    resumed.set_epoch(3)
    assert not caplog.records
    resumed.set_epoch(0)
    (line, *_) = [each.getMessage() for each in caplog.records]
    assert line.startswith("set_epoch(0) of BalancedSampler after a state of epoch 3 was loaded")
    assert line.endswith("loader.set_epoch(3)")
    assert len(resumed.epoch()) == 8


@pytest.mark.parametrize("epoch", [0, 3])
def test_an_epoch_that_a_state_has_complete_is_begun_with_a_warning(
    epoch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Accelerate's loader asks for an epoch again that has no batch."""
    three = Three()
    three.set_epoch(epoch)
    three.epoch()
    resumed = three.restarted()
    resumed.set_epoch(epoch)
    assert resumed.epoch() == [] and not caplog.records
    resumed.set_epoch(epoch)
    (line, *_) = [each.getMessage() for each in caplog.records]
    assert line.endswith(f"epoch {epoch} anew. Try, with Accelerate: loader.set_epoch({epoch + 1})")


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_position_holds_for_another_number_of_ranks(world_size: int) -> None:
    three = Three()
    three.set_epoch(4)
    begin = three.epoch(5)
    other = Job(world_size)
    samplers = [
        BalancedSampler(range(203), model=log, global_batch=24, lookahead=4) for log in other.logs
    ]
    even = (24 // world_size,) * world_size
    for sampler in samplers:
        sampler.load_state_dict(three.state())
        assert sampler.stats().shares == even
    rest = []
    for batches in zip(*samplers, strict=True):
        other.train(even, [1.0] * world_size)
        other.returned()
        rest.append([list(batch) for batch in batches])
    assert len(rest) == 3 and len(set(indices(begin + rest))) == 8 * 24


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"max_batch": 20}, True),
        ({"lookahead": 9}, True),
        ({"min_batch": 2}, True),
        ({"max_batch": 12}, False),
        ({"multiple_of": 4}, False),
        ({"min_batch": 6}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("waiting", [0, 2])
def test_other_limits_keep_times_and_the_shares_that_they_allow(
    options: dict[str, int], kept: bool, waiting: int
) -> None:
    three = Three()
    three.epoch(), three.epoch(5)
    before = three.samplers[0].stats()
    other = Three(three.job.restarted(), **options)
    for log, sampler in zip(other.job.logs, other.samplers, strict=True):
        log.pending_passes = waiting
        sampler.load_state_dict(three.state())
    after = other.samplers[0].stats()
    assert after.fixed_seconds == before.fixed_seconds != ()
    assert after.seconds_per_sample == before.seconds_per_sample
    assert (after.shares == before.shares) == kept
    assert after.changes == before.changes + (not kept)
    steps = other.epoch()
    assert len(steps) == 3 - waiting
    least, unit = options.get("min_batch", 1), options.get("multiple_of", 1)
    for step in sizes(steps):
        assert sum(step) == 24 and all(share % unit == 0 for share in step)
        assert least <= min(step) and max(step) <= options.get("max_batch", 24)
    assert sizes(steps)[0] == after.shares


@pytest.mark.parametrize("first", ["saves", "set_epoch", "iter"])
@pytest.mark.parametrize("begins", [0, 1])
def test_passes_that_wait_are_refused_on_other_ranks_whatever_epoch_begins(
    first: str, begins: int
) -> None:
    """At an epoch's end, with two passes that wait: the next epoch begins before the state is saved
    or after it was loaded. Once this job has dealt a batch, the passes are its own."""
    three = Three()
    iterators = [iter(sampler) for sampler in three.samplers]
    for number in range(8):
        batches = [next(iterator) for iterator in iterators]
        if number < 6:
            three.train(batches)
    for log in three.job.logs:
        log.pending_passes = 2
    if first != "saves":
        three.set_epoch(1)
    if first == "iter":
        for sampler in three.samplers:
            iter(sampler)
    pair = Job(2)
    samplers = [
        BalancedSampler(range(203), model=log, global_batch=24, lookahead=4) for log in pair.logs
    ]
    for log, sampler in zip(pair.logs, samplers, strict=True):
        sampler.load_state_dict(three.state())
        log.pending_passes = 2
        if begins:
            sampler.set_epoch(1)
        with pytest.raises(RuntimeError, match="of other ranks, and the model has 2 backward pass"):
            iter(sampler)
        log.pending_passes = 0
        sampler.set_epoch(1)
        next(iter(sampler))
        log.pending_passes = 1
        next(iter(sampler))


def test_a_state_of_another_order_is_refused_and_changes_nothing() -> None:
    state = Three().state()
    for option, value in (("seed", 1), ("global_batch", 12), ("shuffle", False)):
        sampler = Three(**{option: value}).samplers[0]
        with pytest.raises(ValueError, match=f"saved with {option}=.*nothing was changed"):
            sampler.load_state_dict(state)
    with pytest.raises(ValueError, match=r"len\(dataset\)=203.*len\(dataset\)=100"):
        Three(length=100).samplers[0].load_state_dict(state)
    with pytest.raises(ValueError, match="has no 'options'"):
        Three().samplers[0].load_state_dict({"epoch": 3})


def gathered(different: Any) -> Any:
    """What ranks gather if the last one's numbers are changed by ``different``."""

    def gather(rank: int, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers), list(numbers), different(list(numbers))]

    return gather


def test_ranks_that_load_different_states_get_an_error() -> None:
    three = Three()
    three.epoch(2)
    state = three.state()
    for position, name in enumerate(["the loaded epoch", "the loaded cursor", "the loaded state"]):
        sampler = Three().samplers[0]
        sampler._log._job.gather = gathered(  # type: ignore[attr-defined]
            lambda numbers, at=position: [n + (i == at) for i, n in enumerate(numbers)]
        )
        with pytest.raises(ConfigMismatchError, match=f"{name} is .* on rank 0 and .* on rank 2"):
            sampler.load_state_dict(state)
        assert sampler.stats().cursor == 0


def one_fails(asked: list[int]) -> Any:
    """What ranks gather if rank 1 has raised an error; ``asked``: who has gathered."""

    def gather(rank: int, numbers: Sequence[int]) -> list[list[int]]:
        asked.append(rank)
        return [[*numbers[:-2], int(other == 1), numbers[-1]] for other in range(RANKS)]

    return gather


def test_a_bad_argument_of_one_rank_is_an_error_on_all() -> None:
    """None may wait for one that has raised its own."""
    asked: list[int] = []
    for log in Job(RANKS, one_fails(asked)).logs:
        bad = log.rank == 1
        error, text = (
            (ValueError, "batch=0 is") if bad else (ConfigMismatchError, "error on rank 1")
        )
        with pytest.raises(error, match=text):
            BalancedSampler(range(99), global_batch=24, model=log, max_batch=0 if bad else None)
    assert asked == [0, 1, 2]


def test_a_state_that_one_rank_refuses_is_an_error_on_all() -> None:
    asked: list[int] = []
    three = Three()
    three.job.gather = one_fails(asked)
    for rank, sampler in enumerate(three.samplers):
        bad = rank == 1
        error, text = (ValueError, "saved with seed") if bad else (ConfigMismatchError, "on rank 1")
        with pytest.raises(error, match=text):
            sampler.load_state_dict(Three(seed=int(bad)).state())
    assert asked == [0, 1, 2]


OPTIONS = ["len(dataset)", "global_batch", "seed", "lookahead", "min_batch"]


@pytest.mark.parametrize("option", [*OPTIONS, "multiple_of", "shuffle"])
def test_options_that_differ_between_ranks_are_named(option: str) -> None:
    position = [*OPTIONS, "multiple_of", "shuffle"].index(option)
    job = Job(3, gathered(lambda numbers: [n + (i == position) for i, n in enumerate(numbers)]))
    with pytest.raises(
        ConfigMismatchError, match=rf"{re.escape(option)} is .* on rank 0 and .* on rank 2"
    ):
        Three(job)


def test_max_batch_is_each_ranks_own() -> None:
    job = Job(3, lambda rank, numbers: [[*numbers[:-1], most] for most in (0, 6, 30)])
    three = Three(job, lookahead=2)
    steps = three.epoch() + three.epoch()
    assert max(each[1] for each in sizes(steps)) == 6
    assert sizes(steps)[0] == (9, 6, 9)


def test_min_batch_and_multiple_of_hold_for_all_shares() -> None:
    three = Three(min_batch=3, multiple_of=4)
    steps = three.epoch() + three.epoch() + three.epoch()
    assert {share for each in sizes(steps) for share in each} <= {4, 8, 12, 16}
    assert sizes(steps)[-1] == (16, 4, 4) or sizes(steps)[-1] == (12, 8, 4)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dataset": Endless()}, TypeError, "dataset is a Endless, which is iterable and has no ind"),
    ({"dataset": object()}, TypeError, r"dataset is of type object, which has no len\(\)"),
    ({"dataset": range(23)}, ValueError, "23 samples, fewer than one batch of global_batch=24"),
    ({"model": torch.nn.Linear(1, 1)}, TypeError, "model is of type Linear, which keeps no record"),
    ({"model": None}, TypeError, "model is of type NoneType"),
    ({"global_batch": 2}, ValueError, "global_batch=2 is too small for 3 ranks"),
    ({"global_batch": 0}, ValueError, "global_batch=0 is not a whole number from 1"),
    ({"global_batch": 24.0}, ValueError, "global_batch=24.0 is not a whole number from 1"),
    ({"global_batch": True}, ValueError, "global_batch=True is not a whole number from 1"),
    ({"multiple_of": 5}, ValueError, "global_batch=24 is not a multiple of multiple_of=5"),
    ({"multiple_of": 0}, ValueError, "multiple_of=0 is not"),
    ({"min_batch": 9}, ValueError, "too small for 3 ranks, each of which takes at least 9"),
    ({"min_batch": 0}, ValueError, "min_batch=0 is not"),
    ({"max_batch": 7}, ValueError, "max_batch of all ranks together is 21"),
    ({"max_batch": 0}, ValueError, "max_batch=0 is not"),
    ({"lookahead": 1}, ValueError, "lookahead=1 is not a whole number from 2"),
    ({"seed": -1}, ValueError, "seed=-1 is not a whole number from 0"),
    ({"seed": 2**63}, ValueError, "seed=9223372036854775808 is not"),
    ({"shuffle": 1}, ValueError, "shuffle=1 is neither True nor False"),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD, ids=[text[:40] for _, _, text in BAD])
def test_bad_input_is_an_error(options: Any, error: type[Exception], text: str) -> None:
    arguments = {"dataset": range(100), "global_batch": 24, "model": Job(3).logs[0]} | options
    with pytest.raises(error, match=text):
        BalancedSampler(arguments.pop("dataset"), **arguments)


@pytest.mark.parametrize("epoch", [-1, 1.5, None, "1"])
def test_a_bad_epoch_is_an_error(epoch: Any) -> None:
    with pytest.raises(ValueError, match=r"epoch=.* is not a whole number from 0"):
        Three().samplers[0].set_epoch(epoch)


def test_a_loader_that_runs_ahead_too_far_gets_an_error_and_no_shares() -> None:
    for sampler in Three().samplers:
        pulled = 0
        with pytest.raises(RuntimeError, match=r"4 batches ahead .* lookahead=4.*Try: lookahead="):
            for _ in sampler:
                pulled += 1
        assert pulled == 4


def test_passes_without_batches_are_an_error() -> None:
    """As if a loop called backward twice for each batch."""
    three = Three()
    with pytest.raises(
        RuntimeError, match="has made 2 backward passes, and its loader has dealt 1"
    ):
        for batches in zip(*three.samplers, strict=True):
            three.train(batches)
            three.train(batches)


def train_others(three: Three, steps: int, *, late: bool = False) -> None:
    """Steps with another loader, of a hundredth of the time; one rank looks in the middle."""
    for step in range(steps):
        three.job.train([8] * RANKS, [0.01] * RANKS)
        three.job.returned()
        if step == steps // 2 and not late:
            three.samplers[0].stats()


@pytest.mark.parametrize("steps", [1, 50, 5000])
@pytest.mark.parametrize(
    "when",
    [
        "before the first epoch",
        "after one",
        "after set_epoch",
        "after set_epoch and a restart",
        "after iter and a restart",
    ],
)
def test_steps_of_another_loader_between_epochs_do_not_count(steps: int, when: str) -> None:
    three, other = Three(), Three()
    if when != "before the first epoch":
        assert three.epoch() == other.epoch()
    if "set_epoch" in when:
        for each in (three, other):
            each.set_epoch(1)
    if "iter" in when:
        for sampler in three.samplers:
            next(iter(sampler))
    if "restart" in when:
        three, other = three.restarted(), other.restarted()
    train_others(three, steps)
    dealt, wanted = three.epoch(), other.epoch()
    assert indices(dealt[:2]) == indices(wanted[:2])
    assert all(sum(each) == 24 for each in sizes(dealt))
    for sampler in three.samplers:
        stats = sampler.stats()
        assert stats == three.samplers[0].stats()
        assert stats.batches == other.samplers[0].stats().batches
        assert sum(stats.fixed_seconds) + sum(stats.seconds_per_sample) > 5  # none of 0.01 s
    three.epoch()
    assert len(three.epoch()) == 8


@pytest.mark.parametrize("steps", [1, 3])
def test_a_few_of_them_are_so_too_however_far_loaders_have_run_ahead(steps: int) -> None:
    three, whole = Three(), Three().epoch()
    begin = three.epoch(2)
    ahead = iter(three.samplers[1])
    next(ahead), next(ahead)
    train_others(three, steps)
    three.state()  # is the same on all
    rest = three.epoch()
    assert [sorted(indices([step])) for step in begin + rest] == [
        sorted(indices([step])) for step in whole[:2] + whole[2 + steps :]
    ]


def test_passes_that_a_checkpoint_brings_are_no_others() -> None:
    """It was saved after passes that wait for a reduction, and the model's part was loaded, too."""
    three, whole = Three(), Three().epoch()
    three.epoch(3)
    resumed = three.restarted()
    for log in resumed.job.logs:
        log.pending_passes = 1
    iterators = [iter(sampler) for sampler in resumed.samplers]
    assert sorted(indices([[next(each) for each in iterators]])) == sorted(indices([whole[4]]))


@pytest.mark.parametrize("pulled", [0, 2])
@pytest.mark.parametrize("loads", [False, True])
def test_a_loader_that_was_begun_before_another_epoch_is_an_error(pulled: int, loads: bool) -> None:
    """It has dealt batches of the other one to its workers."""
    three = Three()
    state = three.state()
    iterators = [iter(sampler) for sampler in three.samplers]
    for iterator in iterators:
        assert len(list(itertools.islice(iterator, pulled))) == pulled
    for sampler in three.samplers:
        if loads:
            sampler.load_state_dict(state)
        sampler.set_epoch(0 if loads else 1)
    for iterator in iterators:
        with pytest.raises(RuntimeError, match=r"begun epoch [01], and a loader that .*Try: set_e"):
            next(iterator)
    assert len(three.epoch()) == 8


def test_passes_between_iter_and_the_first_batch_are_an_error() -> None:
    """A loader with workers pulls in iter(), one without them at the first batch."""
    three = Three()
    iterators = [iter(sampler) for sampler in three.samplers]
    next(iterators[0])
    train_others(three, 3)
    assert len({sampler.stats() for sampler in three.samplers}) == 1
    with pytest.raises(RuntimeError, match="made 3 backward passes, and its loader has dealt 0"):
        next(iterators[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_second_iter_of_a_loader_ends_the_first_loop(workers: int) -> None:
    """Both would deal the same batches. A loader with workers has pulled some of them."""
    three = Three()
    # Fork: an interpreter per worker would take as long as all the rest.
    options: Any = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loaders = [
        DataLoader(TensorDataset(torch.arange(203)), batch_sampler=sampler, **options)
        for sampler in three.samplers
    ]
    seen = []

    def train(loops: Sequence[Iterator[Any]], steps: int) -> None:
        for _ in range(steps):
            seen.append([next(loop)[0].tolist() for loop in loops])
            three.train(seen[-1])

    first = [iter(loader) for loader in loaders]
    train(first, 2)
    second = [iter(loader) for loader in loaders]
    train(second, 2)
    for loop in first:
        with pytest.raises(RuntimeError, match=r"and iter\(loader\) once per loop"):
            next(loop)
    train(second, 4)
    assert len(set(indices(seen))) == 8 * 24


@pytest.mark.parametrize("loads", ["", "not begun", "without its pass", "without its passes"])
@pytest.mark.parametrize("steps", [3, 8])
def test_passes_behind_iter_are_no_batches_of_an_epoch_that_dealt_none(
    steps: int, loads: str
) -> None:
    """A loader without workers is begun and left; then a loop trains the epoch."""
    three, epoch = Three(), 0
    if "without" in loads:  # one of each epoch waits for a reduction
        for epoch in range(2 if loads == "without its passes" else 1):
            three.set_epoch(epoch)
            for sampler, log in zip(three.samplers, three.job.logs, strict=True):
                next(iter(sampler))
                log.pending_passes += 1
        assert three.state()["begun"] and three.state()["cursor"] == -epoch
    if loads:
        three = three.restarted()
    for sampler in three.samplers:
        iter(DataLoader(TensorDataset(torch.arange(203)), batch_sampler=sampler))
    train_others(three, steps)
    for sampler in three.samplers:
        text = f"epoch {epoch}, and the model has made {steps} backward passes before its first"
        with pytest.raises(RuntimeError, match=text):
            sampler.set_epoch(epoch)
        with pytest.raises(RuntimeError, match=text):
            iter(sampler)
        sampler.set_epoch(epoch + 1)
    assert len(three.epoch()) == 8


@pytest.mark.parametrize("trained", [7, 8])
def test_a_set_epoch_at_the_last_batch_lets_its_loop_end(trained: int) -> None:
    """A loader with workers has come to the end of the epoch by then."""
    three = Three()
    iterators = [iter(sampler) for sampler in three.samplers]
    for _ in range(trained):
        batches = [next(iterator) for iterator in iterators]
        three.set_epoch(1 if len(three.job.records) == trained - 1 else 0)
        three.train(batches)
    for iterator in iterators:
        if trained == 8:
            assert list(iterator) == []
        else:
            with pytest.raises(RuntimeError, match="begun epoch 1, and a loader that was begun"):
                next(iterator)
    assert len(three.epoch()) == 8


def test_a_set_epoch_in_the_middle_of_one_leaves_its_loader() -> None:
    three = Three()
    three.epoch(3)
    three.set_epoch(5)
    train_others(three, 10)
    steps = three.epoch()
    assert len(steps) == 8 and len(set(indices(steps))) == 8 * 24


def test_steps_of_another_loader_in_the_middle_of_an_epoch_are_batches_of_it() -> None:
    three = Three()
    three.epoch(3)
    train_others(three, 5000)
    assert {sampler.stats().batches for sampler in three.samplers} == {8}
    assert len(three.epoch()) == 8  # of the next epoch


def test_stats_say_what_was_dealt_and_why() -> None:
    three = Three()
    sampler = three.samplers[1]
    before = sampler.stats()
    assert (before.epoch, before.cursor, before.batches, before.changes) == (0, 0, 0, 0)
    assert before.shares == (8, 8, 8) and before.fixed_seconds == before.seconds_per_sample == ()
    assert before.batch_seconds is before.even_batch_seconds is None and before.advice == ""
    for _ in range(4):
        three.epoch()
    three.epoch(5)
    stats = sampler.stats()
    assert stats == three.samplers[0].stats()
    assert (stats.epoch, stats.cursor, stats.batches) == (4, 5, 37)
    assert 1 <= stats.changes <= 4 and sum(stats.shares) == 24
    assert stats.seconds_per_sample == pytest.approx(SPEEDS, rel=0.2)
    assert stats.batch_seconds == pytest.approx(15, rel=0.1)
    assert stats.even_batch_seconds == pytest.approx(33, rel=0.1)


def test_a_rank_that_is_better_left_out_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2)
    samplers = [
        BalancedSampler(range(1000), model=log, global_batch=20, lookahead=4) for log in job.logs
    ]
    with caplog.at_level(logging.INFO, "pycomm"):
        for batches in zip(*samplers, strict=True):
            mine, theirs = map(len, batches)
            job.train([mine, theirs], [1 + mine, 60 + 30 * theirs])
            job.returned()
    (said,) = [each.getMessage() for each in caplog.records if "left out" in each.getMessage()]
    assert said.startswith("rank 1 is better left out: with it a batch takes")
    advice = samplers[1].stats().advice
    assert advice.startswith("rank 1 is better left out") and advice.endswith("21 s without it")


def test_advice_about_another_rank_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    three = Three(length=2403)
    with caplog.at_level(logging.INFO, "pycomm"):
        for number, batches in enumerate(zip(*map(iter, three.samplers), strict=True)):
            sizes = [len(batch) for batch in batches]
            slow = 1 if number < 50 else 2
            seconds = [
                (60 if rank == slow else 1) + size * speed
                for rank, (size, speed) in enumerate(zip(sizes, SPEEDS, strict=True))
            ]
            three.job.train(sizes, seconds)
            three.job.returned()
    said = [each.getMessage() for each in caplog.records if "left out" in each.getMessage()]
    assert [line.partition(" is ")[0] for line in said] == ["rank 1", "rank 2"]


def test_a_line_is_logged_if_shares_change_by_more_than_a_tenth(
    caplog: pytest.LogCaptureFixture,
) -> None:
    three = Three(lookahead=2)
    with caplog.at_level(logging.INFO, "pycomm"):
        for _ in range(6):
            three.epoch()
    lines = [each.getMessage() for each in caplog.records]
    assert lines == [  # of one rank only
        "from batch 4 on the ranks train on 16, 7, 1 samples (before: 8, 8, 8): a batch takes "
        "15.6 s instead of 33 s",
        "from batch 6 on the ranks train on 14, 7, 3 samples (before: 16, 7, 1): a batch takes "
        "15.3 s instead of 17 s",
    ]


class Walk:
    """A random walk of a job's ranks and its oracle: per epoch, what was trained so far.

    Ranks pull at different times and amounts, as their loaders would, and return from backward one
    after the other, as ranks do.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.options = {
            "lookahead": self.random.randint(3, 9),
            "global_batch": self.random.choice([12, 24]),
            "multiple_of": self.random.choice([1, 1, 2]),
            "length": self.random.randint(60, 120),
        }
        self.three = Three(**self.options)
        self.epoch = 0
        self.trained: set[int] = set()
        self.shares: dict[int, tuple[int, ...]] = {}
        self.batch = 0  # of the whole job
        self.leave_loaders()

    def leave_loaders(self) -> None:
        self.iterators = [iter(sampler) for sampler in self.three.samplers]
        self.pulled: list[list[list[int]]] = [[] for _ in self.iterators]
        self.ended = [False] * RANKS

    def pull(self, rank: int) -> None:
        if len(self.pulled[rank]) >= self.options["lookahead"] - 2 or self.ended[rank]:
            return
        try:
            self.pulled[rank].append(next(self.iterators[rank]))
        except StopIteration:
            self.ended[rank] = True

    def train(self) -> None:
        for rank in range(RANKS):
            if not self.pulled[rank]:
                self.pull(rank)
        if any(self.ended[rank] and not self.pulled[rank] for rank in range(RANKS)):
            assert all(self.ended) and not any(self.pulled)
            self.complete()
            return
        batches = [pulled.pop(0) for pulled in self.pulled]
        dealt = [index for batch in batches for index in batch]
        assert len(dealt) == self.options["global_batch"] == len(set(dealt))
        assert not self.trained & set(dealt)
        self.trained |= set(dealt)
        assert all(len(batch) % self.options["multiple_of"] == 0 for batch in batches)
        took = [
            (1.0 + len(batch) * speed) * self.random.uniform(0.9, 1.1)
            for batch, speed in zip(
                batches, self.random.choice([SPEEDS, SPEEDS[::-1]]), strict=True
            )
        ]
        self.three.job.train([len(batch) for batch in batches], took)
        self.batch += 1
        for log in self.random.sample(self.three.job.logs, RANKS):
            log.returned()
            self.pull(log.rank)

    def complete(self) -> None:
        assert self.is_complete()
        self.epoch += 1
        self.trained = set()
        if self.random.random() < 0.5:
            self.three.set_epoch(self.epoch)
        self.leave_loaders()

    def is_complete(self) -> bool:
        length, batch = self.options["length"], self.options["global_batch"]
        return len(self.trained) == length // batch * batch

    def leave(self) -> None:
        """The loop is left in the middle, and the loader begun again."""
        if self.is_complete():
            self.complete()
        else:
            self.leave_loaders()

    def other_epoch(self) -> None:
        self.epoch += self.random.randint(1, 3)
        self.trained = set()
        self.three.set_epoch(self.epoch)
        self.leave_loaders()

    def same_epoch(self) -> None:
        self.three.set_epoch(self.epoch)
        if self.is_complete():  # it is dealt again
            self.trained = set()
            self.leave_loaders()

    def restart(self) -> None:
        self.three = self.three.restarted(**self.options)
        cursor = len(self.trained) // self.options["global_batch"]
        for sampler in self.three.samplers:
            assert sampler.stats().cursor == cursor
        if self.is_complete():
            self.complete()
            return
        if self.random.random() < 0.5:
            self.three.set_epoch(self.epoch)
        self.leave_loaders()


@pytest.mark.parametrize("seed", range(60))
def test_random_walks(seed: int) -> None:
    walk = Walk(seed)
    steps = [walk.leave, walk.other_epoch, walk.same_epoch, walk.restart]
    for _ in range(150):
        if walk.random.random() < 0.06:
            walk.random.choice(steps)()
        else:
            walk.train()
    assert walk.batch > 50


def test_a_loader_takes_it_as_a_batch_sampler() -> None:
    three = Three(lookahead=2)
    loaders = [
        DataLoader(TensorDataset(torch.arange(203)), batch_sampler=sampler)
        for sampler in three.samplers
    ]
    assert {len(loader) for loader in loaders} == {8}
    for loader in loaders:
        loader.batch_sampler.sampler.set_epoch(6)  # type: ignore[union-attr]  # as Lightning does
    assert three.samplers[0].stats().epoch == 6
    seen: list[int] = []
    for batches in zip(*loaders, strict=True):
        values = [batch[0].tolist() for batch in batches]
        three.train(values)
        seen += itertools.chain(*values)
    assert len(set(seen)) == len(seen) == 8 * 24
    assert not math.isnan(three.samplers[0].stats().batch_seconds or math.nan)

"""What a sampler asks of the model that trains on its batches: the steps that the ranks have made.

This is the whole of what ``BalancedSampler`` knows about a model. It says one number: ``allow``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class StepRecord(NamedTuple):
    """What the ranks have exchanged in one step: bit by bit the same object on all of them."""

    batches: int
    """Backward passes since the step before, each of a batch: those in ``no_sync()`` too, and those
    that ``zero_grad()`` has dropped. 1 or more, and the same number on all ranks."""
    samples: Sequence[float]
    """Of each rank, in those of these passes that were averaged. 0: it had nothing to train on."""
    last_seconds: Sequence[float]
    """Of each rank, its compute time in the step before this one, summed over that step's passes:
    from the begin of forward to the end of backward, and what lies between two passes, such as the
    optimizer and the loader, as the median of the last 5 steps; less the time in which it waited
    for other ranks. NaN if it does not know, as in its first step."""
    members: Sequence[int]
    """The ranks themselves, in the order of the lists here. A rank has the number that it had when
    the model was wrapped, also once others are gone; one that has joined has a new one."""
    largest: Sequence[int]
    """Of each rank, the largest share that its sampler allows; 0: any."""


class StepReader(Protocol):
    """A sampler: it reads the records of a log."""

    def read_steps(self) -> None:
        """Takes the records that there are."""

    def is_idle(self) -> bool:
        """Whether the next pass trains no batch of it. All ranks say the same."""

    def has_share(self) -> bool:
        """Whether this rank has a share of the batch that the next pass trains. One that has joined
        has none in its first passes, and the samples of these must not count."""

    def most_ranks(self) -> int:
        """How many ranks a batch has samples for: no more can join."""

    def state_for_others(self) -> dict[str, Any]:
        """What the samplers of processes that join begin with; between two steps. An error: they
        cannot join now."""

    def __hash__(self) -> int: ...


class StepLog(Protocol):
    """``model.step_log``: written by the wrapper, and but for ``allow`` only read by samplers.

    A step is on record once its backward pass has returned with averages, on the thread that called
    it; never earlier, and not if it raised, unless that was because no rank had samples. All
    methods are called between backward passes, from the thread that iterates over the loader, and
    none but ``gather`` blocks.
    """

    @property
    def rank(self) -> int:
        """This rank's number within the model's group, as in ``StepRecord.members``."""

    @property
    def steps(self) -> int:
        """Steps on record since the model was wrapped. Equal on ranks that are at the same step.

        Raises:
            UnsupportedError: The model's group now has other ranks, or the same in another order.
        """

    @property
    def pending_passes(self) -> int:
        """Backward passes since the last step on record, which wait for ``accumulate`` or were in
        ``no_sync()``, dropped or not."""

    def records(self, since: int) -> Sequence[StepRecord]:
        """The records of the steps number ``since``, ``since + 1`` … ``steps - 1``, in this order.

        Raises:
            LookupError: The first of them is no longer kept. At least 4,096 are, and all that those
                who ``follow`` have not read.
            RuntimeError: The ranks have used up different numbers of batches.
        """

    def follow(self, reader: StepReader) -> None:
        """Calls ``reader.read_steps()`` before records are dropped that it has not seen, and after
        a step for which the ranks have used up different numbers of batches; between backward
        passes, on the thread that trains. Keeps no reference to it that counts.

        Raises:
            UnsupportedError: Processes may join, and another reader follows already.
        """

    def allow(self, largest: int) -> None:
        """Says the largest share that this rank allows, to all in each further step. 0: any."""

    def received(self) -> Mapping[str, Any] | None:
        """What ``StepReader.state_for_others`` returned on a member, if this process has joined and
        none follows yet. None: it has not, or one has followed.

        Raises:
            UnsupportedError: It has joined members that have no reader.
        """

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Each rank's numbers, from -2**63 to 2**63 - 1, as many on all. Collective; blocks.

        Raises:
            UnsupportedError: Ranks are gone or have joined.
        """


def step_log_of(model: Any) -> StepLog:
    """The model's log.

    Raises:
        TypeError: It keeps none.
    """
    log: StepLog | None = getattr(model, "step_log", None)
    if log is None:
        raise TypeError(
            f"model is of type {type(model).__name__}, which keeps no record of its steps. Try: "
            'the wrapped model, pycomm.DistributedDataParallel(net, weight="samples")'
        )
    return log

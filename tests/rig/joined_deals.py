"""A constant global batch among ranks that die and join: no index is lost, and none counts twice.

``BalancedSampler`` deals by speed, ahead of training. This has equal shares, and needs only what a
program sees: the members before a step, and which indices its averages hold.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch


@dataclasses.dataclass
class Dealt:
    """The batch of a step."""

    step: int
    members: list[int]
    shares: list[list[int]]

    def share_of(self, member: int) -> list[int]:
        """Empty for a process that has joined since the batch was dealt."""
        return self.shares[self.members.index(member)] if member in self.members else []


class Deal:
    """Part of ``state=``: the position in the data, the same on all members between two steps.

    An index is dealt again, before all others, until a step has counted it. So an epoch ends when
    each of its indices has been in exactly one average.
    """

    def __init__(self, length: int, global_batch: int, seed: int) -> None:
        self._length, self._global_batch, self._seed = length, global_batch, seed
        self.epoch = -1
        self._rest: list[int] = []
        self._dealt: Dealt | None = None

    def deal(self, step: int, members: Sequence[int]) -> Dealt:
        """The batch of this step; for a process that has joined in it, as the others dealt it."""
        if self._dealt is not None and self._dealt.step == step:
            return self._dealt
        if not self._rest:
            self.epoch += 1
            generator = torch.Generator().manual_seed(1000 * self._seed + self.epoch)
            self._rest = torch.randperm(self._length, generator=generator).tolist()
        batch = self._rest[: self._global_batch]
        self._rest = self._rest[self._global_batch :]
        size = len(members)
        # The first ones of a batch that cannot be divided have one more.
        cuts = [(len(batch) * rank + size - 1) // size for rank in range(size + 1)]
        shares = [batch[a:b] for a, b in itertools.pairwise(cuts)]
        self._dealt = Dealt(step, list(members), shares)
        return self._dealt

    def settle(self, counted: Collection[int]) -> None:
        """The step is over, and its averages hold these indices."""
        assert self._dealt is not None
        self._rest[:0] = [
            each for share in self._dealt.shares for each in share if each not in counted
        ]
        self._dealt = None

    def state_dict(self) -> dict[str, Any]:
        dealt = None if self._dealt is None else dataclasses.asdict(self._dealt)
        return {"epoch": self.epoch, "rest": list(self._rest), "dealt": dealt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self._rest = state["epoch"], list(state["rest"])
        self._dealt = None if state["dealt"] is None else Dealt(**state["dealt"])

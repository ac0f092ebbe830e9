"""Checks the notes of a training in which ranks die and join: steps, samples and bits.

Notes come in any order between ranks, and in order within one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_OFF = 1e-3
"""How far a sample may be from counting once: float32 sums are off by about 1e-6."""
_SHOWN = 5


@dataclasses.dataclass
class Step:
    """A step that was committed, as all ranks have noted it."""

    number: int
    members: tuple[int, ...]
    bits: str
    epoch: int
    counted: int
    """A bit for each sample in the average."""
    writers: set[int] = dataclasses.field(default_factory=set)
    shares: int = 0
    """Bits of the shares of the writers."""
    ended_s: float = 0.0
    """When the last of those ranks had ended it that nothing was done to."""
    loss_sum: float = 0.0
    loss_samples: int = 0

    @property
    def samples(self) -> int:
        return self.counted.bit_count()

    @property
    def loss(self) -> float:
        return self.loss_sum / max(1, self.loss_samples)


@dataclasses.dataclass
class Rank:
    """What one process has noted."""

    name: str
    path: Path
    member: int = -1
    """Its number among the members, once it is one."""
    asked_s: float = 0.0
    """When it had its model, and asked to become one."""
    began_s: float = 0.0
    last_step: int = -1
    steps: int = 0
    struck_s: float = float("inf")
    """When something was done to it: from then on it may be late, or without an end."""
    ended: str = ""
    text: str = ""
    accuracy: float | None = None
    looks: list[tuple[float, list[int]]] = dataclasses.field(default_factory=list)
    _read: int = 0
    _partial: bytes = b""

    def new_lines(self) -> list[dict[str, Any]]:
        """Those that it has noted since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                chunk = file.read()
        except FileNotFoundError:
            return []
        self._read += len(chunk)
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        return [json.loads(line) for line in lines]


class Accounts:
    """All ranks of a training."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.ranks: list[Rank] = []
        self.steps: dict[int, Step] = {}
        self.newest = -1
        self.doubled = 0
        self.faults: list[str] = []
        self._seen: dict[int, int] = {}

    def add(self, name: str, path: Path) -> Rank:
        rank = Rank(name, path)
        self.ranks.append(rank)
        return rank

    def read(self) -> None:
        """Takes in what ranks have noted since the last call."""
        for rank in self.ranks:
            for line in rank.new_lines():
                self.take(rank, line)

    def take(self, rank: Rank, line: dict[str, Any]) -> None:
        """One note."""
        kind = line["kind"]
        if kind == "step":
            self._take_step(rank, line)
        elif kind == "asks":
            rank.asked_s = line["at"]
        elif kind == "begin":
            rank.member, rank.began_s = line["member"], line["at"]
            rank.last_step = line["step"] - 1
        elif kind == "look":
            rank.looks.append((line["at"], line["kept"]))
        elif kind == "accuracy":
            rank.accuracy = line["value"]
        else:
            rank.ended, rank.text = line["how"], line["text"]

    def _take_step(self, rank: Rank, line: dict[str, Any]) -> None:
        number, counted, share = line["step"], int(line["counted"], 16), int(line["share"], 16)
        if number != rank.last_step + 1:
            self._fault(f"{rank.name}: step {number} follows step {rank.last_step}")
        rank.last_step, rank.steps = number, rank.steps + 1
        mine = (tuple(line["members"]), line["bits"], line["epoch"], counted)
        step = self.steps.get(number)
        if step is None:
            step = self.steps[number] = Step(number, *mine)
            self.newest = max(self.newest, number)
            self._take_samples(step)
        theirs = (step.members, step.bits, step.epoch, step.counted)
        for name, one, other in zip(
            ("members", "bits", "epoch", "samples"), mine, theirs, strict=True
        ):
            if one != other:
                self._fault(f"step {number}: {rank.name} has other {name}: {one} and {other}")
        if rank.member not in step.members:
            self._fault(f"step {number}: {rank.name} committed it, and is none of its members")
        if line["off"] > _OFF:
            self._fault(f"step {number}: samples count {line['off']:g} more or less than once")
        if share & ~counted:
            self._fault(f"step {number}: {rank.name} committed it without samples of its share")
        if share & step.shares:
            self._fault(f"step {number}: {rank.name} has samples of another rank's share")
        step.shares |= share
        step.writers.add(rank.member)
        samples = share.bit_count()
        step.loss_sum += line["loss"] * samples
        step.loss_samples += samples
        if line["at"] < rank.struck_s:
            step.ended_s = max(step.ended_s, line["at"])

    def _take_samples(self, step: Step) -> None:
        seen = self._seen.get(step.epoch, 0)
        twice = (seen & step.counted).bit_count()
        if twice:
            self.doubled += twice
            self._fault(f"step {step.number}: {twice} samples a second time in epoch {step.epoch}")
        self._seen[step.epoch] = seen | step.counted

    def _fault(self, text: str) -> None:
        self.faults.append(text)

    # --- at the end ------------------------------------------------------------------------------

    def lost_steps(self) -> int:
        """Steps that a member did not commit to which nothing was done, or that nobody did.

        Adds a line to ``faults`` for each of the first ones.
        """
        by_member = {rank.member: rank for rank in self.ranks}
        lost = []
        for number in range(self.newest + 1):
            step = self.steps.get(number)
            if step is None:
                lost.append(f"step {number}: nobody has noted it")
                continue
            for member in set(step.members) - step.writers:
                rank = by_member.get(member)
                if rank is None or rank.struck_s == float("inf"):
                    lost.append(f"step {number}: member {member} has not committed it")
            missing = (step.counted & ~step.shares).bit_count()
            if missing and not set(step.members) - step.writers:
                lost.append(f"step {number}: {missing} samples are of no member's share")
        self.faults += lost[:_SHOWN]
        return len(lost)

    def lost_samples(self) -> int:
        """Of all epochs but the last, which did not end."""
        if not self._seen:
            return 0
        lost = 0
        for epoch in range(max(self._seen)):
            missing = self._length - self._seen.get(epoch, 0).bit_count()
            if missing:
                lost += missing
                self._fault(f"epoch {epoch}: {missing} of {self._length} samples in no average")
        return lost

    def check_ends(self, expected: dict[str, Sequence[str]]) -> None:
        """How ranks ended: by name, of those to which something was done; the others at the end."""
        last = [rank for rank in self.ranks if rank.struck_s == float("inf")]
        for rank in self.ranks:
            ways = expected.get(rank.name, ["end"])
            if rank.ended not in ways:
                what = f"{rank.ended or 'without a note'}: {rank.text}".rstrip(": ")
                self._fault(f"{rank.name} (member {rank.member}) ended with {what}, not {ways}")
        if len({rank.last_step for rank in last}) > 1 or len({r.accuracy for r in last}) > 1:
            self._fault(
                "ranks ended at other steps: "
                + ", ".join(f"{each.name} {each.last_step} {each.accuracy}" for each in last)
            )

    def curve(self, samples: Sequence[int]) -> list[float]:
        """The mean loss of the steps up to each of these numbers of samples, since the one before.

        NaN if there is none.
        """
        means, counted, loss, number = [], 0, [0.0, 0.0], 0
        for most in samples:
            loss = [0.0, 0.0]
            while number <= self.newest and counted < most:
                if step := self.steps.get(number):
                    counted += step.samples
                    loss[0] += step.loss * step.samples
                    loss[1] += step.samples
                number += 1
            means.append(loss[0] / loss[1] if loss[1] else float("nan"))
        return means

    def samples_until(self) -> list[int]:
        """After each step."""
        numbers = range(self.newest + 1)
        each = (self.steps[n].samples if n in self.steps else 0 for n in numbers)
        return list(itertools.accumulate(each))

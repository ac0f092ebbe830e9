"""Does to the ranks of a training what faults are, one after the other, from a fixed seed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence

from death_costs import Fault
from death_trainings import Process, Training

HEARTBEAT_S = 3.0
STEPS_AFTER = 10
"""A fault is over so many steps after all places were taken again."""
SPARED_FROM = 0.4
"""From this part of the faults on two members are left alone, to see whether anything grows."""
KINDS = {
    "SIGKILL": 0.30,
    "SIGKILL, rank 0": 0.15,
    "SIGKILL, two": 0.10,
    "SIGTERM": 0.20,
    "SIGTERM, rank 0": 0.05,
    "SIGSTOP": 0.20,
}
"""How often each comes."""
CUT = "cut wire"
_CUTS = 0.15
_GO_ON_S = 30.0
_JOIN_S = 60.0


def planned(count: int, dice: random.Random, *, cuts: bool, only: str | None) -> list[str]:
    """Kinds of faults in their order: those of rank 0 come while no member is spared."""
    if only is not None:
        return [only] * count
    weights = dict(KINDS)
    if cuts:
        weights[CUT] = _CUTS
    total = sum(weights.values())
    kinds: list[str] = []
    for kind, weight in weights.items():
        kinds += [kind] * max(1, round(count * weight / total))
    kinds += ["SIGKILL"] * (count - len(kinds))
    dice.shuffle(kinds)
    del kinds[count:]
    early = [kind for kind in kinds if "rank 0" in kind]
    others = [kind for kind in kinds if "rank 0" not in kind]
    for kind in early:
        others.insert(dice.randrange(1 + int(SPARED_FROM * count) // 2), kind)
    return others


class Striker:
    """Does what faults are, one after the other, and waits until all places are taken again."""

    def __init__(
        self,
        training: Training,
        dice: random.Random,
        cut: Callable[[int, bool], None] | None = None,
        *,
        steps_after: int = STEPS_AFTER,
    ) -> None:
        self._steps_after = steps_after
        self.training, self._dice, self._cut = training, dice, cut
        self.faults: list[Fault] = []
        self.spared: tuple[int, ...] = ()

    def strike(self, kind: str, stretch: int) -> Fault:
        victims = self._victims(kind)
        what = kind.partition(",")[0]
        training = self.training
        fault = Fault(kind, stretch, time.monotonic(), [each.rank.member for each in victims])
        self.faults.append(fault)
        ends = {
            "SIGKILL": [""],
            "SIGTERM": ["left"],
            "SIGSTOP": ["LeftBehindError"],
            CUT: ["QuorumLostError", "LeftBehindError"],
        }[what]
        if what == CUT:
            assert self._cut is not None
            for each in victims:
                training.expect(each, ends)
            self._cut(victims[0].host, True)
        else:
            for each in victims:
                training.strike(each, getattr(signal, what), ends)
        self._wait_without(fault)
        if what in ("SIGSTOP", CUT):
            time.sleep(max(0.0, fault.at_s + HEARTBEAT_S + 1.0 - time.monotonic()))
            if what == CUT:
                assert self._cut is not None
                self._cut(victims[0].host, False)
            else:
                os.kill(victims[0].process.pid, signal.SIGCONT)
        for each in victims:
            training.wait_for_end(each)
        fault.come_s = time.monotonic()
        for each in victims:
            training.add(each.host)
        training.wait(
            lambda: len(training.members) == training.size, _JOIN_S, f"for {kind}'s newcomers"
        )
        fault.whole_step = training.step
        training.wait_for_steps(self._steps_after)
        fault.over_step = training.step
        return fault

    def _wait_without(self, fault: Fault) -> None:
        training = self.training

        def gone() -> bool:
            return not set(fault.victims) & set(training.members)

        training.wait(gone, _GO_ON_S, f"for a step without members {fault.victims} ({fault.kind})")
        fault.gone_step = training.step
        while fault.gone_step - 1 in training.accounts.steps and not set(fault.victims) & set(
            training.accounts.steps[fault.gone_step - 1].members
        ):
            fault.gone_step -= 1

    def _victims(self, kind: str) -> list[Process]:
        training = self.training
        if "rank 0" in kind:
            return [training.process_of(training.members[0])]
        if kind == CUT:
            by_host: dict[int, list[Process]] = {}
            for member in training.members:
                one = training.process_of(member)
                by_host.setdefault(one.host, []).append(one)
            spared = {training.process_of(member).host for member in self.spared}
            hosts = [host for host, ranks in by_host.items() if len(ranks) < training.size / 2]
            return by_host[self._dice.choice([each for each in hosts if each not in spared])]
        first = self._pick(self.spared)
        if "two" not in kind:
            return [first]
        return [first, self._pick((*self.spared, first.rank.member))]

    def _pick(self, spared: Sequence[int]) -> Process:
        members = [each for each in self.training.members if each not in spared]
        return self.training.process_of(self._dice.choice(members))

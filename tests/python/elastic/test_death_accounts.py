"""The checks of tests/soak/deaths.py notice what they are for; the deal loses no index."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from death_accounts import Accounts
from death_training import mask_of
from joined_deals import Deal

pytestmark = pytest.mark.ci

LENGTH = 48
STEPS = 14

Notes = dict[int, list[dict[str, Any]]]


def notes() -> Notes:
    """Three members; the last one dies in step 5, and member 3 joins in step 9."""
    deal, members = Deal(LENGTH, 12, 0), [0, 1, 2]
    lines: Notes = collections.defaultdict(list)
    for member in members:
        lines[member].append({"kind": "begin", "at": 0.0, "member": member, "step": 0})
    for step in range(STEPS):
        dealt = deal.deal(step, members)
        if step == 5:
            members = [0, 1]
        if step == 9:
            members = [0, 1, 3]
            lines[3].append({"kind": "begin", "at": 9.0, "member": 3, "step": 9})
        counted = [each for member in members for each in dealt.share_of(member)]
        for member in members:
            lines[member].append(
                {
                    "kind": "step",
                    "step": step,
                    "at": step + 0.5,
                    "members": members,
                    "bits": f"bits {step}",
                    "epoch": deal.epoch,
                    "counted": f"{mask_of(counted):x}",
                    "share": f"{mask_of(dealt.share_of(member)):x}",
                    "off": 1e-6,
                    "loss": 1.0,
                }
            )
        deal.settle(set(counted))
    for member in members:
        lines[member] += [
            {"kind": "accuracy", "value": 0.5, "step": STEPS},
            {"kind": "end", "at": 20.0, "how": "end", "text": ""},
        ]
    return lines


def complaints(lines: Notes) -> list[str]:
    accounts = Accounts(LENGTH)
    for member, mine in lines.items():
        rank = accounts.add(f"rank-{member}", Path("/nowhere"))
        if member == 2:
            rank.struck_s = 5.1
        for line in mine:
            accounts.take(rank, line)
    counts = accounts.lost_steps(), accounts.lost_samples(), accounts.doubled
    accounts.check_ends({"rank-2": [""]})
    assert any(counts) <= bool(accounts.faults)
    return accounts.faults


def test_a_good_training_has_none() -> None:
    assert complaints(notes()) == []


def change(field: str, value: Callable[[Any], Any]) -> Callable[[Notes], None]:
    def planted(lines: Notes) -> None:
        lines[1][4][field] = value(lines[1][4][field])

    return planted


def everywhere(step: int, field: str, value: Callable[[Any], Any]) -> Callable[[Notes], None]:
    def planted(lines: Notes) -> None:
        for mine in lines.values():
            for line in mine:
                if line["kind"] == "step" and line["step"] == step:
                    line[field] = value(line[field])

    return planted


def without_samples(text: str) -> str:
    mask = int(text, 16)
    return f"{mask & (mask - 1):x}"


PLANTED: dict[str, tuple[Callable[[Notes], None], str]] = {
    "bits": (change("bits", lambda _: "others"), "has other bits"),
    "members": (change("members", lambda _: [0, 1]), "has other members"),
    "samples": (change("counted", lambda _: "0"), "has other samples"),
    "weights": (change("off", lambda _: 0.5), "more or less than once"),
    "gap": (lambda lines: lines[1].pop(4), "follows step"),
    "share": (everywhere(1, "counted", without_samples), "without samples of its share"),
    "lost": (everywhere(1, "counted", without_samples), "in no average"),
    "doubled": (everywhere(6, "epoch", lambda epoch: epoch - 1), "a second time"),
    "not a member": (everywhere(2, "members", lambda _: [0, 2]), "none of its members"),
    "early end": (lambda lines: lines[0].__delitem__(slice(-4, -2)), "has not committed it"),
    "error": (lambda lines: lines[3][-1].update(how="ValueError"), "ended with ValueError"),
    "accuracy": (lambda lines: lines[3][-2].update(value=0.4), "at other steps"),
    "hole": (
        lambda lines: [mine.__delitem__(slice(2, 3)) for mine in lines.values()][:0],
        "nobody has noted it",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_wrong_is_noticed(name: str) -> None:
    plant, text = PLANTED[name]
    lines = copy.deepcopy(notes())
    plant(lines)
    assert any(text in each for each in complaints(lines)), complaints(lines)


@pytest.mark.parametrize("seed", range(20))
def test_each_index_counts_once_per_epoch(seed: int) -> None:
    """Random deaths, before a step counts and in it, and processes that join in the middle."""
    dice = random.Random(seed)
    members, deals = [0], {0: Deal(LENGTH, 10, seed)}
    counts: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for step in range(200):
        dealt = {each: deals[each].deal(step, members) for each in members}
        first = dealt[members[0]]
        assert all(each == first for each in dealt.values())
        if len(members) < 5 and dice.random() < 0.2:
            joined = max(deals) + 1
            deals[joined] = Deal(LENGTH, 10, seed)
            deals[joined].load_state_dict(copy.deepcopy(deals[members[0]].state_dict()))
            assert deals[joined].deal(step, members).share_of(joined) == []
            members = [*members, joined]
        if len(members) > 1 and dice.random() < 0.2:
            members = [each for each in members if each != dice.choice(members)] or members[:1]
        counted = {each for member in members for each in first.share_of(member)}
        epoch = deals[members[0]].epoch
        counts[epoch].update(counted)
        for member in members:
            deals[member].settle(counted)
    assert max(counts) > 10
    for epoch in range(max(counts)):
        assert counts[epoch] == dict.fromkeys(range(LENGTH), 1)

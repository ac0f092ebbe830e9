"""What the doctor reads from a ruleset of nftables."""

from __future__ import annotations

import json

import pytest

from pycomm.doctor import rules


def ruleset(*entries: dict[str, object]) -> str:
    return json.dumps({"nftables": [{"metainfo": {"version": "1.0.6"}}, *entries]})


def chain(name: str, family: str = "inet", **more: object) -> dict[str, object]:
    return {"chain": {"family": family, "table": "fw", "name": name, "type": "filter", **more}}


def rule(where: str, *expression: object, family: str = "inet") -> dict[str, object]:
    return {"rule": {"family": family, "table": "fw", "chain": where, "expr": [*expression]}}


def test_the_chains_that_need_a_rule_are_those_that_can_drop_incoming_packets() -> None:
    """To accept a packet ends one base chain, and the next still sees it."""
    chains = [
        chain("helpers"),
        chain("out", hook="output", prio=-9, policy="drop"),
        chain("late", hook="input", prio=10, policy="accept"),
        chain("early", hook="input", prio=0, policy="accept"),
        chain("nat", hook="input", prio=-5, type="nat", policy="accept"),
        chain("bridge", "bridge", hook="input", prio=-5, policy="drop"),
    ]
    assert rules.input_chains(ruleset(*chains, rule("late", {"drop": None}))) == ("inet fw late",)
    to_helpers = rule("early", {"jump": {"target": "helpers"}})
    verdicts = {"vmap": {"key": 1, "data": {"set": [[1, {"goto": {"target": "helpers"}}]]}}}
    for jump in (to_helpers, rule("early", verdicts)):
        found = rules.input_chains(ruleset(*chains, jump, rule("helpers", {"reject": None})))
        assert found == ("inet fw early",)
    strict = chain("strict", "ip", hook="input", prio=5, policy="drop")
    both = rules.input_chains(ruleset(*chains, strict, rule("late", {"drop": None})))
    assert both == ("ip fw strict", "inet fw late")


def test_where_no_chain_drops_all_are_named() -> None:
    late, early = chain("late", hook="input", prio=10), chain("early", hook="input", prio=0)
    assert rules.input_chains(ruleset(late, early)) == ("inet fw early", "inet fw late")
    assert rules.input_chains(ruleset()) == ()
    assert rules.input_chains("Operation not permitted (you must be root)") == ()


def met(left: dict[str, object], right: object, op: str = "==") -> dict[str, object]:
    return {"match": {"op": op, "left": left, "right": right}}


NOT_LO = met({"meta": {"key": "iif"}}, "lo", "!=")
OTHERS = met({"payload": {"protocol": "ip", "field": "saddr"}}, {"set": ["10.0.0.2"]}, "!=")
ONE = met({"payload": {"protocol": "ip", "field": "saddr"}}, "10.0.0.9")
SIX = met({"meta": {"key": "nfproto"}}, "ipv6")
DROP: dict[str, object] = {"drop": None}


def to(port: object) -> dict[str, object]:
    return met({"payload": {"protocol": "tcp", "field": "dport"}}, port)


@pytest.mark.parametrize(
    ("parts", "closed"),
    [
        ([NOT_LO, OTHERS, to(29500), DROP], ("ipv4",)),
        ([NOT_LO, SIX, to(29500), DROP], ("ipv6",)),
        ([NOT_LO, to({"set": [80, {"range": [29000, 29999]}]}), DROP], ("ipv4", "ipv6")),
        ([to(29500), {"counter": {"packets": 0}}, {"reject": None}], ("ipv4", "ipv6")),
        ([to(29501), DROP], ()),
        ([to(29500), {"accept": None}], ()),
        ([to(29500), {"counter": {"packets": 0}}], ()),
        ([ONE, to(29500), DROP], ()),  # only one host is kept out
        ([OTHERS, DROP], ()),  # not for this port alone: what is accepted before is not known
    ],
)
def test_the_rules_that_close_a_port_are_found(
    parts: list[dict[str, object]], closed: tuple[str, ...]
) -> None:
    into = chain("in", hook="input", prio=0)
    assert rules.closed_families(ruleset(into, rule("in", *parts)), 29500) == closed
    unused = chain("in")  # no packet comes there
    assert rules.closed_families(ruleset(unused, rule("in", *parts)), 29500) == ()


def test_rules_that_cannot_be_read_are_not_known() -> None:
    assert rules.closed_families("Operation not permitted (you must be root)", 29500) is None

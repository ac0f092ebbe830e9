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


def to(port: object, op: str = "==", protocol: str = "tcp") -> dict[str, object]:
    return met({"payload": {"protocol": protocol, "field": "dport"}}, port, op)


def state(value: object, op: str = "in") -> dict[str, object]:
    return met({"ct": {"key": "state"}}, value, op)


LO = met({"meta": {"key": "iifname"}}, "lo")
ACCEPT: dict[str, object] = {"accept": None}


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
        ([to(29400, "<"), DROP], ()),
        ([to(29500, "<"), DROP], ()),
        ([to(29500, ">"), DROP], ()),
        ([to(29500, "<="), DROP], ()),
        ([to(29500, "in"), DROP], ("ipv4", "ipv6")),
        ([to(29500), to(29501), DROP], ()),
        ([to(29500, protocol="udp"), DROP], ()),
        ([met({"meta": {"key": "nfproto"}}, "ipv6", ">"), to(29500), DROP], ()),
        ([met({"meta": {"key": "nfproto"}}, {"set": ["ipv6"]}), to(29500), DROP], ("ipv6",)),
        ([met({"&": [{"meta": {"key": "mark"}}, 1]}, 1), to(29500), DROP], ()),
    ],
)
def test_the_rules_that_close_a_port_are_found(
    parts: list[dict[str, object]], closed: tuple[str, ...]
) -> None:
    into = chain("in", hook="input", prio=0)
    assert rules.closed_families(ruleset(into, rule("in", *parts)), 29500) == closed
    unused = chain("in")  # no packet comes there
    assert rules.closed_families(ruleset(unused, rule("in", *parts)), 29500) == ()


BOTH = ("ipv4", "ipv6")


@pytest.mark.parametrize(
    ("before", "closed"),
    [
        ([to(29500), ACCEPT], ()),
        ([to({"range": [1024, 65535]}), ACCEPT], ()),
        ([to("@open"), ACCEPT], ()),
        ([to(80, "!="), ACCEPT], ()),
        ([ACCEPT], ()),
        ([{"return": None}], ()),
        ([{"jump": {"target": "more"}}], ()),
        ([to(29500), {"goto": {"target": "more"}}], ()),
        ([{"vmap": {"key": 1, "data": {"set": [[1, ACCEPT]]}}}], ()),
        ([{"queue": {"num": 1}}], ()),
        ([state(["established", "new"]), ACCEPT], ()),
        ([state("established", "!="), ACCEPT], ()),
        ([met({"meta": {"key": "iifname"}}, "eth0"), ACCEPT], ()),
        ([NOT_LO, ACCEPT], ()),
        ([LO, ACCEPT], BOTH),
        ([LO, {"jump": {"target": "more"}}], BOTH),
        ([state(["established", "related"]), {"counter": None}, ACCEPT], BOTH),
        ([state({"set": ["established", "related"]}, "=="), ACCEPT], BOTH),
        ([state("established"), ACCEPT], BOTH),
        ([state("invalid"), DROP], BOTH),
        ([to(22), ACCEPT], BOTH),
        ([to({"set": [80, {"range": [8000, 8080]}]}), ACCEPT], BOTH),
        ([to(29500, protocol="udp"), ACCEPT], BOTH),
        ([{"limit": {"rate": 1, "per": "second"}}, {"log": None}], BOTH),
    ],
)
def test_a_port_that_an_earlier_rule_may_open_is_not_closed(
    before: list[dict[str, object]], closed: tuple[str, ...]
) -> None:
    into = chain("in", hook="input", prio=0)
    drop = rule("in", NOT_LO, to(29500), DROP)
    listing = ruleset(into, chain("more"), rule("in", *before), drop)
    assert rules.closed_families(listing, 29500) == closed
    late = ruleset(into, drop, rule("in", *before))
    assert rules.closed_families(late, 29500) == BOTH
    elsewhere = chain("first", hook="input", prio=-1)  # to accept ends only that chain
    listing = ruleset(into, elsewhere, rule("first", *before), drop)
    assert rules.closed_families(listing, 29500) == BOTH


def test_rules_of_iptables_that_are_not_shown_are_not_known() -> None:
    hidden = rule("INPUT", {"xt": {"type": "match", "name": "tcp"}}, DROP, family="ip")
    into = chain("INPUT", "ip", hook="input", prio=0)
    assert rules.closed_families(ruleset(into, hidden), 29500) is None
    older = rule("INPUT", {"xt": None}, family="ip")
    assert rules.closed_families(ruleset(into, older), 29500) is None
    assert rules.closed_families(ruleset(chain("INPUT", "ip"), hidden), 29500) == ()
    jump = rule("IN", {"jump": {"target": "INPUT"}}, family="ip")
    back = rule("INPUT", {"jump": {"target": "INPUT"}}, family="ip")
    base = chain("IN", "ip", hook="input", prio=0)
    led = ruleset(base, chain("INPUT", "ip"), jump, back, hidden)
    assert rules.closed_families(led, 29500) is None
    # What another chain drops stays dropped; ipv6 no such rule can open or close.
    shown = [chain("in", hook="input", prio=0), rule("in", to(29500), DROP)]
    assert rules.closed_families(ruleset(into, hidden, *shown), 29500) == BOTH


def test_rules_that_cannot_be_read_are_not_known() -> None:
    assert rules.closed_families("Operation not permitted (you must be root)", 29500) is None

"""Reads nftables: which chains of a host can drop an incoming packet, and if a port is closed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_DROPS = ("drop", "reject", "queue")
_JUMPS = ("jump", "goto")

FAMILIES = ("ipv4", "ipv6")
_OF_TABLES = {"ip": ("ipv4",), "ip6": ("ipv6",), "inet": FAMILIES}

Name = tuple[str, str, str]
"""Family, table and chain."""


def input_chains(listing: str) -> tuple[str, ...]:
    """The base chains that can drop an incoming packet, in the order in which they see it.

    A packet passes only if every base chain accepts it: to accept it in one ends that chain, and
    not the others. So a chain that can drop nothing needs no rule.

    Args:
        listing: The output of ``nft -j list ruleset``; not JSON unless root runs it.

    Returns:
        "inet filter input" of each chain whose policy is drop, or that has, or jumps to, a rule
        that drops or rejects. If there is none, all base chains for incoming packets.
    """
    entries = _entries(listing)
    if entries is None:
        return ()
    incoming = _incoming(entries)
    dropping = _dropping([one["rule"] for one in entries if "rule" in one])
    able = [one for one in incoming if one.get("policy") == "drop" or _name(one) in dropping]
    return tuple(" ".join(_name(one)) for one in able or incoming)


def closed_families(listing: str, port: int) -> tuple[str, ...] | None:
    """For which of "ipv4" and "ipv6" a rule drops what other hosts send to this TCP port.

    It may except some hosts, as the rules of ``firewall.lines_to_close`` do. A rule that has any
    other condition does not count, nor does a chain whose policy is drop: it may admit anybody.

    Returns:
        None if the listing cannot be read, as by a user who is not root.
    """
    entries = _entries(listing)
    if entries is None:
        return None
    chains = {_name(one) for one in _incoming(entries)}
    closed = {
        family
        for rule in (one["rule"] for one in entries if "rule" in one)
        if (rule["family"], rule["table"], rule["chain"]) in chains
        for family in _closes(rule, port)
    }
    return tuple(family for family in FAMILIES if family in closed)


def _closes(rule: Mapping[str, Any], port: int) -> tuple[str, ...]:
    """The families that this rule closes the port for."""
    families, of_port, drops = _OF_TABLES[rule["family"]], False, False
    for part in rule.get("expr", ()):
        match = part.get("match")
        if match is None:
            drops |= bool({"drop", "reject"} & set(part))
            if not {"drop", "reject", "counter", "log"} & set(part):
                return ()
            continue
        left, right, unlike = match["left"], match["right"], match["op"] == "!="
        payload, meta = left.get("payload", {}), left.get("meta", {})
        if (payload.get("protocol"), payload.get("field")) == ("tcp", "dport") and not unlike:
            of_port = _includes(right, port)
        elif payload.get("field") == "saddr" and unlike:
            families = tuple(set(families) & set(_OF_TABLES.get(payload["protocol"], ())))
        elif meta.get("key") == "nfproto" and not unlike:
            families = tuple({right} & set(families))
        elif not (meta.get("key") in ("iif", "iifname") and unlike and right == "lo"):
            return ()
    return families if of_port and drops else ()


def _includes(ports: Any, port: int) -> bool:
    """Whether it is one of them: a number, a range, or a set of these."""
    if isinstance(ports, dict):
        first, last = ports.get("range", (0, 0))
        return first <= port <= last or any(_includes(one, port) for one in ports.get("set", ()))
    return bool(ports == port)


def _entries(listing: str) -> list[dict[str, Any]] | None:
    try:
        return list(json.loads(listing)["nftables"])
    except (ValueError, KeyError):
        return None


def _incoming(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The base chains for incoming packets, in the order in which these see them."""
    chains = [one["chain"] for one in entries if "chain" in one]
    incoming = [
        one
        for one in chains
        if one.get("hook") == "input"
        and one.get("type", "filter") == "filter"
        and one["family"] in ("inet", "ip", "ip6")
    ]
    incoming.sort(key=lambda one: one["prio"] if isinstance(one.get("prio"), int) else 0)
    return incoming


def _name(chain: Mapping[str, Any]) -> Name:
    return chain["family"], chain["table"], chain["name"]


def _dropping(rules: Sequence[Mapping[str, Any]]) -> set[Name]:
    """The chains that have a rule which drops, or that lead to such a chain."""
    found: set[Name] = set()
    leads: dict[Name, set[Name]] = {}
    for rule in rules:
        here = rule["family"], rule["table"], rule["chain"]
        for word, content in _words(rule.get("expr", ())):
            if word in _DROPS:
                found.add(here)
            elif word in _JUMPS and isinstance(content, dict) and "target" in content:
                leads.setdefault(here, set()).add((here[0], here[1], content["target"]))
    while more := {chain for chain, ends in leads.items() if ends & found} - found:
        found |= more
    return found


def _words(expression: Any) -> list[tuple[str, Any]]:
    """All keys of a rule's expression with their values, of verdict maps, too."""
    if isinstance(expression, dict):
        below = [pair for value in expression.values() for pair in _words(value)]
        return [*expression.items(), *below]
    if isinstance(expression, list):
        return [pair for one in expression for pair in _words(one)]
    return []

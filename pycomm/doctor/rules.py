"""Reads nftables: which chains of a host can drop an incoming packet, and if a port is closed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_DROPS = ("drop", "reject", "queue")
_JUMPS = ("jump", "goto")
_LIKE = ("==", "in")
_INTERFACE = ("iif", "iifname")
_ADMITS_NOTHING = {"match", "limit", "counter", "log", "drop", "reject"}

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
    other condition does not count, nor one after a rule that may accept such a packet, nor a chain
    whose policy is drop: it may admit anybody.

    Returns:
        None if the listing cannot be read, as by a user who is not root, or if it does not show
        what a rule that iptables has written does ("xt").
    """
    entries = _entries(listing)
    if entries is None:
        return None
    rules: dict[Name, list[Mapping[str, Any]]] = {}
    for rule in (one["rule"] for one in entries if "rule" in one):
        rules.setdefault(_place(rule), []).append(rule)
    closed: set[str] = set()
    hidden: set[str] = set()
    for chain in map(_name, _incoming(entries)):
        for rule in rules.get(chain, ()):
            closed |= set(_closes(rule, port))
            if _may_admit(rule, port):
                break
        hidden |= _hidden(chain, rules)
    if hidden - closed:
        return None
    return tuple(family for family in FAMILIES if family in closed)


def _hidden(start: Name, rules: Mapping[Name, Sequence[Mapping[str, Any]]]) -> set[str]:
    """The families for which this chain, or one that it leads to, has a rule that is not shown."""
    chains, seen = [start], {start}
    while chains:
        chain = chains.pop()
        for rule in rules.get(chain, ()):
            if any(word == "xt" for word, _ in _words(rule.get("expr", ()))):
                return set(_OF_TABLES[chain[0]])
            further = _targets(rule) - seen
            chains += further
            seen |= further
    return set()


def _closes(rule: Mapping[str, Any], port: int) -> tuple[str, ...]:
    """The families that this rule closes the port for."""
    families, of_port, drops = set(_OF_TABLES[rule["family"]]), False, False
    for part in rule.get("expr", ()):
        match = part.get("match")
        if match is None:
            drops |= bool({"drop", "reject"} & set(part))
            if not {"drop", "reject", "counter", "log"} & set(part):
                return ()
            continue
        field, right, like = _field(match), match["right"], match["op"] in _LIKE
        if field == "tcp dport" and like and _includes(right, port):
            of_port = True
        elif field in ("ip saddr", "ip6 saddr") and match["op"] == "!=":
            families &= set(_OF_TABLES[field.split()[0]])
        elif field == "nfproto" and like:
            families &= _members(right)
        elif not (field in _INTERFACE and match["op"] == "!=" and right == "lo"):
            return ()
    return tuple(families) if of_port and drops else ()


def _may_admit(rule: Mapping[str, Any], port: int) -> bool:
    """Whether it may accept a first packet to the port from another host, or lead elsewhere."""
    parts = rule.get("expr", ())
    if all(set(part) <= _ADMITS_NOTHING for part in parts):
        return False
    return not any(_excludes(part["match"], port) for part in parts if "match" in part)


def _excludes(match: Mapping[str, Any], port: int) -> bool:
    """Whether no first packet to the port from another host meets this condition."""
    field, right = _field(match), match["right"]
    if field.startswith(("udp ", "icmp ", "icmpv6 ")):
        return True
    if match["op"] not in _LIKE:
        return False
    if field == "tcp dport":
        return not isinstance(right, str) and not _includes(right, port)  # "@name" is a set
    if field == "state":
        return bool(states := _members(right)) and states <= {"established", "related"}
    return field in _INTERFACE and right == "lo"


def _field(match: Mapping[str, Any]) -> str:
    """What a condition compares: "tcp dport", "iif", "nfproto", or "" for anything unusual."""
    left = match["left"] if isinstance(match["left"], dict) else {}
    if "payload" in left:
        return f"{left['payload'].get('protocol')} {left['payload'].get('field')}"
    return str((left.get("meta") or left.get("ct") or {}).get("key", ""))


def _members(right: Any) -> set[str]:
    """The words of one word, a list or a set; empty if there is anything else among them."""
    words = right.get("set") if isinstance(right, dict) else right
    words = words if isinstance(words, list) else [words]
    return set(words) if all(isinstance(one, str) for one in words) else set()


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


def _place(rule: Mapping[str, Any]) -> Name:
    """The chain that it is in."""
    return rule["family"], rule["table"], rule["chain"]


def _targets(rule: Mapping[str, Any]) -> set[Name]:
    """The chains that it may lead to."""
    family, table, _ = _place(rule)
    return {
        (family, table, content["target"])
        for word, content in _words(rule.get("expr", ()))
        if word in _JUMPS and isinstance(content, dict) and "target" in content
    }


def _dropping(rules: Sequence[Mapping[str, Any]]) -> set[Name]:
    """The chains that have a rule which drops, or that lead to such a chain."""
    found: set[Name] = set()
    leads: dict[Name, set[Name]] = {}
    for rule in rules:
        leads.setdefault(_place(rule), set()).update(_targets(rule))
        if any(word in _DROPS for word, _ in _words(rule.get("expr", ()))):
            found.add(_place(rule))
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

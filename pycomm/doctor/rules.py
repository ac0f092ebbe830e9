"""Reads nftables: which chains of a host can drop an incoming packet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_DROPS = ("drop", "reject", "queue")
_JUMPS = ("jump", "goto")

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
    try:
        entries = json.loads(listing)["nftables"]
    except (ValueError, KeyError):
        return ()
    chains = [one["chain"] for one in entries if "chain" in one]
    rules = [one["rule"] for one in entries if "rule" in one]
    incoming = [
        one
        for one in chains
        if one.get("hook") == "input"
        and one.get("type", "filter") == "filter"
        and one["family"] in ("inet", "ip", "ip6")
    ]
    incoming.sort(key=lambda one: one["prio"] if isinstance(one.get("prio"), int) else 0)
    dropping = _dropping(rules)
    able = [one for one in incoming if one.get("policy") == "drop" or _name(one) in dropping]
    return tuple(" ".join(_name(one)) for one in able or incoming)


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

"""The lines that open or close ports for some hosts, for the firewall that a host has."""

from __future__ import annotations

from collections.abc import Sequence

from pycomm.doctor.facts import Firewall

_MAX_LINES = 4
_UNSURE = "(the table and chain as your firewall has them: sudo nft list ruleset)"
_SEVERAL = "Each of these chains can drop a packet, so each needs the rule."
_NFPROTO = {"ip": "ipv4", "ip6": "ipv6"}


def lines_to_open(
    firewall: Firewall, sources: Sequence[str], ports: Sequence[tuple[int, int]]
) -> list[str]:
    """Commands for the host with this firewall: let these hosts connect to these ports.

    Args:
        firewall: What is in use there.
        sources: Addresses, all of one family.
        ports: First and last of each range.
    """
    if firewall.tool not in ("ufw", "firewalld", "iptables"):
        return _nft(firewall.chains, sources, ports)
    lines = [
        _line(firewall.tool, source, _span(first, last, "-"))
        for source in sources
        for first, last in ports
    ]
    left = len(lines) - _MAX_LINES
    lines = [*lines[:_MAX_LINES], "and the same for the other hosts"] if left > 0 else lines
    return [*lines, "$ sudo firewall-cmd --reload"] if firewall.tool == "firewalld" else lines


def lines_to_close(firewall: Firewall, sources: Sequence[str], port: int) -> list[str]:
    """Commands for the host with this firewall: only these hosts, and itself, reach this port.

    Args:
        firewall: What is in use there.
        sources: Addresses, all of one family. The other family is closed.
        port: One that listens for both families.
    """
    port_text = str(port)
    allowed = [_line(firewall.tool, source, port_text) for source in sources[:_MAX_LINES]]
    if len(sources) > _MAX_LINES:
        allowed.append("and the same for the other hosts")
    if firewall.tool == "ufw":
        # A rule that is prepended comes before the older ones: the last line is the first rule.
        closed = [f"$ sudo ufw prepend deny proto tcp to any port {port_text}"]
        return closed + [line.replace(" allow ", " prepend allow ", 1) for line in allowed]
    if firewall.tool == "firewalld":  # of equal priority, it would deny first
        rule = f"rule priority=-1 port port={port_text} protocol=tcp drop"
        closed = [f"$ sudo firewall-cmd --permanent --add-rich-rule='{rule}'"]
        closed += [line.replace("rule family", "rule priority=-2 family", 1) for line in allowed]
        return [*closed, "$ sudo firewall-cmd --reload"]
    if firewall.tool == "iptables":
        closed = [
            f"$ sudo {command} -I INPUT ! -i lo -p tcp --dport {port_text} -j DROP"
            for command in ("iptables", "ip6tables")
        ]
        return closed + allowed
    return _nft_close(firewall.chains, sources, port_text, firewall.closed or ())


def _line(tool: str, source: str, ports: str) -> str:
    six = ":" in source
    colon = ports.replace("-", ":")
    if tool == "ufw":
        return f"$ sudo ufw allow proto tcp from {source} to any port {colon}"
    if tool == "firewalld":
        rule = f"rule family=ipv{6 if six else 4} source address={source}"
        rule += f" port port={ports} protocol=tcp accept"
        return f"$ sudo firewall-cmd --permanent --add-rich-rule='{rule}'"
    command = "ip6tables" if six else "iptables"
    return f"$ sudo {command} -I INPUT -p tcp -s {source} --dport {colon} -j ACCEPT"


def _nft(
    chains: Sequence[str], sources: Sequence[str], ports: Sequence[tuple[int, int]]
) -> list[str]:
    family = "ip6" if ":" in sources[0] else "ip"
    where = one_or_set([_span(first, last, "-") for first, last in ports])
    rule = f"{family} saddr {one_or_set(sources)} tcp dport {where} accept"
    seen = [chain for chain in chains if chain.split()[0] in ("inet", family)]
    lines = [f"$ sudo nft insert rule {chain} {rule}" for chain in seen[:_MAX_LINES]]
    if not lines:
        return [f"$ sudo nft insert rule inet filter input {rule}", _UNSURE]
    return lines if len(lines) == 1 else [*lines, _SEVERAL]


def _nft_close(
    chains: Sequence[str], sources: Sequence[str], port: str, closed: Sequence[str]
) -> list[str]:
    """A drop in one chain is final, so one chain per family is enough, also a new one."""
    family, other = ("ip6", "ip") if ":" in sources[0] else ("ip", "ip6")
    own = next((one for one in chains if one.split()[0] in ("inet", family)), "")
    others = next((one for one in chains if one.split()[0] in ("inet", other)), "")
    lines = []
    if not own or not others:
        own = others = "inet pycomm input"
        lines.append("$ sudo nft add table inet pycomm")
        lines.append(f"$ sudo nft add chain {own} '{{ type filter hook input priority 0; }}'")
    match = "" if others.startswith(f"{other} ") else f"meta nfproto {_NFPROTO[other]} "
    rules = {
        family: f"$ sudo nft insert rule {own} iif != lo "
        f"{family} saddr != {one_or_set(sources)} tcp dport {port} drop",
        other: f"$ sudo nft insert rule {others} iif != lo {match}tcp dport {port} drop",
    }
    return lines + [line for each, line in rules.items() if _NFPROTO[each] not in closed]


def one_or_set(values: Sequence[str]) -> str:
    """As nft writes one value or a set; quoted, since a shell may take braces for its own."""
    values = list(dict.fromkeys(values))
    return values[0] if len(values) == 1 else f"'{{ {', '.join(values)} }}'"


def _span(first: int, last: int, sign: str) -> str:
    return str(first) if first == last else f"{first}{sign}{last}"

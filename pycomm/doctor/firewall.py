"""The lines that let some hosts connect to some ports, for the firewall that a host has."""

from __future__ import annotations

from collections.abc import Sequence

from pycomm.doctor.facts import Firewall

_MAX_LINES = 4
_UNSURE = "(the table and chain as your firewall has them: sudo nft list ruleset)"


def lines_to_open(
    firewall: Firewall, sources: Sequence[str], ports: Sequence[tuple[int, int]]
) -> list[str]:
    """Commands for the host with this firewall.

    Args:
        firewall: What is in use there.
        sources: Addresses, all of one family.
        ports: First and last of each range.
    """
    if firewall.tool not in ("ufw", "firewalld", "iptables"):
        return _nft(firewall.chain, sources, ports)
    lines = [
        _line(firewall.tool, source, _span(first, last, "-"))
        for source in sources
        for first, last in ports
    ]
    left = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], "and the same for the other hosts"] if left > 0 else lines


def _line(tool: str, source: str, ports: str) -> str:
    six = ":" in source
    colon = ports.replace("-", ":")
    if tool == "ufw":
        return f"$ sudo ufw allow proto tcp from {source} to any port {colon}"
    if tool == "firewalld":
        rule = f"rule family=ipv{6 if six else 4} source address={source}"
        rule += f" port port={ports} protocol=tcp accept"
        return f"$ sudo firewall-cmd --add-rich-rule='{rule}'"
    command = "ip6tables" if six else "iptables"
    return f"$ sudo {command} -I INPUT -p tcp -s {source} --dport {colon} -j ACCEPT"


def _nft(chain: str, sources: Sequence[str], ports: Sequence[tuple[int, int]]) -> list[str]:
    family = "ip6" if ":" in sources[0] else "ip"
    where = one_or_set([_span(first, last, "-") for first, last in ports])
    line = f"$ sudo nft insert rule {chain or 'inet filter input'} "
    line += f"{family} saddr {one_or_set(sources)} tcp dport {where} accept"
    return [line] if chain else [line, _UNSURE]


def one_or_set(values: Sequence[str]) -> str:
    """As nft writes one value or a set; quoted, since a shell may take braces for its own."""
    values = list(dict.fromkeys(values))
    return values[0] if len(values) == 1 else f"'{{ {', '.join(values)} }}'"


def _span(first: int, last: int, sign: str) -> str:
    return str(first) if first == last else f"{first}{sign}{last}"

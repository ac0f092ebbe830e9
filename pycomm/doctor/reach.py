"""Stage 1: who reaches whom, and what stands between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pycomm.doctor import local
from pycomm.doctor.facts import NOTE, STOP, Finding, HostFacts, listed
from pycomm.doctor.firewall import lines_to_open
from pycomm.doctor.probe import (
    ELSEWHERE,
    IN_RANGE,
    LINK,
    OK,
    OTHER,
    REFUSED,
    SILENT,
    STORE,
    STRANGER,
    UNREACHABLE,
    Probe,
)

MAX_ELSEWHERE = 4
"""Other addresses of a host that are asked, at most."""

_EXAMPLE_RANGE = (29600, 29699)

_CAUSES: Mapping[str, str] = {
    REFUSED: "refused by a firewall (the doctor is listening on that port)",
    SILENT: "no answer (dropped: a firewall, a security group, or no route)",
    UNREACHABLE: "unreachable (no route, or a firewall that rejects with ICMP)",
    STRANGER: "something else answered, or the connection was cut",
    OTHER: "another host answered",
}


def judge(hosts: Sequence[HostFacts], probes: Sequence[Probe]) -> list[Finding]:
    """All findings of stage 1. Leaves out what follows from an address that two hosts have."""
    twins = set(local.twins_chosen(hosts))
    links = [one for one in probes if one.purpose == LINK]
    bad = [one for one in links if not one.ok and not twins & {one.source, one.target}]
    elsewhere = [one for one in probes if one.purpose == ELSEWHERE and one.ok]
    closed = [one for one in probes if one.purpose == IN_RANGE and not one.ok]
    # Reached from another address than the one that the source's engine connects from.
    unbound = {
        (one.source, one.target): one
        for one in elsewhere
        if one.address == hosts[one.target].address
    }
    bad = [one for one in bad if (one.source, one.target) not in unbound]
    # By the same address after all: the first packets were lost.
    bound = [one for one in unbound.values() if one.seen != hosts[one.source].address]
    wrong = {
        one.target: one
        for one in elsewhere
        if one.address != hosts[one.target].address
        and one.target not in twins
        and not any(target == one.target for _, target in unbound)
        and _never_reached(one.target, links)
    }
    return [
        *_wrong_interfaces(hosts, wrong),
        *_wrong_sources(hosts, [one for one in bound if one.source not in wrong], twins),
        *_blocked(hosts, [one for one in bad if one.target not in wrong], links),
        *_range_closed(hosts, [one for one in closed if not twins & {one.source, one.target}]),
        *_store(hosts, _store_not_reached(probes)),
        *_seen(hosts, [one for one in links if one.ok and one.source not in twins]),
    ]


def next_questions(hosts: Sequence[HostFacts], answers: Iterable[Probe]) -> list[Probe]:
    """What a host asks after it has asked each other host once."""
    links = [one for one in answers if one.purpose == LINK]
    return [
        question
        for one in links
        for question in (_in_range(hosts, one) if one.ok else _elsewhere(hosts, one))
    ]


def _in_range(hosts: Sequence[HostFacts], reached: Probe) -> Iterator[Probe]:
    """The other ports at which the target listens."""
    for port in hosts[reached.target].further_ports:
        yield Probe(
            source=reached.source,
            target=reached.target,
            purpose=IN_RANGE,
            address=reached.address,
            port=port,
        )


def _elsewhere(hosts: Sequence[HostFacts], lost: Probe) -> Iterator[Probe]:
    """What shows whose address is wrong: the same from any address of this host, and the other
    addresses of a host that was not reached where the engine would listen."""
    host = hosts[lost.target]
    family = host.chosen.family if host.chosen else "ipv4"
    others = [
        one.address
        for one in host.interfaces
        if one.family == family and not one.loopback and one.address != host.address
    ]
    usable = [address for address in others if not address.startswith("fe80:")]
    for address in [host.address, *usable[:MAX_ELSEWHERE]]:
        yield dataclasses.replace(lost, purpose=ELSEWHERE, address=address, outcome=OK, detail="")


def with_strangers(hosts: Sequence[HostFacts], probes: Iterable[Probe]) -> list[Probe]:
    """Replies that came from another doctor than the one that was asked count as not reached."""
    checked = []
    for one in probes:
        if one.ok and one.answered_by != hosts[one.target].process:
            one = dataclasses.replace(one, outcome=OTHER)
        checked.append(one)
    return checked


def reachable(probes: Iterable[Probe]) -> set[tuple[int, int]]:
    """(source, target) of the links that answer."""
    return {(one.source, one.target) for one in probes if one.purpose == LINK and one.ok}


def rtt_ms(host: int, probes: Iterable[Probe]) -> float | None:
    """The shortest round trip to another host."""
    known = [
        p.rtt_ms for p in probes if p.purpose == LINK and p.ok and host in (p.source, p.target)
    ]
    return min(known, default=None)


def _never_reached(target: int, links: Iterable[Probe]) -> bool:
    return not any(one.ok for one in links if one.target == target)


def _wrong_interfaces(hosts: Sequence[HostFacts], wrong: Mapping[int, Probe]) -> Iterator[Finding]:
    set_by_user = [hosts[index].address for index in wrong if hosts[index].interface_setting]
    for index, answer in wrong.items():
        host = hosts[index]
        if not host.interface_setting and any(each in host.why for each in set_by_user):
            continue  # it followed the route to the address that another host chose wrongly
        better = next((one for one in host.interfaces if one.address == answer.address), None)
        name = better.name if better else answer.address
        text = (
            f"{host.name}: wrong interface: {host.interface} ({host.address}) is not reached, "
            f"{name} ({answer.address}) is"
        )
        why = host.why
        if host.interface_setting:
            why = f"{host.interface_origin}={host.interface_setting}"
        todo = [
            f"{host.interface} was taken because of: {why}.",
            f"On {host.name}:",
            f"$ export PYCOMM_SOCKET_IFNAME={name}",
        ]
        yield Finding(STOP, "WRONG_INTERFACE", host.name, text, todo)


def _wrong_sources(
    hosts: Sequence[HostFacts], found: Sequence[Probe], twins: set[int]
) -> Iterator[Finding]:
    """The engine connects from the address that it listens on. Answers to it do not come back."""
    for index in sorted({one.source for one in found} - twins):
        host = hosts[index]
        mine = [one for one in found if one.source == index]
        better = next((i for i in host.interfaces if i.address == mine[0].seen), None)
        name = better.name if better else "…"
        others = listed([hosts[one.target].name for one in mine], 4)
        text = (
            f"{host.name}: wrong interface: from {host.interface} ({host.address}) it does not "
            f"reach {others}, from {name} ({mine[0].seen}) it does"
        )
        todo = [f"On {host.name}:", f"$ export PYCOMM_SOCKET_IFNAME={name}"]
        yield Finding(STOP, "WRONG_INTERFACE", host.name, text, todo)


def _blocked(
    hosts: Sequence[HostFacts], bad: Sequence[Probe], links: Sequence[Probe]
) -> Iterator[Finding]:
    reached = reachable(links)
    groups: dict[tuple[int, str], list[Probe]] = {}
    for one in bad:
        groups.setdefault((one.target, one.outcome), []).append(one)
    for (index, outcome), some in groups.items():
        target = hosts[index]
        sources = [hosts[one.source] for one in some]
        text = f"{listed([s.name for s in sources], 4)} -> {target.name}: {_CAUSES[outcome]}"
        back = [hosts[one.source].name for one in some if (index, one.source) in reached]
        todo = [f"To {target.address}, TCP port {_ports_text(target, some[0])}."]
        if back:
            todo.append(f"Only this direction: {target.name} -> {listed(back, 4)} works.")
        if outcome == OTHER:
            todo.append("Two hosts have this address: python -m pycomm env lists interfaces.")
        elif outcome != STRANGER:
            todo += _opening(target, sources)
        yield Finding(STOP, CODES[outcome], target.name, text, todo)


def _range_closed(hosts: Sequence[HostFacts], bad: Sequence[Probe]) -> Iterator[Finding]:
    """The first port of the range answers, and others of it do not."""
    ports: dict[tuple[int, str, int], list[int]] = {}
    for one in bad:
        ports.setdefault((one.target, one.outcome, one.source), []).append(one.port)
    groups: dict[tuple[int, str, tuple[int, ...]], list[HostFacts]] = {}
    for (index, outcome, source), some in ports.items():
        groups.setdefault((index, outcome, tuple(sorted(some))), []).append(hosts[source])
    for (index, outcome, closed), sources in groups.items():
        target = hosts[index]
        first, last = target.port_range
        text = (
            f"{listed([s.name for s in sources], 4)} -> {target.name}: port {target.port} of "
            f"PYCOMM_PORT_RANGE answers, {listed([str(port) for port in closed], 4)} not: "
            f"{_CAUSES[outcome]}"
        )
        todo = [f"Each rank of a host takes a port of {first}-{last}, for each group another."]
        if outcome not in (OTHER, STRANGER):
            todo += _opening(target, sources)
        needed = target.further_ports[: target.ports_for_ranks]
        level = STOP if set(needed) & set(closed) else NOTE
        yield Finding(level, "RANGE_CLOSED", target.name, text, todo)


CODES: Mapping[str, str] = {
    REFUSED: "REFUSED",
    SILENT: "NO_ANSWER",
    UNREACHABLE: "UNREACHABLE",
    STRANGER: "STRANGER",
    OTHER: "ANOTHER_HOST",
}


def _opening(target: HostFacts, sources: Sequence[HostFacts]) -> list[str]:
    first, last = target.port_range
    lines = []
    if not first:
        first, last = _EXAMPLE_RANGE
        lines += [
            "PYCOMM_PORT_RANGE is not set in this shell: pycomm listens on any free port. Choose a "
            "range, in the shell that starts the job, on all hosts, and open it:",
            f"$ export PYCOMM_PORT_RANGE={first}-{last}",
        ]
    lines.append(f"On {target.name}:")
    lines += lines_to_open(target.firewall, [one.address for one in sources], [(first, last)])
    return [*lines, "In a cloud: the same rule in the security group."]


def _ports_text(target: HostFacts, one: Probe) -> str:
    first, last = target.port_range
    return f"{one.port} (of PYCOMM_PORT_RANGE {first}-{last})" if first else str(one.port)


def _store_not_reached(probes: Sequence[Probe]) -> list[Probe]:
    """One question per host that reached the store at none of its addresses."""
    asked = [one for one in probes if one.purpose == STORE]
    reached = {one.source for one in asked if one.ok}
    first: dict[int, Probe] = {}
    for one in asked:
        if one.source not in reached:
            first.setdefault(one.source, one)
    return list(first.values())


def _store(hosts: Sequence[HostFacts], bad: Sequence[Probe]) -> Iterator[Finding]:
    for outcome in dict.fromkeys(one.outcome for one in bad):
        some = [one for one in bad if one.outcome == outcome]
        target, port = hosts[some[0].target], some[0].port
        sources = [hosts[one.source] for one in some]
        text = (
            f"{listed([s.name for s in sources], 4)} -> {target.name} port {port} "
            f"(torch's store): {_CAUSES[outcome]}"
        )
        lines = []
        if outcome in (STRANGER, OTHER):
            lines.append(f"To {some[0].address}. Its own addresses, on {target.name}:")
            lines.append("$ python -m pycomm env")
        else:
            addresses = [one.address for one in sources]
            lines.append(f"On {target.name}:")
            lines += lines_to_open(target.firewall, addresses, [(port, port)])
        yield Finding(STOP, "STORE_" + CODES[outcome], target.name, text, lines)


def _seen(hosts: Sequence[HostFacts], good: Sequence[Probe]) -> Iterator[Finding]:
    """A source address that is not the advertised one: NAT, or another route back."""
    told: set[tuple[int, str]] = set()
    for one in good:
        source = hosts[one.source]
        if not one.seen or one.seen == source.address.partition("%")[0]:
            continue
        if (one.source, one.seen) in told:
            continue
        told.add((one.source, one.seen))
        own = next((each for each in source.interfaces if each.address == one.seen), None)
        seen = f"{hosts[one.target].name} sees it come from {one.seen}"
        if own is not None:
            text = f"{source.name} listens on {source.interface}, and {seen} ({own.name})"
            todo = ["Two networks: answers may take another way. Choose one on all hosts:"]
            todo.append(f"$ export PYCOMM_SOCKET_IFNAME={own.name}")
            yield Finding(NOTE, "ANOTHER_ROUTE", source.name, text, todo)
        else:
            text = f"{source.name} is {source.address}, and {seen}: address translation (NAT)"
            yield Finding(NOTE, "NAT", source.name, text)

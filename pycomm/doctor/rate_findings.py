"""Stage 2, findings: which host, path or direction is slow, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pycomm.doctor.facts import NOTE, SLOW, STOP, Finding, HostFacts, listed
from pycomm.doctor.flow import BOTH, OUT, Flow, stalled
from pycomm.doctor.rate import (
    MAX_REPEATS,
    SLOW_PART,
    Pair,
    Rate,
    bucket_of,
    common_host,
    link_name,
    megabytes,
    rate_of,
    reference,
    single_rates,
    slow_hosts,
    slow_pairs,
    suspected,
    table,
)

_HALF_DUPLEX = 0.7


def judge(hosts: Sequence[HostFacts], flows: Sequence[Flow]) -> list[Finding]:
    """All findings of stage 2."""
    single = single_rates(flows)
    bucket = bucket_of(len(hosts), single)
    known = set() if bucket is None else {bucket}
    slow = dict(slow_hosts(len(hosts), single))
    # Only so many are measured again alone. The others are not blamed one by one, and not at all
    # once a repeated pair was fast alone: then they may share its uplink.
    rest = set(suspected(len(hosts), [one for one in flows if not one.alone])[MAX_REPEATS:])
    rest_hosts = {host for host in slow if host not in known and _all_in(host, single, rest)}
    company = _company(hosts, flows, known)
    mine = {host: way for host, way in slow.items() if host not in known | rest_hosts}
    pairs = {
        pair: rate
        for pair, rate in slow_pairs(len(hosts), single, {*slow, *known})
        if not rate.bursts
    }
    return [
        *_stalls(hosts, flows),
        *_buckets(hosts, single, bucket),
        *_hosts(hosts, single, mine),
        *_pairs(hosts, single, {p: r for p, r in pairs.items() if _both_ways(p) not in rest}),
        *company,
        *_rest(
            hosts,
            rest_hosts,
            sorted({_both_ways(pair) for pair in pairs} & rest),
            blamed=not company,
        ),
        *_duplex(hosts, [one for one in flows if not one.alone], {*slow, *known}),
        *_by_cores(hosts, flows),
        *_errors(hosts, flows),
    ]


def _stalls(hosts: Sequence[HostFacts], flows: Iterable[Flow]) -> Iterator[Finding]:
    stuck = [one for one in flows if one.kind == OUT and not one.error and stalled(one.bins)]
    for moves in (True, False):
        paths = list(dict.fromkeys((f.source, f.target) for f in stuck if f.small_moves == moves))
        if not paths:
            continue
        culprit = common_host(paths)
        shown = listed([f"{hosts[a].name} -> {hosts[b].name}" for a, b in paths], 3)
        where = hosts[paths[0][0] if culprit is None else culprit]
        if culprit is not None:
            others = sorted({end for path in paths for end in path if end != culprit})
            shown = f"{where.name}, with {listed([hosts[end].name for end in others])}"
        if moves:
            text = f"{shown}: packets of full size vanish (MTU hole); packets of 1200 bytes arrive"
            todo = [*_mtus(hosts, paths), *_mtu_todo(hosts, paths[0])]
            yield Finding(STOP, "MTU_HOLE", where.name, text, todo)
        else:
            text = f"{shown}: connections open, and then no bytes arrive"
            todo = ["A firewall or a proxy between them inspects or drops long connections."]
            yield Finding(STOP, "STALL", where.name, text, todo)


def _mtus(hosts: Sequence[HostFacts], paths: Sequence[Pair]) -> list[str]:
    ends = sorted({host for path in paths for host in path})
    known = [(hosts[i], hosts[i].chosen) for i in ends]
    sizes = [f"{host.name} {one.name} {one.mtu}" for host, one in known if one is not None]
    return [f"MTU: {listed(sizes, 4)}. Something between them carries less."]


def _mtu_todo(hosts: Sequence[HostFacts], path: Pair) -> list[str]:
    source, target = hosts[path[0]], hosts[path[1]]
    mtu = source.chosen.mtu if source.chosen else 1500
    return [
        "Give the switch or tunnel the same MTU, or both hosts a smaller one:",
        f"$ sudo ip link set {source.interface or 'eth0'} mtu 1280",
        "To find the size that passes, try smaller ones:",
        f"$ ping -M do -s {mtu - 28} {target.address}",
    ]


def _buckets(
    hosts: Sequence[HostFacts], single: Mapping[Pair, Rate], bucket: int | None
) -> Iterator[Finding]:
    if bucket is None:
        return
    bursts = [rate for rate in single.values() if rate.bursts]
    first, steady = max(r.first for r in bursts), min(r.steady for r in bursts)
    name = hosts[bucket].name
    if len(hosts) == 2:
        name = f"{name} and {hosts[1 - bucket].name}"
    text = f"{name}: bursts to {megabytes(first)} MB/s, then {megabytes(steady)} MB/s"
    todo = [
        "A token bucket: a cloud's burst credits, or a traffic shaper (tc qdisc show).",
        f"Count on {megabytes(steady)} MB/s. Larger credits show with: doctor --seconds 60",
    ]
    yield Finding(SLOW, "TOKEN_BUCKET", hosts[bucket].name, text, todo)


def _hosts(
    hosts: Sequence[HostFacts], single: Mapping[Pair, Rate], slow: Mapping[int, str]
) -> Iterator[Finding]:
    usual = reference(len(hosts), single)
    for index, direction in slow.items():
        rates = [
            rate
            for (source, target), rate in single.items()
            if (source == index and direction != "in") or (target == index and direction != "out")
        ]
        best = max(rate.steady for rate in rates)
        host = hosts[index]
        does = {"out": "sends", "in": "receives", "": "sends and receives"}[direction]
        link = link_name(best)
        at = f" over {host.interface}" if host.interface else ""
        text = f"{host.name}: {does} at {megabytes(best)} MB/s{at}"
        text += f", the others reach {megabytes(usual)}"
        if link and direction == "":
            text = (
                f"{host.name}: the link runs at {link} ({host.interface}), {megabytes(best)} MB/s"
            )
            text += f"; the others reach {megabytes(usual)}" if usual > 1.5 * best else ""
        yield Finding(SLOW, "LINK_SLOW", host.name, text, _cable(host))


def _both_ways(pair: Pair) -> Pair:
    return min(pair), max(pair)


def _all_in(host: int, single: Mapping[Pair, Rate], rest: set[Pair]) -> bool:
    """Whether no pair of this slow host was measured alone: its fastest would have been."""
    mine = {pair: rate.steady for pair, rate in single.items() if host in pair}
    return _both_ways(max(mine, key=lambda pair: mine[pair])) in rest


def _rest(
    hosts: Sequence[HostFacts], slow: set[int], pairs: Sequence[Pair], *, blamed: bool
) -> Iterator[Finding]:
    """What looked slow and was not measured again alone, in one finding."""
    names = [hosts[index].name for index in sorted(slow)]
    names += [f"{hosts[a].name} <-> {hosts[b].name}" for a, b in pairs]
    if names:
        text = f"{listed(names, 4)}: slow, too, while other pairs sent; not measured alone"
        todo = ["Mend the others first. Then run the doctor again."]
        level = SLOW if blamed else NOTE
        yield Finding(level, "NOT_REPEATED", "", text, todo)


def _pairs(
    hosts: Sequence[HostFacts], single: Mapping[Pair, Rate], found: Mapping[Pair, Rate]
) -> Iterator[Finding]:
    done: set[Pair] = set()
    for (source, target), rate in found.items():
        if (source, target) in done:
            continue
        ways = "->"
        if (target, source) in found:
            done.add((target, source))
            ways = "<->"
        link = link_name(rate.steady)
        a, b = hosts[source], hosts[target]
        text = f"{a.name} {ways} {b.name}: {megabytes(rate.steady)} MB/s"
        text += f": some link on the way runs at {link}" if link else ""
        usual = reference(len(hosts), single)
        text += f"; others reach {megabytes(usual)}" if usual > 1.5 * rate.steady else ""
        todo = [*_cable(a), *(_cable(b)[:2] if len(hosts) == 2 else [])]
        yield Finding(SLOW, "PATH_SLOW", a.name, text, todo)


def _cable(host: HostFacts) -> list[str]:
    name = host.interface or "eth0"
    reported = host.chosen.speed_mbps if host.chosen else -1
    # Virtual interfaces report any large number.
    hint = f" Its driver reports {reported} Mbit/s." if 0 < reported <= 1000 else ""
    return [
        f"On {host.name}:{hint}",
        f"$ ethtool {name} | grep Speed",
        "Then cable, switch port, shaper (tc qdisc show), limit of the virtual machine.",
    ]


def _company(hosts: Sequence[HostFacts], flows: Sequence[Flow], known: set[int]) -> list[Finding]:
    """What was slow while others measured, and is not slow alone: they share an uplink."""
    before = single_rates(flow for flow in flows if not flow.alone)
    alone = single_rates(flow for flow in flows if flow.alone)
    found = [
        pair
        for pair, rate in alone.items()
        if pair in before
        and not known & set(pair)
        and before[pair].possible < SLOW_PART * rate.steady
        and not rate.by_cores
    ]
    findings = []
    for source, target in found[:MAX_REPEATS]:
        was, is_now = before[source, target].steady, alone[source, target].steady
        text = (
            f"{hosts[source].name} -> {hosts[target].name}: {megabytes(is_now)} MB/s alone, "
            f"{megabytes(was)} while other pairs send"
        )
        todo = ["They share an uplink or a switch that carries less than its ports together."]
        findings.append(Finding(SLOW, "SHARED_UPLINK", hosts[source].name, text, todo))
    return findings


def _duplex(
    hosts: Sequence[HostFacts],
    flows: Sequence[Flow],
    known: set[int],
) -> Iterator[Finding]:
    single = single_rates(flows)
    both: dict[Pair, list[Rate]] = {}
    for flow in flows:
        if flow.kind == BOTH and not flow.error:
            pair = (min(flow.source, flow.target), max(flow.source, flow.target))
            both.setdefault(pair, []).append(rate_of(flow))
    for (a, b), rates in both.items():
        one = [single[path].steady for path in ((a, b), (b, a)) if path in single]
        total = sum(rate.steady for rate in rates)
        possible = sum(rate.possible for rate in rates)
        judged = (
            len(one) == 2 and not known & {a, b} and not any(r.by_cores or r.bursts for r in rates)
        )
        if judged and not single[a, b].bursts and possible < _HALF_DUPLEX * max(one):
            text = (
                f"{hosts[a].name} <-> {hosts[b].name}: {megabytes(max(one))} MB/s one way, "
                f"{megabytes(total)} both ways together"
            )
            todo = [
                f"Half duplex? $ ethtool {hosts[a].interface or 'eth0'} | grep Duplex (on both)"
            ]
            yield Finding(SLOW, "HALF_DUPLEX", hosts[a].name, text, todo)


def _by_cores(hosts: Sequence[HostFacts], flows: Sequence[Flow]) -> Iterator[Finding]:
    names = [
        host.name for host, row in zip(hosts, table(len(hosts), flows), strict=True) if row.by_cores
    ]
    if names:
        text = f"{listed(names)}: the cores were the limit, so the network is at least this fast"
        yield Finding(NOTE, "BY_CORES", names[0], text)


def _errors(hosts: Sequence[HostFacts], flows: Iterable[Flow]) -> Iterator[Finding]:
    for flow in flows:
        if flow.error:
            a, b = hosts[flow.source].name, hosts[flow.target].name
            text = f"{a} and {b}: the measurement failed: {flow.error}"
            yield Finding(SLOW, "NOT_MEASURED", a, text, ["Run the doctor again."])
            return

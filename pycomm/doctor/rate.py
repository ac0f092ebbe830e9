"""Stage 2, figures: which pairs measure when, what their bytes mean, and what is slow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from pycomm.doctor.flow import BIN_S, BOTH, OUT, Flow, stalled

_ALL_PAIRS = 8
"""Up to so many hosts, every pair measures."""
SLOW_PART = 0.5
"""Of what the other hosts reach."""
_BUSY = 0.5
"""A thread that waited for the network less than half of the time: the cores are the limit, and the
network was not measured."""
_BUCKET_BINS = 5
"""An empty token bucket shows as this many equal tenths of a second at least."""
_LEAST = 0.05
"""Of the time: a thread that had a core for less is not corrected further."""
_FAST_ETHERNET = 13e6
"""Bytes per second: nobody builds a cluster with 100 Mbit/s on purpose."""
_LINKS = ((10e6, "10 Mbit/s"), (100e6, "100 Mbit/s"), (1e9, "1 Gbit/s"), (2.5e9, "2.5 Gbit/s"))
MAX_REPEATS = 4

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """One direction between two hosts, in bytes per second."""

    steady: float = 0.0
    first: float = 0.0
    """Before it fell: a token bucket was full. Equal to ``steady`` if it did not fall."""
    by_cores: bool = False
    """The cores were the limit, so it is no measure of the network."""
    lost: float = 0.0
    possible: float = 0.0
    """What ``steady`` may have been at most if no thread had lacked a core. Only what is slow by
    this measure is called slow."""

    @property
    def bursts(self) -> bool:
        return self.first > self.steady


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRate:
    """A row of the table; None: not measured."""

    out: float | None = None
    into: float | None = None
    both: float | None = None
    lost: float | None = None
    slow: bool = False
    by_cores: bool = False


def rounds(hosts: int) -> list[list[Pair]]:
    """Pairs that measure at the same time, each host in at most one of a round.

    The circle method: host 0 stays, the others move one place per round. Of more than eight hosts
    each meets 2 log2 N others instead of all.
    """
    places: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    count = len(places)
    found = []
    for _ in range(count - 1):
        pairs = [(places[i], places[count - 1 - i]) for i in range(count // 2)]
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    if hosts <= _ALL_PAIRS:
        return found
    wanted = min(len(found), 2 * math.ceil(math.log2(hosts)))
    return [found[i * len(found) // wanted] for i in range(wanted)]


def rate_of(flow: Flow) -> Rate:
    """The steady rate: the median of the second half, after slow start and after a burst."""
    rates = [count / BIN_S for count in flow.bins]
    by_cores = flow.busy > _BUSY
    later = rates[2:] or rates
    if not later:
        return Rate(by_cores=by_cores, lost=flow.lost)
    had_core = max(1.0 - flow.waited, _LEAST)
    steady = median(later[len(later) // 2 :])
    first = steady
    if not by_cores:
        for split in range(2, len(later) - _BUCKET_BINS + 1):
            before, after = later[:split], later[split:]
            flat = max(after) < 2 * min(after)  # a hiccup is not
            mostly = sorted(before)[len(before) // 4]
            if flat and mostly > 1.5 * max(after) / had_core:
                first, steady = median(before), median(after)
    return Rate(
        steady=steady,
        first=first,
        by_cores=by_cores,
        lost=flow.lost,
        possible=steady / had_core,
    )


def table(hosts: int, flows: Sequence[Flow]) -> list[HostRate]:
    """Each host's best figures: one slow partner does not make a host slow."""
    single = single_rates(flows)
    slow = {host for host, _ in slow_hosts(hosts, single)} | {bucket_of(hosts, single)}
    rows = []
    for host in range(hosts):
        out = [rate for (source, _), rate in single.items() if source == host]
        into = [rate for (_, target), rate in single.items() if target == host]
        both = _both(flows, host)
        rows.append(
            HostRate(
                out=max((rate.steady for rate in out), default=None),
                into=max((rate.steady for rate in into), default=None),
                both=max(both, default=None),
                lost=max((rate.lost for rate in out), default=None),
                slow=host in slow,
                by_cores=bool(out) and all(rate.by_cores for rate in [*out, *into]),
            )
        )
    return rows


def suspects(hosts: int, flows: Sequence[Flow]) -> list[Pair]:
    """The pairs to measure again while no other pair does. The same on every host."""
    return suspected(hosts, flows)[:MAX_REPEATS]


def suspected(hosts: int, flows: Sequence[Flow]) -> list[Pair]:
    """All pairs that look slow, the first pair of each slow host before the others."""
    if hosts <= 2:
        return []
    single = single_rates(flows)
    slow = dict(slow_hosts(hosts, single))
    found: list[Pair] = []
    for host in slow:
        mine = {pair: rate.steady for pair, rate in single.items() if host in pair}
        found.append(max(mine, key=lambda pair: mine[pair]))
    found += [pair for pair, _ in slow_pairs(hosts, single, set(slow))]
    ordered = dict.fromkeys((min(pair), max(pair)) for pair in found)
    return list(ordered)


def slowest(rows: Sequence[HostRate]) -> float:
    """Bytes per second of the slowest host's slower direction; 0 if nothing was measured."""
    known = [min(row.out, row.into) for row in rows if row.out and row.into]
    return min(known, default=0.0)


def megabytes(rate: float) -> str:
    """ "117", "11.8": MB/s in three digits."""
    value = rate / 1e6
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def link_name(rate: float) -> str:
    """The kind of link that carries this much at most; "" if none fits closely."""
    for bits, name in _LINKS:
        if 0.80 * bits / 8 <= rate <= 1.05 * bits / 8:  # what a shaper lets through, and jitter
            return name
    return ""


def single_rates(flows: Iterable[Flow]) -> dict[Pair, Rate]:
    """One direction at a time. A repeated measurement replaces the first, unless that one emptied
    a token bucket: it is empty then."""
    found: dict[Pair, Rate] = {}
    for flow in flows:
        if flow.kind == OUT and not flow.error and not stalled(flow.bins):
            pair = (flow.source, flow.target)
            if pair not in found or not found[pair].bursts:
                found[pair] = rate_of(flow)
    return found


def _both(flows: Iterable[Flow], host: int) -> list[float]:
    """What a host sent and received together, per partner."""
    sums: dict[Pair, float] = {}
    for flow in flows:
        if flow.kind == BOTH and host in (flow.source, flow.target) and not flow.error:
            pair = (min(flow.source, flow.target), max(flow.source, flow.target))
            sums[pair] = sums.get(pair, 0.0) + rate_of(flow).steady
    return list(sums.values())


def reference(hosts: int, single: Mapping[Pair, Rate]) -> float:
    """What a host of this cluster reaches: the median of the hosts' best."""
    best = [
        max((rate.steady for pair, rate in single.items() if host in pair), default=0.0)
        for host in range(hosts)
    ]
    return median(best) if best else 0.0


def slow_hosts(hosts: int, single: Mapping[Pair, Rate]) -> Iterator[tuple[int, str]]:
    """Hosts whose best is slow, with the direction: "out", "in" or ""; none of two hosts."""
    usual = reference(hosts, single)
    for host in range(hosts) if hosts > 2 else ():
        out = [rate for (source, _), rate in single.items() if source == host]
        into = [rate for (_, target), rate in single.items() if target == host]
        low = [
            not all(rate.by_cores for rate in some)
            and max(rate.possible for rate in some) < max(SLOW_PART * usual, _FAST_ETHERNET)
            for some in (out, into)
        ]
        if any(low):
            yield host, "" if all(low) else ("out" if low[0] else "in")


def slow_pairs(
    hosts: int, single: Mapping[Pair, Rate], slow: set[int]
) -> Iterator[tuple[Pair, Rate]]:
    """Paths that are slow between hosts that are not."""
    limit = max(SLOW_PART * reference(hosts, single) if hosts > 2 else 0.0, _FAST_ETHERNET)
    for pair, rate in single.items():
        if rate.possible < limit and not rate.by_cores and not slow & set(pair):
            yield pair, rate


def bucket_of(hosts: int, single: Mapping[Pair, Rate]) -> int | None:
    """The host behind a token bucket: the one that all bursts and slow pairs have in common."""
    bursts = [pair for pair, rate in single.items() if rate.bursts]
    if not bursts:
        return None
    slow = [pair for pair, _ in slow_pairs(hosts, single, set())]
    common = common_host([*bursts, *slow])
    return bursts[0][0] if common is None else common


def common_host(paths: Sequence[Pair]) -> int | None:
    """The one host that is an end of all paths, if there are several paths."""
    shared = set(paths[0]).intersection(*paths[1:])
    return next(iter(shared)) if len(shared) == 1 else None

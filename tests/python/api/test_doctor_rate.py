"""Stage 2 of the doctor: rounds, figures, verdicts over made-up flows; real flows on loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from doctor_facts import cluster_of, healthy, interface, only
from time_bound import assert_within

from pycomm.doctor import flow, probe, rate
from pycomm.doctor.facts import NOTE, SLOW, STOP, Finding
from pycomm.doctor.flow import BOTH, IN, OUT, Flow
from pycomm.doctor.probe import Server
from pycomm.doctor.rate_findings import judge

GIGABIT = 117_500_000
HUNDRED = 11_750_000

# Rounds


@pytest.mark.parametrize("hosts", range(1, 9))
def test_up_to_eight_hosts_every_pair_meets_once(hosts: int) -> None:
    rounds = rate.rounds(hosts)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]
    assert_nobody_is_in_two_pairs(rounds)


@pytest.mark.parametrize("hosts", [9, 16, 33, 64])
def test_many_hosts_meet_a_few_others_each(hosts: int) -> None:
    rounds = rate.rounds(hosts)
    assert len(rounds) == 2 * math.ceil(math.log2(hosts))
    pairs = [pair for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs))
    assert {host for pair in pairs for host in pair} == set(range(hosts))
    assert_nobody_is_in_two_pairs(rounds)


def assert_nobody_is_in_two_pairs(rounds: list[list[rate.Pair]]) -> None:
    for pairs in rounds:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))


# Figures


def bins(*parts: tuple[float, float]) -> tuple[int, ...]:
    """(seconds, bytes per second) one after the other, in bins of 0.1 s."""
    return tuple(round(speed * 0.1) for seconds, speed in parts for _ in range(round(seconds * 10)))


def test_slow_start_does_not_count() -> None:
    grown = bins((0.1, 1e6), (0.1, 60e6), (1.3, GIGABIT))
    found = rate.rate_of(Flow(source=0, target=1, bins=grown))
    assert found.steady == GIGABIT and not found.bursts


def test_a_burst_that_ends_is_a_token_bucket() -> None:
    found = rate.rate_of(Flow(source=0, target=1, bins=bins((0.6, GIGABIT), (0.9, 25e6))))
    assert (found.first, found.steady) == (GIGABIT, 25e6)


def test_what_buffers_take_at_first_is_no_burst() -> None:
    filled = bins((0.2, 3 * GIGABIT), (1.3, GIGABIT))
    assert not rate.rate_of(Flow(source=0, target=1, bins=filled)).bursts


def test_a_rate_that_swings_is_none() -> None:
    swings = bins(*[(0.1, GIGABIT), (0.1, 60e6)] * 8)
    assert not rate.rate_of(Flow(source=0, target=1, bins=swings)).bursts


def test_a_hiccup_at_the_end_is_none() -> None:
    for end in ((0.3, 40e6), (0.1, 40e6), (0.1, 5e6)):
        hiccup = bins((0.2, 5e6), (0.5, GIGABIT), end)
        assert not rate.rate_of(Flow(source=0, target=1, bins=hiccup)).bursts
    uneven = bins((0.9, GIGABIT), *[(0.1, speed) for speed in (60e6, 20e6, 50e6, 10e6, 40e6, 30e6)])
    assert not rate.rate_of(Flow(source=0, target=1, bins=uneven)).bursts


def test_what_busy_cores_did_is_no_token_bucket() -> None:
    fell = Flow(source=0, target=1, bins=bins((0.6, 2e9), (0.9, 1e9)), busy=0.9)
    found = rate.rate_of(fell)
    assert found.by_cores and not found.bursts


@pytest.mark.parametrize(
    ("speed", "name"),
    [
        (11.8e6, "100 Mbit/s"),
        (13e6, "100 Mbit/s"),  # over a shaper that lets a burst through
        (117e6, "1 Gbit/s"),
        (290e6, "2.5 Gbit/s"),
        (60e6, ""),
        (4e9, ""),
    ],
)
def test_links_have_names(speed: float, name: str) -> None:
    assert rate.link_name(speed) == name


# Verdicts


def flows(count: int, speed: float = GIGABIT, **paths: float) -> list[Flow]:
    """All pairs of so many hosts at this speed, but a_b=... from host a to host b (from 0)."""
    made = []
    for a in range(count):
        for b in range(count):
            if a != b:
                own = paths.get(f"p{a}_{b}", speed)
                made.append(Flow(source=a, target=b, bins=bins((1.5, own))))
                made.append(Flow(source=a, target=b, kind=BOTH, bins=bins((1.5, own))))
    return made


def slow_host(count: int, host: int, speed: float) -> list[Flow]:
    paths = {}
    for other in range(count):
        paths |= {f"p{host}_{other}": speed, f"p{other}_{host}": speed}
    return flows(count, **paths)


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def test_a_healthy_cluster_has_no_findings() -> None:
    assert judge(cluster_of(4), flows(4)) == []
    assert judge(cluster_of(2), flows(2)) == []
    assert rate.suspects(4, flows(4)) == []
    (row, *_) = rate.table(4, flows(4))
    assert (row.out, row.into, row.both, row.slow) == (GIGABIT, GIGABIT, 2 * GIGABIT, False)


def test_the_host_at_100_megabits_is_named_and_nobody_else() -> None:
    measured = slow_host(4, 2, HUNDRED)
    (finding,) = judge(cluster_of(4), measured)
    assert (finding.code, finding.level, finding.host) == ("LINK_SLOW", SLOW, "node3")
    assert finding.text == (
        "node3: the link runs at 100 Mbit/s (eth0), 11.8 MB/s; the others reach 118"
    )
    assert finding.todo[1] == "$ ethtool eth0 | grep Speed"
    assert [row.slow for row in rate.table(4, measured)] == [False, False, True, False]
    assert rate.suspects(4, measured) == [(0, 2)]


def test_one_slow_direction_of_a_host() -> None:
    measured = flows(3, p2_0=30e6, p2_1=30e6)
    (finding,) = judge(cluster_of(3), measured)
    assert finding.text == "node3: sends at 30.0 MB/s over eth0, the others reach 118"


def test_one_slow_path_between_good_hosts() -> None:
    measured = flows(4, p1_3=30e6, p3_1=30e6)
    (finding,) = judge(cluster_of(4), measured)
    assert (finding.code, finding.level) == ("PATH_SLOW", SLOW)
    assert finding.text == "node2 <-> node4: 30.0 MB/s; others reach 118"
    assert rate.suspects(4, measured) == [(1, 3)]


def test_two_hosts_at_100_megabits() -> None:
    (finding,) = judge(cluster_of(2), flows(2, HUNDRED))
    assert finding.text.startswith("node1 <-> node2: 11.8 MB/s: some link on the way runs at 100")


def test_two_hosts_at_a_gigabit_have_nothing_to_compare_with() -> None:
    assert judge(cluster_of(2), flows(2, 60e6)) == []


def test_a_network_of_100_megabits_is_slow_even_if_all_are_alike() -> None:
    assert set(codes(judge(cluster_of(3), flows(3, HUNDRED)))) == {"LINK_SLOW"}


def test_busy_cores_are_not_blamed_on_the_network() -> None:
    measured = [
        dataclasses.replace(one, busy=0.9) if 2 in (one.source, one.target) else one
        for one in slow_host(3, 2, 30e6)
    ]
    (finding,) = judge(cluster_of(3), measured)
    assert (finding.code, finding.level, finding.host) == ("BY_CORES", NOTE, "node3")


def test_threads_that_lacked_a_core_are_not_blamed_on_the_network() -> None:
    """Half the rate, while a thread had no core for two thirds of the time."""
    starved = [dataclasses.replace(one, waited=0.66) for one in slow_host(3, 2, 45e6)]
    assert judge(cluster_of(3), starved) == []
    slow = [dataclasses.replace(one, waited=0.66) for one in slow_host(3, 2, HUNDRED)]
    assert codes(judge(cluster_of(3), slow)) == ["LINK_SLOW"]
    fell = bins((0.6, GIGABIT), (0.9, 60e6))
    assert not rate.rate_of(Flow(source=0, target=1, bins=fell, waited=0.66)).bursts
    assert rate.rate_of(Flow(source=0, target=1, bins=fell, waited=0.1)).bursts


def test_a_token_bucket_names_the_host_behind_it() -> None:
    """The bucket was full in the first measurement only; the later ones are merely slow."""
    measured = []
    for one in slow_host(4, 2, 25e6):
        if (one.source, one.target, one.kind) == (2, 0, OUT):
            one = dataclasses.replace(one, bins=bins((0.6, GIGABIT), (0.9, 25e6)))
        measured.append(one)
    # Repeated alone, when the bucket is empty.
    measured.append(Flow(source=2, target=0, bins=bins((0.7, 25e6)), alone=True))
    (finding,) = judge(cluster_of(4), measured)
    assert (finding.code, finding.level, finding.host) == ("TOKEN_BUCKET", SLOW, "node3")
    assert finding.text == "node3: bursts to 118 MB/s, then 25.0 MB/s"


def test_a_token_bucket_between_two_hosts_is_said_once() -> None:
    measured = [
        Flow(source=0, target=1, bins=bins((0.6, GIGABIT), (0.9, 10e6))),
        Flow(source=1, target=0, bins=bins((1.5, 10e6))),
    ]
    (finding,) = judge(cluster_of(2), measured)
    assert finding.text == "node1 and node2: bursts to 118 MB/s, then 10.0 MB/s"


def stuck(source: int, target: int, small_moves: bool) -> Flow:
    few = (20_000, *[0] * 14)
    return Flow(source=source, target=target, bins=few, small_moves=small_moves)


def test_an_mtu_hole_names_both_ends() -> None:
    jumbo = healthy(2, interfaces=(interface("eth0", "10.0.0.2", mtu=9000),))
    measured = [one for one in flows(3) if 1 not in (one.source, one.target)]
    measured += [stuck(1, 0, True), stuck(0, 1, True), stuck(1, 2, True), stuck(2, 1, True)]
    (finding,) = judge(cluster_of(3, node2=jumbo), measured)
    assert (finding.code, finding.level, finding.host) == ("MTU_HOLE", STOP, "node2")
    assert finding.text == (
        "node2, with node1 and node3: packets of full size vanish (MTU hole); "
        "packets of 1200 bytes arrive"
    )
    assert "node2 eth0 9000" in finding.todo[0] and "node1 eth0 1500" in finding.todo[0]
    assert "$ sudo ip link set eth0 mtu 1280" in finding.todo
    assert "$ ping -M do -s 8972 10.0.0.1" in finding.todo


def test_a_stall_that_small_packets_do_not_cure_is_no_mtu_hole() -> None:
    measured = [one for one in flows(2) if one.kind == BOTH] + [stuck(0, 1, False)]
    (finding,) = judge(cluster_of(2), measured)
    assert (finding.code, finding.level) == ("STALL", STOP)


def test_slow_only_in_company_is_the_uplink() -> None:
    alone = [
        Flow(source=a, target=b, bins=bins((1.5, GIGABIT)), alone=True) for a, b in ((1, 3), (3, 1))
    ]
    measured = flows(4, p1_3=30e6, p3_1=30e6) + alone
    findings = judge(cluster_of(4), measured)
    assert set(codes(findings)) == {"SHARED_UPLINK"}
    assert findings[0].text == "node2 -> node4: 118 MB/s alone, 30.0 while other pairs send"


def many_slow_paths(fast: int | None) -> list[Flow]:
    """Seven slow paths between 14 good hosts. Four are repeated, one of them fast alone."""
    slow = [(a, a + 1) for a in range(0, 14, 2)]
    paths = {f"p{a}_{b}": 30e6 for a, b in slow}
    measured = flows(14, **paths)
    for number, (a, b) in enumerate(rate.suspects(14, measured)):
        speed = GIGABIT if number == fast else 30e6
        measured.append(Flow(source=a, target=b, bins=bins((0.7, speed)), alone=True))
    return measured


def test_paths_that_were_not_measured_alone_are_one_finding() -> None:
    findings = judge(cluster_of(14), many_slow_paths(fast=None))
    assert codes(findings) == ["PATH_SLOW"] * rate.MAX_REPEATS + ["NOT_REPEATED"]
    assert findings[-1].level == SLOW
    assert findings[-1].text == (
        "node9 <-> node10, node11 <-> node12 and node13 <-> node14: slow, too, while other pairs "
        "sent; not measured alone"
    )


def test_no_path_is_blamed_unmeasured_once_another_was_fast_alone() -> None:
    findings = judge(cluster_of(14), many_slow_paths(fast=2))
    slow = [finding for finding in findings if finding.level == SLOW]
    assert sorted(codes(slow)) == ["PATH_SLOW"] * 3 + ["SHARED_UPLINK"]
    assert only(findings, "NOT_REPEATED").level == NOTE


def test_slow_hosts_that_were_not_measured_alone_are_one_finding() -> None:
    measured = flows(16, **{f"p{a}_{b}": 30e6 for a in range(7) for b in range(16)})
    findings = judge(cluster_of(16), measured)
    assert codes(findings) == ["LINK_SLOW"] * rate.MAX_REPEATS + ["NOT_REPEATED"]
    assert findings[-1].text.startswith("node5, node6 and node7: slow, too")


def test_half_duplex() -> None:
    measured = [
        dataclasses.replace(one, bins=bins((1.5, 0.3 * GIGABIT))) if one.kind == BOTH else one
        for one in flows(2)
    ]
    finding = only(judge(cluster_of(2), measured), "HALF_DUPLEX")
    assert finding.text == "node1 <-> node2: 118 MB/s one way, 70.5 both ways together"


def test_what_could_not_be_measured_is_a_finding() -> None:
    measured = [Flow(source=0, target=1, error="timed out")]
    finding = only(judge(cluster_of(2), measured), "NOT_MEASURED")
    assert "the measurement failed: timed out" in finding.text


# Real flows


@contextlib.contextmanager
def station() -> Iterator[flow.Peer]:
    server = Server("token", "me", [0], flow.Station().handlers())
    with contextlib.closing(server):
        yield flow.Peer(address="127.0.0.1", port=server.port, token="token")


@pytest.mark.time_bound
def test_bytes_on_loopback_are_counted_where_they_arrive() -> None:
    with station() as peer:
        begin = time.monotonic()
        measured = flow.flows_between(0, 1, peer, 0.5)
        took = time.monotonic() - begin
    kinds = [(one.source, one.target, one.kind) for one in measured]
    assert kinds == [(0, 1, OUT), (1, 0, OUT), (0, 1, BOTH), (1, 0, BOTH)]
    for one in measured:
        assert one.error == "" and len(one.bins) == 5 and not flow.stalled(one.bins)
        assert sum(one.bins) > 1_000_000 and one.busy > 0.0
    assert_within(took, 6.0)


def test_the_report_comes_in_packets_that_pass_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    segments: list[int] = []
    usual = probe.connect

    def connect(*where: Any, **more: Any) -> socket.socket:
        segments.append(where[3])
        return usual(*where, **more)

    monkeypatch.setattr(probe, "connect", connect)
    with station() as peer:
        flow.measure(peer, OUT, 0.5)
    assert segments == [0, 1200]


def test_the_report_of_a_long_measurement_is_read() -> None:
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(
            target=probe.write_line, args=(here, {"bins": [GIGABIT] * 36_000})
        )
        sender.start()
        assert len(probe.read_line(there)["bins"]) == 36_000
        sender.join(10.0)


def test_a_station_that_is_gone_is_an_error_in_the_flow() -> None:
    with station() as peer:
        pass
    (one, other) = flow.flows_between(0, 1, peer, 0.5, (OUT, IN))
    assert "refused" in one.error and "refused" in other.error

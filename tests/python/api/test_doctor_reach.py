"""Stage 1 of the doctor: the verdicts over made-up probes, and real probes on loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
from doctor_facts import cluster_of, healthy, interface, only
from processes import free_port_range
from time_bound import assert_within

from pycomm.doctor import flow, probe, reach
from pycomm.doctor.facts import NOTE, STOP, Firewall, HostFacts
from pycomm.doctor.firewall import lines_to_open
from pycomm.doctor.probe import Probe, Server, ask

LOOPBACK = "127.0.0.1"


def all_links(hosts: list[HostFacts]) -> list[Probe]:
    """Everybody reaches everybody."""
    return [
        Probe(
            source=a,
            target=b,
            address=hosts[b].address,
            port=hosts[b].port,
            seen=hosts[a].address,
            answered_by=hosts[b].process,
            rtt_ms=0.2,
        )
        for a in range(len(hosts))
        for b in range(len(hosts))
        if a != b
    ]


def broken(links: list[Probe], paths: set[tuple[int, int]], outcome: str) -> list[Probe]:
    return [
        dataclasses.replace(one, outcome=outcome, seen="", answered_by="")
        if (one.source, one.target) in paths
        else one
        for one in links
    ]


def test_a_healthy_cluster_has_no_findings() -> None:
    hosts = cluster_of(4)
    assert reach.judge(hosts, all_links(hosts)) == []
    assert reach.reachable(all_links(hosts)) == {
        (a, b) for a in range(4) for b in range(4) if a != b
    }


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (probe.REFUSED, "REFUSED", "refused by a firewall (the doctor is listening on that port)"),
        (probe.SILENT, "NO_ANSWER", "no answer (dropped: a firewall, a security group, or no"),
        (probe.UNREACHABLE, "UNREACHABLE", "unreachable (no route, or a firewall that rejects"),
    ],
)
def test_one_direction_is_blocked(outcome: str, code: str, said: str) -> None:
    in_range = healthy(1, port_range=(29600, 29699), port=29601)
    hosts = cluster_of(4, node1=in_range)
    finding = only(reach.judge(hosts, broken(all_links(hosts), {(3, 0)}, outcome)), code)
    assert (finding.level, finding.host) == (STOP, "node1")
    assert finding.text.startswith(f"node4 -> node1: {said}")
    assert "Only this direction: node1 -> node4 works." in finding.todo
    assert "On node1:" in finding.todo
    rule = "ip saddr 10.0.0.4 tcp dport 29600-29699 accept"
    assert f"$ sudo nft insert rule inet filter input {rule}" in finding.todo
    assert finding.todo[-1] == "In a cloud: the same rule in the security group."


def test_both_directions_blocked_is_not_called_one_direction() -> None:
    hosts = cluster_of(2)
    findings = reach.judge(hosts, broken(all_links(hosts), {(0, 1), (1, 0)}, probe.SILENT))
    assert [finding.host for finding in findings] == ["node2", "node1"]
    assert not any("Only this direction" in line for one in findings for line in one.todo)


IN_RANGE = healthy(
    1,
    port_range=(29600, 29699),
    port=29600,
    further_ports=(29601, 29602, 29699),
    ports_for_ranks=2,
    ranks=(0, 1, 2),
)


@pytest.mark.parametrize(
    ("closed", "level", "said"),
    [
        ((29601, 29602, 29699), STOP, "answers, 29601, 29602 and 29699 not: no answer (dropped"),
        ((29602,), STOP, "answers, 29602 not: no answer"),
        ((29699,), NOTE, "answers, 29699 not: no answer"),  # three ranks need three ports
        ((), None, ""),
    ],
)
def test_other_ports_of_the_range_are_closed(
    closed: tuple[int, ...], level: str | None, said: str
) -> None:
    hosts = cluster_of(3, node1=IN_RANGE)
    links = all_links(hosts)
    asked = reach.next_questions(hosts, links)
    assert [(one.source, one.target, one.address, one.port) for one in asked] == [
        (source, 0, "10.0.0.1", port) for source in (1, 2) for port in (29601, 29602, 29699)
    ]
    answers = [
        dataclasses.replace(one, outcome=probe.SILENT)
        if one.source == 2 and one.port in closed
        else one
        for one in asked
    ]
    findings = reach.judge(hosts, [*links, *answers])
    if level is None:
        assert findings == []
        return
    (finding,) = findings
    assert (finding.level, finding.code, finding.host) == (level, "RANGE_CLOSED", "node1")
    assert f"node3 -> node1: port 29600 of PYCOMM_PORT_RANGE {said}" in finding.text
    assert "dport 29600-29699 accept" in " ".join(finding.todo)


def test_hosts_that_miss_other_ports_are_findings_of_their_own() -> None:
    hosts = cluster_of(3, node1=IN_RANGE)
    missed = {(1, 29699), (2, 29601)}
    answers = [
        dataclasses.replace(one, outcome=probe.SILENT) if (one.source, one.port) in missed else one
        for one in reach.next_questions(hosts, all_links(hosts))
    ]
    levels = {
        found.text.partition(" -> ")[0]: found.level
        for found in reach.judge(hosts, [*all_links(hosts), *answers])
    }
    assert levels == {"node2": NOTE, "node3": STOP}


def test_a_host_that_is_not_reached_is_not_asked_for_its_other_ports() -> None:
    hosts = cluster_of(2, node1=IN_RANGE)
    lost = broken(all_links(hosts), {(1, 0)}, probe.SILENT)
    asked = reach.next_questions(hosts, lost)
    assert asked and {one.purpose for one in asked} == {probe.ELSEWHERE}


def test_without_a_port_range_one_is_to_be_chosen_first() -> None:
    hosts = cluster_of(2)
    finding = only(
        reach.judge(hosts, broken(all_links(hosts), {(0, 1)}, probe.SILENT)), "NO_ANSWER"
    )
    assert "$ export PYCOMM_PORT_RANGE=29600-29699" in finding.todo


def test_the_wrong_interface_is_the_one_with_a_setting() -> None:
    """node2 was set to eth1, and node1 followed its route there."""
    pair = (interface("eth0", "10.0.0.2"), interface("eth1", "10.9.0.2"))
    wrong = {"interface": "eth1", "address": "10.9.0.2"}
    by = {"interface_setting": "eth1", "interface_origin": "PYCOMM_SOCKET_IFNAME"}
    follower = healthy(
        1,
        interfaces=(interface("eth0", "10.0.0.1"), interface("eth1", "10.9.0.1")),
        interface="eth1",
        address="10.9.0.1",
        why="route to rank 1 at 10.9.0.2",
    )
    hosts = cluster_of(3, node1=follower, node2=healthy(2, interfaces=pair, **wrong, **by))
    links = broken(all_links(hosts), {(1, 0), (2, 0), (0, 1), (2, 1)}, probe.SILENT)
    answers = [
        Probe(source=2, target=target, purpose=probe.ELSEWHERE, address=f"10.0.0.{target + 1}")
        for target in (0, 1)
    ]
    (finding,) = reach.judge(hosts, [*links, *answers])
    assert (finding.code, finding.level, finding.host) == ("WRONG_INTERFACE", STOP, "node2")
    assert finding.text == (
        "node2: wrong interface: eth1 (10.9.0.2) is not reached, eth0 (10.0.0.2) is"
    )
    assert "$ export PYCOMM_SOCKET_IFNAME=eth0" in finding.todo


def test_a_reply_of_another_doctor_is_no_success() -> None:
    hosts = cluster_of(2)
    links = [dataclasses.replace(one, answered_by="process9") for one in all_links(hosts)]
    checked = reach.with_strangers(hosts, links)
    assert {one.outcome for one in checked} == {probe.OTHER}
    assert (
        "another host answered"
        in only([f for f in reach.judge(hosts, checked) if f.host == "node2"], "ANOTHER_HOST").text
    )
    assert reach.with_strangers(hosts, all_links(hosts)) == all_links(hosts)


def test_address_translation_and_another_route_are_noted() -> None:
    second = healthy(2, interfaces=(*healthy(2).interfaces, interface("eth1", "10.9.0.2")))
    hosts = cluster_of(3, node2=second)
    links = [
        dataclasses.replace(one, seen={0: "10.0.0.1", 1: "10.9.0.2", 2: "192.0.2.77"}[one.source])
        for one in all_links(hosts)
    ]
    findings = reach.judge(hosts, links)
    assert {finding.level for finding in findings} == {NOTE}
    assert only(findings, "NAT").text == (
        "node3 is 10.0.0.3, and node1 sees it come from 192.0.2.77: address translation (NAT)"
    )
    assert "node2 listens on eth0, and node1 sees" in only(findings, "ANOTHER_ROUTE").text


def test_the_stores_port_is_judged_by_itself() -> None:
    hosts = cluster_of(2)
    store = Probe(source=1, target=0, purpose=probe.STORE, port=29500, outcome=probe.SILENT)
    finding = only(reach.judge(hosts, [*all_links(hosts), store]), "STORE_NO_ANSWER")
    assert finding.text.startswith("node2 -> node1 port 29500 (torch's store): no answer")
    rule = "$ sudo nft insert rule inet filter input ip saddr 10.0.0.2 tcp dport 29500 accept"
    assert rule in finding.todo


def test_one_address_of_the_store_that_answers_is_enough() -> None:
    hosts = cluster_of(2)
    six = Probe(source=1, target=0, purpose=probe.STORE, address="fd77::1", outcome=probe.SILENT)
    four = dataclasses.replace(six, address="10.0.0.1", outcome=probe.OK)
    assert reach.judge(hosts, [*all_links(hosts), six, four]) == []
    neither = dataclasses.replace(four, outcome=probe.REFUSED)
    finding = only(reach.judge(hosts, [*all_links(hosts), six, neither]), "STORE_NO_ANSWER")
    assert finding.level == STOP


@pytest.mark.parametrize("outcome", [probe.STRANGER, probe.OTHER])
def test_no_firewall_line_opens_a_port_that_answers(outcome: str) -> None:
    hosts = cluster_of(2)
    store = Probe(source=1, target=0, purpose=probe.STORE, port=29500, outcome=outcome)
    (finding,) = reach.judge(hosts, [*all_links(hosts), store])
    assert not any("sudo" in line for line in finding.todo)


def test_a_host_that_connects_from_a_wrong_address_is_blamed_and_no_firewall() -> None:
    """The engine binds to the address that it chose. Nobody reaches node2 there, nor it others."""
    pair = (interface("eth0", "10.0.0.2"), interface("eth1", "10.9.0.2"))
    hosts = cluster_of(2, node2=healthy(2, interfaces=pair, interface="eth1", address="10.9.0.2"))
    links = broken(all_links(hosts), {(0, 1), (1, 0)}, probe.SILENT)
    elsewhere = Probe(source=0, target=1, purpose=probe.ELSEWHERE, address="10.0.0.2")
    unbound = Probe(source=1, target=0, purpose=probe.ELSEWHERE, address="10.0.0.1")
    unbound = dataclasses.replace(unbound, seen="10.0.0.2")
    (finding,) = reach.judge(hosts, [*links, elsewhere, unbound])
    assert (finding.code, finding.host) == ("WRONG_INTERFACE", "node2")
    assert "$ export PYCOMM_SOCKET_IFNAME=eth0" in finding.todo
    (finding,) = reach.judge(hosts, [*broken(all_links(hosts), {(1, 0)}, probe.SILENT), unbound])
    assert (finding.code, finding.host) == ("WRONG_INTERFACE", "node2")
    assert finding.text == (
        "node2: wrong interface: from eth1 (10.9.0.2) it does not reach node1, from eth0 "
        "(10.0.0.2) it does"
    )
    late = dataclasses.replace(unbound, seen="10.9.0.2")
    assert reach.judge(hosts, [*broken(all_links(hosts), {(1, 0)}, probe.SILENT), late]) == []


def test_every_kind_of_firewall_has_its_line() -> None:
    def lines(tool: str, *sources: str, chains: tuple[str, ...] = ()) -> list[str]:
        return lines_to_open(Firewall(tool=tool, chains=chains), sources, [(29600, 29699)])

    assert lines("ufw", "10.0.0.4") == [
        "$ sudo ufw allow proto tcp from 10.0.0.4 to any port 29600:29699"
    ]
    assert lines("firewalld", "10.0.0.4") == [
        "$ sudo firewall-cmd --permanent --add-rich-rule='rule family=ipv4 "
        "source address=10.0.0.4 port port=29600-29699 protocol=tcp accept'",
        "$ sudo firewall-cmd --reload",
    ]
    assert lines("iptables", "fd00::4") == [
        "$ sudo ip6tables -I INPUT -p tcp -s fd00::4 --dport 29600:29699 -j ACCEPT"
    ]
    assert lines("nft", "fd00::4", "fd00::5", chains=("inet fw in",)) == [
        "$ sudo nft insert rule inet fw in "
        "ip6 saddr '{ fd00::4, fd00::5 }' tcp dport 29600-29699 accept"
    ]
    two = ("ip filter INPUT", "ip6 filter INPUT", "inet fw in")
    first, second, said = lines("nft", "10.0.0.4", chains=two)
    assert first.startswith("$ sudo nft insert rule ip filter INPUT ip saddr 10.0.0.4 ")
    assert second.startswith("$ sudo nft insert rule inet fw in ip saddr 10.0.0.4 ")
    assert "each needs the rule" in said
    assert "as your firewall has them" in lines("nft", "10.0.0.4")[1]
    assert len(lines("ufw", *[f"10.0.0.{n}" for n in range(9)])) == 5


# Real probes


@contextlib.contextmanager
def server(ports: Sequence[int] = (0,)) -> Iterator[Server]:
    one = Server("token", "me", ports, {})
    with contextlib.closing(one):
        yield one


def question(port: int) -> Probe:
    return Probe(source=0, target=1, address=LOOPBACK, port=port)


@pytest.mark.time_bound
def test_a_doctor_answers_with_what_it_saw() -> None:
    with server() as one:
        begin = time.monotonic()
        answer = ask(question(one.port), "token", 5.0)
        took = time.monotonic() - begin
    assert (answer.outcome, answer.answered_by, answer.seen) == (probe.OK, "me", LOOPBACK)
    assert answer.rtt_ms > 0
    assert_within(answer.rtt_ms / 1000, 1.0)
    assert_within(took, 2.0)


def test_a_probe_leaves_from_the_address_that_the_engine_would_use() -> None:
    with server() as one:
        answer = ask(question(one.port), "token", 5.0, "127.0.0.7")
        assert (answer.outcome, answer.seen) == (probe.OK, "127.0.0.7")
        gone = ask(question(one.port), "token", 5.0, "192.0.2.1")
        assert (gone.outcome, gone.detail) == (probe.UNREACHABLE, "EADDRNOTAVAIL")
        assert flow_peer_of(one.port) == "127.0.0.7"
    assert probe.with_zone("fe80::2%eth7", "fe80::1%eth0") == "fe80::2%eth0"
    assert probe.with_zone("fd00::2", "fe80::1%eth0") == "fd00::2"


def flow_peer_of(port: int) -> str:
    peer = flow.Peer(address=LOOPBACK, port=port, token="token", local="127.0.0.7")
    with peer.connect() as connection:
        return str(connection.getsockname()[0])


def test_a_server_that_lacked_descriptors_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def pause(seconds: float) -> None:
        failed.set()
        time.sleep(seconds)

    monkeypatch.setattr(probe, "time", SimpleNamespace(sleep=pause, perf_counter=time.perf_counter))
    with server() as one, socket.socket() as waiting:
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, usual[1]))
        taken = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(waiting.fileno()))
            waiting.settimeout(5.0)
            waiting.connect((LOOPBACK, one.port))
            assert failed.wait(5.0), "accept() did not fail, or the server has ended"
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        assert ask(question(one.port), "token", 5.0).ok


def test_a_stranger_gets_no_answer() -> None:
    with server() as one:
        assert ask(question(one.port), "guess", 5.0).outcome == probe.STRANGER
        with socket.create_connection((LOOPBACK, one.port), 5.0) as garbage:
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
            garbage.settimeout(5.0)
            with contextlib.suppress(ConnectionResetError):
                assert garbage.recv(100) == b""
        assert ask(question(one.port), "token", 5.0).ok


def test_a_closed_port_is_refused() -> None:
    with socket.socket() as held:  # bound, so that nobody else listens there meanwhile
        held.bind((LOOPBACK, 0))
        answer = ask(question(held.getsockname()[1]), "token", 5.0)
    assert (answer.outcome, answer.detail) == (probe.REFUSED, "ECONNREFUSED")


@pytest.mark.time_bound
def test_a_port_that_never_accepts_is_silent_and_bounded() -> None:
    """A full queue of connections: the kernel drops what comes, as a firewall does."""
    with socket.socket() as full, contextlib.ExitStack() as filling:
        full.bind((LOOPBACK, 0))
        full.listen(0)
        for _ in range(2):
            one = filling.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        begin = time.monotonic()
        answer = ask(question(full.getsockname()[1]), "token", 0.5)
        took = time.monotonic() - begin
    assert (answer.outcome, answer.detail) == (probe.SILENT, "ETIMEDOUT")
    assert_within(took, 2.0)


def test_a_server_takes_the_first_free_port_of_the_range() -> None:
    first, last = free_port_range(3)
    ports = range(first, last + 1)
    with server(ports) as one, server(ports) as other:
        assert (one.port, other.port) == (first, first + 1)
        assert one.also_listen(other.port) == "Address already in use"
        assert one.also_listen(last) == ""
        assert ask(question(last), "token", 5.0).ok


def test_a_server_listens_as_the_other_ranks_would_and_at_the_last_port() -> None:
    first, last = free_port_range(6)
    ports = range(first, last + 1)
    with socket.create_server((LOOPBACK, first + 1)):
        with server(ports) as one:
            further = one.listen_in(ports, 2)
            assert further == [first + 2, first + 3, last]
            assert all(ask(question(port), "token", 5.0).ok for port in [first, *further])
        assert [ask(question(port), "token", 5.0).outcome for port in further] == ["refused"] * 3
        with server(ports) as one:
            assert one.listen_in(ports, 0) == [last]
            assert one.listen_in(ports, 9) == [first + 2, first + 3, first + 4]  # no other is free

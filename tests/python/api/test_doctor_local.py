"""Stage 0 of the doctor: parsers and checks over made-up hosts. No network."""

from __future__ import annotations

import dataclasses
import json

import pytest
from doctor_facts import cluster_of, healthy, interface, only

from pycomm import errors
from pycomm._native import loader
from pycomm.doctor import local, system
from pycomm.doctor.facts import (
    NOTE,
    STOP,
    Finding,
    Firewall,
    HostFacts,
    Interface,
    listed,
    unique_names,
)
from pycomm.doctor.firewall import lines_to_close

# Parsers


@pytest.mark.parametrize(
    ("cgroups", "files", "cores"),
    [
        ("0::/\n", {}, float("inf")),
        ("0::/\n", {"/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/pod/box\n", {"/sys/fs/cgroup/pod/box/cpu.max": "max 100000\n"}, float("inf")),
        (
            "0::/pod/box\n",
            {
                "/sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n",
                "/sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            "5:cpu,cpuacct:/docker/x\n0::/\n",
            {
                "/sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "300000\n",
                "/sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            "5:cpu,cpuacct:/docker/x\n",
            {
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            float("inf"),
        ),
    ],
)
def test_quotas_of_control_groups(cgroups: str, files: dict[str, str], cores: float) -> None:
    assert system.quota_cores(cgroups, lambda path: files.get(path, "")) == cores


TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 0B00000A:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1
   2: 0100007F:733C 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 3 1
   3: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4 1
"""
TCP6 = """\
  sl  local_address                         remote_address                        st
   0: 00000000000000000000000000000000:733C 00000000000000000000000000000000:0000 0A 0 0
   1: 000077FD000000000000000001000000:733C 00000000000000000000000000000000:0000 0A 0 0
"""


def test_listeners_are_those_of_the_port_that_listen() -> None:
    assert system.listeners(TCP, 29500) == ["0.0.0.0", "10.0.0.11"]
    assert system.listeners(TCP6, 29500) == ["::", "fd77::1"]
    assert system.listeners(TCP, 80) == []


def test_firewalld_is_found_by_systemd_where_it_writes_no_pid_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []

    def output(*command: str) -> str:
        asked.append(command)
        return "active\n"

    monkeypatch.setattr(system, "_output", output)
    monkeypatch.setattr(system, "_read", lambda _: "")
    assert system.find_firewall(29500).tool == "firewalld"
    assert asked == [("systemctl", "is-active", "firewalld")]


def test_the_lines_for_other_hosts_carry_the_settings_in_force() -> None:
    environ = {"PYCOMM_PORT_RANGE": "29600-29699", "NCCL_SOCKET_IFNAME": "^lo,x y", "HOME": "/root"}
    environ |= {"PYCOMM_ALGO": "", "PYCOMM_SECRET": "a", "PYCOMM_SECRET_FILE": "/run/a secret"}
    assert system.variables_in_force(environ) == [
        "NCCL_SOCKET_IFNAME='^lo,x y'",
        "PYCOMM_PORT_RANGE=29600-29699",
        "PYCOMM_SECRET_FILE='/run/a secret'",
    ]


# Facts


def test_facts_survive_the_way_to_another_version() -> None:
    facts = healthy(1)
    raw = json.loads(facts.to_json())
    again = HostFacts.from_json(json.dumps(raw))
    assert again.interfaces == facts.interfaces
    assert again.to_json() == facts.to_json()
    raw["invented"] = 1
    raw["interfaces"][0]["invented"] = 2
    del raw["cores_usable"]
    newer = HostFacts.from_json(json.dumps(raw))
    assert newer.name == "node1" and newer.cores_usable == 0.0


def test_names_of_cloned_hosts_get_their_addresses() -> None:
    assert unique_names(["a", "b"], ["1", "2"]) == ["a", "b"]
    assert unique_names(["a", "a", "b"], ["1", "2", "3"]) == ["a(1)", "a(2)", "b"]


def test_long_lists_end_with_how_many_more() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(["a", "b", "c", "d"], limit=3) == "a, b and 2 more"


# Checks


def test_healthy_hosts_have_no_findings() -> None:
    assert local.judge([healthy(1)]) == []
    assert local.judge(cluster_of(4)) == []


def test_another_version_is_named_with_its_host_and_interpreter() -> None:
    old = healthy(2, versions={**healthy(2).versions, "torch": "2.12.1"})
    finding = only(local.judge(cluster_of(3, node2=old)), "VERSION")
    assert (finding.level, finding.host) == (STOP, "node2")
    assert finding.text == "node2: torch 2.12.1, the others have 2.13.0"
    assert "$ /py -m pip list" in finding.todo


def test_another_build_of_the_same_minor_is_fine() -> None:
    patch = healthy(2, versions={**healthy(2).versions, "torch": "2.13.1+cu128"})
    assert local.judge(cluster_of(3, node2=patch)) == []


def test_another_python_starts_and_is_noted() -> None:
    other = healthy(2, versions={**healthy(2).versions, "python": "3.12.0"})
    assert only(local.judge(cluster_of(2, node2=other)), "VERSION").level == NOTE


def test_settings_that_differ() -> None:
    other = healthy(3, same_everywhere={"algorithm": "ring"})
    finding = only(local.judge(cluster_of(3, node3=other)), "SETTINGS_DIFFER")
    assert finding.text == "node3: algorithm is 'ring', elsewhere 'auto'"
    assert finding.level == STOP


def test_settings_that_are_not_allowed() -> None:
    bad = healthy(1, problems=["PYCOMM_ALGO='rnig' is not allowed: did you mean 'ring'?"])
    finding = only(local.judge([bad]), "SETTING")
    assert finding.level == STOP and "PYCOMM_ALGO='rnig'" in finding.text


def test_too_few_descriptors() -> None:
    low = healthy(2, files_limit=30)
    assert local.judge(cluster_of(3, node2=healthy(2, files_limit=28))) == []
    finding = only(local.judge(cluster_of(4, node2=low)), "DESCRIPTORS")
    assert (finding.level, finding.host) == (STOP, "node2")
    assert finding.text == "node2: at most 30 open files, a rank needs 31"  # 14 + 3 * 3 + 8
    assert "$ ulimit -n 65536" in finding.todo


def test_a_master_without_an_address() -> None:
    lost = healthy(2, master_addresses=())
    finding = only(local.judge(cluster_of(2, node2=lost)), "MASTER_UNKNOWN")
    assert finding.text == "node2: the name node1 has no address here"


def test_a_slow_resolver_is_noted() -> None:
    slow = healthy(2, slow_names=("node1",))
    finding = only(local.judge(cluster_of(2, node2=slow)), "SLOW_RESOLVER")
    assert (finding.level, finding.host) == (NOTE, "node2")
    assert "$ time getent hosts node1" in finding.todo


def test_an_extension_that_does_not_load_stops_the_job() -> None:
    other = healthy(2, extension="pycomm was built for torch 2.12")
    finding = only(local.judge(cluster_of(2, node2=other)), "EXTENSION")
    assert (finding.level, finding.text) == (STOP, "node2: pycomm was built for torch 2.12")


def test_a_master_that_is_loopback_elsewhere() -> None:
    cloned = healthy(2, master_addresses=("127.0.1.1",))
    finding = only(local.judge(cluster_of(2, node2=cloned)), "MASTER_IS_LOOPBACK")
    assert finding.level == STOP
    assert "which is node2 itself and not node1" in finding.text
    at_home = healthy(1, master_addresses=("127.0.1.1",))
    assert local.judge(cluster_of(2, node1=at_home)) == []


def test_the_own_name_on_127_0_1_1() -> None:
    debian = healthy(2, own_addresses=("127.0.1.1",))
    finding = only(local.judge(cluster_of(2, node2=debian)), "OWN_NAME_LOOPBACK")
    assert finding.level == NOTE
    assert finding.text.startswith("node2: own name is 127.0.1.1 in /etc/hosts")
    assert "$ 10.0.0.2 node2" in finding.todo
    assert local.judge([healthy(1, own_addresses=("127.0.1.1",))]) == []


def with_docker(number: int, **changes: object) -> HostFacts:
    docker = interface("docker0", "172.17.0.1")
    host = healthy(number)
    return dataclasses.replace(host, interfaces=(*host.interfaces, docker), **changes)


def test_twins_that_nobody_uses_are_noted() -> None:
    finding = only(local.judge([with_docker(1), with_docker(2), healthy(3)]), "TWIN")
    assert finding.level == NOTE
    assert finding.text == (
        "docker0 has 172.17.0.1 on node1 and node2: a local bridge that other hosts cannot reach; "
        "pycomm does not use it"
    )


def test_many_addresses_of_one_interface_are_one_note() -> None:
    services = [interface("kube-ipvs0", f"10.96.0.{n}") for n in range(1, 200)]
    hosts = [
        dataclasses.replace(one, interfaces=(*one.interfaces, *services)) for one in cluster_of(2)
    ]
    text = only(local.judge(hosts), "TWIN").text
    assert text.startswith("kube-ipvs0 has 10.96.0.1, 10.96.0.2 and 197 more on node1 and node2: ")


def test_an_address_that_two_hosts_have_by_mistake_is_called_duplicate() -> None:
    """node2 was cloned. It has a bridge, too, and a second interface that is cloned as well."""
    pair = [interface("eth0", "10.0.0.1"), interface("eth1", "10.9.0.1")]
    mine = [*pair, interface("docker0", "172.17.0.1"), interface("eth2", "10.8.0.2")]
    clone = healthy(2, address="10.0.0.1", interfaces=tuple(mine))
    first = healthy(1, interfaces=tuple(pair))
    by = {"interface_setting": "eth0", "interface_origin": "PYCOMM_SOCKET_IFNAME"}
    findings = local.judge([first, dataclasses.replace(clone, **by)])
    chosen = only(findings, "TWIN_CHOSEN")
    assert chosen.text == (
        "node2: duplicate address: eth0 was chosen by PYCOMM_SOCKET_IFNAME=eth0, and its address "
        "10.0.0.1 is the same on node1 and node2"
    )
    assert chosen.todo[1] == "$ export PYCOMM_SOCKET_IFNAME=eth2"
    assert (
        "eth1 has 10.9.0.1 on node1 and node2: a duplicate address" in only(findings, "TWIN").text
    )


def test_twins_that_were_chosen_stop_the_job_and_name_the_setting() -> None:
    chosen = {"address": "172.17.0.1", "interface": "docker0"}
    by = {"interface_setting": "docker", "interface_origin": "GLOO_SOCKET_IFNAME"}
    hosts = [with_docker(1, **chosen), with_docker(2, **chosen, **by), healthy(3)]
    finding = only(local.judge(hosts), "TWIN_CHOSEN")
    assert (finding.level, finding.host) == (STOP, "node2")
    assert "docker0 was chosen by GLOO_SOCKET_IFNAME=docker" in finding.text
    assert "$ export PYCOMM_SOCKET_IFNAME=eth0" in finding.todo
    assert local.twins_chosen(hosts) == [0, 1]


def test_a_port_range_that_is_full() -> None:
    full = healthy(2, port_range=(29600, 29601), ports_free=1, ranks=(1, 2))
    finding = only(local.judge(cluster_of(2, node2=full)), "PORTS")
    assert "1 of the ports 29600-29601 are free, 2 are needed" in finding.text


def test_a_store_on_all_interfaces() -> None:
    readable = Firewall("nft", ("inet filter input",), ())
    open_store = healthy(1, listeners=("::",), firewall=readable)
    finding = only(local.judge(cluster_of(3, node1=open_store)), "STORE_OPEN")
    assert finding.level == NOTE
    assert finding.text == "node1: torch's store listens on all interfaces (:: port 29500)"
    assert finding.todo[1] == (
        "$ sudo nft insert rule inet filter input iif != lo "
        "ip saddr != '{ 10.0.0.2, 10.0.0.3 }' tcp dport 29500 drop"
    )
    assert finding.todo[2:] == [
        "$ sudo nft insert rule inet filter input iif != lo meta nfproto ipv6 tcp dport 29500 drop"
    ]
    closed = healthy(1, listeners=("10.0.0.1",))
    assert local.judge(cluster_of(3, node1=closed)) == []


def test_a_store_that_rules_close_is_no_finding_and_else_it_says_what_is_open() -> None:
    def found(listener: str, *closed: str) -> list[Finding]:
        firewall = Firewall("nft", ("inet filter input",), closed)
        host = healthy(1, listeners=(listener,), firewall=firewall)
        return local.judge(cluster_of(2, node1=host))

    assert found("::", "ipv4", "ipv6") == found("0.0.0.0", "ipv4") == []
    half = only(found("::", "ipv4"), "STORE_OPEN")
    assert half.text.endswith(". A rule closes the port for ipv4, and none for ipv6")
    (line,) = [line for line in half.todo if line.startswith("$ ")]
    assert line.endswith("meta nfproto ipv6 tcp dport 29500 drop")


def test_where_rules_cannot_be_seen_the_store_says_how_to_confirm_them() -> None:
    unknown = healthy(1, listeners=("::",), firewall=Firewall("ufw"))
    finding = only(local.judge(cluster_of(2, node1=unknown)), "STORE_OPEN")
    assert finding.todo[-2:] == ["$ nc -z -v -w 3 10.0.0.1 29500", "It must time out."]


def test_the_store_is_closed_by_the_firewall_of_the_host_for_both_families() -> None:
    def lines(tool: str, *chains: str) -> list[str]:
        firewall = Firewall(tool=tool, chains=chains)
        return lines_to_close(firewall, ["10.0.0.2", "10.0.0.3"], 29500)

    assert lines("ufw") == [
        "$ sudo ufw prepend deny proto tcp to any port 29500",
        "$ sudo ufw prepend allow proto tcp from 10.0.0.2 to any port 29500",
        "$ sudo ufw prepend allow proto tcp from 10.0.0.3 to any port 29500",
    ]
    assert lines("iptables")[:3] == [
        "$ sudo iptables -I INPUT ! -i lo -p tcp --dport 29500 -j DROP",
        "$ sudo ip6tables -I INPUT ! -i lo -p tcp --dport 29500 -j DROP",
        "$ sudo iptables -I INPUT -p tcp -s 10.0.0.2 --dport 29500 -j ACCEPT",
    ]
    first, second, *_, last = lines("firewalld")
    assert "'rule priority=-1 port port=29500 protocol=tcp drop'" in first
    assert "'rule priority=-2 family=ipv4 source address=10.0.0.2 port" in second
    assert last == "$ sudo firewall-cmd --reload"
    four, six = lines("nft", "ip filter INPUT", "ip6 filter INPUT")
    assert four.startswith("$ sudo nft insert rule ip filter INPUT iif != lo ip saddr != ")
    assert six == "$ sudo nft insert rule ip6 filter INPUT iif != lo tcp dport 29500 drop"
    for chains in ((), ("ip filter INPUT",)):  # a drop is final in a table of its own, too
        table, new, four, six = lines("nft", *chains)
        assert table == "$ sudo nft add table inet pycomm"
        assert new.startswith("$ sudo nft add chain inet pycomm input '{ type filter hook input ")
        assert four.startswith("$ sudo nft insert rule inet pycomm input iif != lo ip saddr != ")
        assert six.startswith("$ sudo nft insert rule inet pycomm input iif != lo meta nfproto ")


def test_cores_of_a_container() -> None:
    small = healthy(1, cores_usable=1.5, ranks=(0, 1))
    findings = local.judge([small])
    assert only(findings, "CORES").text == "node1: this process may use 1.5 of 8 cores"
    assert only(findings, "FEW_CORES").text == "node1: 2 ranks share 1.5 cores"


def test_no_memfd_matters_to_several_ranks_only() -> None:
    assert local.judge([healthy(1, memfd="Function not implemented")]) == []
    finding = only(local.judge([healthy(1, memfd="refused", ranks=(0, 1))]), "MEMFD")
    assert finding.level == NOTE


# This very host


@pytest.mark.needs_native
def test_the_facts_of_this_host() -> None:
    facts = system.local_facts({"PYCOMM_ALGO": "rign"}, "localhost", 29500, 29500, "i", "p")
    assert facts.problems and "did you mean 'ring'?" in facts.problems[0]
    assert facts.same_everywhere["algorithm"] == "auto"
    assert any(one.loopback and one.mtu > 0 for one in facts.interfaces)
    assert 0 < facts.cores_usable <= facts.cores_online
    assert 0 < facts.files_open < facts.files_limit
    assert set(facts.master_addresses) <= {"127.0.0.1", "::1"} and facts.master_addresses
    assert isinstance(facts.interfaces[0], Interface)


@pytest.mark.needs_native
def test_the_engine_tells_which_address_it_would_choose() -> None:
    native = loader.load()
    chosen = native.choose_address("=lo", "ipv4", "", [], 0)
    assert (chosen["address"], chosen["interface"]) == ("127.0.0.1", "lo")
    assert chosen["why"] == 'chosen by "=lo"'
    here = native.host_identity()
    both = [(here, "127.0.0.1"), (here, "127.0.0.1")]
    assert native.choose_address("", "auto", "", both, 1)["why"] == "all ranks are on this host"
    elsewhere = "another-" + here
    with pytest.raises(errors.NoInterfaceError, match="some ranks are on other hosts"):
        native.choose_address("=lo", "ipv4", "", [(here, "127.0.0.1"), (elsewhere, "10.0.0.2")], 0)

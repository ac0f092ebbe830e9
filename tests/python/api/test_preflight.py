"""PYCOMM_PREFLIGHT: what rank 0 logs, over made-up hosts and over ranks of this one.

What needs several hosts is in test_preflight_cluster.py.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from doctor_facts import healthy, interface, only
from ranks import run_ranks

from pycomm._group import secrets
from pycomm._group.creation import native_backend
from pycomm._native import loader
from pycomm.doctor import local, preflight, system
from pycomm.doctor.facts import NOTE, STOP, Finding, HostFacts

needs_native = pytest.mark.needs_native
NO_SECRET = {"PYCOMM_SECRET_FILE": "none", "PYCOMM_SECRET": None}


def with_link(number: int, **changes: Any) -> HostFacts:
    link = interface("eth0", f"10.0.0.{number}", **changes)
    return healthy(number, interfaces=(link,), secret="none")


def lines(hosts: list[HostFacts], missing: dict[int, str] | None = None) -> list[str]:
    return [line for _, line in preflight.as_lines(hosts, missing or {})]


# The rules that the doctor has, too


def test_another_mtu_is_a_note_that_names_the_host_and_the_command() -> None:
    hosts = [with_link(1, mtu=9000), with_link(2, mtu=1500), with_link(3, mtu=9000)]
    finding = only(local.judge(hosts), "MTU_DIFFERS")
    assert (finding.level, finding.host) == (NOTE, "node2")
    assert finding.text == "node2: MTU 1500 on eth0, the others have 9000"
    assert finding.todo[-1] == "$ sudo ip link set eth0 mtu 9000"
    # Of two, the smaller one; loopback and unknown ones do not count.
    pair = [with_link(1, mtu=1400), with_link(2, mtu=1500)]
    assert only(local.judge(pair), "MTU_DIFFERS").host == "node1"
    assert local.judge([with_link(1), with_link(2, mtu=0)]) == []


def test_a_slower_link_is_a_hint_and_unknown_speeds_do_not_count() -> None:
    hosts = [with_link(1, speed_mbps=1000), with_link(2, speed_mbps=100), with_link(3)]
    finding = only(local.judge(hosts), "LINK_SPEED")
    assert finding.level == NOTE
    assert finding.text == "node2: the driver of eth0 reports 100 Mbit/s, the others have 1000"
    assert finding.todo[-1] == "$ ethtool eth0 | grep Speed"
    assert local.judge([with_link(1, speed_mbps=1000), with_link(2, speed_mbps=-1)]) == []


def test_one_secret_everywhere_or_none() -> None:
    hosts = [dataclasses.replace(healthy(n), secret="abc123") for n in (1, 2, 3)]
    assert local.judge(hosts) == []
    hosts[1] = dataclasses.replace(hosts[1], secret="none")
    finding = only(local.judge(hosts), "SECRET_DIFFERS")
    assert finding.level == STOP
    assert finding.text == "node2: no secret, elsewhere secret abc123"
    assert local.judge([healthy(1), hosts[1]]) == []  # an older version does not say


def test_the_speed_of_a_device_is_that_of_the_hardware_below(tmp_path: Path) -> None:
    classes = tmp_path / "class"
    classes.mkdir()

    def device(name: str, where: str, speed: str, *below: str) -> None:
        folder = tmp_path / "devices" / where / "net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(f"{speed}\n")
        for one in below:
            (folder / f"lower_{one}").symlink_to(folder)
        (classes / name).symlink_to(folder)

    device("eno1", "pci0", "1000")
    device("eno2", "pci1", "100")
    device("ens3", "virtio0", "-1")
    device("veth1", "virtual", "10000")
    device("bond0", "virtual", "1100", "eno1", "eno2")
    device("bond0.7", "virtual", "1100", "bond0")
    device("br0", "virtual", "10000", "eno1", "veth1")
    device("docker0", "virtual", "10000", "veth1")
    found = {name: system.link_speed(name, classes) for name in ("eno1", "bond0", "bond0.7", "br0")}
    assert found == {"eno1": 1000, "bond0": 100, "bond0.7": 100, "br0": 1000}
    for name in ("ens3", "veth1", "docker0", "gone"):
        assert system.link_speed(name, classes) == -1, name


def test_addresses_of_a_name_in_the_table_of_hosts() -> None:
    table = "127.0.0.1 localhost\n127.0.1.1\tnode1.lan node1 # Debian\n#10.0.0.1 node1\n\nnode1\n"
    assert system.addresses_in_hosts(table, "node1") == ["127.0.1.1"]
    assert system.addresses_in_hosts(table, "node2") == []


# Logged lines


def test_hosts_that_are_alike_are_one_line() -> None:
    assert lines([with_link(n) for n in (1, 2, 3, 4)]) == [
        "4 hosts alike: pycomm 0.2.0, torch 2.13.0, python 3.11.2, eth0 MTU 1500, no secret"
    ]


def test_a_finding_is_one_line_with_what_to_do() -> None:
    finding = Finding(NOTE, "X", "node2", "node2: wrong", ["Try this:", "$ command"])
    assert finding.as_line() == "node2: wrong. Try this: `command`"
    (line,) = lines([with_link(1), with_link(2, mtu=1400)])
    assert line.startswith("node2: MTU 1400 on eth0, the other has 1500. Where ")
    assert line.endswith("on node2: `sudo ip link set eth0 mtu 1500`")


def test_the_worst_come_first_and_the_lines_are_few() -> None:
    hosts = [with_link(n, mtu=1500 - (n % 2)) for n in range(1, 40)]
    hosts[6] = dataclasses.replace(hosts[6], files_limit=20)
    found = list(preflight.as_lines(hosts, {}))
    assert len(found) == 5
    assert found[0][1].startswith("node7: at most 20 open files, a rank needs ")
    assert found[-1] == (
        logging.WARNING,
        "16 more findings: python -m pycomm doctor prints all.",
    )


def test_a_quota_and_pinned_ranks_are_no_findings() -> None:
    hosts = [dataclasses.replace(with_link(n), cores_usable=2.0) for n in (1, 2)]
    assert lines(hosts)[0].startswith("2 hosts alike: ")
    hosts[1] = dataclasses.replace(hosts[1], ranks=(1, 2, 3))
    assert "FEW_CORES" in {one.code for one in local.judge(hosts)}
    assert lines(hosts)[0].startswith("2 hosts alike: ")


def test_an_odd_line_of_etc_hosts_is_passed_over() -> None:
    table = "127.000.001.001 node1\nx node1\n127.0.1.1 node1 # \xe9\n"
    assert system.addresses_in_hosts(table, "node1") == ["127.0.1.1"]


def test_an_own_name_on_127_0_1_1_is_a_remark_behind_the_first_line() -> None:
    hosts = [with_link(1), dataclasses.replace(with_link(2), own_addresses=("127.0.1.1",))]
    (first, alike), (level, remark) = preflight.as_lines(hosts, {})
    assert (first, level) == (logging.INFO, logging.INFO)
    assert alike.startswith("2 hosts alike: ")
    assert remark.startswith("node2: own name is 127.0.1.1 in /etc/hosts. pycomm works; gloo may")


def test_ranks_without_facts_are_named_and_nothing_is_called_alike() -> None:
    missing = {3: "node4", 4: "node4"}
    assert lines([with_link(1), with_link(2)], missing) == [
        "no facts of rank 3 and 4 (node4) in time. Set PYCOMM_PREFLIGHT=1 on all hosts."
    ]
    assert len(lines([], missing)) == 1


def test_what_strangers_wrote_cannot_break_a_line_of_the_log() -> None:
    shown = preflight._printable("node1\n\x1b[31mpycomm ERROR: " + 600 * "x")
    assert shown.startswith("node1??[31mpycomm")
    assert len(shown) == 400 and shown.endswith("…")


# Ranks of this host


def read_store(rank: int, world_size: int, path: str) -> bool:
    """Whether the store, which is a file, has anything of the preflight."""
    dist.barrier()
    found = b"preflight" in Path(path).read_bytes()
    dist.barrier()
    return found


@needs_native
def test_nothing_is_in_the_store_without_the_variable(tmp_path: Path) -> None:
    for value in (None, "0", "1"):
        path = tmp_path / f"store{value}"
        results = run_ranks(
            2,
            read_store,
            args=(str(path),),
            init=f"file://{path}",
            env={**NO_SECRET, "PYCOMM_PREFLIGHT": value},
        )
        assert results.values() == [value == "1"] * 2
        assert ("preflight" in results[0].stderr) == (value == "1"), results[0].stderr


@needs_native
def test_ranks_of_one_host_are_one_host_and_other_groups_log_nothing() -> None:
    results = run_ranks(3, make_another_group, env={**NO_SECRET, "PYCOMM_PREFLIGHT": "1"})
    said = re.findall(r"pycomm (INFO|WARNING): preflight: (.*)", results[0].stderr)
    assert len(said) == 1, results[0].stderr
    level, line = said[0]
    assert level == "INFO" and line.startswith("1 host, "), line
    assert all("preflight" not in one.stderr for one in results[1:])


def make_another_group(rank: int, world_size: int) -> None:
    dist.barrier(dist.new_group([0, 1, 2]))


def facts_in_the_store(rank: int, world_size: int) -> tuple[str, str]:
    """What this rank wrote, and the secret's key id."""
    backend = native_backend()
    prefix = f"pycomm/preflight/{loader.native.group_run(backend)}"
    text = store_of_the_backend().get(f"{prefix}/{rank}").decode()
    secret, _ = secrets.find()
    dist.barrier()
    return text, "" if secret is None else secret.key_id


def store_of_the_backend() -> Any:
    group = dist.group.WORLD
    assert group is not None
    store = dist.distributed_c10d._get_process_group_store(group)
    return dist.PrefixStore("cpu/", store)  # type: ignore[attr-defined]


@needs_native
def test_records_are_sealed_and_have_what_env_prints(tmp_path: Path) -> None:
    secrets.generate_file(str(tmp_path / "secret"))
    env = {"PYCOMM_SECRET_FILE": str(tmp_path / "secret"), "PYCOMM_SECRET": None}
    env |= {"PYCOMM_PREFLIGHT": "1", "PYCOMM_TRANSPORT": "tcp"}
    results = run_ranks(2, facts_in_the_store, env=env)
    records = []
    for text, key_id in results.values():
        seal, _, value = text.partition("\n")
        assert seal.startswith(f"pcs1 {key_id} ")
        records.append(json.loads(value))
    (facts,) = [one for one in records if "leader" not in one]
    assert sorted(map(len, records))[0] == 1  # the other rank names the one that has the facts
    assert facts["secret"] == results[0].value[1]
    assert sorted(facts["versions"]) == ["pycomm", "python", "torch"]
    assert not [key for key, value in facts.items() if isinstance(value, str) and "/" in value]
    assert len(facts["interfaces"]) <= 1
    secret = (tmp_path / "secret").read_text().strip()
    assert all(secret not in text for text, _ in results.values())


def forge(rank: int, world_size: int) -> None:
    """Rank 1 is a stranger that writes a record without the secret."""
    if rank == 1:
        run = loader.native.group_run(native_backend())
        facts = dataclasses.replace(healthy(2), name="evil").to_json()
        store_of_the_backend().set(f"pycomm/preflight/{run}/1", facts)
    dist.barrier()


@needs_native
def test_a_record_without_the_secret_is_not_believed_and_the_job_goes_on(tmp_path: Path) -> None:
    secrets.generate_file(str(tmp_path / "secret"))
    env = {"PYCOMM_SECRET_FILE": str(tmp_path / "secret"), "PYCOMM_SECRET": None}
    first, _ = run_ranks(
        2, forge, env=lambda rank: env | {"PYCOMM_PREFLIGHT": "1" if rank == 0 else None}
    )
    (line,) = re.findall(r"pycomm WARNING: preflight: (.*)", first.stderr)
    assert line.startswith("the hosts are not compared: ")
    assert "evil" not in first.stderr

"""The doctor's screen and exit codes, over made-up reports."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import time

import pytest
from doctor_facts import cluster_of, healthy, interface
from documents import ROOT, blocks, read, table
from time_bound import assert_within

from pycomm.cli import main
from pycomm.doctor import local, reach, sync, system
from pycomm.doctor import report as reports
from pycomm.doctor.facts import NOTE, SLOW, STOP, Finding, Firewall
from pycomm.doctor.join import NoStoreError
from pycomm.doctor.meeting import Place
from pycomm.doctor.probe import UNREACHABLE, Probe
from pycomm.doctor.rate import HostRate
from pycomm.doctor.report import Report
from pycomm.doctor.screen import WIDTH, as_text, command_lines, seconds_text
from pycomm.doctor.sync import Sync

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FAST = HostRate(out=117e6, into=118e6, both=231e6, lost=0.0)
RULE = (
    "sudo nft insert rule inet filter input ip saddr '{ 10.0.0.2, 10.0.0.3, 10.0.0.4 }' "
    "tcp dport 29600-29699 accept"
)


def full_report(count: int = 4, *findings: Finding) -> Report:
    return Report(
        hosts=cluster_of(count),
        findings=findings,
        rates=[FAST] * count,
        rtts_ms=[0.2] * count,
        syncs=[
            Sync(wire=wire, busy=busy, seconds_per_parameter=seconds * (2 if busy else 1))
            for busy in (False, True)
            for wire, seconds in (("fp32", 48e-9), ("fp16", 24e-9), ("int8", 12e-9))
        ],
        parameters=62.5e6,
        seconds=20.4,
        stages=["local", "reach", "rate", "sync"],
    )


@pytest.mark.parametrize(
    ("levels", "verdict", "code"),
    [
        ([], "READY", 0),
        ([NOTE], "READY", 0),
        ([SLOW], "READY, BUT SLOW", 3),
        ([NOTE, SLOW, STOP], "NOT READY", 1),
    ],
)
def test_the_verdict_comes_first_and_decides_the_exit_code(
    levels: list[str], verdict: str, code: int
) -> None:
    found = full_report(4, *[Finding(level, "X", "node1", f"a {level} thing") for level in levels])
    first = as_text(found).splitlines()[0]
    assert first == "pycomm doctor: 4 hosts, 20 s" + verdict.rjust(WIDTH - 28)
    assert (found.verdict, found.exit_code) == (verdict, code)


def test_nothing_judged_is_no_failure_unless_asked_for() -> None:
    found = Report(reason="nobody came")
    assert (found.verdict, found.exit_code) == (reports.NOT_JUDGED, 0)
    assert dataclasses.replace(found, strict=True).exit_code == 1


def test_the_worst_is_done_first() -> None:
    slow, stop = Finding(SLOW, "A", "a", "slow thing"), Finding(STOP, "B", "b", "stop thing")
    lines = as_text(full_report(4, slow, stop)).splitlines()
    assert lines[2:5] == ["Do item 1 first.", " 1 stop thing", " 2 slow thing"]
    assert "Do item 1 first." not in as_text(full_report(4, slow))


def test_a_healthy_screen() -> None:
    assert as_text(full_report(2)).splitlines() == [
        "pycomm doctor: 2 hosts, 20 s" + "READY".rjust(WIDTH - 28),
        "",
        "host   ranks  torch   interface  address    MTU   out    in  both  rtt  lost",
        "                                                 MB/s  MB/s  MB/s   ms     %",
        "node1  0      2.13.0  eth0       10.0.0.1  1500   117   118   231  0.2   0.0",
        "node2  1      2.13.0  eth0       10.0.0.2  1500   117   118   231  0.2   0.0",
        "cores 8   open files 1024, needs 25   memfd ok   no GPUs",
        "",
        "one sync of 62.5 M parameters     fp32 3 s    fp16 1.5 s  int8 0.75 s predicted",
        "   while the cores compute        fp32 6 s    fp16 3 s    int8 1.5 s  predicted",
        "   other splits, per step         every 32nd step 0.094 s FSDP 4.5 s  computed",
    ]


def test_other_splits_are_computed_from_the_measured_sync() -> None:
    """3 s of fp32: a 32nd of it, and three transfers in place of an all-reduce's two."""
    found = dataclasses.replace(full_report(4), parameters=125e6)
    (line,) = (line for line in as_text(found).splitlines() if "other splits" in line)
    assert " ".join(line.split()) == (
        "other splits, per step every 32nd step 0.19 s FSDP 9 s computed"
    )
    only_int8 = [one for one in found.syncs if one.wire == "int8"]
    assert "other splits" not in as_text(dataclasses.replace(found, syncs=only_int8))


def test_without_the_slow_host_is_computed_by_the_bytes_of_a_ring() -> None:
    slow = HostRate(out=11.7e6, into=11.7e6, both=23e6, lost=0.0, slow=True)
    found = dataclasses.replace(full_report(4), rates=[FAST, FAST, slow, FAST])
    (line,) = (line for line in as_text(found).splitlines() if "without node3" in line)
    # 3 s at 11.7 MB/s and 2 (4 - 1) / 4 of the bytes; 117 MB/s and 2 (3 - 1) / 3 then.
    expected = 3.0 * (4 / 3) / (6 / 4) * 11.7 / 117
    assert sync.without(3.0, 4, 11.7, 117) == pytest.approx(expected)
    assert f"fp32 {seconds_text(expected)}" in line and line.endswith("computed")


def test_nothing_is_wider_than_the_screen() -> None:
    long = Finding(STOP, "X", "n", "word " * 60, [f"$ {RULE}", "word " * 60])
    wide = healthy(1, name="a-host-name-that-is-long", address="fd00:1:2:3:4:5:6:7")
    wide = dataclasses.replace(wide, ranks=tuple(range(8)))
    found = dataclasses.replace(full_report(3, long), hosts=[wide, healthy(2), healthy(3)])
    for line in as_text(found).splitlines():
        assert len(line) <= WIDTH, line


def test_full_addresses_of_ipv6_are_shortened_in_the_middle() -> None:
    full = [f"2001:db8:1111:2222:3333:4444:5555:{n}" for n in (7771, 7772)]
    hosts = [
        healthy(n, name=f"a-host-name-{n}", address=address)
        for n, address in enumerate(full, start=1)
    ]
    shown = as_text(dataclasses.replace(full_report(2), hosts=hosts))
    assert all(len(line) <= WIDTH for line in shown.splitlines()), shown
    assert "2001:" in shown and all(f"{n} " in shown for n in (7771, 7772))


def test_times_of_hours_keep_their_columns() -> None:
    assert [seconds_text(s) for s in (9999, 10_000, 720_000)] == ["9999 s", "2.8 h", "200 h"]
    slow = dataclasses.replace(full_report(2), parameters=62.5e12)
    (line,) = (line for line in as_text(slow).splitlines() if "one sync" in line)
    assert re.search(r"fp32 833 h +fp16 417 h +int8 208 h +predicted$", line), line
    assert len(line) <= WIDTH


def test_no_limit_of_open_files_and_another_pycomm() -> None:
    found = full_report(2, Finding(STOP, "VERSION", "node2", "node2: pycomm 0.0.9, the other 0.1"))
    hosts = [dataclasses.replace(host, files_limit=-1) for host in found.hosts]
    shown = as_text(dataclasses.replace(found, hosts=hosts))
    assert "open files unlimited, needs" in shown
    assert "!2.13.0" not in shown
    torch = Finding(STOP, "VERSION", "node2", "node2: torch 2.12.0, the other has 2.13.0")
    assert "!2.13.0" in as_text(full_report(2, torch))


def test_an_unknown_master_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "resolve", lambda _: [])
    place = Place(rank=1, size=2, master="nowhere", master_port=29500, store_port=29501)
    last = Probe(source=1, target=0, outcome=UNREACHABLE, detail="no address")
    found = NoStoreError(place, last, 1.0).report({}, False)
    assert [finding.code for finding in found.problems] == ["MASTER_UNKNOWN"]


def test_a_broken_line_still_can_be_pasted() -> None:
    lines = command_lines(RULE, "     ")
    assert len(lines) > 1 and all(len(line) <= WIDTH for line in lines)
    script = "set --" + "\n".join(lines) + '; printf "%s\\n" "$@"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=20)
    assert done.stdout.splitlines() == shlex.split(RULE)


def test_commands_stand_on_lines_of_their_own() -> None:
    finding = Finding(STOP, "X", "n", "text", ["On node1:", "$ ip addr"])
    assert re.search(r"^   On node1:\n     ip addr$", as_text(full_report(2, finding)), re.M)


def test_json_holds_all_and_can_be_read_again() -> None:
    found = full_report(3, Finding(STOP, "REFUSED", "node1", "text", ["$ line"]))
    raw = json.loads(json.dumps(found.as_json()))
    assert (raw["verdict"], raw["exit_code"]) == ("NOT READY", 1)
    assert raw["findings"][0]["code"] == "REFUSED"
    assert as_text(Report.from_json(raw)) == as_text(found)


@pytest.mark.needs_native
def test_one_host_alone_says_how_to_check_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name in LAUNCHERS or name.startswith(("PYCOMM_", "SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    code = main(["doctor"])
    shown = capsys.readouterr().out
    verdict = re.fullmatch(
        r"pycomm doctor: this host only, \d+ s +([A-Z ]+)", shown.splitlines()[0]
    )
    assert verdict is not None, shown
    assert (verdict[1], code) in (("READY", 0), ("NOT READY", 1)), shown
    assert "python -m pycomm doctor --hosts node1,node2" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nnodes", "2"],
        ["--nnodes", "2", "--node-rank", "2", "--master-addr", "a"],
        ["--nnodes", "2", "--node-rank", "0"],
        ["--node-rank", "0"],
        ["--master-addr", "node1"],
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    said = r"--nnodes goes with --|--node-rank is from 0 to 1|--(node-rank|master-addr) goes with"
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.time_bound
def test_hosts_is_refused_on_a_host_that_is_not_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    begin = time.monotonic()
    assert main(["doctor", "--hosts", "192.0.2.1,192.0.2.2"]) == 2
    took = time.monotonic() - begin
    assert "run this on 192.0.2.1, the first of --hosts." in capsys.readouterr().err
    assert_within(took, 5.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hosts", "one"],
        ["--seconds", "0"],
        ["--seconds", "121"],  # a station measures no longer than flow.MAX_SECONDS
        ["--model", "many"],
        ["--ranks-per-host", "0"],
    ],
)
def test_values_that_are_not_allowed(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    assert caught.value.code == 2


# docs/doctor.md


def codes_of_the_program() -> dict[str, set[str]]:
    """Every code of a finding in pycomm/doctor, with its levels; "STORE_*" stands for five."""
    sources = "".join(path.read_text() for path in (ROOT / "pycomm" / "doctor").glob("*.py"))
    found: dict[str, set[str]] = {}
    for level, code in re.findall(r'Finding\(\s*(\w+), "([A-Z_]+)"', sources):
        found.setdefault(code, set()).add(level.lower())
    assert found.pop("STORE_") == {"stop"}
    found |= {code: {"stop"} for code in ("STORE_*", *reach.CODES.values())}
    return found


def test_the_page_lists_every_code_with_its_level() -> None:
    rows = table(read("docs/doctor.md"), "code", "level", "what it is")
    listed = {row[0].strip("`"): row[1] for row in rows}
    program = codes_of_the_program()
    assert set(listed) == set(program)
    for code, levels in program.items():
        assert levels == {listed[code]} or levels == {"level"}, code


def form(screen: str) -> list[str]:
    """The lines without their numbers, marks and distances."""
    return [" ".join(re.sub(r"!?\d+(\.\d+)*", "0", line).split()) for line in screen.splitlines()]


def as_on_the_page(*findings: Finding) -> Report:
    """Four made-up hosts that are as those of tools/doctor_screens.py."""
    docker = interface("docker0", "172.17.0.1")
    hosts = []
    for number in range(1, 5):
        host = healthy(number)
        eth0 = interface("eth0", f"10.77.0.{number}")
        own = "127.0.1.1" if number == 2 else eth0.address
        hosts.append(
            dataclasses.replace(
                host,
                versions={**host.versions, "torch": "2.13.0+cpu"},
                interfaces=(eth0, docker),
                address=eth0.address,
                own_addresses=(own,),
                master_addresses=("10.77.0.1",),
                listeners=("::",),
                files_limit=20000,
                firewall=Firewall("nft", closed=()),
            )
        )
    return dataclasses.replace(
        full_report(4),
        hosts=hosts,
        rtts_ms=[0.027] * 4,
        findings=[*findings, *local.judge(hosts)],
    )


def test_the_screens_on_the_page_have_the_form_of_todays() -> None:
    """tools/doctor_screens.py makes them from real runs."""
    healthy_one, sick, slow = blocks(read("docs/doctor.md"), "text")
    assert form(healthy_one) == form(as_text(as_on_the_page()))
    # Of the others the table: what is wrong with them no made-up report has.
    head, *_ = as_text(as_on_the_page()).partition("\n\none sync")
    rows = form(head)[2:]
    assert all("\n".join(rows) in "\n".join(form(screen)) for screen in (sick, slow))


def test_the_page_shows_screens_of_79_columns_and_the_exit_codes() -> None:
    page = read("docs/doctor.md")
    screens = blocks(page, "text")
    assert [screen.splitlines()[0].split("s  ")[-1].strip() for screen in screens] == [
        reports.READY,
        reports.NOT_READY,
        reports.BUT_SLOW,
    ]
    assert all(len(line) <= WIDTH for screen in screens for line in screen.splitlines())
    for verdict, code in (("NOT READY", 1), ("READY, BUT SLOW", 3)):
        assert f"| {code} | `{verdict}`" in page

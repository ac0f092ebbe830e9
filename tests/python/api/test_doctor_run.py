"""A run of the doctor: hosts are threads of this process on loopback, with a store they share.

What needs several real hosts is in test_doctor_cluster.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from processes import LOOPBACK, free_port, free_port_range
from time_bound import assert_within

from pycomm import errors
from pycomm._native import loader
from pycomm.cli import doctor, main
from pycomm.doctor import join, local, meeting, probe, run, sync, system
from pycomm.doctor.board import Board
from pycomm.doctor.facts import NOTE, SLOW, STOP, Finding
from pycomm.doctor.meeting import NoDoctorError, Place, Plan, Roster
from pycomm.doctor.report import Report
from pycomm.doctor.screen import as_text

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(120)]

QUICK = Plan(seconds=0.5, reach_only=True, wait_s=20.0)
Examination = run._Examination


class Died(Exception):
    """Ends a rank, as a signal would."""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in list(os.environ):
        if name.startswith(("PYCOMM_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def loopback_is_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """On real hosts, a master at 127.0.0.1 is a finding of its own."""
    monkeypatch.setattr(local, "is_loopback", lambda _: False)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread is a host of its own at 127.0.0.1; nobody waits long for one that ended."""

    def chosen(*_: object) -> dict[str, str]:
        return {"address": LOOPBACK, "interface": "lo", "why": "the test"}

    monkeypatch.setattr(meeting, "host_identity", lambda: threading.current_thread().name)
    monkeypatch.setattr(meeting, "choose_address", chosen)
    monkeypatch.setattr(run, "choose_address", chosen)
    for name, seconds in (("_CONNECT_S", 3.0), ("_SLACK_S", 4.0), ("_ROLL_CALL_S", 6.0)):
        monkeypatch.setattr(run, name, seconds)


def examine(
    size: int,
    plans: Mapping[int, Plan],
    *,
    environ: Mapping[str, str] | None = None,
    **place: Any,
) -> dict[int, Report | Exception]:
    """What each rank of ``plans`` returns or raises; the other ranks do not come."""
    store = dist.HashStore()
    found: dict[int, Report | Exception] = {}

    def one(rank: int, plan: Plan) -> None:
        at = Place(**{**PLACE, "rank": rank, "size": size, **place})
        try:
            found[rank] = run.examine(store, at, environ or {}, plan)
        except Exception as error:
            found[rank] = error

    threads = [
        threading.Thread(target=one, args=each, name=f"host{each[0]}") for each in plans.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(found) == sorted(plans)
    return found


PLACE = {"master": LOOPBACK, "master_port": 29500, "store_port": 29500}


def report_of(found: Mapping[int, Report | Exception], rank: int = 0) -> Report:
    report = found[rank]
    assert isinstance(report, Report), report
    return report


def problems(report: Report) -> list[tuple[str, str]]:
    return [(finding.level, finding.code) for finding in report.problems]


# Who came


@pytest.mark.usefixtures("hosts")
def test_hosts_that_all_come_are_ready_and_agree() -> None:
    found = examine(3, dict.fromkeys(range(3), QUICK))
    report = report_of(found)
    assert (problems(report), report.verdict, report.exit_code) == ([], "READY", 0)
    assert report.stages == ["local", "reach"]
    assert all(as_text(report_of(found, rank)) == as_text(report) for rank in (1, 2))


@pytest.mark.usefixtures("hosts")
def test_a_first_host_to_which_nobody_comes_judges_nothing() -> None:
    """Its pod was started again, and the others train."""
    report = report_of(examine(3, {0: dataclasses.replace(QUICK, wait_s=0.5)}))
    assert (report.verdict, report.exit_code, problems(report)) == ("NOT JUDGED", 0, [])
    assert "No other host came" in report.reason and "the job is running" in report.reason
    strict = dataclasses.replace(QUICK, wait_s=0.5, strict=True)
    assert report_of(examine(3, {0: strict})).exit_code == 1


@pytest.mark.usefixtures("hosts")
def test_one_of_two_other_hosts_is_missing() -> None:
    plan = dataclasses.replace(QUICK, wait_s=5.0)
    report = report_of(examine(3, {0: plan, 1: plan}))
    assert (report.exit_code, problems(report)) == (1, [(STOP, "MISSING")])


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("stage", ["_reach", "_rates", "_roll_call"])
def test_a_rank_that_ends_in_the_middle_is_named_and_alone_blamed(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = getattr(Examination, stage)

    def dying(self: Any, *rest: Any) -> Any:
        if self._place.rank == 2:
            raise Died
        return usual(self, *rest)

    monkeypatch.setattr(Examination, stage, dying)
    monkeypatch.setattr(sync, "measure", lambda *_: pytest.fail("the engine would wait for it"))
    found = examine(3, dict.fromkeys(range(3), dataclasses.replace(QUICK, reach_only=False)))
    assert isinstance(found[2], Died)
    report = report_of(found)
    assert (report.exit_code, problems(report)[0]) == (1, (STOP, "WENT_SILENT"))
    assert [code for level, code in problems(report) if level == STOP] == ["WENT_SILENT"]
    assert report.problems[0].text == "rank 2 joined and then ended or hung"
    assert as_text(report_of(found, 1)) == as_text(report)


@pytest.mark.usefixtures("hosts")
def test_an_engine_that_fails_on_a_slow_network_is_not_to_be_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("timed out")

    monkeypatch.setattr(sync, "measure", fails)
    for level, advice in ((SLOW, "Mend what is slow"), (NOTE, "please report this")):
        one = Finding(level, "X", "host0", "text")
        monkeypatch.setattr(Examination, "_judge", lambda *_, one=one: [one])
        report = report_of(
            examine(2, dict.fromkeys(range(2), dataclasses.replace(QUICK, reach_only=False)))
        )
        failed = next(each for each in report.findings if each.code == "SYNC_FAILED")
        assert advice in failed.todo[0]


def test_many_hosts_have_time_for_all_questions() -> None:
    """64 at a time, each silent at most; then other addresses of the lost, or other ports."""
    asked_s = (200 / 64) * run._CONNECT_S
    assert run._reach_limit_s(200) > asked_s + max(5, run._MAX_PORTS) * asked_s
    assert run._reach_limit_s(4) > 4 * run._CONNECT_S


# Options of rank 0


@pytest.mark.usefixtures("hosts")
def test_what_to_measure_is_rank_0s_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, Plan] = {}
    usual = Examination._gather

    def gather(self: Any) -> Any:
        seen[self._place.rank] = self._plan
        return usual(self)

    monkeypatch.setattr(Examination, "_gather", gather)
    first = dataclasses.replace(QUICK, seconds=0.7, ranks_per_host=4)
    report = report_of(examine(2, {0: first, 1: Plan(seconds=3.0, wait_s=0.5)}, by_hand=True))
    assert (seen[1].seconds, seen[1].reach_only, seen[1].ranks_per_host) == (0.7, True, 4)
    assert [list(host.ranks) for host in report.hosts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert report.stages == ["local", "reach"]


@pytest.mark.usefixtures("hosts")
def test_fields_of_another_version_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Board.put

    def invented(content: Any) -> Any:
        if isinstance(content, dict):
            return {**{name: invented(one) for name, one in content.items()}, "invented": 1}
        return [invented(one) for one in content] if isinstance(content, list) else content

    def put(self: Board, topic: str, content: Any) -> None:
        usual(self, topic, invented(content))

    monkeypatch.setattr(Board, "put", put)
    monkeypatch.setattr(sync, "measure", lambda *_: [])
    plan = dataclasses.replace(QUICK, reach_only=False)
    found = examine(2, {0: plan, 1: plan})
    assert report_of(found).stages == ["local", "reach", "rate"]
    assert len(report_of(found, 1).rates) == 2


# Ports


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("place_of_master", [0, 1])
def test_a_port_range_may_hold_the_masters_port(place_of_master: int) -> None:
    first, last = free_port_range(5)
    environ = {"PYCOMM_PORT_RANGE": f"{first}-{last}"}
    port = first + place_of_master
    options = argparse.Namespace(
        hosts=None, nnodes=2, node_rank=0, master_addr=LOOPBACK, master_port=port
    )
    place = doctor.find_place(options, environ)
    assert place is not None and place.store_port == first + 1 - place_of_master
    with socket.socket() as store:  # the doctor's own
        store.bind((LOOPBACK, place.store_port))
        store.listen()
        changes = {"master_port": port, "store_port": place.store_port, "by_hand": True}
        found = examine(2, {0: QUICK, 1: QUICK}, environ=environ, **changes)
    report = report_of(found)
    assert problems(report) == []
    assert not {port, place.store_port} & {host.port for host in report.hosts}
    assert report.hosts[0].ports_free == 5


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("how", ["one host", "two hosts"])
def test_the_ports_are_free_again_when_the_engine_needs_them(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = free_port_range(4)
    ports = list(range(first, last + 1))
    held: list[list[int]] = []

    def measured(*_: object) -> list[Any]:
        held.append([port for port in ports if not system._is_free(port)])
        return []

    monkeypatch.setattr(sync, "measure", measured)
    if how == "one host":
        monkeypatch.setattr(meeting, "host_identity", lambda: "one")
    plan = dataclasses.replace(QUICK, reach_only=False)
    environ = {"PYCOMM_PORT_RANGE": f"{first}-{last}"}
    report_of(examine(2, {0: plan, 1: plan}, environ=environ))
    assert held == [[], []]


# A store that is not the doctor's


def test_nothing_is_written_to_a_store_in_which_no_doctor_runs() -> None:
    store = dist.HashStore()
    store.set("of the training", "1")
    place = Place(**{**PLACE, "rank": 1, "size": 2})
    with pytest.raises(NoDoctorError, match="rank 0 runs no doctor there"):
        run.examine(store, place, {}, dataclasses.replace(QUICK, wait_s=0.3))
    assert store.num_keys() == 1


def test_a_run_whose_rank_0_ended_before_its_list_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "_ROSTER_S", 0.9)
    store = dist.HashStore()
    Board(store, 0).put("open", 0.1)
    place = Place(**{**PLACE, "rank": 1, "size": 2})
    with pytest.raises(NoDoctorError, match="no 'roster' for 1 s"):
        meeting.meet(Board(store, 1), place, {}, 0.1)


def judged_nothing(code: int, shown: str) -> None:
    assert (code, shown.splitlines()[0].split("s  ")[-1].strip()) == (0, "NOT JUDGED"), shown
    assert "the job is running" in " ".join(shown.split())


@contextlib.contextmanager
def listener(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """What the training's rank 0 is to the doctor: a port that accepts and is no store."""
    held: list[socket.socket] = []

    def accept(one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(one.accept()[0])
                serve(held[-1])

    first, _ = free_port_range(2)
    with socket.create_server((LOOPBACK, first)) as one:
        threading.Thread(target=accept, args=(one,), daemon=True).start()
        try:
            yield first
        finally:
            one.shutdown(socket.SHUT_RDWR)
            for connection in held:
                connection.close()


@pytest.mark.time_bound
@pytest.mark.parametrize("kind", ["closes", "is silent"])
def test_the_trainings_listener_at_the_stores_port_is_not_judged(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(join, "_OPEN_S", 1.0)
    monkeypatch.setattr(join, "_GRACE_S", 2.0)
    with listener(socket.socket.close if kind == "closes" else lambda _: None) as first:
        monkeypatch.setenv("PYCOMM_PORT_RANGE", f"{first}-{first + 1}")
        begin = time.monotonic()
        options = ["--nnodes=3", "--node-rank=1", f"--master-addr={LOOPBACK}", "--wait=1"]
        code = main(["doctor", *options])
        took = time.monotonic() - begin
    shown = capsys.readouterr().out
    judged_nothing(code, shown)
    assert "another program answers, and no doctor" in " ".join(shown.split())
    assert_within(took, 15.0)


def test_the_trainings_own_store_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RANK and MASTER_ADDR are set in the pod, as Kubeflow does: the store is the training's."""
    port = free_port()
    limit = timedelta(seconds=30)
    store = dist.TCPStore(LOOPBACK, port, 2, True, limit, wait_for_workers=False)
    store.set("of the training", "1")
    keys = store.num_keys()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(port))
    judged_nothing(main(["doctor", "--wait=1"]), capsys.readouterr().out)
    assert store.num_keys() == keys


def test_a_first_host_that_rejects_is_not_judged_and_has_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = free_port_range(2)
    monkeypatch.setenv("PYCOMM_PORT_RANGE", f"{first}-{last}")
    monkeypatch.setattr(system, "find_firewall", lambda _: system.Firewall(tool="ufw"))
    options = ["--nnodes=3", "--node-rank=1", f"--master-addr={LOOPBACK}", "--wait=0.5"]
    judged_nothing(main(["doctor", *options]), shown := capsys.readouterr().out)
    assert "refused (no doctor listens there, or a firewall rejects it)" in " ".join(shown.split())
    assert has_line(shown, f"sudo ufw allow proto tcp from .* to any port {first}:{last}")


def has_line(shown: str, pattern: str) -> bool:
    return re.search(pattern, shown.replace(" \\\n", " ").replace("\n", " ")) is not None


# An extension that does not load


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> str:
    """In threads named host1, and in the main thread."""
    text = "pycomm was built for torch 2.12, and torch 2.13.0 is installed"
    usual = loader.load

    def load() -> Any:
        if threading.current_thread().name == "host0":
            return usual()
        raise errors.TorchVersionError(text)

    monkeypatch.setattr(loader, "load", load)
    return text


@pytest.mark.usefixtures("hosts")
def test_a_host_without_the_extension_is_a_finding_of_rank_0(unbuilt: str) -> None:
    found = examine(2, {0: QUICK, 1: QUICK})
    report = report_of(found)
    assert report.exit_code == 1
    texts = [finding.text for finding in report.problems if finding.code == "EXTENSION"]
    assert texts == [f"{report.hosts[1].name}: {unbuilt}"]
    assert report_of(found, 1).exit_code == 1


def test_a_host_alone_without_the_extension_is_no_traceback(
    unbuilt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].endswith(" NOT READY")
    assert unbuilt in " ".join(shown.split())
    assert meeting.choose_address({}, LOOPBACK, [], 0) == {}
    assert system.host_identity() == system.host_identity() != ""


# Names


@pytest.mark.time_bound
def test_a_resolver_without_a_server_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    over = threading.Event()

    def getaddrinfo(host: str, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        over.wait(30.0)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(system, "_resolved", {})
    monkeypatch.setattr(system, "_RESOLVE_S", 0.3)
    monkeypatch.setattr(system, "_SLOW_RESOLVER_S", 0.2)
    begin = time.monotonic()
    try:
        assert system.resolve("node1") == system.resolve("node1") == []
    finally:
        over.set()
    took = time.monotonic() - begin
    assert asked == ["node1"]
    assert system.is_slow_name("node1") and not system.is_slow_name("node2")
    assert_within(took, 3.0)


def test_a_name_that_may_come_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[Any]] = [[], [(0, 0, 0, "", ("10.0.0.9", 0))]]
    monkeypatch.setattr(system, "_resolved", {})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.pop(0))
    assert [system.resolve("pod-0") for _ in range(3)] == [[], ["10.0.0.9"], ["10.0.0.9"]]


def test_the_roster_has_defaults_for_what_an_older_version_lacks() -> None:
    assert Roster(token="t").plan == {}
    assert probe.Probe(source=0, target=1).outcome == probe.OK

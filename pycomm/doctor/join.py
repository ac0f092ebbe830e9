"""Finds the store: the launcher's, or by hand one that host 0 opens for this run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pycomm.doctor import local, probe, system
from pycomm.doctor.facts import STOP, Finding, Firewall, HostFacts
from pycomm.doctor.firewall import lines_to_open
from pycomm.doctor.meeting import Place, choose_address, with_choice
from pycomm.doctor.report import Report

_TRY_S = 3.5
_PAUSE_S = 0.5
_TOPIC = "pycomm/doctor"


class NoStoreError(Exception):
    """Host 0 was not reached: what this host knows of it."""

    def __init__(self, place: Place, last: probe.Probe, seconds: float) -> None:
        super().__init__(f"{place.master}:{place.store_port}: {last.outcome}")
        self._place = place
        self._last = last
        self._seconds = seconds

    def report(self, environ: Mapping[str, str], strict: bool) -> Report:
        """A verdict without the other hosts.

        A refusal alone does not judge: in a pod that was started again, the others train already
        and no doctor answers.
        """
        place = self._place
        facts = system.local_facts(environ, place.master, place.master_port, 0, "", "")
        chosen = choose_address(environ, place.master, [], 0)
        facts = with_choice(facts, chosen)
        findings = [*local.judge([facts]), *local.master_name([HostFacts(name="host 0"), facts])]
        reason = ""
        if any(finding.level == STOP for finding in findings):
            pass  # which explains it
        elif self._last.outcome == probe.REFUSED:
            reason = (
                f"No doctor answers at {place.master} port {place.store_port} (refused for "
                f"{self._seconds:.0f} s). Nothing is judged: it was not started there, it is "
                "over, or the job runs already. A firewall that rejects looks the same."
            )
        else:
            findings.append(self._unreached(facts))
        return Report(
            hosts=[facts],
            findings=findings,
            seconds=self._seconds,
            reason=reason,
            stages=["local"],
            strict=strict,
        )

    def _unreached(self, facts: HostFacts) -> Finding:
        place, last = self._place, self._last
        where = f"{place.master} ({last.address}) port {place.store_port}"
        kind = {
            probe.SILENT: "no answer (dropped: a firewall, a security group, or no route)",
            probe.UNREACHABLE: f"unreachable ({last.detail}: no route, or a firewall that rejects)",
        }.get(last.outcome, f"{last.outcome} ({last.detail})")
        first, end = facts.port_range if facts.port_range[0] else [place.store_port] * 2
        ports = [(place.master_port, place.master_port), (first, end)]
        todo = [f"On {place.master}:"]  # whose chains are not known here
        todo += lines_to_open(Firewall(tool=facts.firewall.tool), [facts.address], ports)
        todo.append("In a cloud: the same rule in the security group.")
        text = f"{facts.name} -> {where}: {kind}"
        return Finding(STOP, "NO_STORE", place.master, text, todo)


@contextlib.contextmanager
def join(place: Place, wait_s: float) -> Iterator[Any]:
    """The store of this run, for as long as the doctor runs.

    Raises:
        NoStoreError: Host 0 was not reached.
        DistError: torch could not open or join the store.
    """
    if place.rank != 0:
        _wait_for_store(place, wait_s)
    timeout = timedelta(seconds=wait_s + 30.0)
    if place.by_hand:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            place.master,
            place.store_port,
            place.size,
            is_master=place.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
        )
    else:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    yield dist.PrefixStore(_TOPIC, store)  # type: ignore[attr-defined]


def _wait_for_store(place: Place, wait_s: float) -> None:
    """Connects until somebody accepts, so that it is known how it fails."""
    begin = time.monotonic()
    last = probe.Probe(source=place.rank, target=0, outcome=probe.UNREACHABLE, detail="no address")
    while True:
        for address in system.resolve(place.master):
            last = probe.knock(
                probe.Probe(source=place.rank, target=0, address=address, port=place.store_port),
                _TRY_S,
            )
            if last.ok:
                return
        passed = time.monotonic() - begin
        if passed > wait_s:
            raise NoStoreError(place, last, passed)
        time.sleep(_PAUSE_S)

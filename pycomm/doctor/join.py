"""Finds the store: the launcher's, or by hand one that host 0 opens for this run."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pycomm.doctor import local, probe, system
from pycomm.doctor.attendance import NOT_JUDGED
from pycomm.doctor.bounded import within
from pycomm.doctor.facts import NOTE, STOP, Finding, Firewall, HostFacts
from pycomm.doctor.firewall import lines_to_open
from pycomm.doctor.meeting import Place, choose_address, with_choice
from pycomm.doctor.report import Report

_TRY_S = 3.5
_PAUSE_S = 0.5
_OPEN_S = 15.0
"""For torch to talk with a store that accepts connections; it retries until then."""
_GRACE_S = 10.0
_TOPIC = "pycomm/doctor"


class NoStoreError(Exception):
    """Host 0 was not reached, or is no store: what this host knows of it."""

    def __init__(self, place: Place, last: probe.Probe, seconds: float) -> None:
        super().__init__(f"{place.master}:{place.store_port}: {last.outcome}")
        self._place = place
        self._last = last
        self._seconds = seconds

    def report(self, environ: Mapping[str, str], strict: bool) -> Report:
        """A verdict without the other hosts.

        A refusal, or a store that is none, does not judge: in a pod that was started again, the
        others train already and no doctor answers.
        """
        place, last = self._place, self._last
        where = f"{place.master} port {place.store_port}"
        if last.outcome == probe.REFUSED:
            reason = f"No doctor answers at {where} (refused for {self._seconds:.0f} s)."
        elif last.outcome == probe.STRANGER:
            reason = f"At {where} another program answers, and no doctor ({last.detail})."
        else:
            reason = ""
        return report_alone(place, environ, strict, self._seconds, reason, last)


def report_alone(
    place: Place,
    environ: Mapping[str, str],
    strict: bool,
    seconds: float,
    reason: str,
    last: probe.Probe | None = None,
) -> Report:
    """What this host alone shows.

    Args:
        place: Which rank this is.
        environ: ``os.environ``.
        strict: Of the plan.
        seconds: How long it took.
        reason: Why the job is not judged; "" if ``last`` judges it.
        last: How host 0 was not reached.
    """
    facts = system.local_facts(environ, place.master, place.master_port, 0, "", "")
    chosen = choose_address(environ, place.master, [], 0)
    facts = with_choice(facts, chosen)
    # The master's name is judged by the second call, for a host that is not the first.
    findings = local.judge([dataclasses.replace(facts, master="")])
    findings += local.master_name([HostFacts(name="host 0"), facts])
    stops = any(finding.level == STOP for finding in findings)
    if last is not None and not (stops and not reason):
        findings += _unreached(place, last, facts)
    if stops:
        reason = ""  # which explains it
    elif reason:
        reason += f" {NOT_JUDGED}"
    return Report(
        hosts=[facts],
        findings=findings,
        seconds=seconds,
        reason=reason,
        stages=["local"],
        strict=strict,
    )


def _unreached(place: Place, last: probe.Probe, facts: HostFacts) -> list[Finding]:
    if last.outcome == probe.STRANGER:
        return []
    where = f"{place.master} ({last.address}) port {place.store_port}"
    kind = {
        probe.REFUSED: "refused (no doctor listens there, or a firewall rejects it)",
        probe.SILENT: "no answer (dropped: a firewall, a security group, or no route)",
        probe.UNREACHABLE: f"unreachable ({last.detail}: no route, or a firewall that rejects)",
    }.get(last.outcome, f"{last.outcome} ({last.detail})")
    refused = last.outcome == probe.REFUSED
    first, end = facts.port_range if facts.port_range[0] else [place.store_port] * 2
    ports = [(place.master_port, place.master_port), (first, end)]
    todo = [f"On {place.master}{', if the doctor runs there' if refused else ''}:"]
    # Host 0's chains are not known here.
    todo += lines_to_open(Firewall(tool=facts.firewall.tool), [facts.address or "…"], ports)
    todo.append("In a cloud: the same rule in the security group.")
    text = f"{facts.name} -> {where}: {kind}"
    if refused:
        return [Finding(NOTE, "NO_DOCTOR", place.master, text, todo)]
    return [Finding(STOP, "NO_STORE", place.master, text, todo)]


@contextlib.contextmanager
def join(place: Place, wait_s: float) -> Iterator[Any]:
    """The store of this run, for as long as the doctor runs. Writes nothing.

    Raises:
        NoStoreError: Host 0 was not reached, or something else than a store answers there.
        DistError: torch could not open the store.
    """
    begin = time.monotonic()
    if place.rank != 0:
        _wait_for_store(place, wait_s)
    timeout = wait_s + 30.0
    try:
        store = _open(place, timeout)
    except (dist.DistError, TimeoutError) as error:
        if place.rank == 0:
            raise
        answer = probe.Probe(
            source=place.rank,
            target=0,
            port=place.store_port,
            outcome=probe.STRANGER,
            detail=str(error).partition("\n")[0] or type(error).__name__,
        )
        raise NoStoreError(place, answer, time.monotonic() - begin) from error
    yield dist.PrefixStore(f"{_TOPIC}/{place.attempt}", store)  # type: ignore[attr-defined]


def _open(place: Place, timeout: float) -> Any:
    """Not by ``dist.rendezvous``, which counts this rank in the store: it may be the training's."""
    serves = place.rank == 0 and not place.agent_store
    limit_s = timeout if place.rank == 0 else _OPEN_S
    store: Any = within(
        limit_s + _GRACE_S,  # torch waits forever for a program that accepts and is silent
        lambda: dist.TCPStore(  # type: ignore[attr-defined]
            place.master,
            place.store_port,
            place.size,
            is_master=serves,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
        ),
    )
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _wait_for_store(place: Place, wait_s: float) -> None:
    """Connects until somebody accepts, so that it is known how it fails."""
    begin = time.monotonic()
    last = probe.Probe(source=place.rank, target=0, outcome=probe.UNREACHABLE, detail="no address")
    while True:
        for address in system.resolve(place.master, again=True):
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

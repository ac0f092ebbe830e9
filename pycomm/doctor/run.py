"""The stages, in order. Every host gathers; rank 0 judges and writes the verdict for all."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from pycomm import errors
from pycomm.doctor import attendance, flow, local, probe, rate, rate_findings, reach, sync, system
from pycomm.doctor.board import Board
from pycomm.doctor.facts import SLOW, STOP, Finding, HostFacts, known, unique_names
from pycomm.doctor.meeting import Place, Plan, Roster, choose_address, meet, with_choice
from pycomm.doctor.report import Report

_FACTS_S = 30.0
_CONNECT_S = 3.5
"""A second question after 1 s and a third after 3 s: one lost packet is no firewall."""
_MAX_QUESTIONS = 64
_MAX_PORTS = 16
"""Ports of a host's range that are asked, at most."""
_ROLL_CALL_S = 15.0
_SLACK_S = 20.0
"""Hosts need not begin a round at the same time."""
_LEAVE_S = 10.0
_FROM_RANK_0 = ("seconds", "reach_only", "ranks_per_host")


def examine(store: Any, place: Place, environ: Mapping[str, str], plan: Plan) -> Report:
    """Runs all stages as one rank; every rank gets the same report.

    Args:
        store: A ``torch.distributed.Store`` with nothing in it.
        place: Which rank this is.
        environ: ``os.environ``.
        plan: What to do.

    Raises:
        NoDoctorError: Rank 0 runs no doctor.
        TimeoutError: The others began without this rank, or rank 0 went away.
        DistError: The store was lost.
    """
    begin = time.monotonic()
    board = Board(store, place.rank)
    plan.progress(f"waiting for {place.size} ranks")
    roster = meet(
        board, place, environ, plan.wait_s, {name: getattr(plan, name) for name in _FROM_RANK_0}
    )
    given = {name: roster.plan[name] for name in _FROM_RANK_0 if name in roster.plan}
    plan = dataclasses.replace(plan, **given)
    examination = _Examination(board, place, environ, plan, roster, begin)
    with contextlib.closing(examination):
        report = examination.report(store)
    board.put("left", True)
    if place.rank == 0:  # the store may be this process's own
        board.collect("left", examination.present(), _LEAVE_S)
    return report


def examine_alone(environ: Mapping[str, str], plan: Plan) -> Report:
    """Stage 0 of this host, without any other."""
    begin = time.monotonic()
    facts = system.local_facts(environ, "", 0, 0, "", "")
    chosen = choose_address(environ, "", [], 0)
    facts = with_choice(facts, chosen)
    return Report(
        hosts=[facts],
        findings=local.judge([facts]),
        seconds=time.monotonic() - begin,
        stages=["local"],
        alone=True,
    )


class _Examination:
    """One run on one rank, after all have met."""

    def __init__(
        self,
        board: Board,
        place: Place,
        environ: Mapping[str, str],
        plan: Plan,
        roster: Roster,
        begin: float,
    ) -> None:
        self._board = board
        self._place = place
        self._environ = environ
        self._plan = plan
        self._roster = roster
        self._begin = begin
        self._hosts = roster.hosts()
        self._leaders = [ranks[0] for ranks in self._hosts]
        self._server: probe.Server | None = None
        self._facts: list[HostFacts] = []
        self._silent: list[int] = []
        """Ranks that came and then wrote nothing: nobody waits for them again."""

    def present(self) -> list[int]:
        """The ranks that did not end in the middle."""
        return [rank for rank in self._roster.ranks if rank not in self._silent]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def report(self, store: Any) -> Report:
        probes: list[probe.Probe] = []
        flows: list[flow.Flow] = []
        taken: dict[int, str] = {}
        stages = ["local"]
        if self._place.rank in self._leaders:
            taken = self._gather()
            if len(self._facts) > 1:
                stages.append("reach")
                probes = self._reach()
                if not self._plan.reach_only:
                    stages.append("rate")
                    flows = self._rates(reach.reachable(probes))
        self._roll_call()
        self.close()  # all have asked, and the engine of stage 3 needs the ports
        findings = self._judge(taken, probes, flows) if self._place.rank == 0 else []
        nobody = attendance.nobody_else(self._place, self._roster, self._plan.wait_s)
        syncs, trouble = self._sync(store, findings)
        report = Report(
            hosts=self._facts,
            findings=[*findings, *trouble],
            rates=rate.table(len(self._facts), flows) if flows else (),
            rtts_ms=[reach.rtt_ms(index, probes) for index in range(len(self._facts))],
            syncs=syncs,
            parameters=self._plan.parameters,
            seconds=time.monotonic() - self._begin,
            reason="" if _stops(findings) else nobody,
            stages=[*stages, "sync"] if syncs else stages,
            strict=self._plan.strict,
        )
        return self._agreed(report)

    def _judge(
        self, taken: Mapping[int, str], probes: list[probe.Probe], flows: list[flow.Flow]
    ) -> list[Finding]:
        """All findings but the sync's. A host that ended meanwhile is blamed for that only."""
        gone = {index for index, rank in enumerate(self._leaders) if rank in self._silent}
        probes = [one for one in probes if not gone & {one.source, one.target}]
        flows = [one for one in flows if not gone & {one.source, one.target}]
        return [
            *attendance.missing(self._place, self._roster, self._plan.wait_s),
            *map(attendance.went_silent, self._silent),
            *(attendance.port_taken(self._facts[index], why) for index, why in taken.items()),
            *local.judge(self._facts),
            *reach.judge(self._facts, probes),
            *rate_findings.judge(self._facts, flows),
        ]

    def _collect(self, topic: str, ranks: Sequence[int], limit_s: float) -> dict[int, Any]:
        """The entries of these ranks; who has none is remembered as silent."""
        waited_for = [rank for rank in ranks if rank not in self._silent]
        found = self._board.collect(topic, waited_for, limit_s)
        self._silent += [rank for rank in waited_for if rank not in found]
        return found

    def _roll_call(self) -> None:
        """Every rank answers before the verdict, also one that was only asked, or speaks for no
        host: the engine would wait for it."""
        if self._place.rank == 0:
            self._board.put("call", True)
        else:
            self._board.get("call", 0, self._limit_s())
        self._board.put("here", True)
        if self._place.rank == 0:
            self._collect("here", self._roster.ranks, _ROLL_CALL_S)

    # Stage 0

    def _gather(self) -> dict[int, str]:
        """Everybody's facts; returns why a host could not listen at the master's port."""
        self._plan.progress("stage 0: this host")
        place, roster = self._place, self._roster
        facts = system.local_facts(
            self._environ,
            place.master,
            place.master_port,
            place.store_port,
            roster.identities[roster.ranks.index(place.rank)],
            secrets.token_hex(8),
        )
        everyone = list(zip(roster.identities, roster.routes, strict=True))
        index = roster.ranks.index(place.rank)
        facts = with_choice(facts, choose_address(self._environ, place.master, everyone, index))
        trouble = ""
        first, last = facts.port_range
        # The master's port may be in the range, and is opened below.
        ports = [port for port in range(first, last + 1) if port != place.master_port or not first]
        handlers = flow.Station().handlers()
        try:
            self._server = probe.Server(roster.token, facts.process, ports, handlers)
        except OSError:  # the range is full, which is a finding of its own
            self._server = probe.Server(roster.token, facts.process, [0], handlers)
        ranks = self._hosts[self._leaders.index(place.rank)]
        free = facts.ports_free
        if place.by_hand:
            count = self._plan.ranks_per_host
            ranks = list(range(place.rank * count, place.rank * count + count))
            if place.rank == 0:
                trouble = self._server.also_listen(place.master_port)
                free += first <= place.store_port <= last  # the doctor itself has it
        others = min(len(ranks), _MAX_PORTS) - 1
        if place.by_hand and place.rank == 0 and first <= place.store_port <= last:
            others = max(others - 1, 0)  # the doctor's store has the port of a rank
        further = self._server.listen_in(ports, others) if first else []
        facts = dataclasses.replace(
            facts,
            ranks=ranks,
            ports_free=free,
            port=self._server.port,
            further_ports=further,
            ports_for_ranks=others,
        )
        self._board.put("facts", [facts.to_json(), trouble])
        found = self._collect("facts", self._leaders, _FACTS_S)
        self._leaders = [rank for rank in self._leaders if rank in found]
        known = [HostFacts.from_json(found[rank][0]) for rank in self._leaders]
        names = unique_names([one.name for one in known], [one.address for one in known])
        self._facts = [
            dataclasses.replace(one, name=name) for one, name in zip(known, names, strict=True)
        ]
        troubles = enumerate(found[rank][1] for rank in self._leaders)
        return {index: why for index, why in troubles if why}

    # Stage 1

    def _reach(self) -> list[probe.Probe]:
        self._plan.progress(f"stage 1: who reaches whom, {len(self._facts)} hosts")
        here = self._leaders.index(self._place.rank)
        questions = [
            probe.Probe(source=here, target=index, address=host.address, port=host.port)
            for index, host in enumerate(self._facts)
            if index != here and host.address
        ]
        if self._place.by_hand and here != 0:  # a launcher has reached the store already
            # torch tries all addresses of the name, so one that answers is enough.
            store = probe.Probe(
                source=here, target=0, purpose=probe.STORE, port=self._place.master_port
            )
            addresses = self._facts[here].master_addresses or [self._facts[0].address]
            questions += [dataclasses.replace(store, address=one) for one in addresses]
        answers = self._ask(questions)
        answers += self._ask(reach.next_questions(self._facts, answers))
        self._board.put("reach", [dataclasses.asdict(one) for one in answers])
        found = self._collect("reach", self._leaders, _reach_limit_s(len(self._facts)))
        raws = [raw for rank in self._leaders for raw in found.get(rank, ())]
        return [probe.Probe(**known(probe.Probe, raw)) for raw in raws]

    def _ask(self, questions: Sequence[probe.Probe]) -> list[probe.Probe]:
        if not questions:
            return []
        own = self._facts[self._leaders.index(self._place.rank)].address

        def ask(question: probe.Probe) -> probe.Probe:
            as_engine = question.purpose in (probe.LINK, probe.IN_RANGE)
            local_address = own if as_engine else ""
            return probe.ask(question, self._roster.token, _CONNECT_S, local_address)

        with ThreadPoolExecutor(min(len(questions), _MAX_QUESTIONS)) as pool:
            return reach.with_strangers(self._facts, pool.map(ask, questions))

    # Stage 2

    def _rates(self, reached: set[tuple[int, int]]) -> list[flow.Flow]:
        flows: list[flow.Flow] = []
        rounds = rate.rounds(len(self._facts))
        for number, pairs in enumerate(rounds):
            # Token buckets are full at first; later rounds need not last until one is empty.
            seconds = self._plan.seconds if number == 0 else self._plan.seconds / 2
            self._plan.progress(
                f"stage 2: round {number + 1} of {len(rounds)}, pairs at full speed, "
                f"{3 * seconds:.0f} s"
            )
            flows += self._round(f"round{number}", pairs, reached, seconds, alone=False)
        for number, pair in enumerate(rate.suspects(len(self._facts), flows)):
            self._plan.progress("stage 2: once more, a slow pair alone")
            flows += self._round(
                f"alone{number}", [pair], reached, self._plan.seconds / 2, alone=True
            )
        return flows

    def _round(
        self,
        topic: str,
        pairs: Sequence[rate.Pair],
        reached: set[tuple[int, int]],
        seconds: float,
        *,
        alone: bool,
    ) -> list[flow.Flow]:
        """Each pair is measured by the end that reaches the other."""
        here = self._leaders.index(self._place.rank)
        asking = {}
        for a, b in pairs:
            for source, target in ((a, b), (b, a)):
                if (source, target) in reached:
                    asking[source] = target
                    break
        if here in asking:
            other = self._facts[asking[here]]
            measured = flow.flows_between(
                here,
                asking[here],
                flow.Peer(
                    address=other.address,
                    port=other.port,
                    token=self._roster.token,
                    local=self._facts[here].address,
                ),
                seconds,
                flow.DIRECTIONS[:2] if alone else flow.DIRECTIONS,
                alone=alone,
            )
            self._board.put(topic, [dataclasses.asdict(one) for one in measured])
        ranks = [self._leaders[index] for index in sorted(asking)]
        found = self._collect(topic, ranks, 6 * seconds + _SLACK_S)
        return [
            flow.Flow(**{**known(flow.Flow, raw), "bins": tuple(raw["bins"])})
            for rank in ranks
            for raw in found.get(rank, ())
        ]

    # Stage 3

    def _sync(
        self, store: Any, findings: Sequence[Finding]
    ) -> tuple[list[sync.Sync], list[Finding]]:
        """All ranks take part, also those that speak for no host."""
        enough = len(self._roster.ranks) == self._place.size > 1
        if self._place.rank == 0:
            self._board.put("go", enough and not _stops(findings) and not self._plan.reach_only)
        if not self._board.get("go", 0, _ROLL_CALL_S + _FACTS_S):
            return [], []
        self._plan.progress("stage 3: one sync with the real engine")
        try:
            inner = dist.PrefixStore("sync", store)  # type: ignore[attr-defined]
            return sync.measure(inner, self._place.rank, self._place.size), []
        except (errors.PycommError, ImportError, ValueError, RuntimeError) as error:
            text = f"{type(error).__name__}: {error}".partition(" [code=")[0]
            slow = any(finding.level == SLOW for finding in findings)
            fine = "All stages before were fine, so please report this with the screen."
            again = "Mend what is slow, which may be why, and run the doctor again."
            return [], [Finding(STOP, "SYNC_FAILED", "", text, [again if slow else fine])]

    def _agreed(self, report: Report) -> Report:
        """Rank 0's report, on every rank: the launcher sees one exit code."""
        if self._place.rank == 0:
            self._board.put("report", report.as_json())
            return report
        return Report.from_json(self._board.get("report", 0, _FACTS_S))

    def _limit_s(self) -> float:
        """How long the stages before may take rank 0."""
        hosts = len(self._hosts)
        rounds = len(rate.rounds(hosts)) + rate.MAX_REPEATS
        rates_s = rounds * (6 * self._plan.seconds + _SLACK_S)
        return 3 * _FACTS_S + 2 * _reach_limit_s(hosts) + rates_s


def _reach_limit_s(hosts: int) -> float:
    """How long a host may ask: 64 questions at a time, each with a silent connect or answer."""
    batches = math.ceil(hosts / _MAX_QUESTIONS)
    batches += math.ceil(hosts * max(1 + reach.MAX_ELSEWHERE, _MAX_PORTS) / _MAX_QUESTIONS)
    return 2 * _CONNECT_S * (batches + 1)


def _stops(findings: Sequence[Finding]) -> bool:
    return any(finding.level == STOP for finding in findings)

"""The stages, in order. Every host gathers; rank 0 judges and writes the verdict for all."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from pycomm import errors
from pycomm.doctor import flow, local, probe, rate, rate_findings, reach, sync, system
from pycomm.doctor.board import Board
from pycomm.doctor.facts import STOP, Finding, HostFacts, listed, unique_names
from pycomm.doctor.meeting import Place, Roster, choose_address, meet, with_choice
from pycomm.doctor.report import Report

_FACTS_S = 30.0
_CONNECT_S = 3.5
"""A second question after 1 s and a third after 3 s: one lost packet is no firewall."""
_MAX_QUESTIONS = 64
_LEAVE_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What the user wants."""

    seconds: float = 1.5
    """Per measurement in the first round; half of it in later ones."""
    parameters: float = 62.5e6
    reach_only: bool = False
    wait_s: float = 60.0
    strict: bool = False
    progress: Callable[[str], None] = lambda _: None


def examine(store: Any, place: Place, environ: Mapping[str, str], plan: Plan) -> Report:
    """Runs all stages as one rank; every rank gets the same report.

    Args:
        store: A ``torch.distributed.Store`` with nothing in it.
        place: Which rank this is.
        environ: ``os.environ``.
        plan: What to do.

    Raises:
        TimeoutError: The others have not come, or went away.
        DistError: The store was lost.
    """
    begin = time.monotonic()
    board = Board(store, place.rank)
    plan.progress(f"waiting for {place.size} ranks")
    roster = meet(board, place, environ, plan.wait_s)
    examination = _Examination(board, place, environ, plan, roster, begin)
    with contextlib.closing(examination):
        report = examination.report(store)
    board.put("left", True)
    if place.rank == 0:  # the store may be this process's own
        board.collect("left", roster.ranks, _LEAVE_S)
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

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def report(self, store: Any) -> Report:
        findings: list[Finding] = []
        probes: list[probe.Probe] = []
        flows: list[flow.Flow] = []
        stages = ["local"]
        if self._place.rank in self._leaders:
            findings = [*self._missing(), *self._gather(), *local.judge(self._facts)]
            if len(self._facts) > 1:
                stages.append("reach")
                probes = self._reach()
                findings += reach.judge(self._facts, probes)
                if not self._plan.reach_only:
                    stages.append("rate")
                    flows = self._rates(reach.reachable(probes))
                    findings += rate_findings.judge(self._facts, flows)
        syncs, trouble = self._sync(store, findings)
        report = Report(
            hosts=self._facts,
            findings=[*findings, *trouble],
            rates=rate.table(len(self._facts), flows) if flows else (),
            rtts_ms=[reach.rtt_ms(index, probes) for index in range(len(self._facts))],
            syncs=syncs,
            parameters=self._plan.parameters,
            seconds=time.monotonic() - self._begin,
            stages=[*stages, "sync"] if syncs else stages,
            strict=self._plan.strict,
        )
        return self._agreed(report)

    # Stage 0

    def _missing(self) -> list[Finding]:
        count = self._place.size - len(self._roster.ranks)
        if count == 0:
            return []
        names = [str(n) for n in range(self._place.size) if n not in self._roster.ranks]
        what = "node rank" if self._place.by_hand else "rank"
        text = f"{what} {listed(names)} did not come within {self._plan.wait_s:.0f} s"
        todo = [
            "Was the doctor started there? If it had no answer from here, its screen has the line "
            "to open this host's firewall."
        ]
        return [Finding(STOP, "MISSING", "", text, todo)]

    def _gather(self) -> list[Finding]:
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
        if len(everyone) < place.size:  # not all are known: the first guess
            everyone = []
        facts = with_choice(facts, choose_address(self._environ, place.master, everyone, index))
        trouble = ""
        ports = (facts.port_range[0], facts.port_range[1])
        handlers = flow.Station().handlers()
        try:
            self._server = probe.Server(roster.token, facts.process, ports, handlers)
        except OSError:  # the range is full, which is a finding of its own
            self._server = probe.Server(roster.token, facts.process, (0, 0), handlers)
        if place.by_hand and place.rank == 0:
            trouble = self._server.also_listen(place.master_port)
        facts = dataclasses.replace(
            facts, ranks=self._hosts[self._leaders.index(place.rank)], port=self._server.port
        )
        self._board.put("facts", [facts.to_json(), trouble])
        found = self._board.collect("facts", self._leaders, _FACTS_S)
        silent = [rank for rank in self._leaders if rank not in found]
        self._leaders = [rank for rank in self._leaders if rank in found]
        known = [HostFacts.from_json(found[rank][0]) for rank in self._leaders]
        names = unique_names([one.name for one in known], [one.address for one in known])
        self._facts = [
            dataclasses.replace(one, name=name) for one, name in zip(known, names, strict=True)
        ]
        taken = [
            _port_taken(self._facts[index], found[rank][1])
            for index, rank in enumerate(self._leaders)
            if found[rank][1]
        ]
        return [*map(_went_silent, silent), *taken]

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
            address = next(iter(self._facts[here].master_addresses), self._facts[0].address)
            port = self._place.master_port
            questions.append(
                probe.Probe(source=here, target=0, purpose=probe.STORE, address=address, port=port)
            )
        answers = self._ask(questions)
        lost = [one for one in answers if one.purpose == probe.LINK and not one.ok]
        answers += self._ask([other for one in lost for other in self._elsewhere(one)])
        self._board.put("reach", [dataclasses.asdict(one) for one in answers])
        found = self._board.collect("reach", self._leaders, 4 * _CONNECT_S)
        return [probe.Probe(**raw) for rank in self._leaders for raw in found.get(rank, ())]

    def _ask(self, questions: Sequence[probe.Probe]) -> list[probe.Probe]:
        if not questions:
            return []
        with ThreadPoolExecutor(min(len(questions), _MAX_QUESTIONS)) as pool:
            asked = pool.map(lambda q: probe.ask(q, self._roster.token, _CONNECT_S), questions)
            return reach.with_strangers(self._facts, asked)

    def _elsewhere(self, lost: probe.Probe) -> Iterator[probe.Probe]:
        """The other addresses of a host that was not reached where the engine would listen."""
        host = self._facts[lost.target]
        family = host.chosen.family if host.chosen else "ipv4"
        for one in host.interfaces:
            usable = one.family == family and not one.loopback and one.address != host.address
            if usable and not one.address.startswith("fe80:"):
                yield dataclasses.replace(
                    lost, purpose=probe.ELSEWHERE, address=one.address, outcome=probe.OK, detail=""
                )

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
                (other.address, other.port),
                self._roster.token,
                seconds,
                flow.DIRECTIONS[:2] if alone else flow.DIRECTIONS,
                alone=alone,
            )
            self._board.put(topic, [dataclasses.asdict(one) for one in measured])
        ranks = [self._leaders[index] for index in sorted(asking)]
        found = self._board.collect(topic, ranks, 6 * seconds + 20.0)
        return [
            flow.Flow(**{**raw, "bins": tuple(raw["bins"])})
            for rank in ranks
            for raw in found.get(rank, ())
        ]

    # Stage 3

    def _sync(
        self, store: Any, findings: Sequence[Finding]
    ) -> tuple[list[sync.Sync], list[Finding]]:
        """All ranks take part, also those that speak for no host."""
        stopped = any(finding.level == STOP for finding in findings)
        enough = len(self._roster.ranks) == self._place.size > 1
        if self._place.rank == 0:
            self._board.put("go", enough and not stopped and not self._plan.reach_only)
        if not self._board.get("go", 0, self._limit_s()):
            return [], []
        self._plan.progress("stage 3: one sync with the real engine")
        try:
            inner = dist.PrefixStore("sync", store)  # type: ignore[attr-defined]
            return sync.measure(inner, self._place.rank, self._place.size), []
        except (errors.PycommError, ValueError, RuntimeError) as error:
            text = f"{type(error).__name__}: {error}".partition(" [code=")[0]
            todo = ["All stages before were fine, so please report this with the screen."]
            return [], [Finding(STOP, "SYNC_FAILED", "", text, todo)]

    def _agreed(self, report: Report) -> Report:
        """Rank 0's report, on every rank: the launcher sees one exit code."""
        if self._place.rank == 0:
            self._board.put("report", report.as_json())
            return report
        return Report.from_json(self._board.get("report", 0, _FACTS_S))

    def _limit_s(self) -> float:
        """How long the stages before may take rank 0."""
        rounds = len(rate.rounds(len(self._hosts))) + 4
        return 3 * _FACTS_S + 8 * _CONNECT_S + rounds * (6 * self._plan.seconds + 20.0)


def _port_taken(host: HostFacts, trouble: str) -> Finding:
    text = f"{host.name}: port {host.master_port}, for torch's store, is taken ({trouble})"
    todo = [
        "Another --master-port, or end what has it:",
        f"$ ss -ltnp 'sport = :{host.master_port}'",
    ]
    return Finding(STOP, "STORE_PORT_TAKEN", host.name, text, todo)


def _went_silent(rank: int) -> Finding:
    text = f"rank {rank} came and then wrote nothing more"
    return Finding(STOP, "WENT_SILENT", "", text, ["Its own output shows why it ended."])

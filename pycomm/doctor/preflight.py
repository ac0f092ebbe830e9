"""``PYCOMM_PREFLIGHT=1``: the hosts of a job are compared when its default group is made.

Stage 0 of the doctor, passively: no resolver is asked, no port is opened, nothing is sent at speed.
One process per host leaves its facts in the job's store, and rank 0 logs what differs. It never
raises, and only rank 0 waits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pycomm._native import loader
from pycomm.doctor import local, system
from pycomm.doctor.facts import LEVELS, HostFacts, listed, unique_names
from pycomm.options import ResolvedOptions

logger = logging.getLogger("pycomm")

WAIT_S = 5.0
"""Rank 0, for facts that are not there. The ranks have met already, so they write at once. At most
a quarter of the group's timeout: the other ranks may be in their first operation."""
_MAX_FINDINGS = 4
_MAX_NCHARS = 400
_EXPECTED = ("CORES", "FEW_CORES")
"""A container's quota is no mistake, and ranks may be pinned to cores of their own: one speaks for
all of a host."""
_HARMLESS = ("OWN_NAME_LOOPBACK",)
# Versions that the store may have: not the interpreter's path.
_VERSIONS = ("pycomm", "torch", "python")


class Preflight:
    """One rank's part. Make it before the group, which opens files of its own."""

    def __init__(self, options: ResolvedOptions) -> None:
        self._facts: HostFacts | None = None
        self._wait_s = min(WAIT_S, options.timeout / 4)
        try:
            self._facts = system.passive_facts(options)
        except Exception as error:  # of any kind: the job goes on
            logger.warning("preflight: this host is not examined: %r", error)

    def run(self, backend: Any, store: Any, rank: int) -> None:
        """Writes this host's facts; on rank 0, also compares all and logs the result.

        Args:
            backend: Of the group, which has been made.
            store: Of the group.
            rank: In the group.
        """
        if self._facts is None:
            return
        try:
            exchange = _Exchange(backend, store, rank)
            exchange.write(_for_the_store(self._facts, loader.native.describe_backend(backend)))
            if rank == 0:
                for level, line in as_lines(*exchange.collect(self._wait_s)):
                    logger.log(level, "preflight: %s", _printable(line))
        except Exception as error:  # of any kind: the job goes on
            logger.warning("preflight: the hosts are not compared: %s", _printable(str(error)))


class _Exchange:
    """The records in the store: one per rank, which has the facts or names the rank that has."""

    def __init__(self, backend: Any, store: Any, rank: int) -> None:
        self._backend = backend
        self._store = store
        self._rank = rank
        # A store may outlive its ranks: what ranks of another run left is not of this job.
        self._prefix = f"pycomm/preflight/{loader.native.group_run(backend)}"

    def write(self, facts: HostFacts) -> None:
        """Of the ranks of a host, the first that comes writes the facts."""
        identity = hashlib.sha256(system.host_identity().encode()).hexdigest()[:16]
        claim = f"{self._prefix}/host/{identity}"
        first = self._store.compare_set(claim, "", self._sealed(claim, str(self._rank)))
        leader = int(self._opened(claim, first))
        key = self._key(self._rank)
        text = facts.to_json() if leader == self._rank else json.dumps({"leader": leader})
        self._store.set(key, self._sealed(key, text))

    def collect(self, seconds: float) -> tuple[list[HostFacts], Mapping[int, str]]:
        """The hosts' facts in rank order; and by rank, the hosts of the ranks without a record."""
        names: Sequence[str] = loader.native.rank_hosts(self._backend)
        missing = self._wait(range(len(names)), seconds)
        ranks = [rank for rank in range(len(names)) if rank not in missing]
        keys = [self._key(rank) for rank in ranks]
        texts = [
            self._opened(key, value)
            for key, value in zip(keys, self._store.multi_get(keys), strict=True)
        ]
        leaders = {
            rank: int(json.loads(text).get("leader", rank))
            for rank, text in zip(ranks, texts, strict=True)
        }
        hosts = []
        for rank, text in zip(ranks, texts, strict=True):
            if leaders[rank] == rank:
                mine = [other for other in ranks if leaders[other] == rank]
                hosts.append(dataclasses.replace(HostFacts.from_json(text), ranks=mine))
        hosts.sort(key=lambda host: host.ranks[0])
        return hosts, {rank: names[rank] for rank in missing}

    def _wait(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """Returns the ranks without a record when time is up."""
        deadline, pause_s = time.monotonic() + seconds, 0.002
        while not self._store.check([self._key(rank) for rank in ranks]):
            if time.monotonic() >= deadline:
                return [rank for rank in ranks if not self._store.check([self._key(rank)])]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        return []

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _sealed(self, key: str, value: str) -> str:
        sealed: str = loader.native.group_seal(self._backend, key, value)
        return sealed

    def _opened(self, key: str, value: bytes) -> str:
        """Raises an error if the group has a secret and the writer did not know it."""
        text = bytes(value).decode(errors="replace")
        opened: str = loader.native.group_open(self._backend, key, text)
        return opened


def as_lines(hosts: Sequence[HostFacts], missing: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """What rank 0 logs, with the levels of ``logging``.

    Args:
        hosts: In rank order.
        missing: By rank, the host's name, of ranks that left no facts.
    """
    names = unique_names([host.name for host in hosts], [host.address for host in hosts])
    hosts = [dataclasses.replace(one, name=name) for one, name in zip(hosts, names, strict=True)]
    found = [one for one in local.judge(hosts) if one.code not in _EXPECTED] if hosts else []
    found.sort(key=lambda one: LEVELS.index(one.level))
    serious = [one for one in found if one.code not in _HARMLESS]
    if not serious and not missing:
        yield logging.INFO, _alike(hosts)
    if missing:
        ranks = listed([str(rank) for rank in missing])
        yield (
            logging.WARNING,
            f"no facts of rank {ranks} ({listed(list(dict.fromkeys(missing.values())))}) in time. "
            "Set PYCOMM_PREFLIGHT=1 on all hosts.",
        )
    for finding in serious[:_MAX_FINDINGS]:
        yield logging.WARNING, finding.as_line()
    if (more := len(serious) - _MAX_FINDINGS) > 0:
        yield logging.WARNING, f"{more} more findings: python -m pycomm doctor prints all."
    for finding in found:
        if finding.code in _HARMLESS:
            yield logging.INFO, finding.as_line()


def _alike(hosts: Sequence[HostFacts]) -> str:
    first = hosts[0]
    facts = [f"{name} {first.versions.get(name, '?')}" for name in _VERSIONS]
    if first.chosen is not None:
        facts += [f"{first.interface} MTU {first.chosen.mtu}"]
    facts += [local.secret_text(first.secret)]
    return (
        f"{len(hosts)} host{'s alike' if len(hosts) > 1 else ', no findings'}: {', '.join(facts)}"
    )


def _for_the_store(facts: HostFacts, backend: str) -> HostFacts:
    """What others need to know. Anybody who reaches the store can read it.

    Args:
        facts: Of this host.
        backend: ``describe_backend()``, the only text that has the interface in use.
    """
    used = re.search(r"\bTCP on (\S+) \((\S+);", backend)
    name, address = used.groups() if used else ("", "")
    return dataclasses.replace(
        facts,
        versions={name: facts.versions[name] for name in _VERSIONS},
        interface_setting="",
        interface_origin="",
        interface=name,
        address=address,
        interfaces=[one for one in facts.interfaces if (one.name, one.address) == (name, address)],
    )


def _printable(text: str) -> str:
    """One line: without a secret, anybody may have written into the store."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= _MAX_NCHARS else f"{shown[: _MAX_NCHARS - 1]}…"

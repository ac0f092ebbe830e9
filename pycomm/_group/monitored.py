"""A barrier that names missing ranks, and leaves the group usable."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pycomm._group.creation import group_timeout, last_error, native_backend, next_number
from pycomm._native import loader
from pycomm._native.flight_record import group_text
from pycomm._settings import timeout_seconds
from pycomm.errors import BY_CODE, PycommError, UnsupportedError

# How often a waiting rank checks whether the group has failed.
_LOOK_S = 0.25
_PASSED = "passed"
_REFUSED = "refused "
_CAME = "came"
_first_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""On rank 0: the first call whose keys may still be in the store."""


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Waits until all ranks of a group have called this; names those that have not.

    Replaces ``torch.distributed.monitored_barrier``, which supports gloo only. Ranks meet in the
    group's store and not over its connections, so a late rank ends the barrier and not the group:
    you can use the group afterwards, and try the barrier again.

    Args:
        group: A group of pycomm; default: the default group.
        timeout: How long to wait: seconds or a timedelta. Default: the group's timeout.
        wait_all_ranks: A rank whose process has died ends the barrier at once, naming that rank.
            With True the barrier waits for the others until time is up, and then names every
            missing rank.

    Raises:
        CollectiveTimeoutError: On every rank that waited: which ranks, on which hosts, were
            missing when time was up. A rank that comes later gets it, too.
        PycommError: The group has failed; only with ``wait_all_ranks=False``.
        ProtocolViolationError: The group has a secret, and somebody without it has written what a
            rank writes into the store for this (a ConfigMismatchError on the rank that reads it if
            it has no seal at all).
        UnsupportedError: The members of the group can change (docs/reconfigure.md).
        ValueError: The group is not pycomm's, or ``timeout`` is no number above 0.

    Blocks the calling thread. Cost: two store calls per rank, and on rank 0 two for each rank.
    """
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    if dist.distributed_c10d._rank_not_in_group(group):
        return
    backend = native_backend(group)
    if loader.native.is_reconfigurable(backend):
        raise UnsupportedError(
            "monitored_barrier needs a store that all ranks share, which a group that can be "
            "reconfigured does not have. Try: dist.barrier(), whose error names who is missing"
        )
    if timeout is None:
        timeout_s = group_timeout(group).total_seconds()
    else:
        timeout_s = timeout_seconds("monitored_barrier: timeout", timeout)
    number = next_number(group, "monitored_barrier")
    _Round(group, backend, number, timeout_s, wait_all_ranks).run()


class _Round:
    """One call on one rank. Rank 0 collects who has come and writes the verdict for the others."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: Any,
        number: int,
        timeout_s: float,
        wait_all_ranks: bool,
    ) -> None:
        self.group = group
        self.backend = backend
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        """What errors call the ranks: their numbers in the job, by their number in the group."""
        self.hosts: Sequence[str] = loader.native.rank_hosts(backend)
        self.store = dist.distributed_c10d._get_process_group_store(group)
        self.run_number: int = loader.native.group_run(backend)
        self.number = number
        self.wait_all_ranks = wait_all_ranks
        self.timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s

    def run(self) -> None:
        rank = self.group.rank()
        self._write("came", rank, value=_CAME)
        if rank != 0:
            # A little longer than rank 0 itself waits: its verdict has more than this rank knows.
            grace_s = max(1.0, self.timeout_s * 0.1)
            if self._wait_for(self._key("verdict"), grace_s=grace_s):
                verdict = self._read("verdict")
            else:
                verdict = self._conclude(self._without_a_key() or [0])
        else:
            came = [self._has_come(peer) for peer in range(self.group.size())]
            verdict = self._conclude([peer for peer, here in enumerate(came) if not here])
            if all(came):
                self._forget_earlier()
        if verdict.startswith(_REFUSED):
            raise self._refused(int(verdict[len(_REFUSED) :]))
        if verdict != _PASSED:
            raise self._missing([int(each) for each in verdict.split(",")])

    def _conclude(self, missing: Sequence[int]) -> str:
        return self._decide(",".join(map(str, missing)) or _PASSED)

    def _decide(self, verdict: str) -> str:
        # The first verdict counts, so that rank 0 cannot pass when it comes after the others left.
        key = self._key("verdict")
        return self._opened(key, self.store.compare_set(key, "", self._sealed(key, verdict)))

    def _without_a_key(self) -> list[int]:
        """The ranks that have not come; none if all have, and rank 0 does not go on."""
        ranks = range(self.group.size())
        return [peer for peer in ranks if not self.store.check([self._key("came", peer)])]

    def _has_come(self, peer: int) -> bool:
        if not self._wait_for(self._key("came", peer)):
            return False
        try:
            self._read("came", peer)
        except PycommError:
            self._decide(f"{_REFUSED}{peer}")  # else the others would wait for this rank
            raise
        return True

    def _write(self, what: str, *parts: int, value: str) -> None:
        key = self._key(what, *parts)
        self.store.set(key, self._sealed(key, value))

    def _read(self, what: str, *parts: int) -> str:
        key = self._key(what, *parts)
        return self._opened(key, self.store.get(key))

    def _opened(self, key: str, value: bytes) -> str:
        """Raises an error if the group has a secret and the writer did not know it."""
        text = bytes(value).decode(errors="replace")
        opened: str = loader.native.group_open(self.backend, self._sealed_name(key), text)
        return opened

    def _sealed(self, key: str, value: str) -> str:
        # By the secret that the group was made with: a file may have changed since.
        sealed: str = loader.native.group_seal(self.backend, self._sealed_name(key), value)
        return sealed

    def _sealed_name(self, key: str) -> str:
        # A value that is sealed for one group is invalid in another: its keys have another prefix.
        return f"{self.group.group_name}/{key}"

    def _key(self, what: str, *parts: int, number: int | None = None) -> str:
        words = [self.number if number is None else number, what, *parts]
        # A store may outlive its ranks: what ranks of another run left is not for this group.
        return "/".join(map(str, ["pycomm/monitored_barrier", self.run_number, *words]))

    def _wait_for(self, key: str, *, grace_s: float = 0.0) -> bool:
        while not self.store.check([key]):
            left_s = self.deadline_s + grace_s - time.monotonic()
            if left_s <= 0:
                return False
            try:
                self.store.wait([key], timedelta(seconds=max(0.01, min(_LOOK_S, left_s))))
            except dist.DistNetworkError:
                raise  # the store is lost
            except RuntimeError:  # time is up; not every store has an exception class for it
                self._raise_if_failed()
        return True

    def _raise_if_failed(self) -> None:
        record = None if self.wait_all_ranks else last_error(self.group)
        if record is not None:
            error = BY_CODE.get(str(record["code"]), BY_CODE["INTERNAL"])
            raise error(f"monitored_barrier: the group has failed: {record['summary']}", record)

    def _missing(self, ranks: Sequence[int]) -> Exception:
        own = self.group.rank()
        named = ", ".join(f"{self.ranks[rank]} (on {self.hosts[rank]})" for rank in ranks)
        summary = (
            f"timed out after {self.timeout_s:g} s: rank{'s' * (len(ranks) > 1)} {named} of "
            f"{self._of_whom()} did not enter it."
        )
        if own in ranks:
            summary += f" This is rank {self.ranks[own]}: it came too late."
        hint = "look at what these ranks are doing: an exception? a slow loader? other calls?"
        first = ranks[0]
        missing = [self.ranks[rank] for rank in ranks]
        about = {"peer": missing[0], "peer_host": self.hosts[first], "missing": missing}
        return self._error("TIMEOUT", f" {summary}", hint, about)

    def _of_whom(self) -> str:
        if self.group is dist.distributed_c10d._get_default_group():
            return str(self.group.size())
        desc = self.group.group_desc
        called = self.group.group_name if desc in ("", "undefined") else desc
        return group_text(called, self.ranks)

    def _refused(self, peer: int) -> Exception:
        summary = (
            f": what the store has from rank {self.ranks[peer]} was not written with the "
            f"secret of this group; rank {self.ranks[0]} has the details."
        )
        hint = "look for another program that writes into this store"
        return self._error("PROTOCOL_VIOLATION", summary, hint, {})

    def _error(self, code: str, what: str, hint: str, about: Mapping[str, Any]) -> Exception:
        """An error of this round: ``what`` follows its name."""
        own = self.group.rank()
        summary = f"monitored_barrier #{self.number}{what}"
        record = {
            "code": code,
            "summary": summary,
            "hint": hint,
            "rank": self.ranks[own],
            "host": self.hosts[own],
            "op": "monitored_barrier",
            "sequence": self.number,
            **about,
        }
        return BY_CODE[code](f"{summary} Try: {hint}", record)

    def _forget_earlier(self) -> None:
        # All ranks have come to this round, so each has read earlier verdicts. A late
        # rank needs those: only a complete round may delete them.
        first = _first_kept.get(self.group, 1)
        _first_kept[self.group] = self.number
        for number in range(first, self.number):
            keys = [self._key("came", rank, number=number) for rank in range(self.group.size())]
            try:
                for key in [*keys, self._key("verdict", number=number)]:
                    self.store.delete_key(key)
            except (RuntimeError, NotImplementedError):  # not every store can delete
                return

"""All that the doctor found: what the screen shows, and what ``--json`` prints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pycomm.doctor.facts import LEVELS, NOTE, SLOW, STOP, Finding, HostFacts, known
from pycomm.doctor.rate import HostRate
from pycomm.doctor.sync import Sync

READY, BUT_SLOW, NOT_READY, NOT_JUDGED = "READY", "READY, BUT SLOW", "NOT READY", "NOT JUDGED"
_EXITS = {READY: 0, NOT_JUDGED: 0, NOT_READY: 1, BUT_SLOW: 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one run."""

    hosts: Sequence[HostFacts] = ()
    findings: Sequence[Finding] = ()
    rates: Sequence[HostRate] = ()
    rtts_ms: Sequence[float | None] = ()
    syncs: Sequence[Sync] = ()
    parameters: float = 0.0
    seconds: float = 0.0
    reason: str = ""
    """Why nothing was judged; "" if it was."""
    stages: Sequence[str] = ()
    """What was run."""
    strict: bool = False
    alone: bool = False
    """Asked to look at one host only."""

    @property
    def verdict(self) -> str:
        if self.reason:
            return NOT_JUDGED
        levels = {finding.level for finding in self.findings}
        return NOT_READY if STOP in levels else (BUT_SLOW if SLOW in levels else READY)

    @property
    def exit_code(self) -> int:
        """0 ready or not judged, 1 would not start, 3 starts and is slow."""
        if self.strict and self.verdict == NOT_JUDGED:
            return 1
        return _EXITS[self.verdict]

    @property
    def problems(self) -> list[Finding]:
        """What keeps the verdict from being READY, the worst first."""
        found = [finding for finding in self.findings if finding.level != NOTE]
        return sorted(found, key=lambda finding: LEVELS.index(finding.level))

    @property
    def notes(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == NOTE]

    def as_json(self) -> dict[str, Any]:
        """For programs, and for the other ranks."""
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            **dataclasses.asdict(self),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Report:
        """Of ``as_json``, also of another version: unknown fields are left out."""
        fields = known(cls, raw)
        fields["hosts"] = [HostFacts.from_json(json.dumps(one)) for one in raw["hosts"]]
        fields["findings"] = [Finding(**known(Finding, one)) for one in raw["findings"]]
        fields["rates"] = [HostRate(**known(HostRate, one)) for one in raw["rates"]]
        fields["syncs"] = [Sync(**known(Sync, one)) for one in raw["syncs"]]
        return cls(**fields)

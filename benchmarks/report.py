"""Rows, statistics, and the table as text and as JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

SCHEMA = 1
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Versus:
    """How this row's backend compares with the first backend, from pairs of neighbouring blocks."""

    subject: str
    ratio: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True)
class Row:
    workload: str
    backend: str
    ranks: int
    size_bytes: int
    count: int
    dtype: str
    redop: str
    ops: int
    p50_us: float
    p99_us: float
    algbw_gbps: float
    busbw_gbps: float | None
    wrong: int
    checked: int
    cpu_s_per_op: float
    cpu_s_per_gb: float
    versus: Versus | None

    @staticmethod
    def from_json(text: str | bytes) -> Row:
        fields = json.loads(text)
        versus = fields.pop("versus")
        return Row(**fields, versus=None if versus is None else Versus(**versus))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def paired_ratio(subject: str, mine: Sequence[float], others: Sequence[float]) -> Versus:
    """Compare block medians pair by pair: the median of other / mine with a 95 % interval.

    The interval is the bootstrap's: the pairs are drawn again with repetition, 2,000 times. A
    drift of the machine that lasts longer than two blocks touches both halves of a pair alike.
    """
    ratios = np.asarray(others, dtype=np.float64) / np.asarray(mine, dtype=np.float64)
    draws = np.random.default_rng(0).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return Versus(subject, float(np.median(ratios)), float(low), float(high), len(ratios))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _commit() -> str:
    commit = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    return f"{commit} (with changes)" if _git("status", "--porcelain") else commit


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def header(table: str, argv: Sequence[str]) -> dict[str, Any]:
    """Describe what a reader needs to judge the numbers and to repeat them."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    main = getattr(sys.modules["__main__"], "__file__", None)  # none in a process of pytest-xdist
    script = Path(main or table).name
    return {
        "table": table,
        "command": shlex.join(["python", f"benchmarks/{script}", *argv]),
        "commit": _commit(),
        "pycomm": _version("torch-pycomm"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def busy_s() -> float:
    """CPU seconds that all processes of the machine have used, less those of ended children."""
    user, nice, system, _, _, hard, soft, *_ = map(
        int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    )
    children = os.times()
    mine = children.children_user + children.children_system
    return (user + nice + system + hard + soft) / os.sysconf("SC_CLK_TCK") - mine


COLUMNS = (
    f"{'backend':<8} {'ranks':>5} {'size':>11} {'count':>10} {'type':>8} {'redop':>5} "
    f"{'p50':>10} {'p99':>10} {'algbw':>7} {'busbw':>7} {'#wrong':>6} {'cpu/op':>10} {'cpu/GB':>8} "
    "  time / first"
)
UNITS = (
    f"{'':<8} {'':>5} {'(B)':>11} {'(elements)':>10} {'':>8} {'':>5} "
    f"{'(us)':>10} {'(us)':>10} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6} {'(us)':>10} {'(s)':>8} "
    "  median [95 % interval]"
)


def text_facts(facts: dict[str, Any]) -> str:
    return "\n".join(f"# {name:<14} {value}" for name, value in facts.items())


def text_header(facts: dict[str, Any]) -> str:
    return "\n".join([text_facts(facts), COLUMNS, UNITS])


def text_row(row: Row) -> str:
    busbw = "-" if row.busbw_gbps is None else f"{row.busbw_gbps:.3f}"
    line = (
        f"{row.backend:<8} {row.ranks:>5} {row.size_bytes:>11} {row.count:>10} {row.dtype:>8} "
        f"{row.redop:>5} {row.p50_us:>10.1f} {row.p99_us:>10.1f} {row.algbw_gbps:>7.3f} {busbw:>7} "
        f"{row.wrong:>6} {row.cpu_s_per_op * 1e6:>10.1f} {row.cpu_s_per_gb:>8.3g}"
    )
    if row.versus is None:
        return line
    pair = row.versus
    return f"{line}   {pair.ratio:.2f} [{pair.low:.2f}, {pair.high:.2f}] x {pair.subject}"


class Report:
    """Prints the table while it grows and writes the files at the end."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.rows: list[Row] = []
        self.lines: list[str] = []
        self._print(text_header(facts))

    def _print(self, text: str) -> None:
        self.lines.append(text)
        print(text, flush=True)

    def add_json(self, text: str | bytes) -> None:
        """Add what a rank has sent: a row, or a remark."""
        self.add(json.loads(text) if text[:1] in ('"', b'"') else Row.from_json(text))

    def add(self, row: Row | str) -> None:
        if isinstance(row, str):
            self._print(f"# {row}")
            return
        if row.checked == 0:
            raise RuntimeError(f"{row.backend} at {row.size_bytes} B: nothing was checked")
        if row.workload != (self.rows[-1].workload if self.rows else self.facts["table"]):
            self._print(f"# {row.workload}")
        self.rows.append(row)
        self._print(text_row(row))

    def finish(self, out: Path | None, json_path: Path | None) -> int:
        """Write the files and return the exit status: 1 if any element was wrong."""
        wrong = sum(row.wrong for row in self.rows)
        checked = sum(row.checked for row in self.rows)
        self._print(f"# {checked} elements checked, {wrong} wrong")
        if out is not None:
            out.write_text("\n".join(self.lines) + "\n")
        if json_path is not None:
            table = {
                "schema": SCHEMA,
                "header": self.facts,
                "rows": [asdict(row) for row in self.rows],
            }
            json_path.write_text(json.dumps(table, indent=1) + "\n")
        return 1 if wrong else 0

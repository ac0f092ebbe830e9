"""Each fault: what pycomm and what gloo do. Writes the table into docs/evidence/faults.md.

python tests/rig/fault_table.py [--only WORD] [--print]

Three ranks on this host, each backend over what it takes by default there (pycomm shared memory,
gloo TCP, once more with torch's TORCH_DISTRIBUTED_DEBUG=DETAIL), one run of each after the other,
10 s timeout given to the group: gloo's own default is 30 minutes, and nobody would wait for it
here. Whatever runs longer than 25 s is killed and counts as hanging. All takes some 10 minutes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rank_child import describe_exception, mark
from ranks import RankResult, start_ranks

ROOT = Path(__file__).resolve().parents[2]
WORLD_SIZE = 3
VICTIM = 1
TIMEOUT_S = 10.0
LIMIT_S = 25.0
DOCUMENT = ROOT / "docs" / "evidence" / "faults.md"
BEGIN, END = "<!-- fault table: begin -->", "<!-- fault table: end -->"

COLUMNS: dict[str, dict[str, str | None]] = {
    "pycomm": {},
    "gloo": {},
    "gloo, DETAIL": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
}
"""The backend and the environment of each column."""

KILLED = ("a rank is killed in an all_reduce", "a rank is stopped (SIGSTOP) in an all_reduce")


def _loop(numel: int) -> None:
    import torch
    import torch.distributed as dist

    for step in range(100_000):
        if step == 3:
            mark("in the middle")
        dist.all_reduce(torch.ones(numel))


def _calls(fault: str, odd: bool) -> None:
    """What the ranks call in the faults that are mistakes; ``odd`` is the rank that makes it."""
    import torch
    import torch.distributed as dist

    ones, group_size = torch.ones, dist.get_world_size()

    def check(tensor: torch.Tensor, wanted: float) -> None:
        if not bool((tensor == wanted).all()):
            raise AssertionError(f"WRONG NUMBERS: {tensor.flatten()[:3].tolist()}")

    if fault == "another shape":
        dist.all_reduce(ones(100 + 50 * odd))
    elif fault == "another dtype":
        tensor = ones(100, dtype=torch.int32 if odd else torch.float32)
        dist.all_reduce(tensor)
        check(tensor, group_size)
    elif fault == "another reduce op":
        tensor = ones(100)
        dist.all_reduce(tensor, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
        check(tensor, group_size)
    elif fault == "another root":
        dist.broadcast(ones(100), 2 if odd else 0)
    elif fault == "two equal calls in another order":
        first, second = ones(100), 10 * ones(100)
        for tensor in (second, first) if odd else (first, second):
            dist.all_reduce(tensor)
        check(first, group_size)
    elif fault == "all_reduce where the others broadcast":
        dist.all_reduce(ones(100)) if odd else dist.broadcast(ones(100), 0)
    elif fault == "other split sizes in all_to_all":
        splits = [5, 4, 3] if odd else [4, 4, 4]
        dist.all_to_all_single(torch.empty(12), ones(12), [4, 4, 4], splits)
    elif fault == "a rank is late":
        if odd:
            time.sleep(TIMEOUT_S + 3)
        dist.all_reduce(ones(100))
    elif fault == "a rank raises an exception":
        if odd:
            raise ValueError("this rank's own mistake")
        dist.all_reduce(ones(100))
    elif fault == "a rank ends early":
        if odd:
            sys.exit(0)
        dist.all_reduce(ones(100))
    elif fault == "a rank destroys its group in the middle":
        dist.all_reduce(ones(1 << 20), async_op=True)
        if odd:
            dist.destroy_process_group()
            return
        dist.all_reduce(ones(1 << 20))
    elif fault in KILLED:
        _loop(25 << 18)
    elif fault == "a rank is killed between operations":
        if odd:
            mark("in the middle")
            os.kill(os.getpid(), signal.SIGKILL)
        _loop(100)
    dist.barrier()


MISTAKES = (
    "another shape",
    "another dtype",
    "another reduce op",
    "another root",
    "two equal calls in another order",
    "all_reduce where the others broadcast",
    "other split sizes in all_to_all",
)
AT_START = ("a rank never starts", "another world size", "two processes have one rank")
FAULTS = (
    *KILLED,
    "a rank is killed between operations",
    "a rank raises an exception",
    "a rank ends early",
    "a rank destroys its group in the middle",
    "a rank is late",
    *MISTAKES,
    *AT_START,
)


def live(rank: int, world_size: int, backend: str, fault: str, store: str) -> dict[str, Any]:
    """A rank's life; what it met and when."""
    import torch
    import torch.distributed as dist

    if backend == "pycomm":
        import pycomm  # noqa: F401
    began_s = time.monotonic()
    odd = rank == VICTIM
    if fault == "a rank never starts" and odd:
        return {}
    as_rank = rank - 1 if fault == "two processes have one rank" and odd else rank
    try:
        dist.init_process_group(
            backend,
            init_method=store,
            rank=as_rank,
            world_size=world_size + (odd and fault == "another world size"),
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        dist.all_reduce(torch.ones(10))
        began_s = time.monotonic()
        _calls(fault, odd)
    except Exception as error:
        return {"error": describe_exception(error), "began_s": began_s}
    return {"error": None, "s": time.monotonic() - began_s}


def run(column: str, fault: str) -> tuple[list[RankResult], float | None]:
    """All ranks' results, and when the parent struck, if it did."""
    struck_s = None
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"init": "none", "backend": None, "only_pycomm": False}
        options["env"] = COLUMNS[column]
        arguments = (column.partition(",")[0], fault, f"file://{folder}/store")
        with start_ranks(WORLD_SIZE, live, args=arguments, **options) as running:
            if fault in KILLED:
                for rank in range(WORLD_SIZE):
                    running.wait_for_mark(rank, "in the middle")
                number = signal.SIGKILL if fault == KILLED[0] else signal.SIGSTOP
                struck_s = running.kill(VICTIM, number)
                if number == signal.SIGSTOP:
                    deadline = time.monotonic() + LIMIT_S
                    others = [p for rank, p in running.processes.items() if rank != VICTIM]
                    while time.monotonic() < deadline and any(p.poll() is None for p in others):
                        time.sleep(0.05)
                    running.kill(VICTIM, signal.SIGKILL)
            return list(running.collect(LIMIT_S, grace_s=LIMIT_S)), struck_s


def cell(results: list[RankResult], struck_s: float | None, fault: str) -> tuple[str, str]:
    """The table's cell and the message of the first rank that said something."""
    others = [r for r in results if r.rank != VICTIM or fault in (*MISTAKES, *AT_START[1:])]
    errors, parts, seconds = [], [], []
    for result in others:
        error = result.value and result.value.get("error")
        if error:
            errors.append(error)
            began_s = struck_s if struck_s is not None else result.value["began_s"]
            seconds.append(error.monotonic_s - began_s)
    kinds: dict[str, int] = {}
    for result in others:
        error = result.value and result.value.get("error")
        if result.timed_out:
            what = f"**hangs**, killed after {LIMIT_S:.0f} s"
        elif result.exit_code < 0:
            name = signal.Signals(-result.exit_code).name
            what = f"**aborts** ({name}, exit {128 - result.exit_code})"
        elif error and "WRONG NUMBERS" in error.text:
            what = "**wrong numbers**, no error"
        elif error:
            what = f"`{error.type_name}`"
        elif result.exit_code == 0:
            what = "no error" if fault != "a rank destroys its group in the middle" else "ends well"
        else:
            what = f"exit {result.exit_code}"
        kinds[what] = kinds.get(what, 0) + 1
    for what, count in kinds.items():
        parts.append(f"{count} of {len(others)}: {what}" if len(kinds) > 1 else f"all: {what}")
    if seconds:
        parts.append(f"after {statistics.median(seconds):.2f} s")
    if errors:
        culprit = [
            bool(re.search(rf"ranks? {VICTIM}\b(?! successfully)|peer={VICTIM}\b", e.text, re.I))
            for e in errors
        ]
        named = f"{sum(culprit)} of {len(errors)}"
        parts.append("names the rank" if all(culprit) else f"{named} name the rank")
    said = next((e.text for e in errors if "WRONG" not in e.text), "")
    if not said:
        said = next((r.stderr.strip().splitlines()[-1] for r in others if r.stderr.strip()), "")
    return "; ".join(parts), said


def document(rows: list[tuple[str, dict[str, tuple[str, str]]]]) -> str:
    """What stands between the markers."""
    import torch

    from pycomm import _build_info

    # Of the extension that ran, which may be older than the checkout.
    commit, _, changes = _build_info.GIT_COMMIT.partition(" ")
    commit = f"{commit[:7] or 'unknown'} {changes}".strip()
    lines = [
        BEGIN,
        "",
        f"Written by `python tests/rig/fault_table.py` on {datetime.date.today()}: "
        f"{WORLD_SIZE} ranks on one host, pycomm in shared memory and gloo over "
        "TCP as by default, in the last column with `TORCH_DISTRIBUTED_DEBUG=DETAIL`, one run of "
        f"each, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.0f}, torch {torch.__version__}, Linux "
        f"{platform.release().split('-')[0]}, commit {commit}; {TIMEOUT_S:.0f} s timeout "
        f"given to all (gloo's default is 30 minutes). Rank {VICTIM} is the one at fault; the "
        "seconds are from the fault, or from entering the operation, to the exception.",
        "",
        f"| fault | {' | '.join(COLUMNS)} |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for fault, cells in rows:
        lines += [f"| {fault} | {' | '.join(cells[column][0] for column in COLUMNS)} |"]
    lines += ["", "What a rank reads, and what it reads with gloo:", ""]
    for fault, cells in rows:
        lines += [f"**{fault}**", ""]
        for column in COLUMNS:
            text = " ".join(cells[column][1].split())
            text = text if len(text) < 420 else text[:420] + " …"
            lines += [f"- {column}: `{text or '(nothing)'}`".replace("``", "`")]
        lines += [""]
    return "\n".join([*lines, END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name has this word")
    parser.add_argument("--print", action="store_true", help="print, do not write")
    arguments = parser.parse_args()
    rows = []
    for fault in [fault for fault in FAULTS if arguments.only in fault]:
        cells: dict[str, tuple[str, str]] = {}
        for column in COLUMNS:
            cells[column] = cell(*run(column, fault), fault)
            print(
                f"{fault} | {column} | {cells[column][0]}\n    {cells[column][1][:200]}",
                flush=True,
            )
        rows.append((fault, cells))
    table = document(rows)
    if arguments.print:
        print(table)
        return
    text = DOCUMENT.read_text()
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    DOCUMENT.write_text(text[:begin] + table + text[end:])


if __name__ == "__main__":
    # Ranks import this file by its name: one module, not two.
    import fault_table

    fault_table.main()

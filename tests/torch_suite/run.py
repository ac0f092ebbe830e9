"""Runs torch's DistributedTest suite for pycomm and gloo and compares: what gloo passes, we pass.

    python tests/torch_suite/run.py                     2 ranks, pycomm against the recorded gloo
    python tests/torch_suite/run.py --all               2, 3 and 4 ranks, both backends, both faces
    python tests/torch_suite/run.py --all --write       and docs/evidence/torch-suite.md from it

A test that gloo passes and pycomm fails or skips is a failure, unless it is listed in
``HARD_CODED`` with the reason why torch lets no backend but its own pass it, and failed with the
text that belongs to this reason. What only pycomm passes is counted, and the tests of ``MUST_PASS``
have to be among it. The names of the tests that gloo passes are kept in ``gloo.json``, so that with
the torch that is named there one run of one backend is enough to compare.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
RECORDED = FOLDER / "gloo.json"
PAGE = ROOT / "docs" / "evidence" / "torch-suite.md"
WORLD_SIZES = (2, 3, 4)


class HardCoded(NamedTuple):
    """A test that torch lets only its own backends pass."""

    why: str
    says: str
    """What the failure must contain."""
    or_says: str | None = None
    """In the words of another torch."""


_REFUSED_BELOW = (
    "Backend pycomm does not support monitoredBarrier, only GLOO supports monitored barrier."
)

_REFUSED = HardCoded(
    "`dist.monitored_barrier` refuses every group whose backend is not called gloo; "
    "`pycomm.monitored_barrier` replaces it",
    "ValueError: monitored_barrier is only implemented for GLOO backend.",
    _REFUSED_BELOW,  # torch 2.15
)
HARD_CODED = {
    "test_monitored_barrier_gloo": _REFUSED,
    "test_monitored_barrier_gloo_subgroup": _REFUSED,
    "test_monitored_barrier_failure_order": _REFUSED,
    "test_monitored_barrier_wait_all_ranks": _REFUSED,
    "test_monitored_barrier_gloo_rank_0_timeout": HardCoded(
        "`ProcessGroup.monitored_barrier` refuses every other backend as well, in other words",
        _REFUSED_BELOW,
    ),
    "test_ddp_logging_data_cpu": HardCoded(
        'torch\'s DDP logs the kind of backend, and calls every kind but its own "custom"; '
        "everything before that line of the test holds",
        "AssertionError: String comparison failed: 'custom' != 'pycomm'",
    ),
}


def is_hard_coded(name: str, outcome: Mapping[str, Any]) -> bool:
    """Whether a test failed for the reason that is stated for it, and no other."""
    expected = HARD_CODED.get(name)
    if expected is None or outcome["status"] != "fail":
        return False
    words = [expected.says, *filter(None, [expected.or_says])]
    return any(each in outcome["reason"] for each in words)


# What gloo does not do for want of a feature, by face.
MUST_PASS = {
    "nccl": [
        "test_all_gather_v_cuda",
        "test_all_gather_into_cat_tensor_cuda",
        "test_all_gather_into_stack_tensor_cuda",
        "test_all_to_all_cuda",
        "test_all_to_all_full_group_cuda",
        "test_batch_isend_irecv_self_nccl",
        "test_reduce_scatter_tensor_cuda",
        "test_reduce_scatter_v_cuda",
    ],
    "gloo": [],
}

# NCCL's tests of collectives, messages and groups; what it tests of DDP asks for CUDA itself.
TESTS = {
    "gloo": "",
    "nccl": "^test_(all_|batch_|broadcast|barrier|gather|scatter|send|recv|isend|irecv|reduce"
    "|new_sub)|SyncBatchNorm",
}

Outcomes = dict[str, dict[str, Any]]


def run(backend: str, world_size: int, face: str, tests: str) -> Outcomes:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes.json"
        command = [sys.executable, str(FOLDER / "run_one.py"), "--backend", backend]
        command += ["--world-size", str(world_size), "--face", face]
        command += ["--tests", tests or TESTS[face], "--out", str(out)]
        subprocess.run(command, check=True, timeout=3000)
        outcomes: Outcomes = json.loads(out.read_text())
    return outcomes


def counts(outcomes: Outcomes) -> dict[str, int]:
    """How many passed, failed and were skipped."""
    return {
        status: sum(each["status"] == status for each in outcomes.values())
        for status in ("pass", "fail", "skip")
    }


def problems(face: str, ours: Outcomes, gloo_passes: Collection[str], tests: str = "") -> list[str]:
    """Why a run of ``tests`` is not good enough, a line a test; empty if it is."""
    found = [] if ours else ["no test ran"]
    wanted = {name for name in (*gloo_passes, *MUST_PASS[face]) if re.search(tests, name)}
    found += [f"{name}: is not among the tests that ran" for name in sorted(wanted - set(ours))]
    for name, outcome in sorted(ours.items()):
        behind = name in gloo_passes and outcome["status"] != "pass"
        if behind and not is_hard_coded(name, outcome):
            last = (outcome["reason"].strip().splitlines() or [""])[-1]
            found.append(f"{name}: gloo passes it, pycomm has {outcome['status']}: {last}")
        if name in MUST_PASS[face] and outcome["status"] != "pass":
            found.append(f"{name}: must pass, has {outcome['status']}: {outcome['reason'][-500:]}")
    return found


def recorded_for(minor: str) -> dict[str, list[str]]:
    """What gloo passes with this minor of torch, by face and ranks; empty if it is not recorded."""
    if not RECORDED.exists():
        return {}
    kept = json.loads(RECORDED.read_text())
    passes: dict[str, list[str]] = kept["passes"] if kept["torch"] == minor else {}
    return passes


def summary(results: Collection[Outcomes]) -> str:
    """How pycomm's runs went, for the last line."""
    total = {"pass": 0, "fail": 0, "skip": 0}
    for outcomes in results:
        for status, number in counts(outcomes).items():
            total[status] += number
    reserved = sum(
        is_hard_coded(name, each) for outcomes in results for name, each in outcomes.items()
    )
    return (
        f"{total['pass']} passed, {total['skip']} skipped, {total['fail']} not passed, of which "
        f"torch reserves {reserved} for its own backends"
    )


def commit() -> str:
    """The tested commit: a short hash, with a note if tracked files differ from it."""
    git = ["git", "-C", str(FOLDER), "describe", "--always", "--exclude=*", "--dirty= with changes"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def page(results: dict[str, dict[str, Outcomes]], minutes: float) -> str:
    """The document: counts, what is hard-coded, what only one of the two passes."""
    import torch

    chosen, everything = (len(results[f"{face}/2"]["pycomm"]) for face in ("nccl", "gloo"))
    lines = [
        "# torch's own test suite",
        "",
        f"Written by `make torch_suite ARGS=--write` on {date.today()} at commit {commit()}, with",
        f"torch {torch.__version__}, over the default transport (shared memory on one host).",
        f"That is {2 * len(results)} runs, one per row of the table: {minutes:.0f} minutes on "
        f"{os.cpu_count()} cores. `make torch_suite` is the first",
        "row alone, compared with what gloo is recorded to pass.",
        "",
        "PyTorch tests its backends with `DistributedTest`, which ships in the wheel. No test is",
        "copied or edited by hand. For both backends alike,",
        "[the loader](../../tests/torch_suite/suite_module.py) changes this:",
        "",
        "- Where a test compares the backend's name with gloo's, pycomm counts as well.",
        "- Ranks are forked, not spawned, and where the suite polls it sleeps 5 ms, not 100.",
        "- Tests of groups of ranks 1 and 2 run with 3 ranks; torch skips them below 8.",
        "",
        "**gloo's tests** are those that torch runs for gloo on CPU tensors, all of them.",
        f"**NCCL's tests** are {chosen} of the suite's {everything}, as torch runs them for NCCL",
        "or several GPUs: those of collectives, messages, groups and SyncBatchNorm, chosen by name",
        "(`TESTS` in [run.py](../../tests/torch_suite/run.py)). They run on CPU tensors,",
        "which takes more: every request for a CUDA device gets the CPU, decorators that skip",
        "tests without GPUs are removed, DDP's `device_ids` are dropped, and",
        "`torch.nn.SyncBatchNorm`, which takes CUDA tensors only, is `pycomm.SyncBatchNorm`,",
        "for gloo as well.",
        "",
        "| tests | ranks | backend | pass | fail | skip | only this one passes |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, pair in sorted(results.items()):
        face, size = key.split("/")
        title = "gloo's" if face == "gloo" else "NCCL's"
        for backend, other in (("pycomm", "gloo"), ("gloo", "pycomm")):
            mine, theirs = pair[backend], pair[other]
            only = [
                name
                for name, outcome in mine.items()
                if outcome["status"] == "pass" and theirs.get(name, {}).get("status") != "pass"
            ]
            row = counts(mine)
            lines.append(
                f"| {title} | {size} | {backend} | {row['pass']} | {row['fail']} | {row['skip']} "
                f"| {len(only)} |"
            )
    lines += ["", "## What torch reserves for its own backends", ""]
    failing = {
        name
        for pair in results.values()
        for name, outcome in pair["pycomm"].items()
        if outcome["status"] != "pass" and pair["gloo"].get(name, {}).get("status") == "pass"
    }
    lines += ["Each must fail with the text that is named here, or the run fails.", ""]
    for name in sorted(failing):
        expected = HARD_CODED.get(name, HardCoded("NOT EXPECTED", ""))
        lines.append(f"- `{name}`: {expected.why}. `{expected.says}`")
    lines += ["", "## What pycomm passes and gloo does not", ""]
    lines += ["These are tests of NCCL's, moved to the CPU. torch does not run them for gloo.", ""]
    ahead: dict[str, set[str]] = {}
    for key, pair in results.items():
        for name, outcome in pair["pycomm"].items():
            if outcome["status"] == "pass" and pair["gloo"].get(name, {}).get("status") == "fail":
                ahead.setdefault(name, set()).add(key.split("/")[1])
    lines += [
        f"- `{name}` ({', '.join(sorted(sizes))} ranks)" for name, sizes in sorted(ahead.items())
    ]
    lines += ["", "## What both fail", ""]
    both = sorted(
        {
            name
            for pair in results.values()
            for name, outcome in pair["pycomm"].items()
            if outcome["status"] == "fail" and pair["gloo"].get(name, {}).get("status") == "fail"
        }
    )
    lines += [", ".join(f"`{name}`" for name in both) or "None."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line; 1 if pycomm is behind gloo anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every world size, backend and face")
    parser.add_argument("--write", action="store_true", help="record gloo and write the document")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--face", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--tests", default="", help="regular expression over test names")
    arguments = parser.parse_args()
    minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
    recorded = recorded_for(minor)
    runs = [(arguments.face, arguments.world_size)]
    if arguments.all or arguments.write:
        runs = [(face, size) for face in ("gloo", "nccl") for size in WORLD_SIZES]
    results: dict[str, dict[str, Outcomes]] = {}
    bad = []
    began_s = time.monotonic()
    for face, size in runs:
        key = f"{face}/{size}"
        pair = {"pycomm": run("pycomm", size, face, arguments.tests)}
        if arguments.all or arguments.write or key not in recorded:
            pair["gloo"] = run("gloo", size, face, arguments.tests)
            recorded[key] = [
                name for name, each in pair["gloo"].items() if each["status"] == "pass"
            ]
        results[key] = pair
        tests = arguments.tests or TESTS[face]
        bad += [f"{key} {line}" for line in problems(face, pair["pycomm"], recorded[key], tests)]
    if arguments.write:
        kept = {"torch": minor, "passes": recorded}
        RECORDED.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")
        PAGE.write_text(page(results, (time.monotonic() - began_s) / 60))
    for line in bad:
        print(line)
    how = "FAILED" if bad else "pycomm passes whatever gloo passes"
    ours = summary([pair["pycomm"] for pair in results.values()])
    print(f"torch's suite with torch {minor}: {how}; {ours}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

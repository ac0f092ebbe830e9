"""Everything that needs a GPU, once: builds, tests, bandwidths, compute-sanitizer; a text result.

python tools/gpu_checks.py [--output FILE] [--budget SECONDS] [--only NAME ...] [--list]

Default: benchmarks/results/gpu-<device>.txt, written after each check, so that whatever ends the
command leaves what was done. Needs torch with CUDA, pytest and, for what is not built yet, nvcc and
a C++ compiler; no C++ test framework. One check that fails or hangs costs its own time only; within
--budget (default 570 seconds) the last ones, compute-sanitizer's, may have none, and are named with
the command that runs them. At the end stands every target with what was reached. Ends with 1 if
anything failed or was not run; what is not installed is said and skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KERNELS = "pack or overflow or exponent or reduce or codec_kernels"
LEAST_SECONDS = 10.0  # a check is not begun with less
TARGET = re.compile(r"^.*\b(met|MISSED|not seen)$")


@dataclasses.dataclass(frozen=True)
class Check:
    """One command of its own, so that nothing of it reaches the others."""

    command: Sequence[str]
    seconds: float = 90.0
    """At most, also where the budget has more."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def output_of(*command: str) -> str:
    """What a command prints; "" if it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def checks() -> dict[str, Check]:
    """In the order in which they run: what shows the most first."""
    python = sys.executable
    # For this machine's GPU alone: CI builds for all.
    build = {"PYCOMM_BUILD_CUDA": "1", "CMAKE_ARGS": "-DCMAKE_CUDA_ARCHITECTURES=native"}
    build |= {name: os.environ[name] for name in build if name in os.environ}
    tests = [python, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    tests.append("tests/python/cuda/test_cuda.py")
    # Starting ranks is most of what their tests take.
    parallel = ["-n", "4"] if importlib.util.find_spec("xdist") else []

    def ranks(table: str, number: int, *more: str) -> Check:
        script = f"benchmarks/cuda_{table}.py"
        return Check([python, script, "--ranks", str(number), "--blocks", "10", *more])

    found = {
        "build": Check([python, "setup.py", "build_ext", "--inplace"], 400.0, build),
        "kernel-tests": Check([*tests, "-k", KERNELS]),
        "kernels": Check([python, "benchmarks/cuda_kernels.py"]),
        "allreduce-1": ranks("allreduce", 1),
        "allreduce-2": ranks("allreduce", 2),
        "ddp-1": ranks("ddp", 1),
        "rank-tests": Check([*tests, *parallel, "-k", f"not ({KERNELS}) and not nccl"], 200.0),
        "nccl-tests": Check([*tests, *parallel, "-k", "nccl"], 120.0),
        "allreduce-2-nccl": ranks("allreduce", 2, "--shared-nccl"),
        "ddp-2": ranks("ddp", 2),
        "ddp-2-nccl": ranks("ddp", 2, "--shared-nccl"),
    }
    sanitizer = find_sanitizer()
    for tool in ("memcheck", "racecheck", "synccheck") if sanitizer else ():
        command = [str(sanitizer), "--tool", tool, "--error-exitcode", "9"]
        once = [python, "benchmarks/cuda_once.py"]
        # Tensors that are allocations of their own: an access behind an end is seen.
        found[tool] = Check([*command, *once], 120.0, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    return found


def find_sanitizer() -> str | None:
    """compute-sanitizer, which lies beside nvcc where it is not in $PATH."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [None, *(f"{home}/bin" for home in homes if home)]
    found = (shutil.which("compute-sanitizer", path=folder) for folder in folders)
    return next(filter(None, found), None)


def run(check: Check, seconds: float) -> tuple[str, str, str]:
    """A check's verdict, what it printed, and what it complained about."""
    environment = {**os.environ, **check.environment}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    try:
        process = subprocess.Popen(
            check.command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return f"FAILED ({error})", "", ""
    with process:
        try:
            out, complaints = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks with it
            out, complaints = rest_of(process)
            return f"FAILED (not through after {seconds:.0f} s)", out, complaints
    took = f"{time.monotonic() - begin:.0f} s"
    verdict = f"FAILED ({process.returncode})" if process.returncode != 0 else "passed"
    return f"{verdict}, {took}", out, complaints


def rest_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a killed check had printed; also where a process that left its group holds the pipes."""
    try:
        return process.communicate(timeout=2)
    except subprocess.TimeoutExpired as late:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

        def text(part: str | bytes | None) -> str:
            return part.decode(errors="replace") if isinstance(part, bytes) else part or ""

        return text(late.output), text(late.stderr)


def targets(lines: Sequence[str]) -> list[str]:
    """The lines that say whether something was reached, each once, under the check's name."""
    found: list[str] = []
    name = ""
    for line in "\n".join(lines).splitlines():
        if line.startswith("--- "):
            name = line[4:].partition(":")[0]
        elif TARGET.match(line):
            found.append(f"{name}: {' '.join(line.split())}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for all checks")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks; see --list")
    parser.add_argument("--list", action="store_true", help="the checks' names and commands")
    arguments = parser.parse_args()
    found = checks()
    if arguments.list:
        for name, check in found.items():
            print(f"{name}: {' '.join(check.command)}")
        return 0
    unknown = sorted(set(arguments.only or ()) - set(found))
    if unknown:
        parser.error(f"no such check here: {', '.join(unknown)}; there are {', '.join(found)}")
    chosen = {name: found[name] for name in arguments.only or found}
    query = "--query-gpu=name,driver_version,memory.total"
    device = output_of("nvidia-smi", query, "--format=csv,noheader").splitlines()
    if not device:
        print("SKIPPED: nvidia-smi sees no GPU on this machine")
        return 0
    versions = "torch.__version__, torch.version.cuda, torch.cuda.nccl.version()"
    torch_line = f"import torch; print({versions})"
    lines = [
        "command: python tools/gpu_checks.py",
        f"device: {'; '.join(device)}",
        f"commit: {output_of('git', 'rev-parse', 'HEAD') or 'unknown'}",
        f"Python, torch, its CUDA and NCCL: {sys.version.split()[0]} "
        f"{output_of(sys.executable, '-c', torch_line) or 'torch cannot be imported'}",
    ]
    if find_sanitizer() is None:
        lines += ["", "--- compute-sanitizer: SKIPPED, it is not installed"]
    named = re.sub(r"[^a-z0-9]+", "-", device[0].split(",")[0].lower()).strip("-")
    target = arguments.output or RESULTS / f"gpu-{named}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.budget
    failed = []
    for name, check in chosen.items():
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            lines += ["", f"--- {name}: NOT RUN, no time was left: make gpu ARGS='--only {name}'"]
            failed.append(f"{name} (not run)")
            continue
        print(f"::: {name}", flush=True)
        verdict, out, complaints = run(check, min(left, check.seconds))
        print(out[-4000:], complaints[-2000:], verdict, flush=True)
        parts = [Path(part).name if os.path.isabs(part) else part for part in check.command]
        lines += ["", f"--- {name}: {verdict}", f"$ {' '.join(parts)}", out[-8000:].strip()]
        if verdict.startswith("FAILED"):
            failed.append(name)
            lines.append(complaints[-4000:].strip())
        target.write_text("\n".join(lines) + "\n")
    reached = ["", "--- targets", *targets(lines)]
    print("\n".join(reached))
    target.write_text("\n".join([*lines, *reached]) + "\n")
    print(f"written: {target}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

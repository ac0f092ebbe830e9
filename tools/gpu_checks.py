"""Everything that needs a GPU, once: tests, compute-sanitizer, bandwidths; writes a text result.

python tools/gpu_checks.py [--output FILE] [--budget SECONDS] [--only NAME ...] [--list]

Default: benchmarks/results/gpu-<device>.txt, written after each check, so that whatever ends the
command leaves what was done. Needs the extension and libpycomm_cuda.so in place (docs/cuda.md) and
no C++ test framework. Within --budget (default 570 seconds) figures come first; what had no time is
named with the command that runs it. Ends with 1 if anything failed or was not run; what is not
installed is said and skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KERNEL_TESTS = "pack or overflow or reduce or codec_kernels"
LEAST_SECONDS = 10.0  # a check is not begun with less


def output_of(*command: str) -> str:
    """What a command prints; "" if it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def checks() -> dict[str, list[str]]:
    """Each check's name and command."""
    python = sys.executable
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/python/test_cuda.py"]
    found = {"tests": tests, "kernels": [python, "benchmarks/cuda_kernels.py"]}
    for ranks in ("1", "2"):
        for table in ("allreduce", "ddp"):
            script = f"benchmarks/cuda_{table}.py"
            found[f"{table}-{ranks}"] = [python, script, "--ranks", ranks, "--blocks", "10"]
    sanitizer = shutil.which("compute-sanitizer")
    for tool in ("memcheck", "racecheck", "synccheck") if sanitizer else ():
        command = [str(sanitizer), "--tool", tool, "--error-exitcode", "9"]
        found[tool] = [*command, *tests, "-k", KERNEL_TESTS]
    return found


def run(command: list[str], seconds: float) -> tuple[str, str, str]:
    """A check's verdict, what it printed, and what it complained about."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, complaints = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks with it
            out, complaints = process.communicate(timeout=60)
            return f"FAILED (not through after {seconds:.0f} s)", out, complaints
    took = f"{time.monotonic() - begin:.0f} s"
    verdict = f"FAILED ({process.returncode})" if process.returncode != 0 else "passed"
    return f"{verdict}, {took}", out, complaints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for all checks")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks; see --list")
    parser.add_argument("--list", action="store_true", help="the checks' names and commands")
    arguments = parser.parse_args()
    found = checks()
    if arguments.list:
        for name, command in found.items():
            print(f"{name}: {' '.join(command)}")
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
    torch_line = "import torch; print(torch.__version__, torch.version.cuda)"
    lines = [
        "command: python tools/gpu_checks.py",
        f"device: {'; '.join(device)}",
        f"commit: {output_of('git', 'rev-parse', 'HEAD') or 'unknown'}",
        f"torch: {output_of(sys.executable, '-c', torch_line)}",
    ]
    if shutil.which("compute-sanitizer") is None:
        lines += ["", "--- compute-sanitizer: SKIPPED, it is not installed"]
    named = re.sub(r"[^a-z0-9]+", "-", device[0].split(",")[0].lower()).strip("-")
    target = arguments.output or RESULTS / f"gpu-{named}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.budget
    failed = []
    for name, command in chosen.items():
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            lines += ["", f"--- {name}: NOT RUN, no time was left: make gpu ARGS='--only {name}'"]
            failed.append(f"{name} (not run)")
            continue
        print(f"::: {name}", flush=True)
        verdict, out, complaints = run(command, left)
        print(out[-4000:], complaints[-2000:], verdict, flush=True)
        shown = " ".join(Path(part).name if os.path.isabs(part) else part for part in command)
        lines += ["", f"--- {name}: {verdict}", f"$ {shown}", out[-8000:].strip()]
        if verdict.startswith("FAILED"):
            failed.append(name)
            lines.append(complaints[-4000:].strip())
        target.write_text("\n".join(lines) + "\n")
    target.write_text("\n".join(lines) + "\n")
    print(f"written: {target}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Everything that needs a GPU, once: tests, compute-sanitizer, bandwidths; writes a text result.

python tools/gpu_checks.py [--output FILE]

Default: benchmarks/results/gpu-<device>.txt. Needs the extension and libpycomm_cuda.so in place
(docs/cuda.md). Ends with 1 if anything failed; what is not installed is said and skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KERNEL_TESTS = "pack or overflow or reduce"


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
    found = {"tests": tests}
    sanitizer = shutil.which("compute-sanitizer")
    for tool in ("memcheck", "racecheck", "synccheck") if sanitizer else ():
        command = [str(sanitizer), "--tool", tool, "--error-exitcode", "9"]
        found[tool] = [*command, *tests, "-k", KERNEL_TESTS]
    found["bandwidths"] = [python, "benchmarks/cuda_kernels.py"]
    for ranks in ("1", "2"):
        for table in ("cuda_allreduce", "cuda_ddp"):
            found[f"{table}, {ranks} ranks"] = [python, f"benchmarks/{table}.py", "--ranks", ranks]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    failed = []
    for name, command in checks().items():
        print(f"::: {name}", flush=True)
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        print(done.stdout[-4000:], done.stderr[-2000:], flush=True)
        verdict = "passed" if done.returncode == 0 else f"FAILED ({done.returncode})"
        shown = " ".join(Path(part).name if os.path.isabs(part) else part for part in command)
        lines += ["", f"--- {name}: {verdict}", f"$ {shown}", done.stdout[-8000:].strip()]
        if done.returncode != 0:
            failed.append(name)
            lines.append(done.stderr[-4000:].strip())
    if shutil.which("compute-sanitizer") is None:
        lines += ["", "--- compute-sanitizer: SKIPPED, it is not installed"]
    name = re.sub(r"[^a-z0-9]+", "-", device[0].split(",")[0].lower()).strip("-")
    target = arguments.output or RESULTS / f"gpu-{name}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(lines) + "\n")
    print(f"written: {target}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Run the tests of CI and torch's own suite with another torch: `make other_torch TORCH=2.15.0`.

python tools/other_torch.py 2.15.0 [--keep]

The last commit is cloned to build/torch-<version>, which gets an environment and an extension of
its own: one checkout has a module for one torch at a time. Changes that are not committed are not
tested. The clone is removed if all passed, unless --keep is given.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import native
from run_tests import run_and_keep_last_line

ROOT = Path(__file__).resolve().parent.parent


def clone(folder: Path) -> str:
    """Makes the clone anew, or brings one that is there to the last commit; returns that."""
    commit = native.git_commit(ROOT).removesuffix(" with changes")
    if not (folder / ".git").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["git", "clone", "-q", "--no-checkout", str(ROOT), str(folder)], check=True)
    at = ["git", "-C", str(folder)]
    subprocess.run([*at, "fetch", "-q", "origin", commit], check=True)
    subprocess.run([*at, "checkout", "-q", "--force", "--detach", commit], check=True)
    return commit


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("torch", help="a release: 2.14.1 or 2.15.0, for example")
    parser.add_argument("--keep", action="store_true", help="leave the clone, also if all passed")
    options = parser.parse_args()
    versions = native.torch_range(ROOT)
    if versions.why_unsupported(options.torch):
        parser.error(f"{options.torch} is not supported; there are {', '.join(versions.RELEASES)}")
    folder = ROOT / "build" / f"torch-{options.torch}"
    commit = clone(folder)
    python = str(folder / ".venv" / "bin" / "python")
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    os.environ.update(PYCOMM_TORCH=options.torch, PATH=path, OMP_NUM_THREADS="1")
    for name in ("PYTHONPATH", "PYTHONHOME"):
        os.environ.pop(name, None)
    bootstrap = [sys.executable, str(folder / "tools" / "bootstrap.py"), "--group", "test"]
    subprocess.run(bootstrap, check=True)
    version = "import torch; print(torch.__version__)"
    found = subprocess.run([python, "-c", version], check=True, capture_output=True, text=True)
    results = [
        run_and_keep_last_line([python, *command], folder)
        for command in (
            ["tools/python_tests.py", "--ring=test,ci", "-rs"],
            ["tests/torch_suite/run.py", "--all"],
        )
    ]
    failed = any(code for code, _ in results)
    if not (failed or options.keep):
        shutil.rmtree(folder)
    print(
        f"torch {found.stdout.strip()} at {commit[:12]}: {'FAILED' if failed else 'passed'}. "
        + ". ".join(last for _, last in results)
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

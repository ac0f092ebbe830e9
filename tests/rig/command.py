"""`python -m pycomm …` for tests: a process of its own, forked from one that has imported torch.

A new interpreter takes seconds of a core until it has imported torch. What a test looks at, the
exit code and what is printed, is the same. Where the environment could have changed what torch
imports, it is an interpreter of its own after all.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence

from ranks import run_ranks


def _run(rank: int, world_size: int, arguments: Sequence[str]) -> None:
    sys.argv = ["pycomm", *arguments]
    try:
        runpy.run_module("pycomm", run_name="__main__", alter_sys=True)
    except Exception:  # printed, as an interpreter does: a rank would only write it down
        traceback.print_exc()
        sys.exit(1)


def run_pycomm(
    arguments: Sequence[str],
    *,
    timeout_s: float = 100.0,
    env: Mapping[str, str | None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m pycomm ARGUMENTS``; ``env`` is as of ``run_python``."""
    (done,) = run_ranks(
        1,
        _run,
        args=(tuple(arguments),),
        backend=None,
        init="none",
        env=env,
        timeout_s=timeout_s,
        check=False,
    )
    assert not done.timed_out, done.describe()
    command = [sys.executable, "-m", "pycomm", *arguments]
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)

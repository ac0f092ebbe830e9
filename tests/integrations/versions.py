"""Which version of a library or launcher the integration tests ran with."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess

import pytest

# A launcher's name in the table, and the command that tells its version.
COMMANDS = {
    "Open MPI": ["mpirun.openmpi", "--version"],
    "MPICH": ["mpirun.mpich", "--version"],
    "Slurm": ["slurmd", "-V"],
}
DISTRIBUTIONS = {"torchrun": "torch", "HF Trainer": "transformers", "Accelerate": "accelerate"}


def version_of(library: str) -> str:
    """ "2.6.6"; "not installed" where it is not."""
    if library == "mpirun":  # a test of all of them
        return ", ".join(f"{name} {version_of(name)}" for name in ("Open MPI", "MPICH"))
    if library in COMMANDS:
        return _command_version(COMMANDS[library])
    name = DISTRIBUTIONS.get(library, library.lower())
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def require(library: str) -> None:
    """Skips the test where the library is not installed."""
    if version_of(library) == "not installed":
        pytest.skip(f"{library} is not installed")


def _command_version(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return "not installed"
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    found = re.search(r"\d+(\.\d+)+", done.stdout + done.stderr)
    return found[0] if found else "unknown"

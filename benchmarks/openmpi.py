"""Open MPI beside the backends: the same collectives by a small C program, one mpirun per block.

Not a process group: its ranks poll for their messages also where they have nothing to do, so that
they cannot stand idle beside a backend that is measured. Rank 0 of the harness therefore starts
mpirun for each block, while the other ranks wait in the store. `openmpi` uses TCP over the same
interface, `openmpi:shm` Open MPI's own shared memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import torch
from report import Floats

# By the name in the table: what moves the bytes, as Open MPI 4 calls it.
_TRANSPORTS = {"openmpi": "tcp,self", "openmpi:shm": "vader,self"}
NAMES = tuple(_TRANSPORTS)
_SOURCE = Path(__file__).with_name("collectives_mpi.c")
_PROGRAM = _SOURCE.parent.parent / "build" / "collectives_mpi"
# What the program calls a workload that torch has in two forms.
_SAME = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def build() -> None:
    """Compile the program if it is not there or older than its source."""
    lacking = [tool for tool in ("mpicc", "mpirun") if shutil.which(tool) is None]
    if lacking:
        raise SystemExit(
            f"{' and '.join(lacking)} not found: apt install openmpi-bin libopenmpi-dev"
        )
    if _PROGRAM.exists() and _PROGRAM.stat().st_mtime > _SOURCE.stat().st_mtime:
        return
    _PROGRAM.parent.mkdir(exist_ok=True)
    subprocess.run(["mpicc", "-O2", "-o", str(_PROGRAM), str(_SOURCE)], check=True)


def version() -> str:
    """The first line of what mpirun says of itself."""
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0].removeprefix("mpirun (Open MPI) ")


class MpiCase:
    """The size of one workload, and how to run a block of it."""

    def __init__(
        self,
        name: str,
        workload: str,
        ranks: int,
        numel: int,
        dtype: torch.dtype,
        redop: str,
        timeout_s: float,
    ) -> None:
        if dtype != torch.float32 or redop != "sum":
            raise ValueError(f"{name} is measured with float32 and sum only")
        self.numel = numel
        self.nbytes = numel * dtype.itemsize
        self._transport = _TRANSPORTS[name]
        self._workload = _SAME.get(workload, workload)
        self._ranks = ranks
        self._timeout_s = timeout_s

    def block(self, length: int, seed: int) -> tuple[Floats, Floats]:
        """Run one block, on one rank only.

        Returns:
            CPU seconds, wrong and checked elements over all ranks; and the seconds of each
            operation.
        """
        # Without the harness's own variables, which mpirun's ranks would take for a launcher's.
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("RANK", "LOCAL_", "WORLD_"))
        }
        command = ["mpirun", "-np", str(self._ranks), "--oversubscribe", "--bind-to", "none"]
        command += ["--mca", "pml", "ob1", "--mca", "btl", self._transport]
        command += ["--mca", "btl_tcp_if_include", env.get("GLOO_SOCKET_IFNAME", "lo")]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        command += [str(_PROGRAM), self._workload, str(self.numel), str(length), str(seed)]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=self._timeout_s, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
        first, *times = done.stdout.split("\n")
        return np.array(first.split(), float), np.array([t for t in times if t], float)

"""Rank, world size and address from what started this process: torchrun, mpirun or srun.

torch reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, which torchrun sets. Open
MPI, MPICH and Slurm say the same in variables of their own:

    pycomm.integrations.launch.env_from_launcher()
    torch.distributed.init_process_group("pycomm")
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import zlib
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from pycomm._group.creation import effective_timeout_ms
from pycomm.integrations import node_list
from pycomm.options import Options

# Below the kernel's ephemeral ports, which start at 32768, and without 29500, torchrun's own.
FIRST_PORT = 10000
PORT_COUNT = 19000

_LOOPBACK = "127.0.0.1"
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_JOB_KEY = "pycomm/integrations/job"
_found: Launch | None = None
"""By the last call of env_from_launcher(): the variables that it has set look like torchrun's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launcher told this process."""

    launcher: str
    """ "torchrun", "Open MPI", "MPICH" or "Slurm". torchrun: any launcher that sets RANK."""
    rank: int
    world_size: int
    local_rank: int | None
    """Within this host; None where the launcher does not tell."""
    local_world_size: int | None
    address: str
    port: int
    job: str
    """Names this run among others on the same hosts; "" where the launcher does not tell."""

    def variables(self) -> dict[str, str]:
        """As torchrun would set them."""
        known = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in known.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class _Names:
    """The variables of one launcher."""

    launcher: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    job: tuple[str, ...]


# In this order: mpirun inside a Slurm job sees both, and srun's are then those of mpirun's daemon.
_LAUNCHERS = (
    _Names(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        ("TORCHELASTIC_RUN_ID",),
    ),
    _Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Names("MPICH", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",), ()),
    _Names("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), (), ()),
)


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Reads a launcher's variables; None where there are none.

    Args:
        environ: ``os.environ``, or what a test makes up. ``MASTER_ADDR`` and ``MASTER_PORT`` go
            before what would be derived.

    Returns:
        For Slurm, the address is the step's first host, and the port comes from job and step. For
        mpirun on one host, the address is the loopback interface and the port comes from Open MPI's
        job id, or the process that started the ranks.

    Raises:
        ValueError: A variable has no sensible value; or address or port are needed and cannot be
            derived: mpirun over several hosts does not say where rank 0 is.
    """
    names = next((each for each in _LAUNCHERS if environ.get(each.rank, "").strip()), None)
    if names is None:
        return None
    if names.launcher == "MPICH" and _is_srun(environ):
        names = _LAUNCHERS[-1]
    if names.launcher == "Slurm" and not environ.get("SLURM_STEP_NUM_TASKS", "").strip():
        # A batch script's own process: SLURM_PROCID is 0 there, and the other ranks do not exist.
        return None
    rank = _number(environ, names.rank)
    world_size = _number(environ, names.world_size)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{names.rank}={rank} and {names.world_size}={world_size}: "
            "ranks go from 0 to the number of ranks minus 1"
        )
    local_rank = _first_number(environ, names.local_rank)
    local_world_size = _first_number(environ, names.local_world_size)
    if names.launcher == "Slurm":
        local_world_size = _slurm_local_size(environ)
    hosts = _slurm_hosts(environ, names)
    one_host = world_size in (1, local_world_size) or len(hosts) == 1
    if one_host:
        local_rank = rank if local_rank is None else local_rank
        local_world_size = world_size if local_world_size is None else local_world_size
    job = _job(environ, names, one_host)
    return Launch(
        launcher=names.launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        address=_address(environ, names, hosts, one_host),
        port=_port(environ, names, job),
        job=job,
    )


def _is_srun(environ: Mapping[str, str]) -> bool:
    """Whether Slurm itself has set PMI's variables, as its plugins for PMI2 and Cray's PMI do.

    In mpirun's ranks inside a Slurm job, Slurm's variables are those of mpirun's daemon, so that
    the ranks differ in general, and Hydra has set variables of its own.
    """
    if any(name.startswith(("HYDI_", "MPI_LOCAL")) for name in environ):
        return False
    of_slurm = [environ.get(name, "").strip() for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
    of_pmi = [environ.get(name, "").strip() for name in ("PMI_RANK", "PMI_SIZE")]
    return bool(environ.get("SLURM_STEP_ID", "").strip()) and of_slurm == of_pmi


def env_from_launcher() -> Launch | None:
    """Sets the variables that torch reads, where a launcher other than torchrun started this.

    Variables that are there already stay as they are. Call it before ``init_process_group``. A
    later call returns the same as long as the variables are unchanged.

    Returns:
        What was found; None, and nothing is set, where no launcher is known.

    Raises:
        ValueError: As ``find_launch``.
    """
    global _found
    launch = _set_missing(os.environ)
    if launch is None or _found is None or launch.variables() != _found.variables():
        _found = launch
    return _found


def init_process_group(backend: str = "pycomm", **options: Any) -> Launch | None:
    """``torch.distributed.init_process_group`` from whatever launcher's variables there are.

    Also makes sure that the store is this job's own: another job that happens to use the same port
    is an error here, and is not disturbed.

    Args:
        backend: For torch.
        options: Further arguments for torch, such as ``timeout`` and ``pg_options``.

    Returns:
        What was found; None where no launcher is known, and then there is no group.

    Raises:
        ValueError: As ``find_launch``.
        RuntimeError: The port is in use, or belongs to another job.
    """
    launch = env_from_launcher()
    if launch is None:
        return None
    if launch.launcher == "torchrun":  # its agent holds the store, and gave it the address
        dist.init_process_group(backend, **options)
        return launch
    store = _open_store(launch, _timeout(backend, options))
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, **options
    )
    return launch


def _timeout(backend: str, options: Mapping[str, Any]) -> timedelta:
    """That of the group, also if it is set by PYCOMM_TIMEOUT or ``pg_options``."""
    from_torch: timedelta = options.get("timeout") or default_pg_timeout
    pg_options = options.get("pg_options") or Options()
    if "pycomm" not in backend or not isinstance(pg_options, Options):
        return from_torch
    return timedelta(milliseconds=effective_timeout_ms(pg_options.resolve(), from_torch))


def _set_missing(environ: MutableMapping[str, str]) -> Launch | None:
    launch = find_launch(environ)
    if launch is not None:
        for name, value in launch.variables().items():
            if not environ.get(name, "").strip():
                environ[name] = value
    return launch


def _open_store(launch: Launch, timeout: timedelta) -> Any:
    where = f"{launch.address}:{launch.port}"
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            launch.address,
            launch.port,
            launch.world_size,
            is_master=launch.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # a former group of this process may still hold its store
        )
    except dist.DistNetworkError as error:
        if launch.rank != 0:
            raise
        raise RuntimeError(
            f"rank 0 on {socket.gethostname()} cannot listen on {where}: {error}. "
            "Try: MASTER_PORT=… with a free port, the same for all ranks"
        ) from error
    if launch.rank == 0:
        store.set(_JOB_KEY, launch.job)
    elif (other := store.get(_JOB_KEY).decode()) != launch.job:
        raise RuntimeError(
            f"the store at {where} belongs to job {other!r}, and rank {launch.rank} on "
            f"{socket.gethostname()} is of job {launch.job!r}. "
            "Try: MASTER_PORT=… with a free port, the same for all ranks"
        )
    return store


def _slurm_hosts(environ: Mapping[str, str], names: _Names) -> list[str]:
    # mpirun starts its daemons in a step of their own, without the host that it runs on.
    step = environ.get("SLURM_STEP_NODELIST", "").strip() if names.launcher == "Slurm" else ""
    text = step or environ.get("SLURM_JOB_NODELIST", "").strip()
    return node_list.expand(text) if text else []


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """This host's part of "2(x3),1": three hosts with two tasks each, then one with one."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "").strip()
    node = _first_number(environ, ("SLURM_NODEID",))
    if not text or node is None:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def _job(environ: Mapping[str, str], names: _Names, one_host: bool) -> str:
    for name in names.job:
        if value := environ.get(name, "").strip():
            return f"{names.launcher} {value}"
    if job := environ.get("SLURM_JOB_ID", "").strip():
        step = environ.get("SLURM_STEP_ID", "").strip() if names.launcher == "Slurm" else ""
        return f"Slurm {job}.{step}"
    return f"{names.launcher} started by process {_starter()}" if one_host else ""


def _starter() -> int:
    """The ancestor that all ranks of a host share: Hydra's proxy, else the parent.

    Ranks that run inside shell scripts have parents of their own.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            # "pid (name) state ppid …": the name may hold anything, so look from its end.
            begin, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        except OSError:
            break
        if begin.endswith("(hydra_pmi_proxy"):
            return pid
        pid = int(rest.split()[1])
    return os.getppid()


def _address(environ: Mapping[str, str], names: _Names, hosts: list[str], one_host: bool) -> str:
    if given := environ.get("MASTER_ADDR", "").strip():
        return given
    if hosts and names.launcher != "torchrun":
        return hosts[0]  # where rank 0 runs, unless somebody asked for another distribution
    if one_host:
        return _LOOPBACK
    raise ValueError(
        f"{names.launcher} does not say on which of several hosts rank 0 runs. "
        "Try: MASTER_ADDR=… with its name or address, the same for all ranks "
        "(mpirun -x MASTER_ADDR=… for Open MPI, -genv MASTER_ADDR … for MPICH)"
    )


def _port(environ: Mapping[str, str], names: _Names, job: str) -> int:
    if environ.get("MASTER_PORT", "").strip():
        port = _number(environ, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ValueError(f"MASTER_PORT={port} is not a port: 1 to 65535")
        return port
    if names.launcher == "Slurm" and job:
        # Job ids count up, so that neighbours never meet; the steps of a job are spread.
        step = _first_number(environ, ("SLURM_STEP_ID",)) or 0
        return FIRST_PORT + (_number(environ, "SLURM_JOB_ID") + 7919 * step) % PORT_COUNT
    if job and names.launcher != "torchrun":
        return FIRST_PORT + zlib.crc32(job.encode()) % PORT_COUNT
    raise ValueError(
        f"{names.launcher} does not say which port to use. "
        "Try: MASTER_PORT=… with a free port, the same for all ranks"
    )


def _first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((_number(environ, name) for name in names if environ.get(name, "").strip()), None)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name}={text!r} is not a whole number")
    return int(text)

"""A Slurm of one node in a temporary folder: munged, slurmctld and slurmd of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from processes import child_environment, free_port

DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
START_S = 120.0


def require_slurm() -> None:
    """Skips, saying why, where one cannot be started."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in DAEMONS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"Slurm is not installed: no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("starting Slurm's daemons needs root")


class Slurm:
    """Runs Slurm's commands against the daemons of ``start_slurm``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = child_environment({"SLURM_CONF": str(folder / "slurm.conf")})
        for name in [name for name in self.env if name.startswith(("SLURM_", "PMI", "OMPI"))]:
            if name != "SLURM_CONF":
                del self.env[name]
        self.env["PATH"] = f"{self.env.get('PATH', '')}:/usr/sbin:/sbin"
        self.processes: list[subprocess.Popen[bytes]] = []

    def daemon(self, *command: str) -> None:
        log = (self.folder / f"{Path(command[0]).name}.out").open("wb")
        self.processes.append(
            subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        )
        log.close()

    def run(
        self, *command: str, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.env | dict(env or {}),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def logs(self) -> str:
        return "\n".join(
            f"[{path.name}]\n{path.read_text(errors='replace')[-2000:]}"
            for pattern in ("*.out", "*.log")
            for path in sorted(self.folder.glob(pattern))
        )

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def start_slurm() -> Iterator[Slurm]:
    # Under /tmp itself: a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="pycomm-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    slurm = Slurm(folder)
    try:
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool", "munge"):
            (folder / name).mkdir(mode=0o755)
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        cores = os.cpu_count() or 1
        (folder / "slurm.conf").write_text(
            f"""\
ClusterName=pycomm
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny
MessageTimeout=100
BatchStartTimeout=100
TCPTimeout=60
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,sched_min_interval=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={max(8, cores)} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=10 State=UP OverSubscribe=FORCE:4
SlurmdParameters=config_overrides
"""
        )
        munge = folder / "munge"
        slurm.daemon(
            "munged",
            "--foreground",
            "--force",
            f"--socket={munge}/socket",
            f"--key-file={key}",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )
        _wait(slurm, lambda: (munge / "socket").exists())
        slurm.daemon("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        slurm.daemon("slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", host)
        _wait(slurm, lambda: "State=IDLE" in slurm.run("scontrol", "show", "node").stdout)
        yield slurm
    finally:
        slurm.close()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(slurm: Slurm, ready: object) -> None:
    deadline = time.monotonic() + START_S
    while not ready():  # type: ignore[operator]
        ended = [process.args for process in slurm.processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise AssertionError(f"Slurm did not start; ended: {ended}\n{slurm.logs()}")
        time.sleep(0.1)


if __name__ == "__main__":  # by hand: `python slurm.py srun -n2 env`
    with start_slurm() as by_hand:
        done = by_hand.run(*sys.argv[1:])
        print(done.stdout, done.stderr, by_hand.logs() if done.returncode else "")

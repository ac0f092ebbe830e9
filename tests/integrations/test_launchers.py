"""torchrun, mpirun of Open MPI and MPICH, and srun, each starting real ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import rings
import torch.distributed as dist
from documents import blocks, read
from processes import child_environment, free_port, run_python
from slurm import Slurm, require_slurm, start_slurm
from versions import require

# Interpreters that all import torch at once take long on a busy machine.
TIMEOUT_S = 240.0
pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(TIMEOUT_S + 60)]

HERE = Path(__file__).resolve().parent
PROGRAM = str(HERE / "rank_program.py")
ROOT = HERE.parents[1]
OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
MPICH = ["mpirun.mpich"]


def environment() -> dict[str, str]:
    prefixes = ("SLURM_", "PMI", "OMPI_", "MPI_")
    return {k: v for k, v in child_environment().items() if not k.startswith(prefixes)}


def run(
    *command: str, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """In a session of its own, killed whole when time is up: launchers have children."""
    process = subprocess.Popen(
        command,
        env=environment() | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(f"{command} ran longer than {timeout_s} s\n{out}") from None
    return subprocess.CompletedProcess(command, process.returncode, out)


def said_in(folder: Path, count: int) -> list[dict[str, Any]]:
    """What the ranks of one job wrote, in their order; each was there once and added up right."""
    said = sorted(
        (json.loads(path.read_text()) for path in folder.glob("*.json")),
        key=lambda each: (each["job"], each["rank"]),
    )
    assert [each["rank"] for each in said] == list(range(count))
    for each in said:
        assert each["size"] == count and each["total"] == 2.0**count - 1
        assert len(set(each["pids"])) == count
    return said


# accelerate launch


ALONE = """
from pycomm.integrations.accelerate import make_accelerator

print("trains on", make_accelerator().num_processes)
"""


@pytest.mark.integration("Accelerate", "accelerate launch --cpu --num_processes 2")
def test_accelerate_launch_starts_one_process_that_says_so(tmp_path: Path, note: Any) -> None:
    require("Accelerate")
    program = tmp_path / "program.py"
    program.write_text(ALONE)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = run(*launch, str(program))
    assert done.returncode == 0, done.stdout
    assert re.findall(r"trains on (\d)", done.stdout) == ["1"], done.stdout
    assert done.stdout.count("so this process trains alone") == 1, done.stdout
    note("starts one process, which logs a warning")


# torchrun


def restart_until_done(folder: Path, lives: int, *end: str, transport: str = "auto") -> None:
    """torchrun's agent keeps one store for all lives."""
    done = run_python(
        [
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(f"--max-restarts={lives - 1}", str(HERE / "elastic_program.py")),
            *(str(folder), str(lives), *end),
        ],
        env={"PYCOMM_TRANSPORT": transport},
        timeout_s=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ends = [json.loads((folder / f"done-{rank}.json").read_text()) for rank in range(2)]
    assert [end["life"] for end in ends] == [lives - 1] * 2
    # It went on where the life before ended.
    assert [end["first"] for end in ends] == [2 * (lives - 1)] * 2
    assert ends[0]["digest"] == ends[1]["digest"]


@pytest.mark.integration("torchrun", "--max-restarts=1: a rank fails, the second life finishes")
@pytest.mark.parametrize("end", [[], ["killed"]], ids=["exits", "killed"])
def test_elastic_restart(tmp_path: Path, end: list[str]) -> None:
    restart_until_done(tmp_path, 2, *end)


@pytest.mark.ci
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("late_s", [0.5, rings.nightly(60)])
def test_four_elastic_restarts(tmp_path: Path, transport: str, late_s: float) -> None:
    """Rank 0 joins first or last, by turns; once it is so late."""
    restart_until_done(tmp_path, 5, "killed", str(late_s), transport=transport)


# mpirun


@pytest.mark.parametrize("through", ["directly", "through a shell"])
@pytest.mark.parametrize("library", ["Open MPI", "MPICH"])
@pytest.mark.integration("mpirun", "3 ranks, no variable of torch set")
def test_mpirun(library: str, through: str, tmp_path: Path) -> None:
    require(library)
    words = [sys.executable, PROGRAM, str(tmp_path)]
    if through == "through a shell":  # ranks then have parents of their own
        words = ["sh", "-c", '"$0" "$@"; exit $?', *words]
    done = run(*(OPEN_MPI if library == "Open MPI" else MPICH), "-np", "3", *words)
    assert done.returncode == 0, done.stdout
    said = said_in(tmp_path, 3)
    assert {each["launcher"] for each in said} == {library}
    assert [each["local_rank"] for each in said] == ["0", "1", "2"]
    assert {each["address"] for each in said} == {"127.0.0.1"}


@pytest.mark.integration("Open MPI", "a port in use: an error that names rank, host and port")
def test_port_in_use_is_named(tmp_path: Path) -> None:
    require("Open MPI")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*OPEN_MPI, "-np", "1", sys.executable, PROGRAM, str(tmp_path)]
        done = run(*command, env={"MASTER_PORT": port})
    assert done.returncode != 0
    assert f"rank 0 on {socket.gethostname()} cannot listen on 127.0.0.1:{port}" in done.stdout
    assert "MASTER_PORT=" in done.stdout


# srun


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    require_slurm()
    with start_slurm() as running:
        yield running


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Slurm's daemons stay from test to test; their fixture ends them."""
    yield


@pytest.mark.integration("Slurm", "srun, 2 tasks: address from the node list, port from the job")
def test_srun(slurm: Slurm, tmp_path: Path) -> None:
    command = ["srun", "-n2", "--overcommit", sys.executable, PROGRAM, str(tmp_path)]
    done = slurm.run(*command, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr + slurm.logs()
    said = said_in(tmp_path, 2)
    assert {each["launcher"] for each in said} == {"Slurm"}
    assert {each["address"] for each in said} == {socket.gethostname().split(".")[0]}
    assert re.fullmatch(r"Slurm \d+\.0", said[0]["job"])


@pytest.mark.integration("Slurm", "two jobs at once on one node do not collide")
def test_two_jobs_on_one_node(slurm: Slurm, tmp_path: Path) -> None:
    together = [str(tmp_path / "store"), "4"]  # each waits until the ranks of both are here
    jobs = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        words = [sys.executable, PROGRAM, str(folder), *together]
        jobs.append(slurm.start("srun", "-n2", "--overcommit", *words))
    said = []
    for number, job in enumerate(jobs):
        out, _ = job.communicate(timeout=TIMEOUT_S)
        assert job.returncode == 0, out + slurm.logs()
        said.append(said_in(tmp_path / str(number), 2)[0])
    assert said[0]["job"] != said[1]["job"] and said[0]["port"] != said[1]["port"]


@pytest.mark.integration("Slurm", "two jobs with one port: an error that names both, no mix-up")
def test_another_jobs_store_is_refused(slurm: Slurm, tmp_path: Path) -> None:
    port = str(free_port())
    holder, intruder = tmp_path / "holder", tmp_path / "intruder"
    holder.mkdir()
    intruder.mkdir()
    together = [str(tmp_path / "store"), "3"]
    words = ["srun", "-n2", "--overcommit", "--export", f"ALL,MASTER_PORT={port}", sys.executable]
    first = slurm.start(*words, PROGRAM, str(holder), *together)
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(holder.glob("*.json"))) < 2:
        assert time.monotonic() < deadline and first.poll() is None, slurm.logs()
        time.sleep(0.05)
    second = slurm.run(*words, PROGRAM, str(intruder), timeout_s=TIMEOUT_S)
    assert second.returncode != 0
    text = second.stdout + second.stderr
    assert "cannot listen on" in text or "belongs to job" in text, text
    dist.FileStore(together[0], -1).add("here", 1)  # type: ignore[attr-defined]
    out, _ = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 0, out
    said_in(holder, 2)
    assert not list(intruder.glob("*.json"))


@pytest.mark.integration("Slurm", "sbatch with examples/train_digits.sbatch, on one node")
def test_sbatch_example(slurm: Slurm, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    out = tmp_path / "out.txt"
    script = str(ROOT / "examples" / "train_digits.sbatch")
    env = {"PATH": f"{Path(sys.executable).parent}:{slurm.env['PATH']}"}
    words = ["sbatch", "--wait", "--nodes=1", f"--chdir={ROOT}", f"--output={out}", "--overcommit"]
    words += [script, "--epochs", "1", "--target", "0"]
    done = slurm.run(*words, env=env, timeout_s=TIMEOUT_S)
    text = out.read_text() if out.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + text + slurm.logs()
    assert "(local rank 0)" in text and "(local rank 1)" in text
    assert "parameters equal on 2 ranks" in text


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["srun", "torchrun"])
def test_the_batch_script_of_the_page(start: str, slurm: Slurm, tmp_path: Path) -> None:
    """docs/launch.md: all but its modules, its environment and its numbers."""
    pytest.importorskip("sklearn")
    page, torchrun, _ = blocks(read("docs/launch.md"), "sh")
    script = re.sub(r"^(module load|source) .*\n", "", page, flags=re.M)
    assert script.count("\n") == page.count("\n") - 2
    last = "srun --kill-on-bad-exit=1 python train.py\n"
    assert script.endswith(last)
    if start == "torchrun":
        script = script.removesuffix(last) + torchrun
    program = f"{ROOT}/examples/train_digits.py --epochs 1 --target 0"
    file, out = tmp_path / "train.sbatch", tmp_path / "out.txt"
    file.write_text(script.replace("train.py", program))
    env = {"PATH": f"{Path(sys.executable).parent}:{slurm.env['PATH']}"}
    words = ["sbatch", "--wait", "--nodes=1", "--cpus-per-task=1", "--time=00:05:00"]
    words += [f"--chdir={tmp_path}", f"--output={out}", str(file)]
    done = slurm.run(*words, env=env, timeout_s=TIMEOUT_S)
    text = out.read_text() if out.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + text + slurm.logs()
    assert re.search(r"^pycomm doctor: 1 host.* READY$", text, re.M), text
    assert "(local rank 0)" in text and "(local rank 1)" in text
    assert "parameters equal on 2 ranks" in text
    assert not list(tmp_path.glob("records-*"))


@pytest.mark.nightly
def test_a_task_dies_and_the_others_go_on(slurm: Slurm, tmp_path: Path) -> None:
    """docs/launch.md: the step that Slurm does not end."""
    line = blocks(read("docs/launch.md"), "sh")[2].splitlines()[-1]
    program = f"{sys.executable} {HERE / 'death_program.py'} {tmp_path}"
    command = line.replace("srun", "srun -n3 --overcommit").replace("python train.py", program)
    done = slurm.run(*command.split(), timeout_s=TIMEOUT_S)
    text = done.stdout + done.stderr
    assert done.returncode != 0, text
    ends = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert ends == {f"{rank}.json": {"size": 2, "members": [0, 2]} for rank in (0, 2)}, (
        text + slurm.logs()
    )


@pytest.mark.integration("Slurm", "a batch script that forgot srun is no rank of many")
def test_without_srun_there_is_no_launcher(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    script = tmp_path / "job.sh"
    script.write_text(f'#!/bin/bash\n{sys.executable} {PROGRAM} {tmp_path} ; echo "exit $?"\n')
    words = ["sbatch", "--wait", "-n2", "--overcommit", f"--output={out}", str(script)]
    done = slurm.run(*words, timeout_s=TIMEOUT_S)
    assert "no launcher\nexit 3" in out.read_text(), done.stderr


@pytest.mark.integration("Slurm", "the node list as scontrol expands it")
def test_node_list_is_scontrols(slurm: Slurm) -> None:
    from pycomm.integrations.node_list import expand

    lists = ["n1", "n[1-3]", "n[08-11,20],login", "r[1-2]n[01-02]", "a[1-2],b3,c[099-101]"]
    for text in lists:
        done = slurm.run("scontrol", "show", "hostnames", text)
        assert expand(text) == done.stdout.split(), text

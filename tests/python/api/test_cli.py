"""``python -m pycomm``, in a process of its own as users run it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import rings
import torch
from command import run_pycomm
from processes import child_environment, free_port
from ranks import run_python

import pycomm
from pycomm._native import loader
from pycomm.cli import env, main, status

# What Ctrl-C does to a command that waits: the alarm comes when it has begun.
INTERRUPTED = """
import contextlib, os, signal, sys, threading
from pycomm.cli import doctor, main  # an interrupted import may lose the exception
from pycomm._native import loader
with contextlib.suppress(ImportError):
    loader.load()
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
sys.exit(main(sys.argv[1:]))
"""


def run_unread(arguments: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, whose output goes to a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            env=child_environment() | env,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "arguments", rings.ends([["--help"], ["env"], ["status"], ["secret", "--id", "PATH"]])
)
@pytest.mark.parametrize("unbuffered", ["", rings.nightly("1")])
@pytest.mark.ci
def test_output_that_nobody_reads_ends_a_command_quietly(
    arguments: list[str], unbuffered: str, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    if "PATH" in arguments:
        run_pycomm(["secret", "--generate", str(path)])
    done = run_unread(
        ["-m", "pycomm", *(each.replace("PATH", str(path)) for each in arguments)],
        PYTHONUNBUFFERED=unbuffered,
    )
    ignored = arguments == ["--help"] and unbuffered  # by argparse, where it prints
    assert (done.returncode, done.stderr) == (0 if ignored else 141, "")


def test_a_broken_connection_is_no_reader_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(status, "run", broken)
    with pytest.raises(BrokenPipeError):
        main(["status"])


# The command prints, which the buffer holds, and then ends in another way.
ENDS_BADLY = """
import sys
from pycomm.cli import main, status
def run(_):
    print("a line")
    raise ENDS
status.run = run
sys.exit(main(["status"]))
"""


@pytest.mark.parametrize(
    ("ends", "code", "last"),
    [
        ('RuntimeError("a crash")', 1, "RuntimeError: a crash\n"),
        ("KeyboardInterrupt", 130, ""),
    ],
)
@pytest.mark.ci
def test_a_reader_that_has_ended_hides_no_other_error(ends: str, code: int, last: str) -> None:
    done = run_unread(["-c", ENDS_BADLY.replace("ENDS", ends)], PYTHONUNBUFFERED="")
    assert done.returncode == code, done.stderr
    assert done.stderr.endswith(last) and "BrokenPipeError" not in done.stderr
    assert bool(done.stderr) == bool(last)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--sizes=4", "--seconds=0.05"],
        ["bench", "--sizes=4", "--seconds=0.05", "--json"],
        ["serve", "MAKE", "--listen", "127.0.0.1:0", "--workers", "1"],
    ],
)
def test_output_that_nobody_reads_is_no_error_of_the_command(
    arguments: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "make.py"
    path.write_text(
        "from torch import nn, optim\n"
        "def make():\n"
        "    model = nn.Linear(1, 1)\n"
        "    return model, optim.SGD(model.parameters(), lr=1.0)\n"
    )
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = run_unread(
        ["-m", "pycomm", *(each.replace("MAKE", f"{path}:make") for each in arguments)],
        **job,
        MASTER_PORT=str(free_port()),
    )
    assert done.returncode == 141, done.stderr
    assert "pycomm bench: " not in done.stderr and "pycomm serve: " not in done.stderr
    assert "Traceback" not in done.stderr


def test_env_as_json_holds_every_setting_with_its_origin() -> None:
    result = run_python(
        ["-m", "pycomm", "env", "--json"],
        env={"PYCOMM_ALGO": "ring", "NCCL_SOCKET_IFNAME": "^lo"},
    )
    report = json.loads(result.stdout)
    rows = {row["option"]: row for row in report["options"]}
    assert (rows["algorithm"]["value"], rows["algorithm"]["origin"]) == ("ring", "PYCOMM_ALGO")
    assert (rows["interface"]["value"], rows["interface"]["origin"]) == (
        "^lo",
        "NCCL_SOCKET_IFNAME",
    )
    assert (rows["timeout"]["value"], rows["timeout"]["origin"]) == (1800.0, "default")
    versions = report["versions"]
    assert versions["pycomm"] == pycomm.__version__
    assert versions["torch"] == torch.__version__
    assert versions["numpy"] == numpy.__version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert result.returncode == (1 if report["problems"] else 0)
    assert result.stderr == ""


def test_env_shows_all_mistakes_at_once_and_ends_with_1() -> None:
    result = run_pycomm(["env"], env={"PYCOMM_ALOG": "ring", "PYCOMM_DEBUG": "loud"})
    assert result.returncode == 1
    assert "did you mean PYCOMM_ALGO?" in result.stdout
    assert "PYCOMM_DEBUG='loud'" in result.stdout
    assert re.search(r"debug +None +not allowed", result.stdout)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"PYCOMM_SECRET_FILE": "/nowhere/secret"}, "/nowhere/secret"),
        ({"PYCOMM_FAULT": "no such point"}, "PYCOMM_FAULT"),
    ],
)
@pytest.mark.ci
def test_env_reports_what_init_would_raise(variables: dict[str, str], text: str) -> None:
    result = run_pycomm(["env", "--json"], env=variables)
    assert any(text in problem for problem in json.loads(result.stdout)["problems"]), result.stdout
    assert result.returncode == 1


@pytest.mark.ci
def test_env_says_whether_there_is_a_secret_and_never_which(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    run_pycomm(["secret", "--generate", str(path)])
    shown = run_pycomm(["secret", "--id", str(path)]).stdout.split()
    for flags in ([], ["--json"]):
        done = run_pycomm(["env", *flags], env={"PYCOMM_SECRET_FILE": str(path)})
        assert path.read_text().strip().removeprefix("pycomm-secret-1:") not in done.stdout
    report = json.loads(done.stdout)
    key_id, origin = shown
    assert report["secret"] == {"state": "configured", "key_id": key_id, "origin": origin}
    text = run_pycomm(["env"], env={"PYCOMM_SECRET_FILE": str(path)}).stdout
    assert f"secret:\n  configured  key id {key_id}  {path}\n" in text + "\n"
    none = run_pycomm(["env"], env={"PYCOMM_SECRET_FILE": "none"})
    assert "secret:\n  none\n" in none.stdout + "\n"
    path.chmod(0o644)
    done = run_pycomm(["env", "--json"], env={"PYCOMM_SECRET_FILE": str(path)})
    report = json.loads(done.stdout)
    assert report["secret"] == {"state": "cannot be used"} and done.returncode == 1
    assert any(str(path) in problem for problem in report["problems"])


@pytest.mark.ci
def test_ctrl_c_ends_the_doctor_with_130_and_no_traceback() -> None:
    for rank in (0, 1):
        arguments = ["doctor", "--nnodes=2", f"--node-rank={rank}", "--master-addr=127.0.0.1"]
        port = f"--master-port={free_port()}"
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, *arguments, port],
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert (process.returncode, out) == (130, ""), err
        assert "Traceback" not in err


def test_a_foreign_variable_is_a_note_and_no_problem() -> None:
    result = run_pycomm(["env", "--json"], env={"PYCOMM_HOME": "/opt/pycomm"})
    report = json.loads(result.stdout)
    assert any("PYCOMM_HOME" in note for note in report["notes"])
    assert not any("PYCOMM_HOME" in problem for problem in report["problems"])
    assert result.returncode == (1 if report["problems"] else 0)


@pytest.mark.parametrize(
    ("program", "shown"),
    [("/usr/bin/pycomm", "pycomm"), ("/x/pycomm/__main__.py", "python -m pycomm")],
)
def test_help_names_the_command_that_was_typed(
    program: str,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert f"usage: {shown} bench " in out
    assert "[--json]" in out


def test_the_other_package_of_this_name_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.metadata, "packages_distributions", lambda: {"pycomm": ["pycomm", "torch-pycomm"]}
    )
    problems = env.collect({}).problems
    assert any("'pycomm' has a package named pycomm" in problem for problem in problems)
    monkeypatch.setattr(
        importlib.metadata, "packages_distributions", lambda: {"pycomm": ["torch-pycomm"]}
    )
    assert not any("has a package" in problem for problem in env.collect({}).problems)


@pytest.mark.parametrize(
    ("there", "shown"), [(True, "built"), (False, "not built: CPU tensors only")]
)
def test_env_says_whether_the_cuda_library_is_there(
    there: bool, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libpycomm_cuda.so"
    if there:
        library.touch()
    monkeypatch.setattr(loader, "CUDA_LIBRARY", library)
    report = env.collect({})
    assert dataclasses.asdict(report)["versions"][library.name] == shown  # what --json prints
    assert re.search(rf"^libpycomm_cuda\.so +{shown}$", env.as_text(report), re.M)


@pytest.mark.needs_native
def test_env_shows_the_native_part() -> None:
    report = env.collect({})
    assert report.versions["simd"]
    assert any(row["loopback"] and row["address"] for row in report.interfaces)
    assert not [problem for problem in report.problems if "extension" in problem]


def test_wrong_usage_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nonsense"], ["env", "--nonsense"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "usage: python -m pycomm" in capsys.readouterr().err


def test_flags_may_have_underscores_but_values_keep_theirs() -> None:
    from pycomm.cli import _with_dashes

    assert _with_dashes("--nproc_per_node=a_b") == "--nproc-per-node=a_b"
    assert _with_dashes("a_b") == "a_b"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"pycomm {pycomm.__version__}\n"


def test_a_pycomm_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="pycomm")
    assert command.load() is main


@pytest.mark.ci
def test_bench_prints_one_json_object() -> None:
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    table = [sys.executable, "-m", "pycomm", "bench", "--sizes=4", "--seconds=0.05", "--json"]
    done = run_python([*launched, *table], timeout_s=120.0)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["size"], row["collective"], row["wrong"]) == (4, "all_reduce", 0)


OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def as_open_mpi(rank: int, port: int, *options: str) -> subprocess.CompletedProcess[str]:
    number = str(rank)
    env = {"OMPI_COMM_WORLD_RANK": number, "OMPI_COMM_WORLD_LOCAL_RANK": number, **OPEN_MPI}
    bench = ["-m", "pycomm", "bench", "--sizes=4", "--seconds=0.05", *options]
    return run_python(bench, env={**env, "MASTER_PORT": str(port)}, timeout_s=120.0)


@pytest.mark.ci
def test_bench_runs_under_mpirun() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: as_open_mpi(rank, port, "--json"), range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    (row,) = json.loads(first.stdout)["rows"]
    assert (row["collective"], row["wrong"], second.stdout) == ("all_reduce", 0, "")


def test_bench_waits_as_long_as_it_is_told() -> None:
    begin = time.monotonic()
    alone = as_open_mpi(0, free_port(), "--timeout=1.5")
    assert alone.returncode == 1
    waited = re.search(r"pycomm bench: .* timed out: rank 0 waited (\d+) ms", alone.stderr)
    assert waited and 1400 <= int(waited[1]) < 10_000, alone.stderr
    assert time.monotonic() - begin < 60.0  # the default is 300 s


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({}, "no launcher has said which rank this is (torchrun, mpirun and srun do)"),
        ({"RANK": "0"}, "WORLD_SIZE='' is not a whole number"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS='x' is not"),
    ],
)
@pytest.mark.ci
def test_bench_without_a_launcher_is_wrong_usage(env: dict[str, str], text: str) -> None:
    done = run_pycomm(["bench"], env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_bench_refuses_what_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("0", "-1", "nan", "inf", "soon", "90000"):
        with pytest.raises(SystemExit) as caught:
            main(["bench", f"--timeout={wrong}"])
        assert caught.value.code == 2
        said = f"argument --timeout: {wrong!r} is not a number of seconds, above 0 and up to 86400"
        assert said in capsys.readouterr().err

"""``python -m pycomm run``: its lists of hosts, its secret, and a job on this host alone."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from processes import run_python

from pycomm import _extension
from pycomm.cli import doctor, main, remote_end, run
from pycomm.doctor.facts import HostFacts
from pycomm.doctor.report import Report


def hosts_of(*given: str) -> list[run.Host]:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return run.read_hosts(parser.parse_args([*given, "train.py"]))


def test_hosts_have_names_and_ranks(tmp_path: Path) -> None:
    listed = hosts_of("-H", "nowhere.example:2,me@other.example,[fd00::9]:3", "--nproc-per-node=4")
    assert [(host.target, host.name, host.count) for host in listed] == [
        ("nowhere.example", "nowhere.example", 2),
        ("me@other.example", "other.example", 4),
        ("fd00::9", "fd00::9", 3),
    ]
    file = tmp_path / "hosts"
    file.write_text("# two\n\nnowhere.example slots=2  # a\nme@other.example : 1\n")
    with pytest.raises(ValueError, match=r"hosts: 'me@other\.example : 1' is not HOST:RANKS"):
        hosts_of("--hostfile", str(file))
    file.write_text(file.read_text().replace(" : ", ":"))
    assert [host.count for host in hosts_of("--hostfile", str(file))] == [2, 1]
    assert [host.local for host in hosts_of("-H", "localhost,me@127.0.0.1")] == [True, False]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["-H", "alpha:0"], "'alpha:0' is not HOST:RANKS"),
        (["-H", "-oProxyCommand=touch:1"], "is not HOST:RANKS"),
        (["-H", "alpha:1,root@alpha:2"], "lists alpha twice"),
        (["-H", ","], "lists no host"),
        (["--hostfile", "/nowhere/hosts"], "No such file or directory: '/nowhere/hosts'"),
        (["-H", "localhost", "-x", "NO_SUCH_VARIABLE_9"], "NO_SUCH_VARIABLE_9: the variable is"),
    ],
)
def test_wrong_usage_is_2(given: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = f"{given[0]}{given[1]}" if given[1].startswith("-") else None
    assert main(["run", *([option] if option else given), "train.py"]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.needs_native
def test_a_secret_is_one_to_the_native_part() -> None:
    _extension.load()
    made = [_extension.native.Secret.parse(run.make_secret(), "a test").key_id for _ in range(2)]
    assert made[0] != made[1]


def test_versions_are_those_of_what_would_be_imported() -> None:
    import torch

    import pycomm

    assert remote_end.versions() == {"torch": str(torch.__version__), "pycomm": pycomm.__version__}


@pytest.mark.needs_native
def test_this_host_alone_needs_no_ssh_and_passes_arguments_and_exit_codes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['MINE'], flush=True)\nsys.exit(5)\n"
    )
    done = run_python(
        [
            *("-m", "pycomm", "run", "-H", "localhost:1", "--ssh=/nowhere/ssh", "-x", "MINE=a b"),
            *("--monitor_interval=0.5", str(script), "--with_underscore", "--help", "-H", "x"),
        ],
    )
    assert done.returncode == 5, done.stderr
    expected = r"[0@localhost] ['--with_underscore', '--help', '-H', 'x'] a b"
    assert expected in done.stdout.splitlines(), done.stdout
    last = done.stderr.splitlines()[-1]
    assert last == "pycomm run: rank 0 on localhost failed first: exit code 5"
    # Of torchrun itself: a host, and no rank.
    assert re.search(r"^\[localhost\] .*exitcode", done.stderr, re.MULTILINE)


LEAVES_EARLY = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("pycomm")
dist.barrier()
if dist.get_rank() == 1:
    dist.destroy_process_group()  # the other one fails at once
    time.sleep(1)  # and has ended before this one, as if this one had much memory to give back
    sys.exit(7)
dist.barrier()
"""


@pytest.mark.needs_native
@pytest.mark.in_shares
def test_the_rank_that_others_blame_has_failed_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEAVES_EARLY)
    done = run_python(["-m", "pycomm", "run", "-H", "localhost:2", str(script)])
    assert "PEER_LEFT" in done.stderr
    last = done.stderr.splitlines()[-1]
    # torchrun, which sees rank 0 end first, ends rank 1 with a signal.
    assert last == "pycomm run: rank 1 on localhost failed first", done.stderr
    assert done.returncode == 1


def test_the_doctor_writes_what_run_reads(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    facts = [
        HostFacts(name="b", ranks=(2, 3), address="10.0.0.2"),
        HostFacts(name="a", ranks=(0, 1)),
    ]
    given = argparse.Namespace(hostfile=str(path), hosts=None, ranks_per_host=1)
    doctor._write_hostfile(Report(hosts=facts), given)
    assert path.read_text() == "a:2\nb:2  # 10.0.0.2\n"
    assert [(one.name, one.count) for one in hosts_of("--hostfile", str(path))] == [
        ("a", 2),
        ("b", 2),
    ]
    by_hand = argparse.Namespace(hostfile=str(path), hosts=["x.example", "y"], ranks_per_host=8)
    facts = [HostFacts(name="x", ranks=(0,)), HostFacts(name="y", ranks=(1,))]
    doctor._write_hostfile(Report(hosts=facts), by_hand)
    assert path.read_text() == "x.example:8\ny:8\n"

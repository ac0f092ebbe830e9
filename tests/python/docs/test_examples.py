"""The examples as a user runs them: two real ranks, a few steps.

CI runs one under torchrun; ranks that are forked from a process with torch are cheaper, and run the
same programs. `make nightly` runs each under torchrun.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pty
import re
import runpy
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
from documents import read
from ranks import LOOPBACK, TORCH_DDP, child_environment, free_port, run_python, run_ranks

pytestmark = pytest.mark.ci

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# With a busy disk a process may stand still for more than the 3 s after which it counts as gone.
PATIENT = {"PYCOMM_HEARTBEAT_TIMEOUT": "30"}


def run_example(
    name: str, *flags: str, launcher: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    arguments = [*(launcher or TORCHRUN), str(EXAMPLES / name), *flags]
    return run_python(arguments, timeout_s=300.0, env=PATIENT)


def run_as_script(rank: int, world_size: int, path: str, flags: list[str]) -> object:
    """What ``python PATH FLAGS`` would do, in a rank: its exit status."""
    sys.argv = [path, *flags]
    sys.path.insert(0, str(EXAMPLES))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return end.code
    return None


def run_example_without_torchrun(
    name: str, *flags: str, preload: tuple[str, ...] = ()
) -> tuple[object, str]:
    """Exit status and output of two ranks."""
    port = str(free_port())

    def launched(rank: int) -> dict[str, str | None]:
        address: dict[str, str | None] = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
        return {**PATIENT, **address, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}

    args = (str(EXAMPLES / name), list(flags))
    options: dict[str, Any] = {"init": "none", "env": launched}
    options["preload"] = (*TORCH_DDP, *preload)
    options["only_pycomm"] = "gloo" not in flags
    first, second = run_ranks(2, run_as_script, args=args, **options)
    assert first.value == second.value
    return first.value, first.stdout + second.stdout


def assert_parameters_equal(stdout: str) -> None:
    match = re.search(
        r"parameters equal on 2 ranks: sha256 rank 0 (\w+), rank 1 (\w+)$", stdout, re.M
    )
    assert match is not None, stdout
    assert match[1] == match[2]
    assert re.fullmatch("[0-9a-f]{16}", match[1])


@pytest.mark.needs_native
def test_digits_learns() -> None:
    done = run_example("train_digits.py", "--epochs", "3", "--target", "0.8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pycomm, wire dtype none: rank 0 on " in done.stdout
    assert "(local rank 0)" in done.stdout and "(local rank 1)" in done.stdout
    assert re.search(r"rank 0, last epoch: loss \d\.\d{4}, accuracy \d+\.\d%", done.stdout)
    assert re.search(r"s a step, exposed communication -?\d+\.\d% of it \(\d+ comp", done.stdout)
    accuracy = re.search(r"test accuracy (\d+\.\d)% \(target 80\.0% reached\)", done.stdout)
    assert accuracy is not None and float(accuracy[1]) >= 80.0
    assert_parameters_equal(done.stdout)
    assert "[  69/69] epoch 3 loss" in done.stderr  # the plain progress line, off a terminal


# What each of the short examples prints, as patterns. PERCENT is a test accuracy of 80 % or more.
PERCENT = r"test accuracy (8|9)\d\.\d%"
CALLED = r"all_reduce\(SUM, float32 x "
LATE = r"all_reduce #2 timed out after \d+ ms: rank 1 on \S+"
GOOD = rf"rank [02] \(\S+\) has {CALLED}1000, \S+\)"
ODD = rf"rank 1 \(\S+\) has {CALLED}999, \S+\)"
DIFFERENT = rf"({GOOD}, {ODD}|{ODD}, {GOOD})"  # of two that differ, either may be named first

SHORT = {
    "all_reduce.py": [
        "rank 0 of 2: the sum is right; its last number is 199",
        "rank 1 of 2: the sum is right; its last number is 199",
    ],
    "ddp.py": [PERCENT],
    "fewer_syncs.py": [
        f"LocalSGD: 11 syncs in 200 steps, {PERCENT}",
        f"DiLoCo: 10 syncs in 200 steps, {PERCENT}",
    ],
    "parameter_service.py": [f"worker 0: 200 steps, {PERCENT}"],
    "fsdp2.py": [
        "rank 0 holds 2405 of 4810 parameters",
        "rank 1 holds 2405 of 4810 parameters",
        PERCENT,
    ],
    "elastic.py": [
        r"rank 1: 60 steps, members \(1, 2\), (\d+\.\d+)\n(.*\n)?rank 2: 60 steps, .*, \1\n"
        r"|rank 2: 60 steps, members \(1, 2\), (\d+\.\d+)\n(.*\n)?rank 1: 60 steps, .*, \3\n",
        rf"rank 1 is the leader: loss \d\.\d{{3}}, {PERCENT}",
    ],
    "failures.py": [
        r"rank 0: PEER_DEAD: Rank 1 on \S+ is gone: its process ended or was killed\.",
        r"rank 2: PEER_DEAD: Rank 1 on \S+ is gone: its process ended or was killed\.",
        rf"rank [02]: TIMEOUT: {LATE} has not entered it \(its last: {CALLED}1000, \S+\) #1\)\.",
        r"  not entered: Rank 1 on \S+ has not entered all_reduce #2 \(SUM, .*; it last finished ",
        r"rank [012]: COLLECTIVE_MISMATCH: The ranks disagree about the operation #2: "
        rf"{DIFFERENT}\.",
        r"  mismatch: Operation #2 is not the same on all ranks: rank 1 called "
        rf"{CALLED}999, \S+\), but ranks 0 and 2 called {CALLED}1000, \S+\)\.",
    ],
    "joining.py": [],
    "restart.py": ["start at step 0", "start at step 30", PERCENT],
    "streaming_diloco.py": [rf"16\d\d bytes per step instead of 76840, {PERCENT}"],
    "unequal_machines.py": [
        r"epoch 0: \d\.\d\d s, shares \[\d+, \d+\]",
        r"epoch 2: \d\.\d\d s, shares \[[45]\d, 1?\d\]",  # of 60; 48 and 12 by the speeds
        rf"the weights count all samples alike: {PERCENT}",
    ],
    "wire_dtype.py": [
        rf"fp32: 7\d\.\d kB per step, {PERCENT}",
        rf"fp16: 39\.\d kB per step, {PERCENT}",
        rf"int8: 19\.\d kB per step, {PERCENT}",
    ],
}

RUN_ELSEWHERE = ("elastic.py", "failures.py", "restart.py", "parameter_service.py", "joining.py")
"""The first three below, the others by service/test_service_docs.py and
elastic/test_joining_recipes.py: they have no ranks, or each process is one of its own."""


def test_each_short_example_is_run_here_and_short() -> None:
    known = {"_common.py", "train_clicks.py", "train_digits.py", "train_lm.py"}
    short = {path.name for path in EXAMPLES.glob("*.py")} - known
    # tests/integrations runs those that need other libraries.
    assert {name for name in short if not name.startswith("with_")} == set(SHORT)
    for name in short:
        assert "_common" not in (EXAMPLES / name).read_text(), name
        assert len((EXAMPLES / name).read_text().splitlines()) <= 60, name


def test_their_table_says_what_they_print() -> None:
    rows = re.findall(
        r"^\| \[(\w+\.py)\].*\| `(.+)` \|$", (EXAMPLES / "README.md").read_text(), re.M
    )
    printed = {name: line for name, line in rows if not name.startswith("with_")}
    assert set(printed) == set(SHORT) - {"elastic.py", "failures.py", "joining.py"}
    for name, line in printed.items():
        assert any(re.fullmatch(pattern, line) for pattern in SHORT[name]), (name, line)


def test_the_tour_shows_what_they_print() -> None:
    tour = read("docs/tour.md")
    shown = re.findall(
        r"^```bash\n[^\n]*examples/(\w+\.py)[^\n]*\n```\n\n```text\n(.*?)```$", tour, re.M | re.S
    )
    assert [name for name, _ in shown] == [
        *("all_reduce.py", "ddp.py", "wire_dtype.py", "failures.py", "restart.py"),
        "train_digits.py",
    ]
    for name, output in shown[:-1]:
        found = [pattern for pattern in SHORT[name] if re.search(pattern, output)]
        assert len(found) >= min(2, len(SHORT[name])), (name, found)
        if name not in RUN_ELSEWHERE:
            assert found == SHORT[name], name


@pytest.mark.needs_native
@pytest.mark.parametrize(
    "name", rings.first_of([name for name in SHORT if name not in RUN_ELSEWHERE], 4)
)
@pytest.mark.parametrize("by", ["forked", rings.nightly("torchrun")])
def test_short_example(name: str, by: str) -> None:
    if importlib.util.find_spec("sklearn") is None:  # imported, it would leave variables here
        pytest.skip("scikit-learn is not installed")
    if by == "torchrun":
        done = run_example(name)
        status: object = done.returncode or None
        printed, said = done.stdout, done.stderr
    else:
        status, printed = run_example_without_torchrun(name, preload=("sklearn.datasets",))
        said = ""
    assert status is None, printed + said
    for pattern in SHORT[name]:
        assert re.search(pattern, printed), (pattern, printed)


@pytest.mark.needs_native
@pytest.mark.parametrize("name", ["elastic.py", "failures.py"])
def test_short_example_of_failures(name: str) -> None:
    if name == "elastic.py" and importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed")
    done = run_python([str(EXAMPLES / name)], timeout_s=200.0, env=PATIENT)
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in SHORT[name]:
        assert re.search(pattern, done.stdout), (pattern, done.stdout)


@pytest.mark.nightly
@pytest.mark.needs_native
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None, reason="namespaces need root and iproute2"
)
def test_the_tour_of_two_machines() -> None:
    commands = re.findall(r"^(PYCOMM_SECURITY=off python .*switch.*)$", read("docs/tour.md"), re.M)
    (shown,) = re.findall(r"switch[^\n]*\n```\n\n```text\n(.*?)```", read("docs/tour.md"), re.S)
    variable, _, script, *arguments = shlex.split(*commands)
    arguments[arguments.index("--") + 1] = str(EXAMPLES / "train_digits.py")
    env = PATIENT | dict([variable.split("=")])
    done = run_python([str(EXAMPLES.parent / script), *arguments], timeout_s=200.0, env=env)
    assert done.returncode == 0, done.stdout + done.stderr

    def without_accuracy(text: str) -> str:  # other processors round otherwise
        return re.sub(r"accuracy \d+\.\d%", "accuracy %", text)

    printed = without_accuracy(done.stdout + done.stderr)
    for line in without_accuracy(shown).replace("vm", socket.gethostname()).splitlines():
        assert line == "…" or line in printed, (line, printed)


@pytest.mark.nightly
@pytest.mark.needs_native
def test_restart_after_a_rank_was_killed(tmp_path: Path) -> None:
    if importlib.util.find_spec("sklearn") is None:  # imported, it would leave variables here
        pytest.skip("scikit-learn is not installed")
    path = tmp_path / "checkpoint.pt"
    # Time for rank 0 to say what it saw before torchrun looks, and ends it as well.
    launcher = [*TORCHRUN, "--max-restarts=1", "--monitor-interval=5"]
    done = run_example("restart.py", str(path), launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PeerDeadError: Rank 1 on " in done.stderr
    for pattern in SHORT["restart.py"]:
        assert re.search(pattern, done.stdout), (pattern, done.stdout)
    assert torch.load(path, weights_only=True)["step"] == 60


@pytest.mark.nightly
@pytest.mark.needs_native
def test_digits_is_deterministic() -> None:
    flags = ["--epochs", "1", "--target", "0", "--wire-dtype", "fp16"]
    runs = [run_example_without_torchrun("train_digits.py", *flags) for _ in range(2)]
    for status, stdout in runs:
        assert status == 0
        assert_parameters_equal(stdout)
    (_, first), (_, second) = runs
    assert first.splitlines()[-1] == second.splitlines()[-1]


@pytest.mark.nightly
def test_digits_fails_below_its_target_and_takes_the_old_launcher() -> None:
    # torch.distributed.launch passes --local-rank; the other spelling is added by hand.
    launcher = ["-m", "torch.distributed.launch", *TORCHRUN[2:]]
    flags = ["--backend", "gloo", "--epochs", "1", "--target", "1.01", "--local_rank", "0"]
    done = run_example("train_digits.py", *flags, launcher=launcher)
    assert done.returncode != 0
    assert "(target 101.0% MISSED)" in done.stdout, done.stdout + done.stderr
    assert_parameters_equal(done.stdout)


@pytest.mark.nightly
@pytest.mark.needs_native
def test_lm_loss_falls() -> None:
    flags = ["--steps", "20", "--accumulate", "2", "--wire-dtype", "INT8"]
    done = run_example("train_lm.py", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = re.search(
        r"loss fell: first (\d\.\d+), last (\d\.\d+) \(mean of 10 steps\)", done.stdout
    )
    assert ends is not None, done.stdout
    assert 5.0 < float(ends[1]) < 6.5  # about ln 256, before anything is learnt
    assert float(ends[2]) < float(ends[1]) - 1.0
    assert_parameters_equal(done.stdout)


def test_gloo_has_no_int8() -> None:
    flags = ["--backend", "gloo", "--epochs", "1", "--wire-dtype", "int8"]
    status, _ = run_example_without_torchrun("train_digits.py", *flags)
    assert status == "--wire-dtype int8 needs --backend pycomm"


def test_lm_fails_where_the_loss_does_not_fall() -> None:
    flags = ["--backend", "gloo", "--steps", "3", "--lr", "0"]
    status, stdout = run_example_without_torchrun("train_lm.py", *flags)
    assert status == 1
    assert "loss DID NOT FALL by 1.0" in stdout


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["train_digits.py", "train_lm.py"])
def test_help_explains_the_exposed_share(name: str) -> None:
    done = run_python([str(EXAMPLES / name), "--help"])
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "exposed share = median(synchronised - local) / median(whole step)" in text


def compare_with_one_bit_changed(rank: int, world_size: int, changed_rank: int) -> tuple[bool, str]:
    sys.path.append(str(EXAMPLES))
    from _common import compare_parameters

    torch.manual_seed(0)
    net = torch.nn.Linear(100, 10)
    if rank == changed_rank:
        with torch.no_grad():
            net.bias.view(torch.int32)[3] ^= 1
    return compare_parameters(net)


@pytest.mark.needs_native
@pytest.mark.parametrize("changed_rank", [None, 0, 1])
def test_one_changed_bit_is_seen_on_every_rank(changed_rank: int | None) -> None:
    args = (-1 if changed_rank is None else changed_rank,)
    values = run_ranks(2, compare_with_one_bit_changed, args=args).values()
    assert values[0] == values[1]
    equal, line = values[0]
    assert equal == (changed_rank is None)
    assert ("DIFFER" in line) == (changed_rank is not None)


PROGRESS = """
import sys
sys.path.append(sys.argv[1])
if sys.argv[2] == "without": sys.modules["tqdm"] = None
from _common import Progress
progress = Progress(20, enabled=True)
for step in range(20): progress.advance(f"loss {step}")
progress.close()
"""


def read_some(terminal: int) -> str:
    try:
        return os.read(terminal, 1 << 16).decode()
    except OSError:  # Linux says EIO once the other end is closed and all is read
        return ""


@pytest.mark.nightly
@pytest.mark.parametrize("tqdm", ["with", "without"])
def test_progress_on_a_terminal(tqdm: str) -> None:
    if tqdm == "with":
        pytest.importorskip("tqdm")
    terminal, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
    try:
        command = [sys.executable, "-c", PROGRESS, str(EXAMPLES), tqdm]
        subprocess.run(command, stderr=other_end, env=child_environment(), timeout=180, check=True)
        os.close(other_end)
        other_end = -1
        shown = "".join(iter(lambda: read_some(terminal), ""))
    finally:
        os.close(terminal)
        if other_end >= 0:
            os.close(other_end)
    assert "\r" in shown and "loss 19" in shown
    assert ("100%" if tqdm == "with" else "[  20/20]") in shown
    assert shown.count("\n") <= 2  # one line that is rewritten, not one a step

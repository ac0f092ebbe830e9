"""The benchmark harness: its table, its statistics, and that #wrong can be other than 0."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import RIG, child_environment, run_python
from time_bound import assert_within

BENCHMARKS = RIG.parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import torch_floor  # noqa: E402
from exact import (  # noqa: E402
    PERIOD,
    REDOPS,
    check_exact,
    count_wrong,
    fill,
    pattern,
    reduced_pattern,
)
from harness import Place  # noqa: E402
from options import make_parser, size_of  # noqa: E402
from report import paired_ratio  # noqa: E402

pytestmark = pytest.mark.nightly

NATIVE = pytest.mark.needs_native
QUICK = ["--blocks", "2", "--seconds", "0.02", "--timeout", "60"]
ROW_FIELDS = {
    "backend": str,
    "ranks": int,
    "size_bytes": int,
    "count": int,
    "dtype": str,
    "redop": str,
    "ops": int,
    "p50_us": float,
    "p99_us": float,
    "algbw_gbps": float,
    "busbw_gbps": float,
    "wrong": int,
    "checked": int,
    "cpu_s_per_op": float,
    "cpu_s_per_gb": float,
}


def run_table(
    folder: Path, *flags: str, script: Path = BENCHMARKS / "allreduce.py", fault: str = ""
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    output = folder / "table.json"
    arguments = [str(script), *QUICK, *flags, "--json", str(output)]
    done = run_python(arguments, timeout_s=300.0, env={"FAULT": fault})
    table = json.loads(output.read_text()) if output.exists() else {}
    return done, table


@pytest.mark.nightly
@pytest.mark.parametrize(
    "backends",
    [["gloo", "gloo#2"], pytest.param(["pycomm", "gloo"], marks=NATIVE)],
    ids="-".join,
)
def test_table_and_json(backends: list[str], tmp_path: Path) -> None:
    out = tmp_path / "table.txt"
    flags = ["--backends", ",".join(backends), "--ranks", "2,3", "--sizes", "1,4,5000,64K"]
    done, table = run_table(tmp_path, *flags, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert out.read_text() == done.stdout

    assert table["schema"] == 1
    header = table["header"]
    assert header["table"] == "all_reduce"
    assert header["torch"] == torch.__version__
    assert header["cores"] >= 1 and header["cpu"] and header["commit"]
    assert header["command"].startswith("python benchmarks/allreduce.py --blocks 2")

    sizes = [(4, 1), (4, 1), (5000, 1250), (65536, 16384)]
    expected = [(b, r, *size) for r in (2, 3) for size in sizes for b in backends]
    rows = table["rows"]
    assert [(w["backend"], w["ranks"], w["size_bytes"], w["count"]) for w in rows] == expected
    for row in rows:
        for name, kind in ROW_FIELDS.items():
            assert type(row[name]) is kind, name
        assert row["wrong"] == 0
        # At least one whole buffer on every rank in each of the two blocks.
        assert row["checked"] >= 2 * row["ranks"] * row["count"]
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["algbw_gbps"] == pytest.approx(row["size_bytes"] / row["p50_us"] / 1e3)
        factor = 2 * (row["ranks"] - 1) / row["ranks"]
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * factor)
        if row["backend"] == backends[0]:
            assert row["versus"] is None
        else:
            versus = row["versus"]
            assert versus["subject"] == backends[0] and versus["pairs"] == 2
            assert 0 < versus["low"] <= versus["ratio"] <= versus["high"]

    body = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert body[0].split()[:5] == ["backend", "ranks", "size", "count", "type"]
    assert "#wrong" in body[0]
    assert len(body) == 2 + len(rows)


FAULTS = {"none": "4K", "nothing_sent": "8K", "other_op": "16K", "added_twice": "32K"}
FAULTS |= {"one_element_of_one_rank": "64K", "nan": "128K", "shifted": "256K"}


def test_a_wrong_operation_is_counted(tmp_path: Path) -> None:
    """Each fault at a size of its own."""
    flags = ["--backends", "gloo", "--ranks", "2", "--sizes", ",".join(FAULTS.values())]
    script = RIG / "faulty_allreduce.py"
    done, table = run_table(tmp_path, *flags, script=script, fault=",".join(FAULTS))
    assert done.returncode == 1, done.stdout + done.stderr
    assert [row["size_bytes"] for row in table["rows"]] == list(map(size_of, FAULTS.values()))
    wrong = {fault: row["wrong"] for fault, row in zip(FAULTS, table["rows"], strict=True)}
    assert [fault for fault, count in wrong.items() if not count] == ["none"], wrong
    # Two blocks of four checked operations on one rank, and what the timed loops left behind:
    # there the next operation has spread the fault to both ranks.
    assert wrong["one_element_of_one_rank"] == 2 * (4 + 2)
    assert f"{sum(wrong.values())} wrong" in done.stdout


def test_torchs_own_floor_is_below_a_backend_that_sums(tmp_path: Path) -> None:
    flags = ["--backends", "gloo,torch_floor", "--ranks", "2", "--sizes", "4,4K"]
    done, table = run_table(tmp_path, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table["rows"]
    expected = [(name, size) for size in (4, 4096) for name in ("gloo", "torch_floor")]
    assert [(row["backend"], row["size_bytes"]) for row in rows] == expected
    for gloo, floor in zip(rows[::2], rows[1::2], strict=True):
        assert floor["wrong"] == 0 and floor["checked"] > 0
        assert floor["p50_us"] < gloo["p50_us"]


@pytest.mark.parametrize("added", [0, 1])
def test_the_floor_must_leave_the_values(added: int) -> None:
    class Adds(torch_floor.Untouched):
        def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
            output.add_(added)

    group: Any = None
    case = Adds().prepare(Place("torch_floor", group, 1, 2, 4096, torch.float32, "sum"))
    case.arm(3)
    case.burst()
    wrong, checked = case.wrong()
    assert wrong == added * 4 * 1024  # of four checked operations; the timed buffer was not used
    assert checked == 5 * 1024


@pytest.mark.nightly
@pytest.mark.time_bound
@pytest.mark.parametrize("fault", ["rank_exits", "rank_sleeps"])
def test_a_rank_that_fails_ends_the_run(fault: str, tmp_path: Path) -> None:
    timeout = "5" if fault == "rank_sleeps" else "30"  # of the other only a hang may reach it
    flags = ["--backends", "gloo", "--ranks", "2", "--sizes", "4", "--timeout", timeout]
    begin = time.monotonic()
    done, table = run_table(tmp_path, *flags, script=RIG / "faulty_allreduce.py", fault=fault)
    took_s = time.monotonic() - begin
    assert done.returncode == 1 and not table
    assert "benchmark over 2 ranks failed: " in done.stderr
    if fault == "rank_exits":
        assert "rank 1 ended with 7" in done.stderr
    assert_within(took_s, 100)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_the_parent(number: int) -> None:
    command = [sys.executable, str(RIG / "faulty_allreduce.py")]
    command += ["--backends", "gloo", "--ranks", "2", "--sizes", "4"]
    parent = subprocess.Popen(
        command,
        env=child_environment({"FAULT": "rank_sleeps"}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    pids: list[str] = []
    try:
        deadline = time.monotonic() + 120
        while len(pids) < 2 and time.monotonic() < deadline:
            pids = children.read_text().split()
            time.sleep(0.05)
        assert len(pids) == 2
    finally:
        parent.send_signal(number)
        parent.wait(30)
    deadline = time.monotonic() + 60
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.nightly
def test_under_torchrun(tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    table = [str(BENCHMARKS / "allreduce.py"), "--backends", "gloo", "--sizes", "4", *QUICK]
    done = run_python([*launcher, *table, "--json", str(output)], timeout_s=300.0)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(output.read_text())["rows"]
    assert row["ranks"] == 2 and row["wrong"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sizes", "4Q"], "'4Q' is not a size such as 4, 4K, 1M or 1G"),
        (["--ranks", "0"], "'0' is not a positive whole number"),
        (["--redop", "band"], "invalid choice: 'band'"),
    ],
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        make_parser("all_reduce").parse_args(flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes() -> None:
    sizes = [size_of(text) for text in ("4", "4K", "1m", "2G")]
    assert sizes == [4, 4096, 1 << 20, 2 << 30]


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8]


EXACT_CASES = [
    (dtype, redop)
    for dtype in DTYPES
    for redop in REDOPS
    if dtype.is_floating_point or redop != "avg"  # no backend averages whole numbers
]


@pytest.mark.parametrize(("dtype", "redop"), EXACT_CASES, ids=str)
def test_inputs_reduce_exactly_in_any_order(dtype: torch.dtype, redop: str) -> None:
    ranks, numel = 5, 2 * PERIOD + 11
    inputs = [torch.empty(numel, dtype=dtype) for _ in range(ranks)]
    for rank, tensor in enumerate(inputs):
        fill(tensor, pattern(rank, 3, ranks, redop))
    combine = {"sum": torch.add, "avg": torch.add, "prod": torch.mul}
    combine |= {"min": torch.minimum, "max": torch.maximum}
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        result = inputs[order[0]].clone()
        for rank in order[1:]:
            result = combine[redop](result, inputs[rank])
        if redop == "avg":
            result = result / ranks
        assert count_wrong(result, reduced_pattern(3, ranks, redop)) == 0


def test_inexact_inputs_are_refused() -> None:
    check_exact(torch.bfloat16, 42, "sum")
    with pytest.raises(ValueError, match="sum over 43 ranks is not exact"):
        check_exact(torch.bfloat16, 43, "sum")


@given(
    numel=st.integers(1, 3 * PERIOD),
    seed=st.integers(0, 1000),
    spots=st.sets(st.integers(0, 3 * PERIOD), max_size=20),
    nan=st.booleans(),
)
def test_count_wrong_counts_every_element(
    numel: int, seed: int, spots: set[int], nan: bool
) -> None:
    numbers = pattern(0, seed, 2, "sum")
    tensor = torch.empty(numel)
    fill(tensor, numbers)
    assert np.array_equal(tensor.numpy(), np.resize(numbers, numel))
    inside = [spot for spot in spots if spot < numel]
    tensor[inside] = float("nan") if nan else tensor[inside] + 1
    assert count_wrong(tensor, numbers) == len(inside)


def test_paired_ratio_sees_through_drift() -> None:
    # The machine slows down tenfold during the run; in every pair one takes 3 times the other.
    mine = np.geomspace(1.0, 10.0, 20)
    versus = paired_ratio("pycomm", mine, 3.0 * mine)
    assert (versus.ratio, versus.low, versus.high) == pytest.approx((3.0, 3.0, 3.0))
    noise = np.random.default_rng(1).lognormal(0.0, 0.2, 20)
    noisy = paired_ratio("pycomm", mine, 3.0 * mine * noise)
    assert noisy.low < noisy.ratio < noisy.high
    assert 2.5 < noisy.low < 3.0 < noisy.high < 3.6

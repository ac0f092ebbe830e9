"""Measured tables: their files, what is refused, and that a group goes by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from pycomm import Options, flight_record
from pycomm.cli.tune import _choices
from pycomm.tuning import Choice, TuningTable, read_table

TABLE = TuningTable(
    "1 host with 2 ranks",
    (Choice("all_reduce", 1024, "auto"), Choice("all_reduce", 1 << 20, "direct")),
)


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(TABLE.to_json())
    assert read_table(path) == TABLE
    assert read_table(path).digest == TABLE.digest
    other = TuningTable("1 host with 3 ranks", TABLE.choices)
    assert other.digest != TABLE.digest


def broken(**changes: Any) -> str:
    return json.dumps({**json.loads(TABLE.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "it has no 'pycomm_tuning'"),
        (broken(pycomm_tuning=2), "its version is 2"),
        (broken(choices=[{"collective": "all_reduce"}]), "missing"),
        (
            broken(choices=[{**json.loads(TABLE.to_json())["choices"][0], "up_to_nbytes": "9"}]),
            "'9'",
        ),
        (broken(choices=json.loads(TABLE.to_json())["choices"][::-1]), "grows within a collective"),
        (broken(topology=3), "its topology is not text"),
    ],
)
def test_a_bad_table_says_what_is_wrong_with_it(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=why) as caught:
        read_table(path)
    assert str(path) in str(caught.value)
    assert "bench --tune" in str(caught.value)


def test_a_missing_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_table(tmp_path / "none.json")


def test_choices_hold_half_way_to_the_next_size() -> None:
    best = [(4, "ring"), (16, "ring"), (64, "auto"), (256, "direct"), (1024, "auto")]
    assert _choices("reduce", best) == [
        Choice("reduce", 32, "ring"),
        Choice("reduce", 128, "auto"),
        Choice("reduce", 512, "direct"),
    ]


def reduce_with(rank: int, world_size: int, folder: str) -> list[str]:
    """Which algorithm two all_reduces went by, in a group with the table of this folder."""
    path = Path(folder) / "table.json"
    group = dist.new_group(backend="pycomm", pg_options=Options(tuning=path, transport="tcp"))
    for numel in (1, 1024):
        tensor = torch.full((numel,), float(rank + 1))
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((numel,), 3.0))
    return [operation.algorithm for operation in flight_record(group).operations]


@pytest.mark.needs_native
def test_a_group_goes_by_its_table_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(TABLE.to_json())
    outcome = run_ranks(2, reduce_with, args=(str(tmp_path),))
    assert outcome.values() == [["recursive_doubling", "direct"]] * 2
    elsewhere = TuningTable("2 hosts with 1 rank each", TABLE.choices)
    path.write_text(elsewhere.to_json())
    outcome = run_ranks(2, reduce_with, args=(str(tmp_path),))
    assert outcome.values() == [["recursive_doubling", "recursive_doubling"]] * 2


def differ(rank: int, world_size: int, folder: str) -> str:
    choices = TABLE.choices if rank == 0 else TABLE.choices[:1]
    path = Path(folder) / f"{rank}.json"
    path.write_text(TuningTable(TABLE.topology, choices).to_json())
    try:
        dist.new_group(backend="pycomm", pg_options=Options(tuning=path))
    except dist.DistBackendError as error:
        return str(error)
    return "joined"


@pytest.mark.needs_native
def test_ranks_with_different_tables_do_not_come_together(tmp_path: Path) -> None:
    for text in run_ranks(2, differ, args=(str(tmp_path),)).values():
        assert "CONFIG_MISMATCH" in text
        assert "tuning=" in text


def refused(rank: int, world_size: int, folder: str) -> str:
    table = TuningTable(TABLE.topology, (Choice("broadcast", 99, "bruck"),))
    path = Path(folder) / f"{rank}.json"
    path.write_text(table.to_json())
    try:
        dist.new_group(backend="pycomm", pg_options=Options(tuning=path))
    except (ValueError, dist.DistBackendError) as error:
        return str(error)
    return "joined"


@pytest.mark.needs_native
def test_an_algorithm_that_there_is_not_is_named(tmp_path: Path) -> None:
    (text,) = run_ranks(1, refused, args=(str(tmp_path),)).values()
    assert "broadcast goes by bruck" in text

"""Putting records side by side: made-up ranks, whose story is known."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_format import torch_record

from pycomm._native.flight_record import BadRecordError, parse_record
from pycomm._settings import SETTINGS
from pycomm.cli import main
from pycomm.trace.align import dump_files, read_records
from pycomm.trace.chrome import chrome_trace
from pycomm.trace.findings import findings_of, ranks_text

MS = 1_000_000
START = 1_700_000_000_000 * MS


def operation(sequence: int, **changes: Any) -> dict[str, Any]:
    """An all_reduce that is entered 10 ms after the one before and takes 1 ms."""
    issued_ns = START + sequence * 10 * MS
    fields = {
        **{"ticket": sequence, "id": str(sequence), "sequence": sequence, "op": "all_reduce"},
        **{"state": "done", "dtype": "float32", "numel": 1000, "reduce_op": "SUM"},
        **{"algorithm": "ring", "issued_ns": issued_ns, "started_ns": issued_ns + 1000},
        **{"first_byte_ns": issued_ns + 2000, "ended_ns": issued_ns + MS},
        **{"bytes_done": 4000, "bytes_total": 4000, "thread": 1},
    } | changes
    return {key: value for key, value in fields.items() if value is not None}


def stuck(sequence: int, **changes: Any) -> dict[str, Any]:
    return operation(
        sequence, **({"state": "running", "ended_ns": None, "bytes_done": 0} | changes)
    )


def process(rank: int, operations: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A record of one group of three ranks, on hosts a, b and c."""
    group = {
        **{"name": "0", "rank": rank, "size": 3, "global_ranks": [], "hosts": ["a", "b", "c"]},
        **{"run": "77", "slots": 2000, "complete": True, "phases_ns": {"rendezvous": START}},
        "operations": operations,
    }
    group |= {key: changes.pop(key) for key in list(changes) if key in (*group, "failure")}
    return {
        **{"format": "pycomm-flight-record", "version": 3, "rank": rank, "host": "abc"[rank]},
        **{"pid": 100 + rank, "written_ns": START + 2_000 * MS, "groups": [group]},
    } | changes


def written(folder: Path, *processes: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for one in processes:
        (folder / f"pycomm_rank_{one['rank']}.json").write_text(json.dumps(one))
    return folder


def texts(folder: Path) -> dict[str, str]:
    (group,) = read_records(dump_files([folder])).groups
    return {finding.kind: finding.text for finding in findings_of(group)}


def healthy(count: int = 5) -> list[dict[str, Any]]:
    return [operation(sequence) for sequence in range(1, count + 1)]


def test_nothing_is_wrong_with_a_healthy_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, *(process(rank, healthy()) for rank in range(3)))
    assert texts(tmp_path) == {}
    assert main(["trace", str(tmp_path)]) == 0
    assert "nothing is wrong here" in capsys.readouterr().out


def test_a_rank_that_has_not_entered_is_named_with_its_last_operation(tmp_path: Path) -> None:
    inside = [*healthy(), stuck(6)]
    written(tmp_path, process(0, inside), process(1, healthy()), process(2, inside))
    text = texts(tmp_path)["not_entered"]
    assert text.startswith(
        "Rank 1 on b has not entered all_reduce #6 (SUM, float32 x 1000, ring); it last finished "
        "all_reduce #5, 1.9 s before the end. Ranks 0 and 2 waited in it from "
    )
    assert text.endswith(" on, 1.9 s.")


def test_a_rank_that_comes_after_the_failure_has_not_entered(tmp_path: Path) -> None:
    """Its record may be written after that: what it began then must not hide that it was late."""
    failed_ns = START + 500 * MS
    inside = [*healthy(), stuck(6, state="failed", ended_ns=failed_ns)]
    after = failed_ns + 300 * MS
    too_late = stuck(6, numel=7, state="failed", issued_ns=after, started_ns=None, ended_ns=after)
    message = stuck(1, op="recv", id="99", peer=0, tag=0, issued_ns=after)
    waited = {"phases_ns": {"rendezvous": START, "failed": failed_ns}}
    written(
        tmp_path,
        process(0, inside, **waited),
        process(1, [*healthy(), too_late, message], **waited),
        process(2, inside, **waited),
    )
    found = texts(tmp_path)
    assert list(found) == ["not_entered"]
    assert found["not_entered"].startswith(
        "Rank 1 on b has not entered all_reduce #6 (SUM, float32 x 1000, ring) before the group "
        "failed, but 300.0 ms after that; it last finished all_reduce #5, 449.0 ms before the end."
    )


def test_a_rank_that_may_have_forgotten_is_not_accused(tmp_path: Path) -> None:
    late = [operation(sequence) for sequence in range(8, 12)]
    written(
        tmp_path,
        process(0, [stuck(6), *late]),
        process(1, late, complete=False),
        process(2, [stuck(6), *late]),
    )
    found = texts(tmp_path)
    assert "not_entered" not in found
    assert found["unfinished"].startswith("all_reduce #6 ")


def test_what_all_have_entered_and_none_finished_says_who_has_what(tmp_path: Path) -> None:
    inside = [stuck(1, bytes_done=rank * 1000, bytes_total=2000) for rank in range(3)]
    inside[2] |= {"state": "queued"}
    del inside[2]["started_ns"]
    written(tmp_path, *(process(rank, [inside[rank], stuck(2)]) for rank in range(3)))
    assert texts(tmp_path)["unfinished"] == (
        "all_reduce #1 (SUM, float32 x 1000, ring) did not end: rank 0 received nothing of 2000 "
        "bytes, rank 1 received 1000 of 2000 bytes, rank 2 has it queued. 1 later operation did "
        "not end either."
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"numel": 999}, "all_reduce(SUM, float32 x 999, ring)"),
        ({"dtype": "float16"}, "all_reduce(SUM, float16 x 1000, ring)"),
        ({"reduce_op": "MAX"}, "all_reduce(MAX, float32 x 1000, ring)"),
        ({"op": "broadcast", "reduce_op": None, "root": 1}, "broadcast(float32 x 1000, root 1, "),
    ],
)
def test_a_mismatch_names_the_odd_one_out(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    odd = [*healthy(), stuck(6, **changed)]
    written(tmp_path, *(process(rank, odd if rank == 2 else healthy(6)) for rank in range(3)))
    text = texts(tmp_path)["mismatch"]
    assert text.startswith(f"Operation #6 is not the same on all ranks: rank 2 called {said}")
    assert text.endswith("but ranks 0 and 1 called all_reduce(SUM, float32 x 1000, ring).")


def behind(number: int, wait_ms: int, *, every: int = 2, took_ms: int = 1) -> dict[str, Any]:
    """An operation every 100 ms that this rank enters late, each second time; all end together."""
    wait_ns = wait_ms * MS * (number % every == 1)
    begin = START + number * 100 * MS
    return operation(
        number,
        issued_ns=begin + wait_ns,
        started_ns=begin + wait_ns,
        first_byte_ns=begin + wait_ns,
        ended_ns=begin + (wait_ms + took_ms) * MS,
    )


def three(folder: Path, count: int, wait_ms: int, **how: int) -> Path:
    on_time = [
        {**behind(n, wait_ms, **how), "issued_ns": START + n * 100 * MS} for n in range(count)
    ]
    slow = [behind(n, wait_ms, **how) for n in range(count)]
    return written(folder, process(0, on_time), process(1, slow), process(2, on_time))


def test_who_is_mostly_last(tmp_path: Path) -> None:
    assert texts(three(tmp_path, 11, 20))["late"] == (
        "Rank 1 on b was late in 5 of 10 operations that ended, 20.0 ms after the first (median), "
        "20.0 ms at most (all_reduce #9): 11% of the recorded time."
    )


@pytest.mark.parametrize(
    ("wait_ms", "how", "late"),
    [
        (10, {}, True),
        (9, {}, False),  # a scheduler's noise
        (10, {"took_ms": 10}, True),
        (10, {"took_ms": 11}, False),  # the others would have waited longer than this anyway
        (10, {"every": 10}, False),  # once in a while
        (50, {"every": 10}, True),
    ],
)
def test_what_is_noise_is_not_late(
    tmp_path: Path, wait_ms: int, how: dict[str, int], late: bool
) -> None:
    assert ("late" in texts(three(tmp_path, 12, wait_ms, **how))) == late


def test_clocks_of_hosts_are_set_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ahead = 3_000 * MS
    keys = ("issued_ns", "started_ns", "first_byte_ns", "ended_ns")
    shifted = [{**one, **{key: one[key] + ahead for key in keys}} for one in healthy()]
    written(
        tmp_path,
        process(0, [*healthy(), stuck(6)]),
        process(1, shifted, written_ns=START + 2_000 * MS + ahead),
        process(2, [*healthy(), stuck(6)]),
    )
    found = texts(tmp_path)
    assert "late" not in found
    assert "1.9 s before the end" in found["not_entered"]
    assert main(["trace", str(tmp_path)]) == 1
    assert "the clock of b is taken to be 3.0 s ahead" in capsys.readouterr().out


def test_failures_and_missing_records_are_told(tmp_path: Path) -> None:
    failure = {"code": "PEER_DEAD", "summary": "Rank 1 on b is gone.", "peer": 1}
    written(tmp_path, *(process(rank, healthy(), failure=failure) for rank in (0, 2)))
    found = texts(tmp_path)
    assert found["failed"] == "Rank 1 on b is gone. [PEER_DEAD] Reported by ranks 0 and 2."
    assert found["no_record"].startswith("There is no record of rank 1 on b: it was killed")


def test_records_of_another_run_are_left_out(tmp_path: Path) -> None:
    old = process(1, healthy(3), run="66", written_ns=START)
    written(tmp_path, process(0, healthy()), old, process(2, healthy()))
    records = read_records(dump_files([tmp_path]))
    assert [one.rank for one in records.processes] == [0, 2]
    assert "pycomm_rank_1.json is of another run than" in records.notes[0]
    assert records.groups[0].missing == [1]


def test_groups_of_a_part_of_the_ranks(tmp_path: Path) -> None:
    both = []
    for rank in range(3):
        one = process(rank, healthy())
        if rank:
            part = {"name": "1", "rank": rank - 1, "size": 2, "global_ranks": [1, 2], "run": "5"}
            one["groups"].append(one["groups"][0] | part | {"hosts": ["b", "c"]})
        both.append(one)
    written(tmp_path, *both)
    world, part = read_records(dump_files([tmp_path])).groups
    assert (world.size, part.size, sorted(part.members)) == (3, 2, [1, 2])
    assert part.members[1].process.rank == 1
    assert part.title == "group '1' of ranks 1 and 2"
    torchs = torch_record(part.members[1].process)
    assert torchs["pg_config"]["1"]["ranks"] == "[1, 2]"
    events = chrome_trace([world, part])["traceEvents"]
    rows = {(one["pid"], one["tid"]) for one in events if "ts" in one}
    assert rows >= {(1, 0), (1, 1), (0, 0)} and (0, 1) not in rows


def test_rows_of_groups_do_not_mix(tmp_path: Path) -> None:
    endless = START + 10**6 * MS
    both = process(0, [operation(number, ended_ns=endless) for number in range(1, 151)])
    part = {"name": "1", "rank": 0, "size": 1, "global_ranks": [0], "run": "5"}
    both["groups"].append(both["groups"][0] | part | {"hosts": ["a"]})
    written(tmp_path, both)
    events = chrome_trace(read_records(dump_files([tmp_path])).groups)["traceEvents"]
    named = [one["tid"] for one in events if one["name"] == "thread_name"]
    assert sorted(named) == list(range(300))


def test_operations_that_overlap_get_rows_of_their_own(tmp_path: Path) -> None:
    overlapping = [operation(1, ended_ns=START + 100 * MS), operation(2), operation(3)]
    written(tmp_path, *(process(rank, overlapping) for rank in range(3)))
    events = chrome_trace(read_records(dump_files([tmp_path])).groups)["traceEvents"]
    mine = [one for one in events if one["pid"] == 0 and one["ph"] == "X"]
    rows = {one["name"]: one["tid"] for one in mine if one["cat"] != "part"}
    assert rows == {"all_reduce #1": 0, "all_reduce #2": 1, "all_reduce #3": 1}
    for row in (0, 1):  # within a row nothing overlaps
        spans = sorted(
            (one["ts"], one["ts"] + one["dur"])
            for one in mine
            if one["tid"] == row and one["cat"] != "part"
        )
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


# Bad files

BAD = [
    ("", "it is not JSON"),
    ("{", "it is not JSON"),
    ("[1]", "it says nothing of"),
    ('{"format": "other"}', "it says nothing of"),
    ('{"format": "pycomm-flight-record", "version": 1}', "is of version 1"),
    ('{"format": "pycomm-flight-record", "version": 3}', "KeyError"),
    (json.dumps(process(0, [{"id": "1"}])), "is not a flight record"),
    (json.dumps(process(0, healthy()) | {"rank": "zero"}), "rank is 'zero'"),
]


@pytest.mark.parametrize(("text", "said"), BAD)
def test_a_bad_file_gets_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert main(["trace", str(path)]) == 2
    printed = capsys.readouterr()
    assert str(path) in printed.err and said in printed.err and printed.out == ""
    # Beside good ones it is noted, and they are read.
    written(tmp_path, *(process(rank, healthy()) for rank in range(3)))
    assert main(["trace", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert f"note: {path}" in printed.out and "nothing is wrong here" in printed.out


def test_places_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (variable,) = (each.variable for each in SETTINGS if each.field == "flight_recorder_dir")
    todo = f"Set {variable} before the job starts: each rank writes there when its group fails"
    assert main(["trace", str(tmp_path / "none")]) == 2
    assert f"none does not exist. {todo}\n" in capsys.readouterr().err
    assert main(["trace", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "has no flight records: none of its files is *.json. " + todo in printed
    good = written(tmp_path, process(0, healthy()))
    assert main(["trace", str(good), "--chrome", str(tmp_path / "no" / "out.json")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
@pytest.mark.ci
def test_any_json_is_read_or_refused(value: Any) -> None:
    for top in (value, process(0, healthy()) | {"groups": value}):
        try:
            parse_record(json.dumps(top), "file")
        except BadRecordError as error:
            assert "file" in str(error)


def test_json_is_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, process(0, [*healthy(), stuck(6)]), process(1, healthy()))
    assert main(["trace", "--json", str(tmp_path)]) == 1
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert (group["missing"], group["records"], group["operations"]) == ([2], [0, 1], 6)
    kinds = [(finding["kind"], finding["ranks"], finding["op"]) for finding in group["findings"]]
    assert kinds == [("no_record", [2], None), ("not_entered", [1], "all_reduce #6")]


def test_ranks_read_like_words() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([2, 0]) == "ranks 0 and 2"
    assert ranks_text([0, 2, 3]) == "ranks 0, 2 and 3"
    assert ranks_text(range(8)) == "ranks 0 to 7"

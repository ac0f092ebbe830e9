"""What a metrics file says: the counts of operations, and text that Prometheus' parser reads."""

from __future__ import annotations

import contextlib
import os
import re
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from documents import blocks, read, table
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pycomm._metrics import writer as _metrics
from pycomm._metrics.metrics_content import MetricsContent
from pycomm._metrics.metrics_file import Identity, check_folder, remove_old, replace
from pycomm._metrics.metrics_text import METRICS, MetricsText
from pycomm._native.operation_counts import UNKNOWN, OperationCounts


def op(ticket: int, kind: str = "all_reduce", state: str = "done", **more: Any) -> dict[str, Any]:
    return {"ticket": ticket, "op": kind, "state": state, "issued_ns": ticket, "bytes_done": 8} | (
        more
    )


# Counts


def read_into(
    counts: OperationCounts, operations: list[dict[str, Any]], slots: int = 10, now_ns: int = 9
) -> None:
    """As a reader of the record does, with no more of it than is wanted."""
    tickets = [one["ticket"] for one in operations]
    wanted = [one for one in operations if counts.wants(one["ticket"])]
    counts.update(tickets, wanted, slots, now_ns)


def test_operations_are_counted_once_however_often_they_are_read() -> None:
    counts = OperationCounts()
    first = [op(1), op(2, "barrier"), op(3, state="running"), op(4, "send", state="queued")]
    for _ in range(2):
        read_into(counts, first, now_ns=2_000_000_003)
        assert counts.issued == {"all_reduce": 2, "barrier": 1, "send": 1}
        assert counts.completed == {"all_reduce": 1, "barrier": 1}
        assert (counts.pending, counts.oldest_age_s) == (2, 2.0)
    read_into(counts, [*first[:2], op(3), op(4, "send", state="failed")])
    assert counts.completed == {"all_reduce": 2, "barrier": 1} and counts.failed == {"send": 1}
    assert counts.received_nbytes == {"all_reduce": 16, "barrier": 8, "send": 8}
    assert (counts.pending, counts.oldest_age_s) == (0, 0.0)


def test_operations_that_came_and_went_between_two_readings_are_of_unknown_kind() -> None:
    counts = OperationCounts()
    read_into(counts, [op(1), op(2, state="running"), op(3, "barrier")], 4)
    # 5 and 7 are forgotten, and 6 was never given: 2 still runs in the slot that it would have.
    # Nor were 8 and 10, because of 4 and 2. 6 looks like 5 and 7.
    read_into(counts, [op(2, state="running"), op(4, "b", state="running"), op(9), op(11)], 4)
    assert counts.issued == {"all_reduce": 4, "barrier": 1, "b": 1, UNKNOWN: 3}
    assert counts.completed == {"all_reduce": 3, "barrier": 1, UNKNOWN: 3}
    assert counts.pending == 2


def test_an_operation_whose_slot_was_being_written_is_counted_next_time() -> None:
    counts = OperationCounts()
    read_into(counts, [op(1), op(3)])
    assert counts.issued == {"all_reduce": 2}
    read_into(counts, [op(1), op(2, "barrier"), op(3)])
    read_into(counts, [op(1), op(2, "barrier"), op(3)])
    assert counts.issued == {"all_reduce": 2, "barrier": 1} == counts.completed


@given(st.data(), st.integers(1, 8))
def test_counts_add_up_to_what_was_issued(data: st.DataObject, slots: int) -> None:
    """Beside a ring that forgets, as the native one does, there is a list that does not."""
    ring: dict[int, dict[str, Any]] = {}
    everything: list[dict[str, Any]] = []
    counts = OperationCounts()
    for _ in range(data.draw(st.integers(1, 6))):
        for kind in data.draw(st.lists(st.sampled_from(["a", "b"]), max_size=2 * slots)):
            ticket = len(everything) + 1
            everything.append(op(ticket, kind, "running"))
            for old in everything[: max(0, ticket - slots)]:
                old["state"] = "failed" if old["state"] == "failed" else "done"
            ring[ticket % slots] = everything[-1]
        for one in ring.values():
            if one["state"] == "running":
                one["state"] = data.draw(st.sampled_from(["running", "done"]))
        read_into(counts, sorted(ring.values(), key=lambda one: one["ticket"]), slots)
    assert counts.issued.total() == len(everything)
    assert counts.pending == sum(one["state"] == "running" for one in everything)
    assert counts.completed.total() + counts.pending == len(everything)
    by_kind = Counter(one["op"] for one in everything)
    assert all(counts.issued[kind] <= by_kind[kind] for kind in "ab")
    if len(everything) <= slots:
        assert counts.issued == by_kind


# The text


@given(st.text(), st.text())
def test_any_label_survives(group: str, model: str) -> None:
    text = MetricsText({"rank": "0"})
    text.add("pycomm_group_size", 2, group=group)
    text.add("pycomm_ddp_exposed_seconds_total", 0.25, model=model)
    encodable = text.text().encode(errors="replace").decode()
    size, exposed = text_string_to_metric_families(encodable)
    assert size.samples[0].labels == {"rank": "0", "group": group}
    assert (exposed.samples[0].labels["model"], exposed.samples[0].value) == (model, 0.25)


def test_names_follow_the_rules() -> None:
    """https://prometheus.io/docs/practices/naming and the format's own."""
    for name, (kind, meaning) in METRICS.items():
        assert re.fullmatch(r"pycomm_[a-z]+(_[a-z0-9]+)*", name)
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(r"(milli|micro|nano|kilo|mega|_ms|_ns|_nbytes)", name)
        assert meaning.endswith(".") and not set(meaning) & set("\\\n")
    with pytest.raises(KeyError):
        MetricsText({}).add("pycomm_anything", 1)


def test_the_documented_metrics_are_those_of_the_code() -> None:
    rows = table(read("docs/monitoring.md"), "metric", "type", "labels", "meaning")
    documented = {name.strip("`"): (kind, meaning) for name, kind, _, meaning in rows}
    assert documented == METRICS
    (rules,) = blocks(read("docs/monitoring.md"), "yaml")
    used = set(re.findall(r"pycomm_\w+", rules))
    assert used <= set(METRICS) and len(used) >= 4


def record(*groups: dict[str, Any]) -> dict[str, Any]:
    known = {"run": "5", "size": 2, "slots": 9, "global_ranks": [], "operations": [], "tickets": []}
    known |= {"phases_ns": {"ready": 1}}
    return {"host": "h", "pid": 7, "written_ns": 9, "groups": [known | one for one in groups]}


def values(text: str) -> dict[tuple[str, str], float]:
    lines = text.splitlines()
    assert len({line.rpartition(" ")[0] for line in lines}) == len(lines), "a series twice"
    return {
        (sample.name, sample.labels.get("group", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_groups_of_one_name_and_groups_that_were_destroyed() -> None:
    content = MetricsContent()
    closed = {"phases_ns": {"ready": 1, "closed": 2}}
    failure = {"failure": {"code": "PEER_DEAD", "peer": 6}}
    groups = [
        {"name": "0", **closed, **failure},
        {"name": "0", "run": "6"},
        {"name": "1", **closed},
        {"name": "2", **closed, **failure, "global_ranks": [4, 6]},
    ]
    text = content.text(record(*groups), {}, world_size=8, running=True)
    got = values(text)
    assert got["pycomm_groups", ""] == 1
    failed = {name: value for (metric, name), value in got.items() if "group_failed" in metric}
    assert failed == {"0": 0, "2": 1} and content.failed == {"2"}
    assert 'pycomm_group_failure_info{group="2",code="PEER_DEAD",peer="6"} 1\n' in text
    content.text(record(groups[1]), {}, world_size=8, running=True)
    assert not content.failed


# The file


def test_a_failure_that_the_record_has_later_is_written_when_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [record({"name": "0"})] * 3 + [record({"name": "0", "failure": {"code": "PEER_DEAD"}})]
    read = []

    def next_record(*_: Any) -> dict[str, Any]:
        read.append(time.monotonic())
        return known[min(len(read), len(known)) - 1]

    monkeypatch.setattr(_metrics, "read_some", next_record)
    monkeypatch.setattr(_metrics, "open_record", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(_metrics, "PERIOD_S", 60.0)
    identity = Identity(str(tmp_path), rank=0, run=1, world_size=2)
    # The group has failed from the beginning, so the first look finds it.
    writer = _metrics._Writer(types.ModuleType("native"), identity, lambda: frozenset({"0"}))
    try:
        deadline = time.monotonic() + 30
        while len(read) < len(known) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(3 * _metrics._POLL_S)
        assert len(read) == len(known)  # and no more: once it is written, the period is long
    finally:
        writer.stop()
        writer.join(30)
    assert values(identity.path.read_text())["pycomm_group_failed", "0"] == 1


def test_a_file_that_cannot_be_written_is_not_tried_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(*_: Any) -> None:
        tried.append(time.monotonic())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_metrics, "read_some", lambda *_: record({"name": "0"}))
    monkeypatch.setattr(_metrics, "open_record", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(_metrics, "replace", refuse)
    identity = Identity(str(tmp_path), rank=0, run=1, world_size=2)
    writer = _metrics._Writer(types.ModuleType("native"), identity, lambda: frozenset({"0"}))
    deadline = time.monotonic() + 30
    while not tried and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(5 * _metrics._POLL_S)
    before_the_end = len(tried)
    writer.stop()
    writer.join(30)
    assert before_the_end == 1


def test_the_file_of_a_group_that_has_failed_stays_though_the_record_does_not_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_metrics, "read_some", lambda *_: record({"name": "0"}))
    monkeypatch.setattr(_metrics, "open_record", lambda *_: contextlib.nullcontext())
    for failed in (frozenset({"0"}), frozenset[str]()):
        identity = Identity(str(tmp_path), rank=len(failed), run=1, world_size=2)
        writer = _metrics._Writer(types.ModuleType("native"), identity, lambda: failed)  # noqa: B023
        writer.stop()
        writer.join(30)
        assert identity.path.exists() == bool(failed)
        if failed:
            assert values(identity.path.read_text())["pycomm_running", ""] == 0


def test_old_files_are_removed_and_no_others(tmp_path: Path) -> None:
    run = "0123456789abcdef"
    old = [f"pycomm_rank_0_{run}.prom", f"pycomm_rank_17_{run}.prom.99.tmp"]
    kept = [f"pycomm_rank_1_{run}.prom", "pycomm_rank_0.json", "pycomm_rank_0.prom", "node.prom"]
    for name in old + kept:
        (tmp_path / name).touch()
    for name in old + kept[1:]:
        os.utime(tmp_path / name, (0, time.time() - 3700))
    remove_old(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
    remove_old(str(tmp_path / "not there"))


def test_a_file_is_replaced_whole_and_others_may_read_it(tmp_path: Path) -> None:
    path = Identity(str(tmp_path), rank=3, run=255, world_size=4).path
    assert path.name == "pycomm_rank_3_00000000000000ff.prom"
    stranger = tmp_path / "stranger"
    stranger.write_text("untouched")
    Path(f"{path}.{os.getpid()}.tmp").symlink_to(stranger)
    before = os.umask(0o077)
    try:
        for text in ("one\n", "two\n"):
            replace(path, text)
            assert path.read_text() == text
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    assert stranger.read_text() == "untouched"
    assert {one.name for one in tmp_path.iterdir()} == {path.name, "stranger"}


def test_a_file_that_cannot_be_replaced_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "pycomm_rank_0_0000000000000000.prom"
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(OSError):
        replace(path, "one\n")
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_folder_is_made_or_refused_by_the_settings_name(tmp_path: Path) -> None:
    check_folder("PYCOMM_METRICS_DIR", str(tmp_path / "new" / "folder"))
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^PYCOMM_METRICS_DIR='/.*/file/x' cannot be used: Not a"):
        check_folder("PYCOMM_METRICS_DIR", str(tmp_path / "file" / "x"))

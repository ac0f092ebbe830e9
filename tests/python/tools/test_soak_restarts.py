"""tests/soak/restarts.py: kinds of faults, a row of each, and the file with its header."""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path

import pytest
from ranks import RIG, run_python

SOAK = RIG.parent / "soak"
sys.path.append(str(SOAK))

import restarts  # noqa: E402


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        restarts.main(["torchrun", "--kind", "kill,hang"])
    assert caught.value.code == 2
    assert "hang: the kinds are kill, stop, term" in capsys.readouterr().err


def test_each_kind_comes_as_often_and_in_every_round() -> None:
    options = argparse.Namespace(kind=["kill", "stop", "term"], kills=20)
    kinds = restarts.planned(options, random.Random(0))
    rounds = [kinds[first : first + 3] for first in range(0, 60, 3)]
    assert len(kinds) == 60 and all(sorted(each) == options.kind for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1, "not always in one order"


def test_a_row_per_kind_has_its_median_and_its_maximum() -> None:
    values = {"kill": [1.0, 4.0, 2.0], "stop": [40.5, 41.5]}
    assert restarts.rows("until then, seconds", values) == [
        "SIGKILL, until then, seconds: 3 faults, p50 2.00 max 4.00",
        "SIGSTOP, until then, seconds: 2 faults, p50 41.00 max 41.50",
    ]


def test_the_file_is_what_was_printed_with_its_header(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[list[str], int]] = []

    def watch(options: argparse.Namespace, folder: Path, stack: object) -> list[str]:
        asked.append((options.kind, options.kills))
        return ["a row", "another row"]

    monkeypatch.setattr(restarts, "watch_torchft", watch)
    monkeypatch.setattr(restarts.signal, "signal", lambda *_: None)
    arguments = ["torchft", "--kind", "stop,kill,stop", "--kills", "3"]
    assert restarts.main(arguments) == 0
    without_file = capsys.readouterr().out
    arguments += ["--out", str(tmp_path / "table.txt")]
    assert restarts.main(arguments) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "table.txt").read_text() == text
    assert asked == [(["stop", "kill"], 3)] * 2
    assert text.endswith("\na row\nanother row\n") and without_file.endswith("\nanother row\n")
    facts = dict(re.findall(r"^(\w+): (.+)$", text, re.M))
    assert facts["command"] == " ".join(["python", "tests/soak/restarts.py", *arguments])
    assert {"commit", "cpu", "cores", "memory_gib", "load_at_start", "load_at_end"} <= set(facts)
    assert "torch " in facts["ranks_have"]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_torchrun_under_each_kind(tmp_path: Path) -> None:
    out = tmp_path / "table.txt"
    arguments = ["torchrun", "--kills", "1", "--kind", "kill,stop,term", "--ranks", "2"]
    arguments += ["--every", "5", "--timeout-s", "2", "--out", str(out)]
    done = run_python([str(SOAK / "restarts.py"), *arguments], timeout_s=380.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert out.read_text() == done.stdout
    words = r"^(SIG\w+), to the end of the first step after it, .*: 1 faults, p50 (.*) max"
    seconds = {kind: float(p50) for kind, p50 in re.findall(words, done.stdout, re.M)}
    assert set(seconds) == {"SIGKILL", "SIGSTOP", "SIGTERM"}, done.stdout
    assert seconds["SIGSTOP"] > restarts.AGENT_KILLS_S, "torchrun kills a rank that does not end"
    assert max(seconds["SIGKILL"], seconds["SIGTERM"]) < seconds["SIGSTOP"]
    trained = re.findall(r"^SIG\w+, steps trained again.*max (\d+)\.00$", done.stdout, re.M)
    assert len(trained) == 3

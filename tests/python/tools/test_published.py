"""benchmarks/published.py: every command has its script; a failure is kept, said and passed on."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import RIG, child_environment

BENCHMARKS = RIG.parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import published  # noqa: E402

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is idle."""
    monkeypatch.setattr(published, "load", lambda: 0.0)


def scripts_of(command: str) -> list[list[str]]:
    """The script of a command with its arguments, and the one that it runs on its hosts."""
    words = shlex.split(command)
    found = [[str(published.ROOT / words[0]), *words[1:]]]
    if "--" in words:  # under benchmarks/switch.py
        inner = words[words.index("--") + 1 :]
        found.append([str(BENCHMARKS / inner[0]), *inner[1:]])
    return found


COMMANDS = [command for topic in published.TOPICS for command in topic.commands]


def test_every_command_has_its_script() -> None:
    for command in COMMANDS:
        assert all(Path(words[0]).is_file() for words in scripts_of(command)), command


# One process for all scripts: they import torch. Each goes as far as its parser.
PARSE = """
import argparse, contextlib, io, json, os, runpy, sys

class Parsed(Exception):
    pass

def parse_args(parser, *args, **kwargs):
    parse(parser, *args, **kwargs)
    raise Parsed

parse, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, parse_args
refused = []
for words in json.load(sys.stdin):
    sys.argv, sys.path[0] = words, os.path.dirname(words[0])
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            runpy.run_path(words[0], run_name="__main__")
        refused.append([words, "it has parsed nothing"])
    except Parsed:
        pass
    except SystemExit:
        refused.append([words, said.getvalue()])
print(json.dumps(refused))
"""


def refused(commands: list[list[str]]) -> list[tuple[list[str], str]]:
    """The commands that their scripts' parsers do not take, with what they say."""
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(commands),
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found: list[tuple[list[str], str]] = [(words, said) for words, said in json.loads(done.stdout)]
    return found


def test_every_option_is_its_scripts() -> None:
    commands = [words for command in COMMANDS for words in scripts_of(command)]
    with_options = [words for words in commands if not words[0].endswith("soak/exits.py")]
    assert len(with_options) >= len(commands) - 1
    misspelled = [str(BENCHMARKS / "allreduce.py"), "--rank", "2", "--second", "1", "--sizzes", "4"]
    (found,) = refused([*with_options, misspelled])
    assert found[0] == misspelled and "--sizzes" in found[1]


def test_a_command_that_fails_is_kept_and_the_next_one_runs(tmp_path: Path) -> None:
    (bad := tmp_path / "bad.py").write_text("raise SystemExit('no such card')")
    (good := tmp_path / "good.py").write_text("print('a row')")
    into = tmp_path / "topic.txt"
    topic = published.Topic("topic", 1, (f"{bad}", f"{good} --fast"))
    assert published.measure(topic, into) == [f"{bad}"]
    text = into.read_text()
    assert re.match(r"# table +topic\n# command .*\n# commit ", text)
    assert "# cores " in text.partition("\n\n")[0]
    assert "# FAILED (1)\nno such card" in text
    assert f"$ python {good} --fast\na row\n# it took" in text


@pytest.mark.parametrize(
    ("loads", "looks", "said"),
    [
        ([0.29, 5.0], 0, "0.29"),
        ([2.0, 0.3, 0.12, 5.0], 2, "0.12"),
        ([1.5] * 61, 60, "1.50 (not below 0.3 in 600 s)"),
        ([1.0] * 60 + [0.2], 60, "0.20"),
    ],
    ids=["idle", "busy at first", "busy", "busy for ten minutes"],
)
def test_a_topic_begins_on_an_idle_machine_or_says_that_it_is_not(
    loads: list[float],
    looks: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    slept: list[float] = []
    found = iter(loads)
    monkeypatch.setattr(published, "load", lambda: next(found))
    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    monkeypatch.setattr(published, "time", clock)
    (good := tmp_path / "good.py").write_text("print('a row')")
    into = tmp_path / "topic.txt"
    assert published.measure(published.Topic("topic", 1, (str(good),)), into) == []
    head, _, rest = into.read_text().partition("\n\n")
    assert re.findall(r"^# load_at_start +(.*)$", head, re.M) == [said]
    assert "\na row\n" in rest
    assert slept == [10.0] * looks


def test_a_tree_with_changes_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(published, "git", lambda *_: " M pycomm/ddp/wrapper.py")
    monkeypatch.setattr(published, "measure", lambda *_: pytest.fail("it measured"))
    monkeypatch.setattr(sys, "argv", ["published.py", "soak"])
    with pytest.raises(SystemExit):
        published.main()
    assert "the tree has changes" in capsys.readouterr().err


def test_no_result_is_overwritten_and_a_failed_topic_is_not_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (good := tmp_path / "good.py").write_text("print('a row')")
    (bad := tmp_path / "bad.py").write_text("raise SystemExit(1)")
    topics = [published.Topic("good", 1, (str(good),)), published.Topic("bad", 1, (str(bad),))]
    monkeypatch.setattr(published, "git", lambda *_: "")
    monkeypatch.setattr(published, "ROOT", tmp_path)
    monkeypatch.setattr(published, "RESULTS", results)
    monkeypatch.setattr(published, "TOPICS", topics)
    monkeypatch.setattr(sys, "argv", ["published.py"])
    assert [published.main(), published.main()] == [1, 1]
    said = capsys.readouterr().out
    (first, second) = sorted(results.iterdir(), key=lambda path: len(path.name))
    assert first.name.startswith("good-20") and second.name == f"{first.stem}b.txt"
    assert "a row" in first.read_text() and "a row" in second.read_text()
    kept = sorted((tmp_path / "build" / "published").glob("bad-*"))
    assert len(kept) == 2
    assert f"not copied to benchmarks/results: build/published/{kept[0].name}" in said

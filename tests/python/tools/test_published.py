"""benchmarks/published.py: every command has its script; a failure is kept, said and passed on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ranks import RIG

BENCHMARKS = RIG.parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import published  # noqa: E402


def test_every_command_has_its_script() -> None:
    for topic in published.TOPICS:
        for command in topic.commands:
            words = command.split()
            scripts = [published.ROOT / words[0]]
            if "--" in words:  # under benchmarks/switch.py
                scripts.append(BENCHMARKS / words[words.index("--") + 1])
            assert all(script.is_file() for script in scripts), command


def test_a_command_that_fails_is_kept_and_the_next_one_runs(tmp_path: Path) -> None:
    (bad := tmp_path / "bad.py").write_text("raise SystemExit('no such card')")
    (good := tmp_path / "good.py").write_text("print('a row')")
    into = tmp_path / "topic.txt"
    topic = published.Topic("topic", 1, (f"{bad}", f"{good} --fast"))
    assert published.measure(topic, into) == [f"{bad}"]
    text = into.read_text()
    assert "# FAILED (1)\nno such card" in text
    assert f"$ python {good} --fast\na row\n# it took" in text


def test_a_tree_with_changes_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(published, "git", lambda *_: " M pycomm/ddp.py")
    monkeypatch.setattr(published, "measure", lambda *_: pytest.fail("it measured"))
    monkeypatch.setattr(sys, "argv", ["published.py", "soak"])
    with pytest.raises(SystemExit):
        published.main()
    assert "the tree has changes" in capsys.readouterr().err

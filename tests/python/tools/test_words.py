"""The list of words that are hard to read: it finds bad lines, and no good ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_tools import tool

BAD = {
    "csrc/a.h": (
        ("/// Memory of whoever calls.", "whoever"),
        ("// Ends them. What is under way is dropped.", "What is"),
        ("int baton = 0;", "our own term"),
        ("// Any thread, whichever comes first.", "whichever"),
        ("// When the data loop is through with them.", "through with"),
        ("// It met an error.", "met an exception"),
    ),
    "pycomm/a.py": (
        ('    """Who waits for the others."""', "Who does"),
        ('raise ValueError("one port a rank")', "one X a Y"),
    ),
    "docs/a.md": (
        ("The others are told why.", "is told"),
        ("A rank that hears nothing fails.", "hears"),
        ("It goes by NCCL.", "goes by"),
        ("A name that is none.", "that is none"),
        ("Unless it says otherwise.", "says otherwise"),
    ),
}
GOOD = {
    "csrc/a.h": (
        "/// The caller's memory.",
        "// What is under way?",
        "// Hosts are told apart by their names.",
    ),
    "pycomm/a.py": ('    """The ranks that wait."""', 'raise ValueError("one port per rank")'),
    "docs/a.md": ("## What is missing", "## Who waits", "The others get the reason.", "A desktop."),
}


def names(path: str, text: str) -> list[str]:
    return [name for _, _, name in tool("words").found(path, text)]


def test_each_word_has_a_bad_line() -> None:
    assert {name for lines in BAD.values() for _, name in lines} == set(tool("words").WORDS)


@pytest.mark.parametrize("path", BAD)
def test_a_bad_line_is_found(path: str) -> None:
    for line, name in BAD[path]:
        assert names(path, f"\n{line}\n") == [name], line


@pytest.mark.parametrize("path", GOOD)
def test_a_good_line_and_a_heading_are_not(path: str) -> None:
    assert names(path, "\n".join(GOOD[path])) == []


def test_each_line_is_named_and_allowed_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tool("words")
    texts = [("a.py", "x = 1  # for whoever\ny = 2  # for whoever\n"), ("b.md", "Any rank.\n")]
    monkeypatch.setattr(words, "files", lambda _: iter(texts))
    monkeypatch.setattr(sys, "argv", ["words.py"])
    monkeypatch.setattr(words, "ALLOWED", {"a.py: whoever": 1})
    assert words.main() == 1
    printed = capsys.readouterr().out
    assert "a.py:2: y = 2  # for whoever\n" in printed
    assert printed.endswith("words: 1 to mend\n")
    monkeypatch.setattr(words, "ALLOWED", {"a.py: whoever": 2})
    assert words.main() == 0


def test_without_git_it_is_skipped(tmp_path: Path) -> None:
    script = Path(tool("words").__file__)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "words.py").write_text(script.read_text())
    (tmp_path / "a.md").write_text("Memory of whoever calls.\n")
    command = [sys.executable, str(tmp_path / "tools" / "words.py")]
    done = subprocess.run(
        command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("words: skipped")

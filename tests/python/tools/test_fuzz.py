"""tools/fuzz.py: what a run of a fuzzer comes to, by its exit code and its log."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tools"))
fuzz = importlib.import_module("fuzz")

OPTIONS = argparse.Namespace(seconds=1, keep=0)
ENDED = r"#2\tINITED cov: 40 ft: 80\n#9\tNEW    cov: 42 ft: 81\nDone 1100 runs in 2 second(s)\n"


def fuzzer(folder: Path, log: str, ends_with: int) -> Path:
    """A program that gives a sample, or logs as libFuzzer does. A failing one leaves its input."""
    path = folder / "fuzzer"
    path.write_text(f"""#!/bin/sh
for word in "$@"; do
  case $word in
    --sample) printf x; exit 0;;
    -artifact_prefix=*) [ {ends_with} -eq 0 ] || printf Z >"${{word#-artifact_prefix=}}crash";;
  esac
done
printf '{log}' >&2
exit {ends_with}
""")
    path.chmod(0o700)
    return path


def test_a_run_says_how_far_it_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.run(fuzzer(tmp_path, ENDED, 0), "any", OPTIONS, tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert said == "any 1,100 inputs 42 edges, 40 at the start; nothing found"


@pytest.mark.parametrize(
    ("log", "ends_with", "inputs"),
    [(ENDED, 77, "['5a']"), ("ERROR: AddressSanitizer", 1, "['5a']"), ("begun", 0, "[]")],
)
def test_a_find_fails_and_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log: str, ends_with: int, inputs: str
) -> None:
    """The last one ends well, and has not run to its end."""
    assert not fuzz.run(fuzzer(tmp_path, log, ends_with), "any", OPTIONS, tmp_path)
    said = capsys.readouterr().out
    assert f"any: FOUND SOMETHING with {inputs}\n" in said and log[-20:-2] in said


@pytest.mark.parametrize("ends_with", [0, 77])
def test_one_target_that_fails_fails_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_with: int
) -> None:
    program = fuzzer(tmp_path, ENDED, ends_with)
    monkeypatch.setattr(fuzz, "find_clang", lambda: "clang++")
    monkeypatch.setattr(fuzz, "build", lambda _: program)
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "hello", "reply", "--seconds", "1"])
    assert fuzz.main() == (1 if ends_with else 0)

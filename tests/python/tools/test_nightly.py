"""tools/nightly.py and .ci/run: what they run, keep and print."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tools"))


@pytest.fixture
def nightly() -> ModuleType:
    return importlib.import_module("nightly")


def steps_of(nightly: ModuleType, folder: Path, *commands: str) -> list[object]:
    """Steps a, b, …; each leaves a file that says that it ran."""
    return [
        nightly.Step(name, f"echo x >> {folder}/ran_{name}; {command}", 1)
        for name, command in zip("abc", commands, strict=False)
    ]


def runs(folder: Path) -> str:
    return "".join(
        name * len((folder / f"ran_{name}").read_text().split())
        for name in "abc"
        if (folder / f"ran_{name}").exists()
    )


def without_seconds(line: str) -> str:
    return re.sub(r"\b\d+ s (passed|skipped|FAILED)", r"N s \1", " ".join(line.split()))


def test_summaries_have_results_counts_and_reruns(
    nightly: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = steps_of(
        nightly,
        tmp_path,
        "echo '== 1,203 passed, 2 skipped in 3 s =='",
        "echo 't.py::test_x (passed)' >> $RERUNS_FILE; echo done",
        "echo '1 failed, 4 passed'; exit 7",
    )
    assert nightly.nightly(steps, [], tmp_path / "out", "c0ffee") == 1
    text = (tmp_path / "out" / "summary.txt").read_text()
    lines = [without_seconds(line) for line in text.splitlines()]
    assert lines == [
        "a N s passed: 1,203 passed, 2 skipped in 3 s",
        "b N s passed: done; run again: t.py::test_x (passed)",
        "c N s FAILED (7): 1 failed, 4 passed",
        "2 of 3 steps passed, 1 tests run again; FAILED: c",
    ]
    assert capsys.readouterr().out.endswith(text)
    kept = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["counts"] for row in kept] == [
        {"passed": 1203, "skipped": 2},
        {},
        {"failed": 1, "passed": 4},
    ]
    assert kept[1]["reruns"] == ["t.py::test_x (passed)"]
    assert (tmp_path / "out" / "c.log").read_text() == "1 failed, 4 passed\n"


@pytest.mark.parametrize(
    "said",
    [
        "fuzz: SKIPPED, no clang++ that links libFuzzer",
        "===== 2 skipped, 41 deselected in 1.03s =====",
    ],
)
def test_a_step_that_checked_nothing_has_not_passed(
    nightly: ModuleType, tmp_path: Path, said: str
) -> None:
    steps = steps_of(nightly, tmp_path, f"echo '{said}'", "echo fine")
    out = tmp_path / "out"
    for times in (1, 2):
        assert nightly.nightly(steps, [], out, "one") == 0
        lines = (out / "summary.txt").read_text().splitlines()
        assert without_seconds(lines[0]) == f"a N s skipped: {said.strip(' =')}"
        assert lines[-1] == "1 of 2 steps passed, 0 tests run again; skipped: a"
        assert runs(tmp_path) == "a" * times + "b", "what was skipped is tried again"


def test_a_summary_is_the_tools_own_and_not_makes(nightly: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("all:\n\t@echo '1 failed, 4 passed in 2 s'; exit 3\n")
    steps = steps_of(nightly, tmp_path, f"make -C {tmp_path}", f"make -C {tmp_path} no-such-target")
    assert nightly.nightly(steps, [], tmp_path / "out", "one") == 1
    log = (tmp_path / "out" / "a.log").read_text()
    assert re.match(r"make(\[\d+\])?: ", log.splitlines()[-1]), log
    results = nightly.load(tmp_path / "out")
    assert results["a"].summary == "1 failed, 4 passed in 2 s"
    assert results["b"].summary == "no output"


def test_a_step_that_passed_at_this_commit_is_not_repeated(
    nightly: ModuleType, tmp_path: Path
) -> None:
    steps = steps_of(nightly, tmp_path, "echo fine", "echo bad; exit 1", "echo fine")
    out = tmp_path / "out"
    assert nightly.nightly(steps, ["a", "b"], out, "one") == 1
    assert "not run: c" in (out / "summary.txt").read_text()
    assert runs(tmp_path) == "ab"
    assert nightly.nightly(steps, [], out, "one") == 1
    assert runs(tmp_path) == "abbc", "a has passed"
    assert nightly.nightly(steps, ["a"], out, "one") == 1, "b still has not passed"
    assert runs(tmp_path) == "aabbc", "who names a step wants it run"
    assert nightly.nightly(steps, [], out, "two") == 1
    assert runs(tmp_path) == "aaabbbcc", "another commit"


def usage_error(tool: str, *arguments: str) -> str:
    """What a tool writes about arguments that it refuses."""
    command = [sys.executable, str(ROOT / "tools" / tool), *arguments]
    wrong = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    return wrong.stderr


def test_the_night_has_three_hours(nightly: ModuleType) -> None:
    assert sum(step.minutes for step in nightly.NIGHTLY) <= nightly.NIGHTLY_MINUTES == 180


def test_the_commit_of_a_changed_tree_equals_no_other(
    nightly: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        command = ["git", *identity, *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "docs/page.md"):
        (tmp_path / name).write_text("1\n")
    git("add", "-A")
    git("commit", "-m", "one")
    clean = nightly.commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "docs" / "page.md").write_text("2\n")
    assert nightly.commit(tmp_path) == clean, "a step wrote its record"
    (tmp_path / "code.py").write_text("2\n")
    assert nightly.commit(tmp_path).startswith(f"{clean} with changes")


def test_other_torch_refuses_a_torch_that_is_not_supported() -> None:
    assert "2.9.0 is not supported; there are 2.11.0, " in usage_error("other_torch.py", "2.9.0")


def test_every_step_exists(nightly: ModuleType) -> None:
    names = [step.name for step in nightly.STEPS]
    assert len(set(names)) == len(names)
    targets = (ROOT / "Makefile").read_text()
    for step in nightly.STEPS:
        runner, what = step.command.split()[:2]
        if runner == "{make}":
            assert f"\n{what}: ## " in targets, step
        else:
            assert runner == "{python}" and (ROOT / what).is_file(), step
    assert "no step is named fuz; --list prints them" in usage_error("nightly.py", "fuz")


FAKE_MAKE = """#!/bin/sh
case "$2" in
  docs) echo "docs: SKIPPED, there is no browser" ;;
  site) echo "=== 1,203 passed, 2 skipped in 3 s ===" ;;
  test) echo "tests/a.py::test_x (passed)" >> "$RERUNS_FILE"
        echo "Suite.One (passed)" >> "$RERUNS_FILE" ;;
  lint) exit 3 ;;
esac
"""


def test_the_table_of_ci_names_reruns(tmp_path: Path) -> None:
    for name, text in {"make": FAKE_MAKE, "id": "#!/bin/sh\necho 1000\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [ROOT / ".ci" / "run", "docs", "site", "test", "lint"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()[-6:]]
    assert [re.sub(r"\d+ s (\d+ s of cores )?", "N s ", line) for line in lines] == [
        "docs N s skipped",
        "site N s passed: 1,203 passed, 2 skipped",
        "test N s passed, 2 run again: tests/a.py::test_x (passed), Suite.One (passed)",
        "lint N s FAILED (3)",
        "N s in all",
        "2 tests were too slow and run again",
    ]

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
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tools"))


@pytest.fixture
def nightly() -> ModuleType:
    return importlib.import_module("nightly")


def steps_of(nightly: ModuleType, folder: Path, *commands: str) -> list[Any]:
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


def run_all(
    nightly: ModuleType, steps: list[Any], out: Path, tree: str, *chosen: str
) -> dict[str, Any]:
    results: dict[str, Any] = nightly.nightly(
        steps, chosen, out, "c0ffee", dict.fromkeys("abc", tree)
    )
    return results


def failed(results: dict[str, Any]) -> str:
    return "".join(sorted(name for name, result in results.items() if result.failed))


def without_seconds(line: str) -> str:
    return re.sub(r"\b\d+ s, expected", "N s, expected", " ".join(line.split()))


def test_summaries_have_results_counts_and_reruns(
    nightly: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = steps_of(
        nightly,
        tmp_path,
        "printf 'SKIPPED [1] a_test.py:9: needs 9 MiB\\nSKIPPED [1] b_test.py: needs 9 MiB\\n';"
        "echo '== 1,203 passed, 2 skipped in 3 s =='",
        "echo 't.py::test_x (passed)' >> $RERUNS_FILE; echo done",
        "echo '1 failed, 4 passed'; exit 7",
    )
    assert failed(run_all(nightly, steps, tmp_path / "out", "one")) == "c"
    text = (tmp_path / "out" / "summary.txt").read_text()
    lines = [without_seconds(line) for line in text.splitlines()]
    assert lines == [
        "a N s, expected 60 s passed: 1,203 passed, 2 skipped in 3 s; skipped: 2 needs 9 MiB",
        "b N s, expected 60 s passed: done; run again: t.py::test_x (passed)",
        "c N s, expected 60 s FAILED (7): 1 failed, 4 passed",
        "in all N s, expected 180 s",
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
        assert failed(run_all(nightly, steps, out, "one")) == ""
        lines = (out / "summary.txt").read_text().splitlines()
        assert without_seconds(lines[0]) == f"a N s, expected 60 s skipped: {said.strip(' =')}"
        assert lines[-1] == "1 of 2 steps passed, 0 tests run again; skipped: a"
        assert runs(tmp_path) == "a" * times + "b", "what was skipped is tried again"


def test_a_summary_is_the_tools_own_and_not_makes(nightly: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("all:\n\t@echo '1 failed, 4 passed in 2 s'; exit 3\n")
    steps = steps_of(nightly, tmp_path, f"make -C {tmp_path}", f"make -C {tmp_path} no-such-target")
    assert failed(run_all(nightly, steps, tmp_path / "out", "one")) == "ab"
    log = (tmp_path / "out" / "a.log").read_text()
    assert re.match(r"make(\[\d+\])?: ", log.splitlines()[-1]), log
    results = nightly.load(tmp_path / "out")
    assert results["a"].summary == "1 failed, 4 passed in 2 s"
    assert results["b"].summary == "no output"


def test_a_step_that_passed_is_not_repeated(nightly: ModuleType, tmp_path: Path) -> None:
    steps = steps_of(nightly, tmp_path, "echo fine", "echo bad; exit 1", "echo fine")
    out = tmp_path / "out"
    assert failed(run_all(nightly, steps, out, "one", "a", "b")) == "b"
    assert "not run: c" in (out / "summary.txt").read_text()
    assert runs(tmp_path) == "ab"
    run_all(nightly, steps, out, "one")
    assert runs(tmp_path) == "abbc", "a has passed"
    assert failed(run_all(nightly, steps, out, "one", "a")) == "b", "b still has not passed"
    assert runs(tmp_path) == "aabbc", "who names a step wants it run"
    run_all(nightly, steps, out, "two")
    assert runs(tmp_path) == "aaabbbcc", "other files"


def test_the_table_adds_up_what_steps_took(nightly: ModuleType) -> None:
    steps = [nightly.Step("a", "x", 1), nightly.Step("b", "y", 2), nightly.Step("c", "z", 4)]
    results = {
        name: nightly.Result("c0ffee", "one", 0, seconds, "fine", [], [], 0.1)
        for name, seconds in {"a": 50, "b": 130}.items()
    }
    lines = [" ".join(line.split()) for line in nightly.table(results, steps).splitlines()]
    assert lines[:3] == [
        "a 50 s, expected 60 s passed: fine",
        "b 130 s, expected 120 s passed: fine",
        "in all 180 s, expected 180 s",
    ]


def test_the_record_has_the_steps_that_passed_and_sets_what_is_expected(
    nightly: ModuleType, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    steps = steps_of(nightly, tmp_path, "echo fine", "echo fine", "exit 1")
    results = run_all(nightly, steps, tmp_path / "out", "one")
    results["a"].seconds, results["b"].seconds = 125, 7000
    nightly.record(record, results, steps)
    rows = json.loads(record.read_text())
    assert [row["step"] for row in rows] == ["a", "b"], "c failed"
    assert set(rows[0]) == {"step", "command", "commit", "seconds", "summary", "load"}
    assert (rows[0]["commit"], rows[0]["seconds"], rows[0]["summary"]) == ("c0ffee", 125, "fine")
    assert 0 <= rows[0]["load"] < 10000

    def expected(*steps: Any) -> list[tuple[int, int]]:
        found = nightly.measured(steps, nightly.recorded(record))
        return [(step.seconds, step.minutes) for step in found]

    assert expected(*steps) == [(125, 3), (7000, 117), (60, 1)]
    assert nightly.measured(steps, nightly.recorded(record))[1].limit_s == 4 * 7000
    assert nightly.measured(steps, nightly.recorded(tmp_path / "none")) == steps
    changed = nightly.Step("a", "another command", 1)
    assert expected(changed) == [(60, 1)]
    # A step that fails keeps its row; one whose command has changed has none.
    results["b"].code = 1
    nightly.record(record, {"b": results["b"]}, [changed, *steps[1:]])
    assert [row["step"] for row in json.loads(record.read_text())] == ["b"]


def usage_error(tool: str, *arguments: str) -> str:
    """What a tool writes about arguments that it refuses."""
    command = [sys.executable, str(ROOT / "tools" / tool), *arguments]
    wrong = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    return wrong.stderr


def test_the_night_has_three_hours(nightly: ModuleType) -> None:
    """By the record, where it has the step, else by its guess."""
    seconds = {step.name: step.seconds for step in nightly.NIGHTLY}
    assert sum(seconds.values()) <= 60 * nightly.NIGHTLY_MINUTES == 3 * 60 * 60, seconds


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository of code and pages, all committed."""
    git(tmp_path, "init")
    for name in ("code.py", "tests/cpp/proof/seeds.txt", "docs/read.md", *NOT_READ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    commit_all(tmp_path)
    return tmp_path


NOT_READ = (
    *("docs/other.md", "docs/evidence/nightly.json", "README.md", "CHANGELOG.md"),
    *("CONTRIBUTING.md", "benchmarks/results/a.txt"),
)


def git(root: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", *arguments]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


def commit_all(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-m", "x")


def test_only_files_that_a_step_reads_void_its_pass(nightly: ModuleType, repository: Path) -> None:
    steps = [nightly.Step("a", "x", 1), nightly.Step("b", "y", 1, ("docs/read.md",))]

    def after(name: str, text: str) -> dict[str, str]:
        (repository / name).write_text(text)
        commit_all(repository)
        trees: dict[str, str] = nightly.trees_of(steps, repository)
        return trees

    first, head = nightly.trees_of(steps, repository), nightly.commit_of(repository)
    assert len(head) == 40 and " with changes" not in "".join(first.values())
    for name in NOT_READ:
        assert after(name, "2\n") == first, name
    assert nightly.commit_of(repository) not in (head, "")
    page = after("docs/read.md", "2\n")
    assert page["a"] == first["a"] and page["b"] != first["b"]
    code = after("code.py", "2\n")
    assert code["a"] != page["a"] and code["b"] != page["b"]
    seeds = after("tests/cpp/proof/seeds.txt", "2\n")
    assert seeds["a"] != code["a"], "other seeds run"


def test_the_tree_of_changed_files_equals_no_other(
    nightly: ModuleType, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [nightly.Step("a", "x", 1), nightly.Step("b", "y", 1, ("docs/read.md",))]
    clean, head = nightly.trees_of(steps, repository), nightly.commit_of(repository)
    for name in (*NOT_READ, "tests/cpp/proof/seeds.txt"):
        (repository / name).write_text("2\n")
    assert nightly.trees_of(steps, repository) == clean, "a step wrote its record"
    assert nightly.commit_of(repository) == head
    (repository / "docs" / "read.md").write_text("2\n")
    page = nightly.trees_of(steps, repository)
    assert page["a"] == clean["a"]
    assert page["b"].startswith(f"{clean['b']} with changes at ")
    (repository / "new.py").write_text("2\n")
    assert nightly.commit_of(repository) == f"{head} with changes"
    one = nightly.trees_of(steps, repository)["a"]
    assert one.startswith(f"{clean['a']} with changes at ")
    monkeypatch.setattr("time.time", lambda: 1e9)
    assert nightly.trees_of(steps, repository)["a"] != one


def test_other_torch_refuses_a_torch_that_is_not_supported() -> None:
    assert "2.9.0 is not supported; there are 2.11.0, " in usage_error("other_torch.py", "2.9.0")


def test_every_step_exists(nightly: ModuleType) -> None:
    names = [step.name for step in nightly.STEPS]
    assert len(set(names)) == len(names)
    targets = (ROOT / "Makefile").read_text()
    for step in nightly.STEPS:
        assert all(any(ROOT.glob(page)) for page in step.pages), step
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

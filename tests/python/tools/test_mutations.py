"""The simulator's mutations: each must still find the text that it breaks."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import read, table

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "cpp" / "proof" / "programs" / "mutations.py"
sys.path.append(str(PROGRAM.parent))
mutations = importlib.import_module("mutations")


def test_every_mutation_applies() -> None:
    assert mutations.misplaced(ROOT) == []
    assert len({mutation.name for mutation in mutations.MUTATIONS}) == len(mutations.MUTATIONS)


def test_the_page_lists_those_that_survive() -> None:
    listed = {
        row[0] for row in table(read("docs/evidence/simulator.md"), "broken", "why no seed notices")
    }
    assert listed == {mutation.name for mutation in mutations.MUTATIONS if mutation.survives}


@pytest.mark.parametrize(("copies", "said"), [(0, "stands 0 times"), (2, "stands 2 times")])
def test_one_that_no_longer_applies_fails_the_program(
    tmp_path: Path, copies: int, said: str
) -> None:
    for part in ("csrc/engine", "tests/cpp/proof/programs"):
        shutil.copytree(ROOT / part, tmp_path / part)
    mutation = mutations.MUTATIONS[-1]
    file = mutations.path_of(tmp_path, mutation)
    file.write_text(file.read_text().replace(mutation.old, mutation.old * copies))
    for options in (["--check"], ["--work", str(tmp_path / "work")]):
        done = subprocess.run(
            [sys.executable, str(tmp_path / PROGRAM.relative_to(ROOT)), *options],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        place = file.relative_to(tmp_path)
        assert done.stdout == f"{mutation.name}: its text {said} in {place}, not once\n"
    assert not (tmp_path / "work").exists(), "nothing was built"


def test_what_is_not_as_expected_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A survivor without a reason, one that does not compile, and violations without a mutation."""
    none, lost = mutations.Found(0, 0, ""), mutations.Found(3, 17, "rank 0 hangs")
    seen = none

    def run_seeds(program: Path, first: int, last: int) -> object:
        return lost if first == last else seen

    monkeypatch.setattr(mutations, "run_seeds", run_seeds)
    unchanged = mutations.Mutation("none", "", "", "")
    plain = mutations.Mutation("m", "a.cc", "x", "y")

    def complaint(mutation: object, program: Path | None = tmp_path) -> str:
        return str(mutations.verdict(mutation, program, 10)[1])

    assert complaint(unchanged) == ""
    assert complaint(plain) == "no seed notices it"
    assert complaint(plain._replace(survives="nothing asks")) == ""
    assert complaint(plain._replace(kept=5)) == "", "one seed that is kept does"
    assert complaint(plain, None) == "does not compile"
    seen = lost
    assert complaint(plain) == ""
    assert complaint(unchanged) == "violations"
    noticed = [mutations.verdict(each, tmp_path, 10).noticed for each in (plain, unchanged)]
    assert noticed == [True, False]
    seen = none
    assert not mutations.verdict(plain._replace(survives="nothing asks"), tmp_path, 10).noticed

"""A new option takes three edits: docs/development.md, "How to add an option", done in a copy."""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, code, read, table
from processes import child_environment

SETTING = """\
    Setting(
        "tries",
        _count(1, 9, "tries, 1 to 9"),
        3,
        "PYCOMM_TRIES",
        "How often, see [errors](errors.md#the-codes).",
        ("OTHER_TRIES",),
    ),
"""
# file, what the new lines stand before, the new lines
EDITS = [
    ("pycomm/_settings.py", "\n)\n", SETTING),
    ("pycomm/options.py", "\n\n    def __post_init__", "    tries: int | None = None"),
    ("pycomm/options.py", "\n    origins: Mapping", "    tries: int"),
]
SCRIPT = """
import dataclasses, json, sys
import pycomm
from pycomm._group.native_options import native_options
from pycomm.options import ResolvedOptions

def refused(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"

options = pycomm.Options
found = options().resolve({"PYCOMM_TRIES": "5"})
print(json.dumps({
    "file": pycomm.__file__,
    "default": options().resolve({}).tries,
    "given": options(tries=4).resolve({"PYCOMM_TRIES": "5"}).tries,
    "variable": [found.tries, found.origins["tries"]],
    "fallback": options().resolve({"OTHER_TRIES": "6"}).tries,
    "bad": refused(lambda: options().resolve({"PYCOMM_TRIES": "10"})),
    "bad given": refused(lambda: options(tries=0)),
    "misspelled": refused(lambda: options().resolve({"PYCOMM_TRIE": "5"})),
    "misspelled given": refused(lambda: options(trie=5)),
    "native": [
        "tries" in native_options(found, "", [0]),
        "algorithm" in native_options(found, "", [0]),
    ],
    "doc": options.__doc__,
    "resolved": [field.name for field in dataclasses.fields(ResolvedOptions)][-2:],
}))
"""


def add_option(folder: Path) -> None:
    for name, before, lines in EDITS:
        path = folder / name
        head, mark, tail = path.read_text().rpartition(before)
        assert mark, f"{name} has no {before!r}"
        path.write_text(f"{head}\n{lines.rstrip()}{mark}{tail}")


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = child_environment() | {"PYTHONPATH": str(folder)} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new_option")
    for name in ("pycomm", "docs", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "torch_[0-9]*", "*.so", "pictures")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("_pycomm_autoload.py",):
        shutil.copy(ROOT / name, folder / name)
    add_option(folder)
    done = run(folder, "tools/doc_tables.py", "options")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrote docs/options.md\nwrote pycomm/options.py\n"
    return folder


def changed(one: Path, other: Path, names: list[str]) -> set[str]:
    return {name for name in names if not filecmp.cmp(one / name, other / name, shallow=False)}


def test_three_edits_in_two_files_and_a_page_that_is_written(copied: Path) -> None:
    assert len(EDITS) == 3
    names = [
        str(path.relative_to(copied))
        for folder in ("pycomm", "docs", "tools")
        for path in (copied / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    edited = {name for name, _, _ in EDITS}
    assert changed(copied, ROOT, names) == {*edited, "docs/options.md"}
    assert len(edited) == 2
    # The recipe names them.
    recipe = (
        read("docs/development.md").partition("## How to add an option")[2].partition("\n## ")[0]
    )
    assert edited <= set(code(recipe))


def test_the_option_is_read_and_checked_everywhere(copied: Path) -> None:
    done = run(copied, "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["file"] == str(copied / "pycomm" / "__init__.py")
    assert (found["default"], found["given"], found["fallback"]) == (3, 4, 6)
    assert found["variable"] == [5, "PYCOMM_TRIES"]
    allowed = "is not allowed: use tries, 1 to 9"
    assert found["bad"] == f"ValueError: PYCOMM_TRIES='10' {allowed}"
    assert found["bad given"] == f"ValueError: Options.tries=0 {allowed}"
    assert (
        "PYCOMM_TRIE is not a variable of pycomm; did you mean PYCOMM_TRIES?"
        in (found["misspelled"])
    )
    assert "pycomm.Options has no 'trie'; did you mean tries?" in found["misspelled given"]
    said = "tries: How often, see errors (docs/errors.md). ``PYCOMM_TRIES``, then ``OTHER_TRIES``;"
    assert said in " ".join(found["doc"].split())
    assert found["resolved"] == ["tries", "origins"]


@pytest.mark.ci
def test_the_command_shows_it(copied: Path) -> None:
    for text, value in (("7", 7), ("seven", None)):
        done = run(copied, "-m", "pycomm", "env", "--json", PYCOMM_TRIES=text)
        report = json.loads(done.stdout)
        (row,) = (row for row in report["options"] if row["option"] == "tries")
        assert (row["value"], row["variable"]) == (value, "PYCOMM_TRIES")
        problem = "PYCOMM_TRIES='seven' is not allowed: use tries, 1 to 9"
        assert (problem in report["problems"]) == (value is None)


def test_the_page_has_its_row(copied: Path) -> None:
    header = ("field", "values", "default", "variable", "also read")
    rows = table((copied / "docs" / "options.md").read_text(), *header)
    see = "How often, see [errors](errors.md#the-codes)."
    assert rows[-1] == ["`tries`", see, "`3`", "`PYCOMM_TRIES`", "`OTHER_TRIES`"]

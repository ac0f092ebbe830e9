"""setup.py: what it asks of torch, and how it puts modules where they are loaded from."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import setuptools

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))

import native

pytestmark = pytest.mark.ci

ROOT = native.ROOT


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py, as a module."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("setup_of_pycomm", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("commands", "builds"),
    [
        (["sdist"], False),
        (["egg_info", "--egg-base", "/tmp"], False),
        (["clean", "--all"], False),
        (["sdist", "bdist_wheel"], True),
        (["egg_info", "bdist_wheel"], True),
        (["clean", "build_ext", "--inplace"], True),
        (["clean", "build"], True),
        (["build_ext"], True),
    ],
)
def test_a_command_that_builds_is_given_modules(
    monkeypatch: pytest.MonkeyPatch, setup: ModuleType, commands: list[str], builds: bool
) -> None:
    keywords: dict[str, object] = {}
    monkeypatch.setattr(sys, "argv", ["setup.py", *commands])
    monkeypatch.setattr(setup.setuptools, "setup", lambda **given: keywords.update(given))
    monkeypatch.setattr(setup, "extension_keywords", lambda: {"ext_modules": ["a module"]})
    setup.main()
    assert ("ext_modules" in keywords) is builds


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_an_sdist_has_every_file_but_those_of_the_checkout(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (listed,) = tmp_path.glob("*.egg-info/SOURCES.txt")
    git = ["git", "-C", str(ROOT), "ls-files"]
    tracked = subprocess.run(git, check=True, capture_output=True, text=True).stdout.splitlines()
    missing = {name for name in tracked if (ROOT / name).exists()}
    missing -= set(listed.read_text().splitlines())
    of_the_checkout = (".clang-format", ".editorconfig", ".git", ".pre-commit-config.yaml")
    assert {name for name in missing if not name.startswith(of_the_checkout)} == set()
    assert ".gitignore" in missing


def test_a_module_in_place_is_there_at_every_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setup: ModuleType
) -> None:
    torch = native.Torch("2.13.0+cpu", (), "")
    command = setup.build_command([torch])(
        setuptools.Distribution(
            {"ext_modules": [setuptools.Extension("pycomm.torch_2_13._C", sources=[])]}
        )
    )
    command.build_lib = str(tmp_path / "lib")
    command.ensure_finalized()
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)  # where setuptools' own would write
    target = native.module_in(tmp_path / "pycomm", torch)
    built = native.module_in(tmp_path / "lib" / "pycomm", torch)
    for path, text in [(target, "old"), (built, "new")]:
        path.parent.mkdir(parents=True)
        path.write_text(text)
    copy2, seen = shutil.copy2, []

    def copy(source: Path, goal: Path) -> None:
        copy2(source, goal)
        seen.append(target.read_text())

    monkeypatch.setattr(setup.shutil, "copy2", copy)
    with target.open() as loaded:
        command.copy_extensions_to_source()
        assert loaded.read() == "old"
    assert seen == ["old"]
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_the_commit_of_a_checkout_says_if_files_have_changed(tmp_path: Path) -> None:
    root = tmp_path.resolve() / "checkout"
    root.mkdir()
    (root / "a").write_text("1")
    settings = ("user.name=a", "user.email=a@b", "commit.gpgsign=false")
    git = ["git", "-C", str(root), *(word for each in settings for word in ("-c", each))]
    assert native.git_commit(root) == ""
    for arguments in (["init", "-q"], ["add", "a"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *arguments], check=True)
    commit = native.git_commit(root)
    assert len(commit) == 40
    (root / "b").write_text("a file that git does not track")
    os.utime(root / "a", (1, 1))
    assert native.git_commit(root) == commit
    (root / "a").write_text("2")
    assert native.git_commit(root) == f"{commit} with changes"
    subprocess.run([*git, "add", "a"], check=True)
    assert native.git_commit(root) == f"{commit} with changes"
    # An sdist that was unpacked inside the checkout.
    (root / "sdist").mkdir()
    assert native.git_commit(root / "sdist") == ""


def test_the_number_of_compilers_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.machine, "jobs", lambda _: 5)
    for given, wanted in [("", 5), (" ", 5), ("3", 3)]:
        monkeypatch.setenv("MAX_JOBS", given)
        assert native.jobs(1.0) == wanted
    for given in ("x", "0", "-1", "1.5"):
        monkeypatch.setenv("MAX_JOBS", given)
        with pytest.raises(SystemExit, match=r"^MAX_JOBS='.+' is not allowed: use a whole number"):
            native.jobs(1.0)

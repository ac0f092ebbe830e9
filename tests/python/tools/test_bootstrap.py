"""tools/bootstrap.py: which .venv, Python and torch it uses, and when it builds again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))

import bootstrap
import machine

pytestmark = pytest.mark.ci

ROOT = bootstrap.ROOT
OLDER = (sys.version_info[0], sys.version_info[1] - 1)


@pytest.fixture
def venv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A .venv, in a folder of the test, that bootstrap.py uses."""
    folder = tmp_path / "checkout" / ".venv"
    (folder / "bin").mkdir(parents=True)
    monkeypatch.setattr(bootstrap, "VENV", folder)
    monkeypatch.setattr(bootstrap, "STAMPS", folder / "pycomm-stamps")
    monkeypatch.delenv("PYCOMM_TORCH", raising=False)
    return folder


# --- .venv ----------------------------------------------------------------------------------------

# Lines of the script as Python 3.10, 3.12 and 3.13 and uv write it.
ACTIVATE = {
    "quoted": 'VIRTUAL_ENV="{}"\nexport VIRTUAL_ENV\n',
    "plain": "VIRTUAL_ENV={}\nexport VIRTUAL_ENV\n",
    "by system": "  VIRTUAL_ENV=$(cygpath {0})\n    export VIRTUAL_ENV={0}\n",
    "single": "VIRTUAL_ENV='{}'\n",
}


@pytest.mark.parametrize("kind", ACTIVATE)
def test_a_copied_venv_is_noticed(venv: Path, tmp_path: Path, kind: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(venv)
    elsewhere = tmp_path / "original"
    for named, former in [
        (venv, ""),
        (link, ""),
        (elsewhere, str(elsewhere)),  # moved: that folder is gone
        (tmp_path, str(tmp_path)),  # copied
    ]:
        text = f"deactivate () {{\n    unset VIRTUAL_ENV\n}}\n{ACTIVATE[kind].format(named)}"
        (venv / "bin" / "activate").write_text(text)
        assert bootstrap.former_place() == former


def test_a_script_that_computes_its_folder_is_accepted(venv: Path) -> None:
    assert bootstrap.former_place() == ""
    (venv / "bin" / "activate").write_text('VIRTUAL_ENV="$(cd "$(dirname "$0")" && pwd)"\n')
    assert bootstrap.former_place() == ""


@pytest.mark.parametrize("copied", [False, True])
def test_a_copied_venv_is_made_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], venv: Path, copied: bool
) -> None:
    ran: list[tuple[object, ...]] = []
    monkeypatch.setattr(bootstrap, "run", lambda *command: ran.append(command))
    monkeypatch.setattr(bootstrap, "pip_version", lambda: (99, 0))
    named = "/gone/.venv" if copied else venv
    (venv / "bin" / "activate").write_text(f'VIRTUAL_ENV="{named}"\n')
    bootstrap.make_venv()
    said = capsys.readouterr().out
    assert (len(ran) == 1 and ran[0][1:] == ("-m", "venv", "--clear", venv)) is copied
    assert (".venv was made as /gone/.venv" in said) is copied


def test_a_link_to_a_copied_venv_clears_nothing(
    monkeypatch: pytest.MonkeyPatch, venv: Path, tmp_path: Path
) -> None:
    (venv / "bin" / "activate").write_text('VIRTUAL_ENV="/gone/.venv"\n')
    link = tmp_path / ".venv"
    link.symlink_to(venv)
    monkeypatch.setattr(bootstrap, "VENV", link)
    monkeypatch.setattr(bootstrap, "run", lambda *command: pytest.fail(str(command)))
    with pytest.raises(SystemExit, match=r"\.venv is a link to .*name /gone/\.venv\. Try: rm"):
        bootstrap.make_venv()


def test_bootstrap_goes_on_with_the_python_of_the_venv(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[Path, list[str], dict[str, str]]] = []
    version = sys.version_info[:2]

    def asked(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(stdout="{} {}\n".format(*version))

    monkeypatch.setattr(bootstrap.subprocess, "run", asked)
    monkeypatch.setattr(bootstrap.os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(sys, "argv", ["tools/bootstrap.py", "--group", "test"])
    monkeypatch.setattr(machine, "MINIMUM_PYTHON", OLDER)
    monkeypatch.delenv(bootstrap.SWITCHED, raising=False)
    bootstrap.use_venvs_python()
    assert not calls and not capsys.readouterr().out
    version = OLDER
    bootstrap.use_venvs_python()
    ((program, command, environment),) = calls
    assert program == bootstrap.PYTHON
    assert command == [str(program), str(ROOT / "tools" / "bootstrap.py"), "--group", "test"]
    has = f".venv has Python {OLDER[0]}.{OLDER[1]}; delete .venv to use {machine.VERSION}"
    assert capsys.readouterr().out == f"[bootstrap] {has}\n"
    # The second time is not followed by a third.
    monkeypatch.setenv(bootstrap.SWITCHED, environment[bootstrap.SWITCHED])
    with pytest.raises(SystemExit, match=r"delete \.venv to use"):
        bootstrap.use_venvs_python()
    # A Python that pycomm does not support is not continued with.
    monkeypatch.delenv(bootstrap.SWITCHED)
    monkeypatch.setattr(machine, "MINIMUM_PYTHON", sys.version_info[:2])
    with pytest.raises(SystemExit, match=r"delete \.venv to use"):
        bootstrap.use_venvs_python()
    assert len(calls) == 1


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "versions", "url", "expected"),
    [
        # Exactly the release that was asked for, in the order of torch_arguments without one.
        ("2.13.0", ["2.15.0", "2.14.0+cpu", "2.13.0+cpu"], "", ["torch==2.13.0+cpu"]),
        ("2.14.1", ["2.14.0+cpu", "2.13.0+cpu"], "file:///wheels/x.whl", ["torch==2.14.1"]),
        ("2.14.1", ["2.14.0+cpu", "2.14.1"], "https://files.pythonhosted.org/x.whl", None),
        ("2.14.1", [], "", None),
    ],
)
def test_torch_of_the_release_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    versions: list[str],
    url: str,
    expected: list[str] | None,
) -> None:
    def would_take(requirement: str) -> dict[str, object] | None:
        assert requirement == f"torch=={release}"
        return {"download_info": {"url": url}} if url else None

    monkeypatch.setattr(bootstrap, "torch_versions", lambda: versions)
    monkeypatch.setattr(bootstrap, "would_take", would_take)
    index = [f"torch=={release}+cpu", "--extra-index-url", bootstrap.TORCH_INDEX]
    assert bootstrap.torch_arguments(release) == (expected or index)


@pytest.mark.parametrize(
    "asked", ["2.10.0", "2.16.0", "2.14", "2.14.1+cpu", "3.0.0", "newest", "/"]
)
def test_an_unsupported_release_is_refused(
    monkeypatch: pytest.MonkeyPatch, venv: Path, asked: str
) -> None:
    monkeypatch.setenv("PYCOMM_TORCH", asked)
    with pytest.raises(SystemExit) as refused:
        bootstrap.asked_torch()
    said = str(refused.value)
    assert said.startswith(f"[bootstrap] TORCH={asked} is not a release of torch 2.11 to 2.")
    assert said.endswith(f"Try: TORCH={bootstrap.TORCH}") and "\n" not in said


def test_a_release_without_wheels_for_this_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, venv: Path
) -> None:
    monkeypatch.setattr(bootstrap, "NEWEST_TORCH", "2.14.1")  # as for Python 3.10
    monkeypatch.setenv("PYCOMM_TORCH", "2.14.0")
    assert bootstrap.asked_torch() == "2.14.0"
    monkeypatch.setenv("PYCOMM_TORCH", "2.15.0")
    with pytest.raises(SystemExit, match=r"torch 2\.11 to 2\.14, .* Try: TORCH=2\.13\.0$"):
        bootstrap.asked_torch()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, venv: Path) -> list[str]:
    """The torches that pip is called for. The machine has the CPU wheel of 2.13.0."""
    found: list[str] = []

    def pip(*arguments: str | Path) -> None:
        found.extend(str(each) for each in arguments if str(each).startswith("torch=="))

    monkeypatch.setattr(bootstrap, "pip", pip)
    monkeypatch.setattr(bootstrap, "torch_versions", lambda: ["2.15.0", "2.13.0+cpu"])
    local = {"download_info": {"url": "file:///wheels/torch.whl"}}
    monkeypatch.setattr(bootstrap, "would_take", lambda _: local)
    return found


def test_a_release_that_was_asked_for_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: list[str]
) -> None:
    def install(asked: str) -> str:
        monkeypatch.setenv("PYCOMM_TORCH", asked)
        installed.clear()
        bootstrap.install(["test"], build=False)
        return capsys.readouterr().out

    assert "installing torch==2.13.0+cpu (200 MB)" in install("")
    assert installed == ["torch==2.13.0+cpu"]
    assert install("") == "" and installed == []
    # Although it is the newest, which a run that names none may have put another in place of.
    assert "torch==2.15.0 (with its CUDA packages, several GB)" in install("2.15.0")
    assert installed == ["torch==2.15.0"]
    said = install("")
    assert installed == []
    assert said == (
        "[bootstrap] keeping torch 2.15.0, which an earlier TORCH=2.15.0 chose; "
        "TORCH=... chooses another\n"
    )
    assert install("2.15.0") == "" and installed == []
    install("2.13.0")
    assert installed == ["torch==2.13.0+cpu"]
    assert "keeping torch 2.13.0" in install("") and installed == []


def test_a_release_that_could_not_be_installed_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, installed: list[str]
) -> None:
    def fail(*arguments: str | Path) -> None:
        if str(arguments[0]).startswith("torch=="):
            raise SystemExit(1)

    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "pip", fail)
        patch.setenv("PYCOMM_TORCH", "2.15.0")
        with pytest.raises(SystemExit):
            bootstrap.install([], build=False)
    bootstrap.install([], build=False)
    assert installed == ["torch==2.13.0+cpu"]


def test_a_kept_release_that_is_no_longer_supported_is_replaced(installed: list[str]) -> None:
    bootstrap.Stamp("torch", "2.10.0").write()
    assert bootstrap.asked_torch() == ""


# --- when the extension is built again ------------------------------------------------------------


def test_the_stamp_of_the_extension_has_its_inputs(
    monkeypatch: pytest.MonkeyPatch, venv: Path
) -> None:
    root = venv.parent
    monkeypatch.setattr(bootstrap, "ROOT", root)
    names = ["csrc/engine/a.cc", "csrc/engine/a.h", "csrc/flags.txt", "csrc/cuda/kernels.cu"]
    names += ["csrc/cuda/a.cuh", "csrc/cuda/exports.map", "cmake/Flags.cmake", "CMakeLists.txt"]
    names += ["tools/native.py", "tools/cuda_library.py", "pycomm/_torch_range.py"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1")
    variables = ("PYCOMM_BUILD_CUDA", "CXX", "CXXFLAGS")
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    seen = {bootstrap.extension_digest("")}
    assert seen == {bootstrap.extension_digest("")}
    for name in names:
        (root / name).write_text("2")
        seen.add(bootstrap.extension_digest(""))
    for name in variables:
        monkeypatch.setenv(name, "0")
        seen.add(bootstrap.extension_digest(""))
    assert len(seen) == 1 + len(names) + len(variables)


# --- the Makefile ---------------------------------------------------------------------------------


def run_make(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`make cpp` with a Python and, if `system` is there, an uname of the test."""
    python = folder / "python"
    python.write_text(
        '#!/bin/sh\necho "$1: [$PYTHONPATH] [$PYTHONHOME] [$PYCOMM_TORCH]" >&2; exit 3\n'
    )
    python.chmod(0o755)
    env = os.environ | {"PYTHONPATH": "/a/path", "PYTHONHOME": "/a/home", "MAKEFLAGS": ""} | more
    return subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT), "cpp", f"PYTHON={python}", *arguments],
        env={name: value for name, value in env.items() if name not in ("TORCH", "PYCOMM_TORCH")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_make_hands_over_the_release_and_no_other_pythons_paths(tmp_path: Path) -> None:
    said = run_make(tmp_path).stderr.splitlines()[0]
    assert said == "tools/bootstrap.py: [] [] []"
    said = run_make(tmp_path, "TORCH=2.14.1").stderr.splitlines()[0]
    assert said == "tools/bootstrap.py: [] [] [2.14.1]"


def test_make_names_the_system_before_it_asks_for_python(tmp_path: Path) -> None:
    uname = tmp_path / "uname"
    uname.write_text("#!/bin/sh\necho Darwin\n")
    uname.chmod(0o755)
    done = run_make(tmp_path, "PYTHON=", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == "pycomm runs on Linux only; on macOS, use gloo"
    assert "apt-get" not in done.stderr

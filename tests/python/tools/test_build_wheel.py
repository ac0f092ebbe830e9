"""tools/build_wheel.py and try_wheel.py: what a wheel must be, and which torch it is built with."""

from __future__ import annotations

import glob
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))

import build_wheel
import machine
import native
import try_wheel

pytestmark = pytest.mark.nightly

COMPILER = (machine.compiler() or "c++").split()


def link(target: Path, source: str, *flags: str) -> None:
    """Makes a library of one C++ source."""
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [*COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(target), *flags]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.fixture
def torch(tmp_path: Path) -> native.Torch:
    """A torch whose libraries define one function each."""
    folder = tmp_path / "torch" / "lib"
    for name in native.TORCH_LIBRARIES:
        link(folder / f"lib{name}.so", f"int of_{name}() {{ return 1; }}")
    return native.Torch("2.13.0+cpu", (), str(folder))


# It needs a symbol of each library of torch, of C++ and of Python.
GOOD = """
#include <string>
int of_c10(), of_torch(), of_torch_cpu(), of_torch_python();
extern "C" void Py_IncRef(void*);
std::string f(int n) {
  Py_IncRef(nullptr);
  return std::to_string(n + of_c10() + of_torch() + of_torch_cpu() + of_torch_python());
}
"""
FOREIGN = GOOD + "int of_a_later_torch(); int g() { return of_a_later_torch(); }"


@pytest.mark.parametrize(
    ("source", "flags", "wrong"),
    [
        (GOOD, [], []),
        (FOREIGN, [], ["torch 2.13.0+cpu does not define _Z16of_a_later_torchv"]),
        (
            GOOD,
            ["-Wl,-rpath,/opt/torch/lib"],
            ["the module for torch 2.13.0+cpu names folders to search"],
        ),
        (None, [], ["no module for torch 2.13.0+cpu"]),
    ],
)
def test_a_wrong_module_is_noticed(
    tmp_path: Path, torch: native.Torch, source: str | None, flags: list[str], wrong: list[str]
) -> None:
    module = tmp_path / "module.so"
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pycomm/__init__.py", "")
        if source is not None:
            link(module, source, *flags)
            archive.write(module, native.module_in(Path("pycomm"), torch))
    assert build_wheel.look(wheel, [torch]) == wrong
    assert try_wheel.minors(wheel) == ([] if source is None else ["2.13"])


def test_the_minors_of_a_wheel_are_in_order(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        for name in ("torch_2_11/_C.x.so", "torch_2_9/_C.x.so", "torch_3_0/other.py"):
            archive.writestr(f"pycomm/{name}", "")
    assert try_wheel.minors(tmp_path / "a.whl") == ["2.9", "2.11"]


@pytest.mark.parametrize(
    ("version", "has_cpu", "asked", "folder"),
    [
        ("2.13.0", True, ["torch==2.13.0+cpu"], "2.13.0-"),
        ("2.13.0", False, ["torch==2.13.0+cpu", "torch==2.13.0"], "2.13.0-"),
        ("===2.13.0", True, ["torch===2.13.0"], "2.13.0-plain-"),
    ],
)
def test_which_wheel_of_torch_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    version: str,
    has_cpu: bool,
    asked: list[str],
    folder: str,
) -> None:
    calls: list[str] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command[-1])
        if command[-1].endswith("+cpu") and not has_cpu:
            return SimpleNamespace(returncode=1)
        into = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(into / "torch-x.whl", "w") as archive:
            for name in ("version.py", *(f"lib/lib{name}.so" for name in native.TORCH_LIBRARIES)):
                archive.writestr(f"torch/{name}", calls[-1])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(build_wheel, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(build_wheel.subprocess, "run", run)
    found = build_wheel.unpacked(version)
    assert calls == asked
    assert found == tmp_path / "kept" / f"{folder}{sys.implementation.cache_tag}"
    assert (found / "torch" / "version.py").read_text() == asked[-1]
    said = capsys.readouterr().out
    line = "no CPU wheel of torch 2.13.0 was found: downloading the CUDA one (0.9 GB)"
    assert (line in said) is (len(asked) == 2)
    assert build_wheel.unpacked(version) == found and calls == asked


def test_folders_with_brackets_are_named_and_colons_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [tmp_path / "a [1]*" / "2.13.0", tmp_path / "b" / "2.14.1"]
    for folder in folders:
        folder.mkdir(parents=True)
    patterns = build_wheel.named(folders).split(":")
    assert [glob.glob(pattern) for pattern in patterns] == [[str(folder)] for folder in folders]
    build_wheel.check_path()
    monkeypatch.setattr(build_wheel, "ROOT", tmp_path / "a:b")
    with pytest.raises(SystemExit, match="because its path has ':'"):
        build_wheel.check_path()

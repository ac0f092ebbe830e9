"""Which code the CUDA library is built with, by the version of nvcc; and how tests build theirs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import fake_cuda_device
import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[3]


def _chosen(version: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "choose.cmake"
    script.write_text(
        f'include("{ROOT}/cmake/CudaArchitectures.cmake")\n'
        f"pycomm_cuda_architectures({version} chosen)\n"
        'message("chosen: ${chosen}")\n'
    )
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    return subprocess.run([cmake, "-P", str(script)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("version", "architectures"),
    [
        ("12.1.66", "80-real;90"),
        ("12.6.85", "80-real;90"),
        ("12.8.61", "80-real;90-real;100"),
        ("13.0.48", "80-real;90-real;100"),
    ],
)
def test_each_nvcc_gets_architectures_that_it_knows(
    version: str, architectures: str, tmp_path: Path
) -> None:
    # sm_100 since 12.8: "CUDA Toolkit 12.8 Release Notes", new architectures.
    assert f"chosen: {architectures}\n" in _chosen(version, tmp_path).stderr


def test_an_old_nvcc_is_named(tmp_path: Path) -> None:
    refused = _chosen("12.0.140", tmp_path)
    assert refused.returncode != 0
    assert "needs nvcc 12.1 or later" in refused.stderr and "12.0.140" in refused.stderr


def test_a_compiler_may_have_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "csrc" / "base" / "answer.cc"
    source.parent.mkdir(parents=True)
    source.write_text("int answer() { return 42; }\n")
    (tmp_path / "csrc" / "layers.txt").write_text("1 base core\n")
    (tmp_path / "csrc" / "flags.txt").write_text("fake -O0\n")
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/launched\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"{launcher} {compiler}")
    monkeypatch.setattr(fake_cuda_device, "ROOT", tmp_path)
    assert fake_cuda_device.build(tmp_path).is_file()
    launched = (tmp_path / "launched").read_text().splitlines()
    assert [line.split()[0] for line in launched] == [compiler] * 3, (
        "a look, an object, the library"
    )


CONFTEST = f"""
import importlib.util
import sys

sys.path.insert(0, {str(ROOT / "tests/rig")!r})
import fake_cuda_device

spec = importlib.util.spec_from_file_location("real", {str(ROOT / "tests/python/conftest.py")!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
fake_cuda = real.fake_cuda

def build_or_skip(folder):
    with open("built", "a") as built:
        print(folder, file=built)
    (folder / "libpycomm_cuda.so").write_text("it")
    return folder / "libpycomm_cuda.so"

fake_cuda_device.build_or_skip = build_or_skip
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_of_one_run_build_the_library_once(tmp_path: Path, processes: int) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(
        "def test_it(fake_cuda):\n    assert fake_cuda.read_text() == 'it'\n"
    )
    workers = ["--dist=each", f"--tx={processes}*popen"] if processes > 1 else []
    command = [sys.executable, "-m", "pytest", "-q", *workers, f"--basetemp={tmp_path / 'temp'}"]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert f"{processes} passed" in done.stdout, done.stdout + done.stderr
    assert len((tmp_path / "built").read_text().splitlines()) == 1

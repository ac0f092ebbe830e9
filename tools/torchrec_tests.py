"""Run tests/torchrec in an environment of its own: build/torchrec/venv. `make torchrec` does.

    python tools/torchrec_tests.py                      all tests
    python tools/torchrec_tests.py -k plan              pytest's options
    python tools/torchrec_tests.py --run FILE.py …      a program there, such as a benchmark

Each release of TorchRec's kernels for the CPU is built for one minor of torch, which is not the
newest. Where .venv has the same torch, its extension is used; else one is built for this torch.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import bootstrap
import fault_build
import native

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "torchrec"
VENV = BUILD / "venv"
PYTHON = VENV / "bin" / "python"
TESTS = ROOT / "tests" / "torchrec"
TORCH = "2.13.0+cpu"
RELEASE = "1.8.0"


def install() -> None:
    """Makes the environment, unless it is there for these very packages."""
    # The first names the others.
    others = [bootstrap.REQUIREMENTS / f"{name}.txt" for name in ("build", "test", "demo")]
    requirements = [TESTS / "requirements.txt", *others]
    wanted = bootstrap.digest(requirements, TORCH, RELEASE)
    stamp = BUILD / "installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    bootstrap.say(f"making {VENV.relative_to(ROOT)}, with torch {TORCH} and TorchRec {RELEASE}")
    bootstrap.run(sys.executable, "-m", "venv", "--clear", VENV)
    pip: list[str | Path] = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    here = TORCH in bootstrap.torch_versions()
    index = [] if here else ["--extra-index-url", bootstrap.TORCH_INDEX]
    bootstrap.run(*pip, f"torch=={TORCH}", *index)
    bootstrap.run(*pip, "-r", TESTS / "requirements.txt")
    bootstrap.run(*pip, "--no-deps", f"torchrec=={RELEASE}", f"fbgemm-gpu-cpu=={RELEASE}")
    stamp.write_text(wanted)


def package() -> Path:
    """The folder to import pycomm from, with an extension for this torch."""
    if native.Torch.installed().version == TORCH:  # that of .venv, which runs this
        return ROOT
    library = BUILD / "lib"
    fault_build.mirror_python_files(library / "pycomm")
    (library / "pycomm" / "_build_info.py").unlink(missing_ok=True)  # a link to .venv's
    bootstrap.run(PYTHON, "setup.py", "-q", "build_ext", "--build-lib", library)
    return library


def main(arguments: Sequence[str]) -> int:
    BUILD.mkdir(parents=True, exist_ok=True)
    lock = os.open(BUILD, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once take turns to install and to build
    install()
    paths = [str(package()), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.close(lock)
    command: list[str | Path]
    if arguments[:1] == ["--run"]:
        command = [PYTHON, *arguments[1:]]
    else:
        # As a script, not as `-m pytest`, which puts this folder and its pycomm first.
        command = [PYTHON, VENV / "bin" / "pytest", "--require-native", TESTS, *arguments]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

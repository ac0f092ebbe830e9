"""Install the wheel of dist/ beside different releases of torch, and train with it.

    python tools/try_wheel.py                  # 2.13.0, 2.14.1 and 2.15.0
    python tools/try_wheel.py 2.11.0
    python tools/try_wheel.py ===2.13.0        # this very build, which is the CUDA one
    python tools/try_wheel.py --sdist 2.13.0   # build from the sdist there, without git and CMake
    python tools/try_wheel.py --built-with ===2.13.0 2.13.0
                                               # a wheel built with the CUDA torch only

Each release gets an environment of its own, without anything of this checkout. The wheel is
installed from dist/ alone. With --built-with, build_wheel.py builds the wheel for this one release,
and dist/ stays as it is. Then: torch is the one that was there, two ranks train the example, the
right module of this commit was loaded, libpycomm_cuda.so loads if the wheel has it, and beside a
torch that pycomm does not know it says so in one sentence.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import build_wheel
import native

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
RELEASES = ("2.13.0", "2.14.1", "2.15.0")
# What the example needs besides torch.
EXAMPLE = ("numpy", "scikit-learn", "tqdm")

LOADED = """
import ctypes, json, sys, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
name, = (name for name in sys.modules if name.startswith("pycomm.") and name.endswith("._C"))
import pycomm
library = Path(pycomm.__file__).parent / "libpycomm_cuda.so"
found = library.exists()
if found:
    assert ctypes.CDLL(str(library)).pycomm_cuda_table
from pycomm._build_info import GIT_COMMIT
library = "loads" if found else "none"
facts = [torch.__version__, torch.version.cuda, name, library, GIT_COMMIT, pycomm.__file__]
print(json.dumps(facts))
dist.destroy_process_group()
"""

UNKNOWN = """
import torch, torch.distributed as dist
torch.__version__ = "{version}"
import pycomm
try:
    dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print(error)
"""


class Environment:
    """A virtual environment that knows nothing of this checkout."""

    def __init__(self, folder: Path) -> None:
        self._bin = folder / "bin"
        self._scratch = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)

    def pip(self, *arguments: str) -> None:
        command = [str(self._bin / "python"), "-m", "pip", "install", "-q", "--no-compile"]
        subprocess.run([*command, *arguments], check=True, cwd=self._scratch)

    def run(self, *command: str, tools: Path | None = None) -> str:
        """What a program of it prints. `tools`: the folder of the system's programs."""
        kept = ("HOME", "LANG", "TMPDIR", "PIP_CONFIG_FILE", "MAX_JOBS")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        path = f"{self._bin}:{tools or '/usr/bin:/bin'}"
        done = subprocess.run(
            [str(self._bin / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            cwd=self._scratch,
            env=environment | {"PATH": path, "OMP_NUM_THREADS": "1"},
            timeout=1800,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{command[:3]} failed\n{done.stdout}\n{done.stderr}")
        return done.stdout.strip()


def without(folder: Path, *names: str) -> Path:
    """A folder of links to the system's programs, less those that begin with these names."""
    folder.mkdir()
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith(names):
            (folder / program.name).symlink_to(program)
    return folder


def install_sdist(here: Environment, scratch: Path) -> None:
    """Builds from the sdist as a user would who has only that file, torch and a compiler."""
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(scratch)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    requirements = ROOT / "tools" / "requirements" / "build.txt"
    here.pip("-r", str(requirements))
    tools = without(scratch / "programs", "git", "cmake", "ccache")
    install = ["python", "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps"]
    here.run(*install, str(next(scratch.glob("torch_pycomm-*.tar.gz"))), tools=tools)


def minors(wheel: Path) -> list[str]:
    """The minors of torch that the wheel has modules for, in order."""
    with zipfile.ZipFile(wheel) as archive:
        found = {re.match(r"pycomm/torch_(\d+)_(\d+)/_C", name) for name in archive.namelist()}
    numbers = sorted((int(each[1]), int(each[2])) for each in found if each)
    return [f"{major}.{minor}" for major, minor in numbers]


def newer(versions: Sequence[str]) -> str:
    """A torch that does not exist yet."""
    major, minor = versions[-1].split(".")
    return f"{major}.{int(minor) + 1}.0"


def attempt(release: str, wheel: Path | None) -> str:
    """Tries this wheel, or the sdist, beside this release of torch; returns a line about it."""
    versions = native.torch_range(ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        here = Environment(Path(scratch) / "venv")
        here.pip(f"torch{release}" if release.startswith("=") else f"torch=={release}", *EXAMPLE)
        ask = ("python", "-c", "import torch; print(torch.__version__)")
        before = here.run(*ask)
        if wheel is None:
            install_sdist(here, Path(scratch))
        else:
            here.pip("--no-index", str(wheel))
        after = here.run(*ask)
        if before != after:
            raise SystemExit(f"torch {before} became {after}")
        facts = json.loads(here.run("python", "-c", LOADED))
        version, cuda, module, library, commit, where = facts
        if f".{versions.module_folder(before)}." not in module or not where.startswith(scratch):
            raise SystemExit(f"{where}: torch {before} loaded {module}")
        head = native.git_commit(ROOT)
        if wheel and commit != head:
            raise SystemExit(f"the wheel is of commit {commit}, not {head}. Try: make wheel")
        for name in ("train_digits.py", "_common.py"):
            shutil.copy2(ROOT / "examples" / name, scratch)
        program = str(Path(scratch) / "train_digits.py")
        trained = here.run("torchrun", "--standalone", "--nproc-per-node=2", program)
        unknown = newer(versions.SUPPORTED)
        said = here.run("python", "-c", UNKNOWN.format(version=unknown))
        built = ", ".join(minors(wheel)) if wheel else versions.torch_minor(before)
        if f"built for torch {built}, and torch {unknown} is" not in said or (
            "Try: a newer pycomm" not in said
        ):
            raise SystemExit(f"beside torch {unknown} it says: {said}")
        return (
            f"torch {version} (CUDA {cuda}): {module}, libpycomm_cuda.so {library}; "
            f"{trained.splitlines()[-1]}\n  beside torch {unknown}: {said}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", metavar="release", default=RELEASES)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--sdist", action="store_true", help="build from the sdist, not the wheel")
    way.add_argument("--built-with", metavar="RELEASE", help="build a wheel for this torch first")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.built_with:
            build_wheel.check_path()
            folder = build_wheel.unpacked(options.built_with)
            wheel: Path | None = build_wheel.build([folder], Path(scratch))
        else:
            wheel = next(DIST.glob(f"torch_pycomm-*-{build_wheel.TAG}-*.whl"), None)
        if options.sdist:
            wheel = None
        elif wheel is None:
            raise SystemExit(f"there is no wheel for this Python in {DIST}. Try: make wheel")
        for release in options.releases:
            print(attempt(release, wheel), flush=True)
    what = f"wheel: {wheel.name}" if wheel else "sdist: it"
    print(f"{what} passed beside each")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What C++ is built from and with: sources, units, flags, and the ninja files of the extension.

csrc/layers.txt has the folders and csrc/flags.txt the flags, for this module and for CMake, which
builds the C++ tests. This module builds the extension for setup.py, one module for each minor of
torch, and the same with sanitizers for tools/seam.py.

Folders are compiled in few large units, each of which includes many files: parsing torch's headers
takes 10 to 18 of the 15 to 28 seconds that a file with them takes. PYCOMM_UNITY=0 compiles every
file by itself, which rebuilds one changed file faster and shows a missing include.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import machine

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path("build") / "native"
HEADERS = ROOT / "build" / "python-headers"  # where Python.h is unpacked if the system has none
STANDARD = "-std=c++20"
TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")

ALONE = "kernels_*.cc"  # one per instruction set: they give the same names to different vectors
GIB_PER_CORE_COMPILER = 1.0
GIB_PER_COMPILER = 1.7


# --- what there is --------------------------------------------------------------------------------


def rows(path: Path) -> list[list[str]]:
    """The lines of a table under csrc/, without comments, in words."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def folders(root: Path, *kinds: str) -> list[Path]:
    """The folders of csrc/layers.txt that are of these kinds, lowest layer first."""
    table = rows(root / "csrc" / "layers.txt")
    return [root / "csrc" / folder for _, folder, kind in table if kind in kinds]


def sources(root: Path, *kinds: str) -> list[Path]:
    """Every .cc file of those folders, in a fixed order."""
    return [path for folder in folders(root, *kinds) for path in sorted(folder.rglob("*.cc"))]


def flags(root: Path, *names: str) -> list[str]:
    """The flags that csrc/flags.txt has for these names."""
    table = rows(root / "csrc" / "flags.txt")
    return [flag for name in names for row in table if row[0] == name for flag in row[1:]]


def wanted() -> bool:
    """Whether many files are compiled at once: PYCOMM_UNITY is not "0"."""
    value = os.environ.get("PYCOMM_UNITY", "").strip() or "1"
    if value not in ("0", "1"):
        raise SystemExit(f"PYCOMM_UNITY={value!r} is not allowed: use '0' or '1'")
    return value == "1"


def units(root: Path, kind: str) -> list[tuple[Path, str]]:
    """What to compile of the folders of this kind, and each one's folder.

    A folder is one unit, so that the compiler sees all calls within it: with the engine in three
    units a small all_reduce over TCP costs 3 % more CPU time. A unit of the core takes a compiler
    up to 30 seconds and 0.8 GB, one that includes torch 1.3 to 1.7 GB, most of it for torch's
    headers. Units are written under build/units, and only if they change.
    """
    if not wanted():
        return [(path, path.relative_to(root / "csrc").parts[0]) for path in sources(root, kind)]
    found = []
    for folder in folders(root, kind):
        alone = sorted(folder.rglob(ALONE))
        found += [(path, folder.name) for path in alone]
        names = [
            path.relative_to(root / "csrc") for path in sorted({*folder.rglob("*.cc")} - {*alone})
        ]
        if not names:
            continue
        text = "".join(f'#include "{name}"\n' for name in names)
        unit = root / "build" / "units" / f"{folder.name}.cc"
        unit.parent.mkdir(parents=True, exist_ok=True)
        if not unit.exists() or unit.read_text(encoding="utf-8") != text:
            unit.write_text(text, encoding="utf-8")
        found.append((unit, folder.name))
    return found


def git_commit(root: Path) -> str:
    """HEAD of the checkout in this folder, and " with changes" if tracked code differs from it.

    Empty in an sdist, also in one that was unpacked inside another checkout.
    """
    git = ["git", "-C", str(root)]
    try:
        asked = [*git, "rev-parse", "--show-toplevel", "HEAD"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        top, commit = said.split("\n")[:2]
    except (OSError, ValueError, subprocess.CalledProcessError):
        return ""
    if Path(top) != root:
        return ""
    code = ["--", ".", ":(exclude)docs", ":(exclude)benchmarks/results"]  # nothing of it is built
    differs = subprocess.run([*git, "diff", "--quiet", "HEAD", *code], check=False).returncode == 1
    return f"{commit} with changes" if differs else commit


# --- torch ----------------------------------------------------------------------------------------


def torch_range(root: Path) -> ModuleType:
    """pycomm/_torch_range.py, loaded without the package, which needs torch."""
    path = root / "pycomm" / "_torch_range.py"
    spec = importlib.util.spec_from_file_location("_torch_range", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class Torch:
    """A torch to build against."""

    version: str
    includes: tuple[str, ...]
    libraries: str
    has_cuda: bool = False
    kind: str = ""
    """What tells its objects from those of another with the same version."""

    @classmethod
    def installed(cls) -> Torch:
        """That of this interpreter. Raises ImportError if there is none."""
        import torch
        from torch.utils import cpp_extension

        return cls(
            str(torch.__version__),
            tuple(cpp_extension.include_paths()),
            str(cpp_extension.TORCH_LIB_PATH),
            torch.version.cuda is not None,
        )

    @classmethod
    def unpacked(cls, folder: Path) -> Torch:
        """That of a folder into which a wheel of torch for Linux was unpacked."""
        stated: dict[str, object] = {}
        exec((folder / "torch" / "version.py").read_text(encoding="utf-8"), stated)
        include = folder / "torch" / "include"
        return cls(
            str(stated["__version__"]),
            (str(include), str(include / "torch" / "csrc" / "api" / "include")),
            str(folder / "torch" / "lib"),
            stated["cuda"] is not None,
            "-unpacked",
        )

    @property
    def tag(self) -> str:
        """What objects compiled against it, by this interpreter, are kept under."""
        return f"{sys.implementation.cache_tag}-torch{self.version}{self.kind}-{platform.machine()}"


# --- ninja ----------------------------------------------------------------------------------------


def compiler() -> list[str]:
    """The C++ compiler, behind ccache where there is one and CXX names no launcher itself."""
    found = machine.compiler()
    if found is None:
        raise SystemExit(machine.sentence([machine.COMPILER_LACK]))
    words = shlex.split(found)
    path = shutil.which(words[0])
    is_ccache = "ccache" in Path(words[0]).name or "ccache" in os.path.realpath(path or "")
    launched = any(not word.startswith("-") and shutil.which(word) for word in words[1:])
    return words if is_ccache or launched or not shutil.which("ccache") else ["ccache", *words]


def ninja() -> list[str]:
    """The ninja of PATH or of this interpreter's packages."""
    if path := shutil.which("ninja"):
        return [path]
    if importlib.util.find_spec("ninja"):
        return [sys.executable, "-m", "ninja"]
    raise SystemExit("ninja is needed to build: pip install ninja")


def near(path: str | Path) -> str:
    """Relative where it lies under ROOT: then ccache finds what another checkout compiled."""
    absolute = Path(path)
    return str(absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute)


def link_flags(torch: Torch) -> list[str]:
    """What follows the objects where an extension is linked.

    Some compilers link the C++ library as an archive. Its symbols stay inside then: half of them
    bound to torch's copy of that library, the first stream that is opened ends the process.
    """
    flags = [f"-L{near(torch.libraries)}", *(f"-l{name}" for name in TORCH_LIBRARIES)]
    return [*flags, "-Wl,--exclude-libs,ALL", *shlex.split(os.environ.get("LDFLAGS", ""))]


def link_command(target: Path, inputs: Iterable[Path], torch: Torch) -> list[str]:
    """Links an extension without a ninja file. Run it in ROOT."""
    command = [*compiler(), "-shared", "-pthread", *map(str, inputs), *link_flags(torch)]
    return [*command, "-o", str(target)]


class NinjaFile:
    """Compiles and links for one build; every path is as seen from ROOT."""

    def __init__(self, folder: Path, extra: Sequence[str] = ()) -> None:
        """`folder`: what ninja remembers lies there. `extra`: for compiling and for linking."""
        self._folder = Path(near(folder))
        self._extra = list(extra)
        self._lines = [
            f"builddir = {self._folder}",
            "rule compile",
            "  command = $cxx $flags -MMD -MF $out.d -c $in -o $out",
            "  description = $in",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule archive",
            "  command = rm -f $out && ar crs $out $in",
            "rule link",
            "  command = $cxx -shared -pthread $in $flags -o $out",
            f"cxx = {shlex.join(compiler())}",
        ]

    def compile(
        self, kind: str, where: Path, names: Sequence[str], includes: Sequence[str] = ()
    ) -> list[str]:
        """Compiles the folders of a kind into `where`; returns the objects.

        `names`: of the lines of csrc/flags.txt that hold besides those of every build.
        """
        user = [
            flag
            for name in ("CPPFLAGS", "CFLAGS", "CXXFLAGS")
            for flag in shlex.split(os.environ.get(name, ""))
        ]
        objects = []
        for unit, folder in units(ROOT, kind):
            chosen = [STANDARD, "-fPIC", "-pthread", "-Icsrc", *includes]
            chosen += flags(ROOT, "all", kind, *names)
            if "extension" in names:
                chosen += flags(ROOT, folder)
            target = near(where / Path(near(unit)).with_suffix(".o"))
            self._lines.append(f"build {target}: compile {near(unit)}")
            self._lines.append(f"  flags = {shlex.join([*chosen, *self._extra, *user])}")
            objects.append(target)
        return objects

    def archive(self, target: Path, objects: Iterable[str]) -> str:
        self._lines.append(f"build {near(target)}: archive {' '.join(objects)}")
        return near(target)

    def link(self, target: Path, inputs: Sequence[str | Path], torch: Torch) -> str:
        self._lines.append(f"build {near(target)}: link {' '.join(map(near, inputs))}")
        self._lines.append(f"  flags = {shlex.join([*self._extra, *link_flags(torch)])}")
        return near(target)

    def command(self, name: str, jobs: int) -> list[str]:
        """Writes the file; returns what builds all of it. Run that in ROOT."""
        path = ROOT / self._folder / f"{name}.ninja"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")
        return [*ninja(), "-f", near(path), "-j", str(jobs)]


def jobs(gib_each: float) -> int:
    """How many compilers at once: MAX_JOBS, else what cores and memory allow."""
    given = os.environ.get("MAX_JOBS", "").strip()
    if not given:
        return machine.jobs(gib_each)
    if not given.isdecimal() or int(given) < 1:
        raise SystemExit(f"MAX_JOBS={given!r} is not allowed: use a whole number from 1")
    return int(given)


# --- the extension --------------------------------------------------------------------------------


def _core(file: NinjaFile) -> str:
    folder = BUILD / f"core-{platform.machine()}"
    return file.archive(folder / "libpycomm_core.a", file.compile("core", folder, ["extension"]))


def core_command() -> list[str]:
    """What builds the extension's core, for which neither torch nor Python's headers are needed."""
    file = NinjaFile(BUILD)
    _core(file)
    return file.command("core", jobs(GIB_PER_CORE_COMPILER))


def python_includes() -> list[str]:
    """Where Python.h is: with the interpreter, or where bootstrap.py has unpacked it."""
    unpacked = machine.unpacked_headers(HEADERS)
    folders = [Path(sysconfig.get_paths()["include"]), *unpacked]
    return [word for folder in folders for word in ("-isystem", near(folder))]


def torch_objects(file: NinjaFile, torch: Torch, where: Path, names: Sequence[str]) -> list[str]:
    """Compiles what includes torch; returns the objects."""
    includes = [word for path in torch.includes for word in ("-isystem", near(path))]
    return file.compile("torch", where, names, [*includes, *python_includes()])


def extension_name() -> str:
    """The file name of the module for this interpreter."""
    return f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def module_in(package: Path, torch: Torch) -> Path:
    """Where in a folder with the package the module for this torch and this interpreter lies."""
    folder: str = torch_range(ROOT).module_folder(torch.version)
    return package / folder / extension_name()


def build_extension(torch: Torch) -> Path:
    """Builds the module for this torch; returns the file. Raises CalledProcessError where the
    compiler refuses."""
    file = NinjaFile(BUILD)
    # Those that take longest first: with few cores, the last one decides when all are done.
    objects = torch_objects(file, torch, BUILD / torch.tag, ["extension"])
    library = file.link(BUILD / torch.tag / extension_name(), [*objects, _core(file)], torch)
    command = file.command(torch.tag, jobs(GIB_PER_COMPILER))
    subprocess.run(command, cwd=ROOT, check=True)
    return ROOT / library


def build_file(torch: Torch) -> Path:
    """The ninja file of the last build of the extension for this torch."""
    return ROOT / BUILD / f"{torch.tag}.ninja"


def built_torch_objects(torch: Torch) -> list[Path]:
    """The objects that include torch, of the last build for it; empty if there was none.

    Not all that the folder holds: a build with the other value of PYCOMM_UNITY, or of sources that
    are gone, leaves objects that nothing brings up to date.
    """
    path = build_file(torch)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    made = [Path(name) for name in re.findall(r"^build (.+\.o): compile ", text, re.MULTILINE)]
    return [ROOT / name for name in made if name.is_relative_to(BUILD / torch.tag)]


def update(torch: Torch, objects: Sequence[Path]) -> bool:
    """Compiles those of `built_torch_objects` again that are older than what they are made of.

    Linked with a core of other headers they would crash. False if the compiler refuses one.
    """
    build = [*ninja(), "-f", near(build_file(torch)), "-j", str(jobs(GIB_PER_COMPILER))]
    # Standard output is for what the caller prints.
    command = [*build, *map(near, objects)]
    return subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode == 0


def main() -> None:
    """`native.py core` compiles what needs no torch: bootstrap.py runs it during a download."""
    if sys.argv[1:] != ["core"]:
        raise SystemExit("usage: native.py core")
    os.chdir(ROOT)
    command = core_command()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

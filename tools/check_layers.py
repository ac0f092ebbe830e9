"""Enforce the layers: who may include and import whom. Prints one line for each violation.

The layers of C++ stand in csrc/layers.txt; every other rule stands below, as plain tables.
A folder of csrc/ may have subfolders; CPP_SUBFOLDERS says which of them sees which.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# --- C++ ------------------------------------------------------------------------------------------

CPP_SUFFIXES = {".cc", ".h", ".cu", ".cuh"}

# The subfolders of a folder, lowest first: a file includes lower ones and its own. Those of one set
# do not see each other. "" is for files that lie in the folder itself.
CPP_SUBFOLDERS = {
    "engine": [
        {"loop"},
        {"operation"},
        {"report"},
        {"links", "meeting"},
        {"host", "monitor"},
        {"data"},
        {""},
        {"survive"},
    ],
    "proof": [{"schedule"}, {"sim"}, {"elastic"}],
    "transport": [{""}, {"secure"}, {"net", "memory"}, {"rendezvous"}],
}

# Headers that only some kinds of folder (csrc/layers.txt) may include: (pattern, what it is,
# kinds).
FOREIGN_HEADERS = [
    (
        r"(cuda|nccl|cub|thrust|cooperative_groups|nvToolsExt)[^/]*(/|\.h)|(c10|ATen|torch/csrc)/cuda/",
        "CUDA",
        {"cuda"},
    ),
    (r"(torch|ATen|c10|caffe2)/", "torch", {"torch"}),
    (r"(pybind11/|Python\.h)", "Python", {"torch"}),
]

# A layer sees the layers below, but these kinds are seen only by themselves: `proof` is for tests
# and does not ship, and the CUDA library is loaded at run time.
PRIVATE_KINDS = {"proof", "cuda"}

# Of other projects, unchanged: no rule of ours holds in it.
VENDORED_KIND = "vendored"

# Within the CUDA folder only these files include CUDA's headers: the others are built and tested
# without a toolkit.
CUDA_SUFFIXES = {".cu", ".cuh"}

# Folders that are pure, or that know no sockets: (folders or subfolders, pattern of system headers
# they must not include, why).
IMPURE_HEADERS = [
    (
        {"base", "numeric", "schedule", "proof/schedule"},
        r"(sys/socket|netinet/.*|arpa/.*|netdb|poll|sys/epoll|ifaddrs|net/if)\.h",
        "knows no sockets",
    ),
    (
        {"schedule", "numeric", "proof/schedule"},
        r"thread|mutex|condition_variable|fstream|unistd\.h|chrono",
        "is pure: no I/O, threads or time",
    ),
]

# Ends processes because a test asked it to; empty where PYCOMM_FAULT_POINTS is not defined.
ENDS_PROCESSES = "csrc/base/fault_point.cc"

# What a library must not do to the process it is loaded into.
FORBIDDEN_CALLS = [
    (
        r"(?<!\w)(std::|(?<![\w>])::)(abort|exit|_exit|_Exit|quick_exit|terminate)\s*\(",
        "ends the process: throw an Error",
    ),
    (r"(^|[;{}(!]|\breturn)\s*(exit|_exit|quick_exit)\s*\(", "ends the process: throw an Error"),
    (
        r"\b(std::(cout|cerr|clog)\b|(std::)?(printf|puts|perror)\s*\(|\bstd(out|err)\b)",
        "prints: use log() of base/log.h",
    ),
    (r"\b(secure_)?getenv\s*\(|\benviron\b", "reads the environment: only pycomm/options.py does"),
    (
        r"\w\s*[({]\s*::(open|openat|socket|accept4|epoll_create1|eventfd|timerfd_create|"
        r"memfd_create|pidfd_open|inotify_init1|dup)\s*\(",
        "a fork() may copy the descriptor before it is guarded: use UniqueFd::from()",
    ),
]

# --- Python ---------------------------------------------------------------------------------------

# A module or folder imports only those that stand in a line above its own, and its own folder.
PYTHON_LAYERS = [
    {"_build_info", "_C", "_saved_state", "_settings", "_torch_range", "_version", "errors"},
    {"_wire_patterns", "options"},
    {"_native"},
    {"_metrics"},
    {"_group"},
    {"balance", "codecs", "comm_hooks", "memory", "sync_batch_norm"},
    {"ddp"},
    {"fewer_syncs", "report", "service"},
    {"integrations"},
    {"__init__"},
    {"doctor", "trace"},
    {"cli"},
    {"__main__"},
]

# The only module that may read PYCOMM_* variables.
ENVIRONMENT_READER = "pycomm/options.py"
# These may pass os.environ on whole and still not ask it for anything. test_options.py looks for
# names of variables where it arrives.
ENVIRONMENT_PASSERS = {
    "pycomm/cli/doctor.py",
    "pycomm/cli/env.py",
    "pycomm/cli/remote_end.py",
    "pycomm/cli/run.py",
    "pycomm/integrations/launch.py",
}

# torch imports this module while torch itself is half imported, so it may import nothing of ours
# and no torch when it is loaded; inside a function it may.
AUTOLOAD = "_pycomm_autoload.py"
AUTOLOAD_MUST_NOT_IMPORT = {"torch", "pycomm"}

# --- both -----------------------------------------------------------------------------------------


class Layer(NamedTuple):
    level: int
    kind: str


class Violation(NamedTuple):
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def read_layers(root: Path) -> dict[str, Layer]:
    """Each folder of csrc/ with its layer, from csrc/layers.txt."""
    lines = (root / "csrc" / "layers.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {folder: Layer(int(level), kind) for level, folder, kind in rows}


def without_comments(source: str) -> str:
    """C++ source with comments and the insides of strings blanked; lines stay where they were."""
    token = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)

    def blank(match: re.Match[str]) -> str:
        text = match.group()
        # An include's name is a string too, but it is looked at in the lines as written.
        return '""' if text.startswith('"') else "\n" * text.count("\n")

    return token.sub(blank, source)


def why_not_include(
    includer: str, header: str, quoted: bool, layers: dict[str, Layer]
) -> str | None:
    """Why a file of folder `includer` must not include `header`, or None where it may."""
    own = layers[includer]
    if quoted and (header.split("/")[0] in layers or "/" not in header):
        folder = header.split("/")[0]
        if "/" not in header:
            return f'write the folder: "{includer}/{header}"'
        target = layers[folder]
        if folder == includer:
            return None
        if target.kind in PRIVATE_KINDS:
            return f"csrc/{folder} is used by nothing else in csrc/"
        if target.level >= own.level:
            return f"{includer} [layer {own.level}] must not see {folder} [layer {target.level}]"
        return None
    for pattern, what, kinds in FOREIGN_HEADERS:
        if re.match(pattern, header):
            return None if own.kind in kinds else f"{includer} must not see {what}"
    return f'no folder of csrc/ is named "{header.split("/")[0]}"' if quoted else None


def why_impure(own: tuple[str, ...], header: str) -> str | None:
    """Why the file `own` must not include this system header, or None where it may."""
    for folders, pattern, why in IMPURE_HEADERS:
        for place in {own[0], "/".join(own[:2])} & folders:
            if re.fullmatch(pattern, header):
                return f"{place} {why}"
    return None


def subfolder_of(path_parts: tuple[str, ...]) -> str:
    """The subfolder of a file, from its path below csrc/: "" if it lies in the folder itself."""
    return path_parts[1] if len(path_parts) > 2 else ""


def why_not_subfolder(own: tuple[str, ...], header: tuple[str, ...]) -> str | None:
    """Why the file `own` must not include `header` of the same folder, or None where it may."""
    folder = own[0]
    if header[0] != folder or folder not in CPP_SUBFOLDERS:
        return None
    level = {name: number for number, names in enumerate(CPP_SUBFOLDERS[folder]) for name in names}
    mine, theirs = subfolder_of(own), subfolder_of(header)
    if mine == theirs or level.get(theirs, len(level)) < level.get(mine, 0):
        return None
    names = [f"{folder}/{name}" if name else f"{folder} itself" for name in (mine, theirs)]
    return f"{names[0]} must not see {names[1]}: see CPP_SUBFOLDERS"


INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def check_cpp(root: Path) -> Iterator[Violation]:
    layers = read_layers(root)
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix not in CPP_SUFFIXES:
            continue
        where = path.relative_to(root)
        folder = where.parts[1]
        if folder not in layers:
            yield Violation(where, 1, f"csrc/layers.txt does not say in which layer {folder} is")
            continue
        if layers[folder].kind == VENDORED_KIND:
            continue
        subfolder = subfolder_of(where.parts[1:])
        if folder in CPP_SUBFOLDERS and not any(subfolder in row for row in CPP_SUBFOLDERS[folder]):
            yield Violation(
                where, 1, f"CPP_SUBFOLDERS does not say where {folder}/{subfolder} stands"
            )
        source = path.read_text()
        for number, line in enumerate(source.splitlines(), start=1):
            include = INCLUDE.match(line)
            why = include and (
                why_not_include(folder, include[2], include[1] == '"', layers)
                or why_impure(where.parts[1:], include[2])
                or (
                    why_not_subfolder(where.parts[1:], tuple(include[2].split("/")))
                    if include[1] == '"'
                    else None
                )
            )
            if include and why:
                yield Violation(where, number, f"includes {include[2]}: {why}")
            if (
                include
                and layers[folder].kind == "cuda"
                and path.suffix not in CUDA_SUFFIXES
                and include[1] == "<"
                and re.match(FOREIGN_HEADERS[0][0], include[2])
            ):
                yield Violation(
                    where, number, f"includes {include[2]}: only .cu files see CUDA's headers"
                )
        for number, line in enumerate(without_comments(source).splitlines(), start=1):
            for pattern, why in FORBIDDEN_CALLS:
                if str(where) == ENDS_PROCESSES and why.startswith("ends the process"):
                    continue
                if not line.lstrip().startswith("#") and re.search(pattern, line):
                    yield Violation(where, number, why)


def check_cpp_tests(root: Path) -> Iterator[Violation]:
    """The C++ tests build without torch and Python, as what they test does."""
    foreign = [(pattern, what) for pattern, what, _ in FOREIGN_HEADERS if what != "CUDA"]
    for path in sorted((root / "tests" / "cpp").rglob("*")):
        if path.suffix in CPP_SUFFIXES:
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                include = INCLUDE.match(line)
                for pattern, what in foreign if include else []:
                    if include and re.match(pattern, include[2]):
                        yield Violation(
                            path.relative_to(root),
                            number,
                            f"includes {include[2]}: C++ tests see no {what}",
                        )


def imported_modules(node: ast.AST, package: str) -> list[str]:
    """Full dotted names that a statement may import; b of `from a import b` may be a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parents = package.split(".")
    base = (
        ".".join([*parents[: len(parents) - node.level + 1], node.module or ""])
        if node.level
        else node.module or ""
    )
    base = base.rstrip(".")
    return [f"{base}.{alias.name}" for alias in node.names]


def loaded_on_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node that runs on import: not function bodies, not `if TYPE_CHECKING`."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


def check_autoload(root: Path) -> Iterator[Violation]:
    path = root / AUTOLOAD
    if not path.exists():
        return
    for node in loaded_on_import(ast.parse(path.read_text())):
        for name in imported_modules(node, ""):
            if name.split(".")[0] in AUTOLOAD_MUST_NOT_IMPORT:
                yield Violation(
                    Path(AUTOLOAD),
                    getattr(node, "lineno", 1),
                    f"imports {name.split('.')[0]} when loaded",
                )


def environment_uses(tree: ast.Module, may_pass: bool) -> Iterator[tuple[int, str]]:
    """Line and reason of each use of the environment that may read a PYCOMM_* variable.

    Asking for another variable by its literal name is allowed; everything else could read ours.
    """
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ("environ", "getenv", "environb", "getenvb"):
                    yield node.lineno, f"imports {alias.name} by name: write os.{alias.name}"
        if not (
            isinstance(node, ast.Attribute)
            and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb")
        ):
            continue
        user = parents[node]
        if may_pass and isinstance(user, ast.Call) and node in user.args:
            continue
        if isinstance(user, ast.Attribute):  # os.environ.get(...)
            user = parents[user]
        key: ast.AST | None = None
        if isinstance(user, ast.Call) and user.args:
            key = user.args[0]
        elif isinstance(user, ast.Subscript):
            key = user.slice
        elif isinstance(user, ast.Compare):  # "NAME" in os.environ
            key = user.left
        name = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None
        if name is None:
            yield node.lineno, "reads the environment by no literal name"
        elif name.startswith("PYCOMM_"):
            yield node.lineno, f"reads {name}"


def check_python(root: Path) -> Iterator[Violation]:
    level = {module: number for number, modules in enumerate(PYTHON_LAYERS) for module in modules}
    for path in sorted((root / "pycomm").rglob("*.py")):
        where = path.relative_to(root)
        own = where.with_suffix("").parts[1]
        package = ".".join(where.parts[:-1])
        if own not in level:
            yield Violation(
                where, 1, f"PYTHON_LAYERS in tools/check_layers.py does not say where {own} stands"
            )
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            for name in imported_modules(node, package):
                parts = name.split(".")
                if parts[0] != "pycomm":
                    continue
                target = parts[1] if len(parts) > 1 and parts[1] in level else "__init__"
                if target != own and level[target] >= level[own]:
                    yield Violation(
                        where, getattr(node, "lineno", 1), f"{own} must not import {name}"
                    )
        if where.as_posix() != ENVIRONMENT_READER:
            for line, what in environment_uses(tree, where.as_posix() in ENVIRONMENT_PASSERS):
                yield Violation(
                    where, line, f"{what}: only {ENVIRONMENT_READER} reads PYCOMM_* variables"
                )


CHECKS = [check_cpp, check_cpp_tests, check_autoload, check_python]


def violations(root: Path) -> list[Violation]:
    return [violation for check in CHECKS for violation in check(root)]


def main() -> int:
    found = violations(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
    for violation in found:
        print(violation)
    print(
        f"layers: {len(found)} violations" if found else "layers: every file sees only what it may"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""The project's own checks must fail when they should: each is fed something that is wrong."""

from __future__ import annotations

import ast
import functools
import http.server
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"


def tool(name: str) -> ModuleType:
    if str(TOOLS) not in sys.path:
        sys.path.insert(0, str(TOOLS))
    return importlib.import_module(name)


# --- layers ---------------------------------------------------------------------------------------

LAYERS = """\
# a comment
0 base core
1 numeric core
1 transport core
1 schedule core
1 cuda cuda
2 engine core
3 proof proof
4 c10d torch
5 ddp torch
6 bindings torch
"""

GOOD_TREE = {
    "csrc/base/error.h": "#pragma once\n#include <string>\n// abort() is not called here\n",
    "csrc/base/error.cc": '#include "base/error.h"\n',
    "csrc/transport/link.h": '#include <sys/socket.h>\n#include "base/error.h"\n',
    "csrc/engine/lane.cc": '#include "engine/lane.h"\n#include "base/error.h"\n#include <thread>\n',
    "csrc/engine/links/port.h": '#include "engine/loop/loop.h"\n#include "engine/links/a.h"\n',
    "csrc/engine/group.cc": '#include "engine/links/port.h"\n',
    "csrc/transport/net/tcp.h": '#include "transport/link.h"\n',
    "csrc/engine/lane.h": "bool abort(int r);\nvoid exit();\nvoid f() { t.abort(1); l->exit(); }\n",
    "csrc/cuda/pack.cu": '#include <cuda_runtime.h>\n#include "base/error.h"\n',
    "csrc/c10d/work.h": '#include <torch/types.h>\n#include "engine/lane.h"\n',
    "csrc/bindings/module.cc": '#include <pybind11/pybind11.h>\n#include "c10d/work.h"\n',
    "tests/cpp/base/error_test.cc": '#include <gtest/gtest.h>\n#include "base/error.h"\n',
    "_pycomm_autoload.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def autoload():\n    from torch.distributed import Backend\n    import pycomm.report\n"
    ),
    "pycomm/__init__.py": "from pycomm import errors\nfrom pycomm.options import Options\n",
    "pycomm/errors.py": "import os\na = os.environ.get('LOCAL_RANK')\nb = os.environ['PORT']\n",
    "pycomm/options.py": "import os\nfrom .errors import Error\nx = os.environ['PYCOMM_TIMEOUT']\n",
    "pycomm/report.py": "import os\nfrom pycomm import errors, options\nx = os.getenv('HOME')\n",
    "pycomm/cli/__init__.py": "import pycomm\nfrom pycomm.cli import env\n",
    "pycomm/cli/env.py": "import os\nfrom pycomm.options import read\nread(os.environ)\n",
}

BAD_FILES = {
    "up": (
        "csrc/base/a.h",
        '#include "engine/lane.h"\n',
        "base [layer 0] must not see engine [layer 2]",
    ),
    "sideways": ("csrc/numeric/a.h", '#include "transport/link.h"\n', "must not see transport"),
    "up a subfolder": (
        "csrc/engine/loop/a.h",
        '#include "engine/links/port.h"\n',
        "engine/loop must not see engine/links",
    ),
    "into a subfolder beside it": (
        "csrc/engine/host/a.h",
        '#include "engine/monitor/membership.h"\n',
        "engine/host must not see engine/monitor",
    ),
    "to the face": (
        "csrc/engine/data/a.h",
        '#include "engine/group.h"\n',
        "engine/data must not see engine itself",
    ),
    "a subfolder of transport": (
        "csrc/transport/a.h",
        '#include "transport/net/tcp.h"\n',
        "transport itself must not see transport/net",
    ),
    "a subfolder that is not listed": (
        "csrc/engine/attic/a.h",
        "\n",
        "CPP_SUBFOLDERS does not say where engine/attic stands",
    ),
    "engine to torch seam": ("csrc/engine/a.cc", '#include "c10d/work.h"\n', "must not see c10d"),
    "test code": ("csrc/c10d/a.cc", '#include "proof/sim/clock.h"\n', "used by nothing else"),
    "cuda library": ("csrc/c10d/a.cc", '#include "cuda/pack.h"\n', "used by nothing else"),
    "no folder": ("csrc/base/a.cc", '#include "error.h"\n', 'write the folder: "base/error.h"'),
    "unknown quoted": (
        "csrc/base/a.cc",
        '#include "gloo/x.h"\n',
        'no folder of csrc/ is named "gloo"',
    ),
    "torch": ("csrc/engine/a.cc", "#include <torch/torch.h>\n", "engine must not see torch"),
    "torch, quoted": ("csrc/engine/a.cc", '#include "ATen/ATen.h"\n', "engine must not see torch"),
    "c10": ("csrc/proof/sim/a.h", "  #  include <c10/util/Half.h>\n", "proof must not see torch"),
    "torch in cuda": (
        "csrc/cuda/a.cu",
        "#include <torch/extension.h>\n",
        "cuda must not see torch",
    ),
    "pybind11": ("csrc/engine/a.cc", "#include <pybind11/gil.h>\n", "engine must not see Python"),
    "Python": ("csrc/base/a.cc", "#include <Python.h>\n", "base must not see Python"),
    "cuda in seam": ("csrc/c10d/a.cc", "#include <cuda_runtime.h>\n", "c10d must not see CUDA"),
    "torch's cuda": ("csrc/c10d/a.cc", "#include <c10/cuda/CUDAStream.h>\n", "must not see CUDA"),
    "nccl": ("csrc/c10d/a.cc", "#include <nccl.h>\n", "must not see CUDA"),
    "sockets": ("csrc/base/a.cc", "#include <netinet/in.h>\n", "base knows no sockets"),
    "threads": ("csrc/schedule/a.cc", "#include <thread>\n", "schedule is pure"),
    "threads in a proof": (
        "csrc/proof/schedule/a.cc",
        "#include <thread>\n",
        "proof/schedule is pure",
    ),
    "a proof to the simulator": (
        "csrc/proof/schedule/a.cc",
        '#include "proof/sim/run.h"\n',
        "proof/schedule must not see proof/sim",
    ),
    "abort": ("csrc/engine/a.cc", "void f() { std::abort(); }\n", "ends the process"),
    "global abort": ("csrc/engine/a.cc", "void f() { ::abort(); }\n", "ends the process"),
    "exit": ("csrc/engine/a.cc", "void f() { exit(1); }\n", "ends the process"),
    "print": ("csrc/engine/a.cc", 'void f() { std::cerr << "x"; }\n', "prints"),
    "printf": ("csrc/engine/a.cc", 'void f() { printf("x"); }\n', "prints"),
    "getenv": ("csrc/engine/a.cc", 'auto x = std::getenv("X");\n', "reads the environment"),
    "new folder": ("csrc/rdma/a.cc", "\n", "csrc/layers.txt does not say in which layer rdma is"),
    "torch in a C++ test": (
        "tests/cpp/base/a.h",
        "#include <ATen/ATen.h>\n",
        "C++ tests see no torch",
    ),
    "autoload torch": (
        "_pycomm_autoload.py",
        "from torch import nn\n",
        "imports torch when loaded",
    ),
    "autoload pycomm": (
        "_pycomm_autoload.py",
        "import pycomm.errors\n",
        "imports pycomm when loaded",
    ),
    "descriptor for a fork": (
        "csrc/engine/a.cc",
        "Loop::Loop() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {}\n",
        "a fork() may copy the descriptor",
    ),
    "autoload in try": (
        "_pycomm_autoload.py",
        "try:\n    import torch\nexcept ImportError:\n    pass\n",
        "imports torch when loaded",
    ),
    "autoload in class": ("_pycomm_autoload.py", "class A:\n    import torch\n", "imports torch"),
    "Python up": (
        "pycomm/errors.py",
        "from pycomm.options import Options\n",
        "errors must not import",
    ),
    "Python up, lazily": (
        "pycomm/errors.py",
        "def f():\n    import pycomm.ddp\n",
        "must not import",
    ),
    "Python up, relative": ("pycomm/options.py", "from . import report\n", "must not import"),
    "Python top": ("pycomm/report.py", "import pycomm\n", "report must not import pycomm"),
    "new module": ("pycomm/magic.py", "\n", "does not say where magic stands"),
    "variable": ("pycomm/report.py", "import os\nos.environ['PYCOMM_X']\n", "reads PYCOMM_X"),
    "variable, get": ("pycomm/report.py", "import os\nos.environ.get('PYCOMM_X')\n", "PYCOMM_X"),
    "variable, getenv": ("pycomm/report.py", "import os\nos.getenv('PYCOMM_X')\n", "PYCOMM_X"),
    "variable, in": ("pycomm/report.py", "import os\n'PYCOMM_X' in os.environ\n", "PYCOMM_X"),
    "variable, computed": (
        "pycomm/cli/env.py",
        "import os\nos.environ['PYCOMM' + x]\n",
        "no literal",
    ),
    "all variables": ("pycomm/report.py", "import os\nd = dict(os.environ)\n", "no literal name"),
    "environ by name": (
        "pycomm/report.py",
        "from os import environ\n",
        "environ by name",
    ),
}


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in {"csrc/layers.txt": LAYERS, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_good_tree_has_no_violation(tmp_path: Path) -> None:
    write_tree(tmp_path, GOOD_TREE)
    assert tool("check_layers").violations(tmp_path) == []


@pytest.mark.parametrize("case", BAD_FILES)
def test_each_violation_is_found_once(tmp_path: Path, case: str) -> None:
    name, text, expected = BAD_FILES[case]
    write_tree(tmp_path, {**GOOD_TREE, name: text})
    found = tool("check_layers").violations(tmp_path)
    assert len(found) == 1, found
    assert found[0].path == Path(name)
    assert expected in str(found[0])


def test_violation_names_the_line(tmp_path: Path) -> None:
    text = '/* two\n lines */\n#include "base/error.h"\nvoid f() { std::abort(); }\n'
    write_tree(tmp_path, {**GOOD_TREE, "csrc/engine/a.cc": text})
    (violation,) = tool("check_layers").violations(tmp_path)
    assert str(violation).startswith("csrc/engine/a.cc:4: ")


def test_this_tree_is_clean() -> None:
    assert [str(violation) for violation in tool("check_layers").violations(ROOT)] == []


# --- what the machine lacks -----------------------------------------------------------------------


def test_everything_missing_is_one_line() -> None:
    machine = tool("machine")
    line = machine.sentence([machine.COMPILER_LACK, machine.HEADERS_LACK])
    assert "\n" not in line
    assert re.search(r"C\+\+20 compiler .* and Python's C headers\.", line)
    assert re.search(
        r"sudo apt-get install g\+\+ python3\.\d+-dev .*dnf install gcc-c\+\+ python3-devel", line
    )


def test_missing_compiler_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = tool("machine")
    assert machine.lacks(tmp_path) == []
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(SystemExit, match=r"pycomm needs a C\+\+20 compiler"):
        machine.require(tmp_path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs GCC")
def test_an_old_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GCC 10 has the headers of C++20, too; this compiler says that it is that version."""
    machine = tool("machine")
    for named, found in [("g++ -U__GNUC__ -D__GNUC__=10", False), ("g++ -D__GNUC_MINOR__=0", True)]:
        monkeypatch.setenv("CXX", named)
        assert machine.compiler() == (named if found else None)
    assert "if yours is older, install a newer one and set CXX" in machine.COMPILER_LACK.what


def test_missing_venv_and_headers_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = tool("machine")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        machine.importlib.util,
        "find_spec",
        lambda name: None if name == "ensurepip" else find_spec(name),
    )
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert machine.lacks(tmp_path) == [machine.VENV_LACK, machine.HEADERS_LACK]


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = tool("machine")
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    with pytest.raises(SystemExit, match="pycomm runs on Linux only, and this is darwin"):
        machine.require(tmp_path)


def recording(folder: Path, *names: str) -> Path:
    """Programs that write down how they were called, and fail; returns the file."""
    calls = folder / "calls"
    calls.touch()
    for name in names:
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> "{calls}"\nexit 1\n')
        program.chmod(0o755)
    return calls


def test_nothing_is_installed_unasked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = tool("machine")
    calls = recording(tmp_path, "apt-get", "dpkg-deb", "sudo", "dnf")
    monkeypatch.setattr(machine, "includes", lambda header, *folders: False)
    monkeypatch.setattr(machine, "GOOGLETEST_SOURCES", tmp_path / "none")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    headers = {"include": f"/usr/include/python{machine.VERSION}-of-a-test"}
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: headers)
    assert machine.find_headers(tmp_path / "headers") is None
    assert machine.find_googletest(tmp_path / "googletest") is None
    assert machine.find_googletest(tmp_path / "googletest") is None  # not tried again today
    said = capsys.readouterr().out.splitlines()
    failed = "they could not be fetched: is the network there, and a proxy set if needed?"
    assert said[1::2] == [failed, failed]
    said = said[::2]
    assert [line.partition(", and unpacking")[0] for line in said] == [
        f"fetching libpython{machine.VERSION}-dev",
        "fetching libgtest-dev and libgmock-dev",
    ]
    called = calls.read_text().splitlines()
    assert {line.split()[0] for line in called} == {"apt-get"}
    assert not any(re.search(r"\b(install|upgrade|remove)\b", line) for line in called)
    # Lists of packages go where this user may write, and away again.
    assert all(f"Dir::State::lists={tmp_path}" in line for line in called if " update" in line)
    assert [each.name for each in (tmp_path / "googletest").iterdir()] == ["failed"]


def test_old_python_is_named_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = tool("machine")
    monkeypatch.setattr(machine.sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"^pycomm needs Python 3\.10 or newer\. Debian"):
        machine.require(tmp_path)


def test_compilers_at_once_are_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tool("machine")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(16)))
    for gib, expected in [(1, 1), (8, 2), (15.9, 5), (500, 16)]:
        monkeypatch.setattr(machine, "memory_gib", lambda gib=gib: gib)
        assert machine.jobs(3.0) == expected


# --- bootstrap ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "url", "expected"),
    [
        # A wheel of the CPU build that pip already knows of wins: CI's, else the newest supported.
        (["2.15.0", "2.14.0+cpu", "2.13.0+cpu"], "", ["torch==2.13.0+cpu"]),
        (["2.16.0+cpu", "2.15.0", "2.14.1+cpu", "2.10.0+cpu"], "", ["torch==2.14.1+cpu"]),
        # A plain version is taken from a local file only: PyPI's is the CUDA build.
        (["2.15.0"], "file:///wheels/x.whl", ["torch==2.13.0"]),
        (["2.15.0"], "https://files.pythonhosted.org/x.whl", None),
        (["2.16.0+cpu", "2.10.0+cpu"], "", None),
        ([], "", None),
    ],
)
def test_torch_never_comes_with_cuda(
    monkeypatch: pytest.MonkeyPatch, versions: list[str], url: str, expected: list[str] | None
) -> None:
    bootstrap = tool("bootstrap")

    def would_take(requirement: str) -> dict[str, object] | None:
        assert requirement == "torch==2.13.0"
        return {"download_info": {"url": url}} if url else None

    monkeypatch.setattr(bootstrap, "torch_versions", lambda: versions)
    monkeypatch.setattr(bootstrap, "would_take", would_take)
    index = ["torch==2.13.0+cpu", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    assert bootstrap.torch_arguments() == (expected or index)


@pytest.mark.ci
def test_pip_lists_the_versions_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip's own words, from an index of this test."""
    for name in ("torch-2.13.0+cpu-py3-none-any.whl", "torch-2.15.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    bootstrap = tool("bootstrap")
    monkeypatch.setattr(bootstrap, "PIP", [sys.executable, "-m", "pip"])
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert bootstrap.torch_versions() == []
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert bootstrap.torch_versions() == ["2.15.0", "2.13.0+cpu"]


def write_wheel(folder: Path, name: str, version: str, tag: str) -> str:
    """A wheel with nothing in it; returns its file name."""
    folder.mkdir(parents=True, exist_ok=True)
    file = f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / file, "w") as archive:
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", text)
        archive.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file


def write_index(page: Path, links: dict[str, str]) -> None:
    page.mkdir(parents=True)
    lines = [f'<a href="{target}">{name}</a><br/>' for name, target in links.items()]
    (page / "index.html").write_text(
        "<!DOCTYPE html><html><body>" + "\n".join(lines) + "</body></html>"
    )


@pytest.mark.ci
def test_torch_comes_from_its_own_index_where_pypi_has_the_cuda_build_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyPI's layout and that of torch's index, both from a server of this test; pip decides."""
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    tag = f"{python}-{python}-linux_{platform.machine()}"
    cuda = write_wheel(tmp_path / "packages", "torch", "2.15.0", tag)
    write_index(tmp_path / "simple" / "torch", {cuda: f"/packages/{cuda}"})
    # The index has each build by its own name, with the "+" encoded, beside those of other systems.
    names = [
        write_wheel(tmp_path / "whl" / "cpu", "torch", version, each)
        for version in ("2.13.0+cpu", "2.15.0+cpu")
        for each in (tag, f"{python}-{python}-win_amd64")
    ]
    links = {name: f"/whl/cpu/{name.replace('+', '%2B')}" for name in names}
    write_index(tmp_path / "whl" / "cpu" / "torch", links)
    bootstrap = tool("bootstrap")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(bootstrap, "PIP", [sys.executable, "-m", "pip"])
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
            assert bootstrap.torch_versions() == ["2.15.0"]
            monkeypatch.setattr(bootstrap, "TORCH_INDEX", f"{address}/whl/cpu")
            arguments = bootstrap.torch_arguments()
            chosen = bootstrap.would_take(*arguments)
        finally:
            server.shutdown()
            thread.join()
    assert arguments[0] == "torch==2.13.0+cpu"
    assert chosen is not None
    assert chosen["download_info"]["url"] == f"{address}/whl/cpu/torch-2.13.0%2Bcpu-{tag}.whl"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


# --- what the extension is built from -------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "newer"),
    [
        ("2.16.0+cu140", "a newer pycomm, from its sources (it is not on PyPI), or "),
        ("3.0.0a0+git1234", "a newer pycomm, from its sources (it is not on PyPI), or "),
        ("2.10.0", ""),
    ],
)
def test_an_unknown_torch_is_refused_before_the_compiler_starts(
    tmp_path: Path, installed: str, newer: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f'__version__ = "{installed}"\n')
    started = tmp_path / "started"
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\ntouch '{started}'\nexit 1\n")
    compiler.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "CXX": str(compiler)}
    environment.pop("PYCOMM_UNTESTED_TORCH", None)

    def build(**more: str) -> subprocess.CompletedProcess[str]:
        folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
        return subprocess.run(
            [sys.executable, "setup.py", "build_ext", *folders],
            cwd=ROOT,
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    refused = build()
    assert refused.returncode == 1
    assert refused.stderr.strip() == (
        f"this pycomm supports torch 2.11 to 2.15, and torch {installed} is installed. "
        f"Try: {newer}pip install 'torch==2.15.*', best in an environment of its own; "
        "PYCOMM_UNTESTED_TORCH=1 builds against it all the same"
    )
    assert not started.exists()
    # Told to, it looks for more of this torch than there is.
    assert "No module named 'torch.utils'" in build(PYCOMM_UNTESTED_TORCH="1").stderr


def write_sources(root: Path, *names: str) -> None:
    """A csrc/ with the project's own layers and flags, and these sources."""
    for table in ("layers.txt", "flags.txt"):
        (root / "csrc").mkdir(exist_ok=True)
        (root / "csrc" / table).write_text((ROOT / "csrc" / table).read_text())
    for name in names:
        (root / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "csrc" / name).write_text("int x;\n" * 1000)


def included(root: Path, unit: Path) -> list[str]:
    """The sources that the compiler is given in this unit."""
    if unit.is_relative_to(root / "csrc"):
        return [str(unit.relative_to(root / "csrc"))]
    return re.findall(r'#include "(.*)"', unit.read_text())


@pytest.mark.parametrize("unity", ["0", "1"])
def test_units_have_every_source_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unity: str
) -> None:
    native = tool("native")
    monkeypatch.setenv("PYCOMM_UNITY", unity)
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    for kind in ("core", "torch"):
        found = [
            name for unit, _ in native.units(tmp_path, kind) for name in included(tmp_path, unit)
        ]
        folders = [row[1] for row in native.rows(ROOT / "csrc" / "layers.txt") if row[2] == kind]
        there = [path for folder in folders for path in (ROOT / "csrc" / folder).rglob("*.cc")]
        assert sorted(found) == sorted(str(path.relative_to(ROOT / "csrc")) for path in there)


def test_a_moved_file_is_in_its_new_unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native = tool("native")
    monkeypatch.setenv("PYCOMM_UNITY", "1")
    names = [f"engine/{letter}.cc" for letter in "abcd"]
    write_sources(tmp_path, *names, "c10d/work.cc", "numeric/kernels_x.cc", "numeric/reduce.cc")

    def seen(kind: str) -> dict[str, list[str]]:
        return {
            str(unit.relative_to(tmp_path)): included(tmp_path, unit)
            for unit, _ in native.units(tmp_path, kind)
        }

    assert seen("core") == {
        "csrc/numeric/kernels_x.cc": ["numeric/kernels_x.cc"],  # one per instruction set: alone
        "build/units/numeric.cc": ["numeric/reduce.cc"],
        "build/units/engine.cc": names,
    }
    engine = tmp_path / "csrc" / "engine"
    (engine / "links").mkdir()
    (engine / "a.cc").rename(engine / "links" / "a.cc")
    (engine / "b.cc").rename(tmp_path / "csrc" / "c10d" / "b.cc")
    core = seen("core")
    assert core["build/units/engine.cc"] == [*names[2:], "engine/links/a.cc"]
    assert seen("torch") == {"build/units/c10d.cc": ["c10d/b.cc", "c10d/work.cc"]}


def test_a_unit_is_written_only_if_it_changes(tmp_path: Path) -> None:
    native = tool("native")
    write_sources(tmp_path, "base/a.cc")
    ((unit, _),) = native.units(tmp_path, "core")
    os.utime(unit, (1, 1))
    native.units(tmp_path, "core")
    assert unit.stat().st_mtime == 1
    (tmp_path / "csrc" / "base" / "b.cc").touch()
    native.units(tmp_path, "core")
    assert unit.stat().st_mtime > 1


def names_of_flags(python: str) -> set[str]:
    """The strings in calls of the functions of tools/native.py that take names of flags.txt."""
    calls = [each for each in ast.walk(ast.parse(python)) if isinstance(each, ast.Call)]
    taking = re.compile(r"(native\.|file\.)?(flags|compile|torch_objects)")
    found = [call for call in calls if taking.fullmatch(ast.unparse(call.func))]
    strings = [each for call in found for each in ast.walk(call) if isinstance(each, ast.Constant)]
    return {each.value for each in strings if isinstance(each.value, str)}


def test_every_line_of_flags_is_used() -> None:
    native = tool("native")
    names = {row[0] for row in native.rows(ROOT / "csrc" / "flags.txt")}
    folders = {row[1] for row in native.rows(ROOT / "csrc" / "layers.txt")}
    used: set[str] = set()
    for path in [*TOOLS.glob("*.py"), ROOT / "tests" / "rig" / "fake_cuda_device.py"]:
        used |= names_of_flags(path.read_text())
    for path in [ROOT / "CMakeLists.txt", *(ROOT / "cmake").glob("*.cmake")]:
        calls = re.findall(r"^ *pycomm_use_flags\(\w+ ([^)]+)\)", path.read_text(), re.MULTILINE)
        used |= {name for call in calls for name in call.split()}
    # NinjaFile.compile() adds the line of each folder that it compiles.
    assert names - folders == used - folders, "lines without a user, or users without a line"
    assert native.flags(ROOT, "bindings") == ["-O1"]
    # One place: no other file of the build names what decides about the bits of a sum.
    for path in [ROOT / "setup.py", *TOOLS.glob("*.py"), *(ROOT / "cmake").glob("*.cmake")]:
        assert "-ffp-contract" not in path.read_text(), path


def test_stamp_is_stale_when_a_file_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bootstrap = tool("bootstrap")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "STAMPS", tmp_path / "stamps")
    source = tmp_path / "a.cc"
    source.write_text("1")
    stamp = bootstrap.Stamp("x", bootstrap.digest([source]))
    assert not stamp.fresh()
    stamp.write()
    assert bootstrap.Stamp("x", bootstrap.digest([source])).fresh()
    source.write_text("2")
    assert not bootstrap.Stamp("x", bootstrap.digest([source])).fresh()
    source.write_text("1")
    assert not bootstrap.Stamp("x", bootstrap.digest([source], "other torch")).fresh()


# --- the build with fault points -----------------------------------------------------------------


@pytest.mark.parametrize("unity", ["0", "1"])
def test_the_fault_build_links_the_objects_of_the_last_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unity: str
) -> None:
    """Whatever PYCOMM_UNITY is now: the objects of the other way of compiling may be older."""
    native = tool("native")
    monkeypatch.setattr(native, "ROOT", tmp_path)
    layers = "1 engine core\n2 c10d torch\n"
    write_tree(tmp_path, {"csrc/layers.txt": layers, "csrc/flags.txt": "all -Wall\n"})
    files = ("c10d/work.cc", "c10d/store.cc", "engine/lane.cc")
    write_tree(tmp_path, {f"csrc/{name}": "int number;\n" for name in files})
    torch = native.Torch("2.13.0", ("include",), "lib")
    assert native.built_torch_objects(torch) == []
    monkeypatch.setenv("PYCOMM_UNITY", unity)
    file = native.NinjaFile(native.BUILD)
    where = native.BUILD / torch.tag
    file.link(where / "_C.so", native.torch_objects(file, torch, where, []), torch)
    file.compile("core", native.BUILD / "core", [])
    file.command(torch.tag, 1)
    monkeypatch.setenv("PYCOMM_UNITY", "1" if unity == "0" else "0")
    found = [path.name for path in native.built_torch_objects(torch)]
    assert found == (["c10d.o"] if unity == "1" else ["store.o", "work.o"])


# --- summaries, documents, stubs, metadata --------------------------------------------------------


def write_results(folder: Path, failure: str = "x", **failed: list[str]) -> None:
    """What two test programs of three tests each leave, of which these failed."""
    (folder / "results").mkdir(exist_ok=True)
    for program in ("a", "b"):
        cases = [
            {"name": name, "status": "RUN", "result": "COMPLETED"}
            | ({"failures": [{"failure": failure}]} if name in failed.get(program, []) else {})
            for name in ("One", "Two")
        ]
        cases += [{"name": "Three", "status": "RUN", "result": "SKIPPED"}]
        cases += [{"name": "Four", "status": "NOTRUN", "result": "SUPPRESSED"}]
        text = json.dumps({"testsuites": [{"name": "Suite", "testsuite": cases}]})
        (folder / "results" / f"{program}.json").write_text(text)


@pytest.mark.parametrize("ask", [["plain", "--help"], ["-h"]])
def test_cpp_help_builds_nothing(
    ask: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpp = tool("cpp")
    monkeypatch.setattr(cpp, "build", None)
    monkeypatch.setattr(sys, "argv", ["cpp.py", *ask])
    assert cpp.main() == 0
    assert "python tools/cpp.py FLAVOUR" in capsys.readouterr().out


def test_cpp_counts(tmp_path: Path) -> None:
    write_results(tmp_path, a=["Two"], b=["One", "Two"])
    found = tool("cpp").counts(tmp_path / "results")
    assert (found.ran, found.skipped) == (6, 2)
    assert found.failed == {"a": ["Suite.Two"], "b": ["Suite.One", "Suite.Two"]}
    assert found.names == ["Suite.Two", "Suite.One", "Suite.Two"]


SLOW = "within_test.cc:12\nTookTooLong: elapsedMs(begin) is 31 ms, the limit is 20 ms"
WRONG = "within_test.cc:12\nExpected equality of these values:\n  sum\n    Which is: 3\n  4"


def test_cpp_knows_a_failure_by_a_time_bound(tmp_path: Path) -> None:
    said = {"One": [SLOW, SLOW], "Two": [SLOW, WRONG], "Three": [WRONG + "\nTookTooLong: "]}
    cases = [
        {"name": name, "status": "RUN", "failures": [{"failure": text} for text in texts]}
        for name, texts in said.items()
    ]
    suites = {"testsuites": [{"name": "Suite", "testsuite": cases}]}
    (tmp_path / "a.json").write_text(json.dumps(suites))
    found = tool("cpp").counts(tmp_path)
    assert found.names == ["Suite.One", "Suite.Two", "Suite.Three"]
    assert found.late == {"Suite.One"}


def test_a_build_folder_of_another_checkout_is_deleted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpp = tool("cpp")
    old, new = tmp_path / "old", tmp_path / "new"
    cache = new / "build" / "cpp-plain" / "CMakeCache.txt"
    cache.parent.mkdir(parents=True)
    (tmp_path / "link").symlink_to(new)
    monkeypatch.setattr(cpp, "ROOT", new)
    monkeypatch.setattr(cpp, "BUILD", new / "build")
    monkeypatch.setattr(cpp.machine, "find_googletest", lambda _: None)
    monkeypatch.setattr(cpp.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    for source, kept in [(new, True), (tmp_path / "link", True), (old, False)]:
        cache.write_text(f"CMAKE_BUILD_TYPE:STRING=x\nCMAKE_HOME_DIRECTORY:INTERNAL={source}\n")
        assert cpp.build("plain") is None
        assert cache.exists() is kept
        said = capsys.readouterr().out
        assert (f"was made for {source}: deleting it" in said) is not kept
        assert "CMake downloads it (1 MB)" in said
    (cache.parent / "_deps" / "googletest-src").mkdir(parents=True)
    assert cpp.build("plain") is None
    assert "downloads" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("failed", "failure", "programs", "said", "wanted"),
    [
        ({"a": ["One"]}, SLOW, ["1:a"], "", True),
        ({"a": ["One"], "b": ["Two"]}, SLOW, ["1:a", "2:b"], "", True),
        ({"a": ["One"]}, WRONG, ["1:a"], "", False),  # a wrong number
        ({"a": ["One", "Two"], "b": ["Two"]}, SLOW, ["1:a", "2:b"], "", False),  # too many
        ({"a": ["One"]}, SLOW, ["1:a", "2:b"], "", False),  # b crashed, or ran out of time
        ({}, SLOW, ["1:a"], "", False),
        ({"a": ["One"]}, SLOW, ["1:a"], "WARNING: ThreadSanitizer: data race", False),
        ({"a": ["One"]}, SLOW, ["1:a"], "==7==ERROR: LeakSanitizer: detected", False),
        ({"a": ["One"]}, SLOW, ["1:a"], "x.cc:3:1: runtime error: shift", False),
    ],
)
def test_cpp_runs_again_only_what_was_too_slow(
    tmp_path: Path,
    failed: dict[str, list[str]],
    failure: str,
    programs: list[str],
    said: str,
    wanted: bool,
) -> None:
    write_results(tmp_path, failure=failure, **failed)
    logs = tmp_path / "Testing" / "Temporary"
    logs.mkdir(parents=True)
    (logs / "LastTestsFailed.log").write_text("\n".join(programs) + "\n")
    (logs / "LastTest.log").write_text(f"a test\n{said}\n")
    found = tool("cpp").counts(tmp_path / "results")
    assert tool("cpp").may_run_again(found, tmp_path) is wanted


@pytest.mark.parametrize(
    ("ran", "code", "wanted"), [(2, 0, True), (1, 0, False), (2, 1, False), (0, 0, False)]
)
def test_cpp_runs_the_slow_tests_of_a_part_again(
    tmp_path: Path, ran: int, code: int, wanted: bool
) -> None:
    """A program that says in its results that ``ran`` tests ran."""
    home = tmp_path / "tests" / "cpp"
    home.mkdir(parents=True)
    (tmp_path / "results").mkdir()
    cases = ", ".join(f'{{"name": "T{number}", "status": "RUN"}}' for number in range(ran))
    program = home / "engine_test"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --gtest_filter=S.T0:S.T1 ] || exit 9\npwd >where\n'
        f'echo \'{{"testsuites": [{{"name": "S", "testsuite": [{cases}]}}]}}\' '
        f'>"${{2#--gtest_output=json:}}"\nexit {code}\n'
    )
    program.chmod(0o755)
    assert tool("cpp").run_again(tmp_path, {"engine-2": ["S.T0", "S.T1"]}, []) is wanted
    assert (home / "where").read_text().strip() == str(home)


def test_the_simulators_seeds_that_ran_are_counted_and_those_that_failed_kept(
    tmp_path: Path,
) -> None:
    simulate = tool("simulate")
    output = "seed 7 broke a promise\nfault  seeds\nall     1000     31       1\n"
    assert simulate.read(output) == (1000, 1, ["7"])
    assert simulate.read("Segmentation fault\n") == (0, 0, [])
    kept = tmp_path / "seeds.txt"
    kept.write_text("# why\n12\n")
    simulate.remember(["7", "12", "7"], kept)
    assert kept.read_text() == "# why\n12\n7\n"


def test_cpp_compiles_file_by_file_in_strict_and_where_units_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpp = tool("cpp")
    monkeypatch.delenv("PYCOMM_UNITY", raising=False)
    assert {flavour for flavour in cpp.FLAVOURS if not cpp.united(flavour)} == {"strict"}
    monkeypatch.setenv("PYCOMM_UNITY", "0")
    assert not any(map(cpp.united, cpp.FLAVOURS))


def test_stub_difference_is_shown() -> None:
    difference = tool("make_stubs").difference
    assert difference("def f() -> int: ...\n", "def f() -> int: ...\n") == ""
    assert "+def g() -> int: ..." in difference("", "def g() -> int: ...\n")


def test_stub_is_rewritten_outside_its_docstrings() -> None:
    stub = "def f(n: typing.SupportsInt | typing.SupportsIndex, *args, **kwargs) -> dict:\n"
    stub += '    """A dict or a list."""\n'
    assert tool("make_stubs").rewritten(stub) == (
        "def f(n: int, *args: typing.Any, **kwargs: typing.Any) -> dict[typing.Any, typing.Any]:\n"
        '    """A dict or a list."""\n'
    )


def test_versions_agree() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    module = (ROOT / "pycomm" / "_version.py").read_text()
    assert f'__version__ = "{version[1]}"' in module
    assert f"## [{version[1]}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_extra_asks_for_a_torch_that_is_supported() -> None:
    supported = tool("native").torch_range(ROOT).requirement()
    assert f'\ntorch = ["{supported}"]' in (ROOT / "pyproject.toml").read_text()


def test_the_wheel_is_built_for_every_supported_minor() -> None:
    versions = tool("native").torch_range(ROOT)
    built = [versions.torch_minor(version) for version in versions.RELEASES]
    assert built == list(versions.SUPPORTED)


def test_the_newest_torch_is_one_that_this_python_can_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = tool("native").torch_range(ROOT)
    assert versions.LAST_FOR_PYTHON_3_10 in versions.RELEASES
    for python, newest in (
        ((3, 10, 14), versions.LAST_FOR_PYTHON_3_10),
        ((3, 11, 0), versions.RELEASES[-1]),
    ):
        monkeypatch.setattr(versions.sys, "version_info", python)
        assert versions.newest() == newest


def test_every_layer_is_built_or_private() -> None:
    layers = tool("check_layers").read_layers(ROOT)
    assert {layer.kind for layer in layers.values()} <= {
        "core",
        "proof",
        "cuda",
        "torch",
        "vendored",
    }
    folders = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert folders <= set(layers)


# --- what a machine with a GPU runs -----------------------------------------------------------


def _gpu_checks(
    monkeypatch: pytest.MonkeyPatch, target: Path, programs: dict[str, str], *arguments: str
) -> tuple[int, str]:
    gpu_checks = tool("gpu_checks")
    checks = {
        name: gpu_checks.Check([sys.executable, "-c", program])
        for name, program in programs.items()
    }
    monkeypatch.setattr(gpu_checks, "checks", lambda: checks)
    monkeypatch.setattr(gpu_checks, "output_of", lambda *_: "A Device, 1.0, 1 MiB")
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "--output", str(target), *arguments])
    return gpu_checks.main(), target.read_text()


def test_gpu_checks_write_what_failed_and_what_had_no_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = {
        "good": "print('a figure')\nprint('a speed  2.00 at least 1: met')",
        "bad": "import sys; print('half'); sys.exit('why')",
        "slow": "import time; time.sleep(600)",
        "late": "print('never')",
    }
    gpu_checks = tool("gpu_checks")
    monkeypatch.setattr(gpu_checks, "LEAST_SECONDS", 0.0)
    target = tmp_path / "result.txt"
    code, text = _gpu_checks(monkeypatch, target, checks, "--budget", "5")
    assert code == 1
    assert "device: A Device" in text
    if "good: passed" in text:  # unless even that had no time here
        assert "a figure" in text
    assert "slow: FAILED (not through" in text or "slow: NOT RUN" in text
    assert "late: NOT RUN, no time was left: make gpu ARGS='--only late'" in text
    assert "never" not in text

    code, text = _gpu_checks(monkeypatch, target, checks, "--only", "bad")
    assert code == 1
    assert "bad: FAILED (1)" in text and "half" in text and "why" in text
    code, text = _gpu_checks(monkeypatch, target, checks, "--only", "good")
    assert code == 0
    assert "good: passed" in text and "a figure" in text
    assert text.endswith("--- targets\ngood: a speed 2.00 at least 1: met\n")


def test_gpu_checks_end_one_that_hangs_and_go_on(tmp_path: Path) -> None:
    gpu_checks = tool("gpu_checks")
    pid = tmp_path / "pid"
    # Its child has left the process group, and keeps the pipe open.
    program = f"""
import pathlib, subprocess, sys, time
child = [sys.executable, "-c", "import time; time.sleep(60)"]
left = subprocess.Popen(child, start_new_session=True)
print("half", flush=True)
pathlib.Path({str(pid)!r}).write_text(str(left.pid))
time.sleep(600)
"""
    check = gpu_checks.Check([sys.executable, "-c", program])
    try:
        verdict, out, _ = gpu_checks.run(check, 3.0)
    finally:
        left = pid.read_text() if pid.exists() else ""  # "": it has not come so far here
        if left:
            os.kill(int(left), signal.SIGKILL)
    assert verdict == "FAILED (not through after 3 s)"
    assert out == ("half\n" if left else out)
    missing = gpu_checks.Check([str(tmp_path / "nothing")])
    assert gpu_checks.run(missing, 3.0)[0].startswith("FAILED (")


def test_gpu_checks_know_their_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_checks = tool("gpu_checks")
    monkeypatch.setattr(gpu_checks.shutil, "which", lambda name, path=None: f"/bin/{name}")
    found = gpu_checks.checks()
    assert {"build", "kernel-tests", "kernels", "allreduce-2", "ddp-1", "memcheck"} <= set(found)
    assert next(iter(found)) == "build"
    for check in found.values():
        for part in check.command:
            assert "/" not in part or part.startswith("/") or (ROOT / part).exists(), part


def test_gpu_checks_skip_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_checks = tool("gpu_checks")
    monkeypatch.setattr(gpu_checks, "output_of", lambda *_: "")
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py"])
    assert gpu_checks.main() == 0
    assert "SKIPPED" in capsys.readouterr().out

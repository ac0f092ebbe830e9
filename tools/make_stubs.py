"""Write pycomm/_C.pyi from the built extension; with --check, fail where it would change.

The signatures come from pybind11's own docstrings, by way of pybind11-stubgen, so an unclear one is
mended where it is bound, with py::arg and a docstring, and never by hand in the stub.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import native

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "pycomm" / "_C.pyi"
HEADER = "# Written by `make stubs` from what csrc/bindings binds: do not edit.\n\n"

# What stubgen writes, and what mypy --strict and a reader want. The bound functions take Python's
# int and float; that pybind11 would also convert other things is not promised.
REWRITES = [
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    (r"\bdict\b(?!\[)", "dict[typing.Any, typing.Any]"),
    (r"\blist\b(?!\[)", "list[typing.Any]"),
    (r"\btuple\b(?!\[)", "tuple[typing.Any, ...]"),
    (r"\btorch\.Future\b(?!\[)", "torch.Future[typing.Any]"),
    (r"\*args, \*\*kwargs\)", "*args: typing.Any, **kwargs: typing.Any)"),
    (r"\*args\)", "*args: typing.Any)"),
]


def generate(module: str) -> str:
    """The stub of a built module, formatted. Raises SystemExit with what stubgen said."""
    tools = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        # torch is loaded first: the extension links against its libraries.
        arguments = ["--exit-code", "-o", folder, module]
        code = f"import torch, pybind11_stubgen; pybind11_stubgen.main({arguments!r})"
        env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        path = Path(folder, *module.split(".")).with_suffix(".pyi")
        if done.returncode != 0 or not path.is_file():
            raise SystemExit(f"{module}: no stub could be made\n{done.stdout}{done.stderr}")
        path.write_text(HEADER + rewritten(path.read_text()))
        format_command = [
            str(tools / "ruff"),
            "format",
            "--quiet",
            "--line-length",
            "100",
            str(path),
        ]
        subprocess.run(format_command, check=True)
        return path.read_text()


def rewritten(stub: str) -> str:
    """The stub with REWRITES applied to its code, not to its docstrings."""
    parts = re.split(r'(""".*?""")', stub, flags=re.DOTALL)
    for number in range(0, len(parts), 2):
        for pattern, replacement in REWRITES:
            parts[number] = re.sub(pattern, replacement, parts[number])
    return "".join(parts)


def difference(old: str, new: str) -> str:
    """A unified diff; empty where the two are equal."""
    lines = difflib.unified_diff(
        old.splitlines(True), new.splitlines(True), "pycomm/_C.pyi", "the built extension"
    )
    return "".join(lines)


def main() -> int:
    new = generate(native.torch_range(ROOT).module_name(native.Torch.installed().version))
    old = STUB.read_text() if STUB.is_file() else ""
    if "--check" not in sys.argv[1:]:
        STUB.write_text(new)
        print(f"stubs: {'unchanged' if old == new else 'wrote pycomm/_C.pyi'}")
        return 0
    changes = difference(old, new)
    print(
        f"{changes}stubs: pycomm/_C.pyi is out of date: run `make stubs`"
        if changes
        else "stubs: up to date"
    )
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())

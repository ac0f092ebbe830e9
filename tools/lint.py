"""Check the form of C++, Python and workflows, and the words; --fix mends what a machine can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPP_FOLDERS = ("csrc", "tests/cpp", "benchmarks")
CPP_SUFFIXES = {".cc", ".h", ".cu", ".cuh"}


def main() -> int:
    fix = "--fix" in sys.argv[1:]
    cpp = [
        str(p)
        for folder in CPP_FOLDERS
        for p in (ROOT / folder).rglob("*")
        if p.suffix in CPP_SUFFIXES and "third_party" not in p.parts
    ]
    tools = Path(sys.executable).parent
    check_schema = [str(tools / "check-jsonschema"), "--quiet", "--builtin-schema"]
    github = {
        "vendor.github-workflows": sorted((ROOT / ".github" / "workflows").glob("*.yml")),
        "vendor.github-issue-forms": sorted(
            path
            for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
            if path.name != "config.yml"
        ),
    }
    commands = [
        [str(tools / "ruff"), "check", *(["--fix"] if fix else []), "."],
        [str(tools / "ruff"), "format", *([] if fix else ["--check"]), "."],
        [
            str(tools / "clang-format"),
            *(["-i"] if fix else ["--dry-run", "-Werror", "--ferror-limit=1"]),
            *sorted(cpp),
        ],
        *(
            [*check_schema, schema, *map(str, files)]
            for schema, files in github.items()
            if files  # none in an sdist
        ),
        [sys.executable, "tools/words.py"],
    ]
    failed = [
        command
        for command in commands
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    ]
    print("lint: " + ("FAILED, see above; `make format` mends most" if failed else "clean"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

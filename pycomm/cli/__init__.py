"""The command line, ``pycomm COMMAND`` or ``python -m pycomm COMMAND``.

Exit codes: 0 fine, 1 a problem was found, 2 wrong usage, 130 Ctrl-C; ``doctor`` has one more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pycomm._version import __version__
from pycomm.cli import bench, doctor, env, secret, serve, status, trace

_INTERRUPTED = 130  # as a shell says of a program that SIGINT has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog=_called_as(sys.argv[0]), description="Collective communication for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"pycomm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    env.add_parser(commands)
    doctor.add_parser(commands)
    status.add_parser(commands)
    trace.add_parser(commands)
    bench.add_parser(commands)
    secret.add_parser(commands)
    serve.add_parser(commands)
    given = sys.argv[1:] if arguments is None else arguments
    parsed = parser.parse_args([_with_dashes(argument) for argument in given])
    try:
        return int(parsed.run(parsed))
    except KeyboardInterrupt:
        return _INTERRUPTED


def _called_as(program: str) -> str:
    """What to type for help and usage: the installed command, if that was typed."""
    return "pycomm" if Path(program).name == "pycomm" else "python -m pycomm"


def _with_dashes(argument: str) -> str:
    """torchrun takes --nproc_per_node as well as --nproc-per-node, and so does every flag here."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value

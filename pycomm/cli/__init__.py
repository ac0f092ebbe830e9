"""The command line, ``pycomm COMMAND`` or ``python -m pycomm COMMAND``.

Exit codes: 0 fine, 1 a problem was found, 2 wrong usage, 130 Ctrl-C, 141 the reader of the output
has ended; ``doctor`` has one more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from pycomm._version import __version__

# As a shell says of a program that SIGINT or SIGPIPE has ended. SIGPIPE itself stays ignored: torch
# and the engine write to sockets, too.
_INTERRUPTED, _BROKEN_PIPE = 130, 141
# Each is a module of this package, imported if it is chosen.
_COMMANDS = {
    "run": "start one job on several hosts, by ssh and torchrun",
    "env": "print versions, network interfaces and every setting with its origin",
    "doctor": "check a cluster: why a job would not start, and which host is slow",
    "status": "say what your ranks on this host are doing, also if they hang",
    "trace": "report which rank was in which operation, from the flight records that ranks wrote "
    "when they failed",
    "bench": "time collectives on the ranks that a launcher has started",
    "secret": "make the secret that the processes of a job share, or print its key id",
    "serve": "keep a model's parameters for workers that push and pull (a parameter server)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        try:
            code = _run(sys.argv[1:] if arguments is None else arguments)
        except SystemExit:  # of argparse, as for --help
            _flush()
            raise
        _flush()
        return code
    except KeyboardInterrupt:
        _flush_or_discard()
        return _INTERRUPTED
    except BrokenPipeError:
        broken = [stream for stream in (sys.stdout, sys.stderr) if _reader_is_gone(stream)]
        if not broken:
            raise  # of a socket
        for stream in broken:
            _discard(stream)
        return _BROKEN_PIPE
    except Exception:
        _flush_or_discard()
        raise


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()  # not at exit, where an error could not be handled


def _flush_or_discard() -> None:
    """If another error is under way, which one of the output must not replace, nor at exit."""
    try:
        _flush()
    except OSError:
        with contextlib.suppress(OSError):  # it has no file
            _discard(sys.stdout)


def _run(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=_called_as(sys.argv[0]), description="Collective communication for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"pycomm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((argument for argument in given if not argument.startswith("-")), None)
    for name, text in _COMMANDS.items():
        described = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if name == chosen:
            module = importlib.import_module(f"pycomm.cli.{name}")
            module.add_arguments(described)
            described.set_defaults(run=module.run, given=given)
    parsed = parser.parse_args([_with_dashes(argument) for argument in given])
    return int(parsed.run(parsed))


def _reader_is_gone(stream: TextIO | None) -> bool:
    """Whether the stream is a pipe or a socket that nobody reads any more."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # it is None, or has no file
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # type: ignore[union-attr]
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False


def _discard(stream: TextIO) -> None:
    """Sends the rest of the stream's buffer to nowhere: at exit it would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _called_as(program: str) -> str:
    """What to type for help and usage: the installed command, if that was typed."""
    return "pycomm" if Path(program).name == "pycomm" else "python -m pycomm"


def _with_dashes(argument: str) -> str:
    """torchrun takes --nproc_per_node as well as --nproc-per-node, and so does every flag here."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value

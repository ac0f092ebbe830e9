"""``python -m pycomm serve``: a server of the parameter service."""

from __future__ import annotations

import argparse
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from pycomm import errors


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of ``pycomm.cli``."""
    parser = commands.add_parser(
        "serve",
        help="keep a model's parameters for workers that push and pull (a parameter server)",
        description="Runs a parameter server until all workers have said goodbye. SIGTERM and "
        "SIGINT write the checkpoint and end it with 0.",
    )
    parser.add_argument(
        "make",
        metavar="FILE:FUNCTION",
        help="a Python file, which is run, and its function of no arguments that returns "
        "(model, optimizer) or (model, optimizer, scheduler)",
    )
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="port 0: any")
    parser.add_argument("--workers", type=int, help="how many; default PADDLE_TRAINERS_NUM")
    parser.add_argument("--checkpoint", metavar="PATH", help="written to, and read from at start")
    parser.add_argument("--checkpoint-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument(
        "--rejoin",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="after which the others no longer wait for a worker that is gone",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves; 1 if it cannot."""
    try:
        made = _make(arguments.make)
        server = _server(arguments, made)
    except (ValueError, OSError, errors.PycommError) as error:
        print(f"pycomm serve: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    print(f"serving on {server.address}", flush=True)
    try:
        server.serve()
    except (OSError, RuntimeError) as error:
        print(f"pycomm serve: {error}", file=sys.stderr)
        return 1
    stats = server.stats()
    print(f"ended at version {stats.version}; {stats.lost_pushes} pushes lost")
    return 0


def _make(text: str) -> tuple[Any, ...]:
    file, colon, function = text.rpartition(":")
    if not colon or not file or not function:
        raise ValueError(f"{text!r} is not FILE:FUNCTION, as train.py:make")
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}")
    sys.path.insert(0, str(Path(file).resolve().parent))  # as Python does for a script
    make = runpy.run_path(file).get(function)
    if not callable(make):
        raise ValueError(f"{file} has no function {function}")
    made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(
            f"{function}() of {file} returned {type(made).__name__}; it has to return "
            "(model, optimizer) or (model, optimizer, scheduler)"
        )
    return made


def _server(arguments: argparse.Namespace, made: tuple[Any, ...]) -> Any:
    from pycomm.service import ParameterServer

    model, optimizer, *scheduler = made
    return ParameterServer(
        model,
        optimizer,
        listen=arguments.listen,
        workers=arguments.workers,
        checkpoint=arguments.checkpoint,
        checkpoint_every=arguments.checkpoint_every,
        scheduler=scheduler[0] if scheduler else None,
        rejoin=arguments.rejoin,
    )

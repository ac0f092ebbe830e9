"""``python -m pycomm serve``: a server of the parameter service."""

from __future__ import annotations

import argparse
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from pycomm import errors

_LISTEN = "the address that workers reach this server by; with port 0 the kernel chooses one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command; ``pycomm.cli`` has made its parser."""
    parser.description = (
        "Runs a parameter server until all workers have said goodbye. SIGTERM and SIGINT write "
        "the checkpoint and end it with 0."
    )
    parser.epilog = (
        "Example: pycomm serve train.py:make --listen 10.0.0.1:6170 --workers 2 "
        "--checkpoint server.pt"
    )
    parser.add_argument(
        "make",
        metavar="FILE:FUNCTION",
        help="a Python file, which is run, and its function of no arguments that returns "
        "(model, optimizer) or (model, optimizer, scheduler)",
    )
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help=_LISTEN)
    parser.add_argument(
        "--workers", type=int, metavar="N", help="how many workers; default PADDLE_TRAINERS_NUM"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="the file of this server's state; an existing file is continued; default: none",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="between two writes of the checkpoint (default: %(default)g)",
    )
    parser.add_argument(
        "--rejoin",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="after which the others no longer wait for a worker that is gone "
        "(default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves; 1 if it cannot."""
    servers: list[Any] = []

    def end(*_: object) -> None:
        if not servers:
            raise SystemExit(0)  # there is no state yet
        servers[0].stop()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server = _server(arguments, _make(arguments.make))
        servers.append(server)
        print(f"serving on {server.address}", flush=True)
        begun = server.stats()
        if begun.version > 0:
            print(
                f"goes on from {arguments.checkpoint}: version {begun.version}, {begun.steps} "
                "steps. For a new run, stop and move the file away",
                flush=True,
            )
        server.serve()
    except BrokenPipeError:  # of what it prints: for main()
        raise
    except (ValueError, OSError, RuntimeError, errors.PycommError) as error:
        print(f"pycomm serve: {error}", file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    stats = server.stats()
    print(
        f"ended at version {stats.version} after {stats.steps} steps; "
        f"{stats.lost_pushes} pushes lost"
    )
    return 0


def _make(text: str) -> tuple[Any, ...]:
    file, colon, function = text.rpartition(":")
    if not colon or not file or not function:
        raise ValueError(f"{text!r} is not FILE:FUNCTION, as train.py:make")
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}")
    sys.path.insert(0, str(Path(file).resolve().parent))  # as Python does for a script
    try:
        make = runpy.run_path(file).get(function)
        made = make() if callable(make) else None
    except Exception as error:
        traceback.print_exc()  # of the user's code: the text alone does not say where
        raise ValueError(f"{text} raised {type(error).__name__}, see above") from None
    if not callable(make):
        raise ValueError(f"{file} has no function {function}")
    # Not at the top: `pycomm --help` starts without torch.
    from torch import nn, optim

    kinds = (nn.Module, optim.Optimizer, optim.lr_scheduler.LRScheduler)
    if (
        not isinstance(made, tuple)
        or len(made) not in (2, 3)
        or not all(map(isinstance, made, kinds))
    ):
        names = [type(each).__name__ for each in made] if isinstance(made, tuple) else []
        returned = f"({', '.join(names)})" if names else type(made).__name__
        raise ValueError(
            f"{function}() of {file} returned {returned}; it has to return (model, optimizer) or "
            "(model, optimizer, scheduler)"
        )
    return made


def _server(arguments: argparse.Namespace, made: tuple[Any, ...]) -> Any:
    from pycomm.service import ParameterServer
    from pycomm.service.endpoint import workers_from

    model, optimizer, *scheduler = made
    return ParameterServer(
        model,
        optimizer,
        listen=arguments.listen,
        workers=workers_from(arguments.workers, "--workers"),
        checkpoint=arguments.checkpoint,
        checkpoint_every=arguments.checkpoint_every,
        scheduler=scheduler[0] if scheduler else None,
        rejoin=arguments.rejoin,
    )

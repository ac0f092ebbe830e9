"""``python -m pycomm secret``: makes the secret of a job, or prints the key id of one."""

from __future__ import annotations

import argparse
import os
import sys

from pycomm import errors, options
from pycomm._group import secrets
from pycomm._settings import SECRET_FILE_VARIABLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command; ``pycomm.cli`` has made its parser."""
    parser.description = (
        f"{parser.description} PATH: $PYCOMM_SECRET_FILE if set, else ~/.config/pycomm/secret. "
        "If no host of a job has a secret, run --generate on one of them. It prints the command "
        "that copies the file to the others: do not generate a second one. If nobody else reaches "
        "any network between the hosts, PYCOMM_SECURITY=off on all of them ends the warning."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--generate",
        nargs="?",
        const="",
        metavar="PATH",
        help="write a new secret to a new file that only you may read",
    )
    what.add_argument(
        "--id",
        nargs="?",
        const="",
        metavar="PATH",
        help="print the key id: 8 hexadecimal digits, equal on two hosts if their secrets are",
    )


def run(arguments: argparse.Namespace) -> int:
    """Does what was asked; 1 if it cannot."""
    try:
        if arguments.generate is not None:
            text = _generate(_path(arguments.generate) or options.secret_file())
        else:
            path = _path(arguments.id)
            secret, origin = secrets.read_file(path) if path else secrets.read()
            text = f"{secret.key_id}  {origin}"
    except (ValueError, OSError, errors.PycommError) as error:
        print(f"pycomm secret: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


def _path(given: str) -> str:
    return os.path.abspath(os.path.expanduser(given)) if given else ""


def _generate(path: str) -> str:
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    key_id = secrets.generate_file(path).key_id
    there, source, target, how = folder, path, path, ""
    if path == options.secret_file({}):  # another host may have another home folder
        there = ".config/pycomm"
        source, target = f"~/{there}/secret", f"{there}/"
    else:
        how = f"\nJobs find it there with this, on every host: export {SECRET_FILE_VARIABLE}={path}"
    return f"""wrote {path}, key id {key_id}
Run this here, once for each other host of the job (scp -p keeps the file private):
  ssh HOST mkdir -p -m 700 {there} && scp -p {source} HOST:{target}{how}
If the hosts share this folder, do not copy: the file is there already.
Then start your jobs as before. "python -m pycomm secret --id" must print {key_id} on every host.
Anybody who has this file can read your jobs' traffic.
Make one per user or per job, not one per cluster."""

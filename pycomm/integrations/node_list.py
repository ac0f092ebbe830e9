"""Slurm's notation for lists of hosts: ``rack[1-2]node[01-04,7],login``."""

from __future__ import annotations

import itertools
import re

# What stands between commas that are not inside brackets.
_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MAX_HOSTS = 1 << 20


def expand(node_list: str) -> list[str]:
    """The hosts of a list, in its order, as ``scontrol show hostnames`` prints them.

    Args:
        node_list: Names separated by commas. Brackets hold numbers and ranges; a range keeps the
            leading zeros of its first number: ``n[08-10]`` is n08, n09, n10. A name may have
            several brackets; the last varies fastest.

    Raises:
        ValueError: It is empty or malformed, or names more than a million hosts.
    """
    text = node_list.strip()
    entries = _ENTRY.findall(text)
    if not entries or ",".join(entries) != text:
        raise _malformed(node_list)
    hosts: list[str] = []
    for entry in entries:
        pieces = [
            _numbers(inside, node_list) if plain == "" else [plain]
            for inside, plain in _PIECE.findall(entry)
        ]
        count = 1
        for choices in pieces:
            count *= len(choices)
        if len(hosts) + count > _MAX_HOSTS:
            raise ValueError(f"the node list {node_list!r} names more than {_MAX_HOSTS} hosts")
        hosts += ["".join(parts) for parts in itertools.product(*pieces)]
    return hosts


def _numbers(inside: str, node_list: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _malformed(node_list)
        first, last = match[1], match[2] or match[1]
        count = int(last) - int(first) + 1
        if not 0 < count <= _MAX_HOSTS:
            raise _malformed(node_list)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _malformed(node_list: str) -> ValueError:
    return ValueError(
        f"{node_list!r} is not a list of hosts as Slurm writes it, like node[01-04,7],login"
    )

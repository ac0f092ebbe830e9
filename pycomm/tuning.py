"""Measured tables of algorithms: what ``python -m pycomm bench --tune`` writes and groups read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

_VERSION = 1
_MARK = "pycomm_tuning"
_AGAIN = "measure it again: python -m pycomm bench --tune FILE"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is best for one collective over tensors of up to so many bytes."""

    collective: str
    up_to_nbytes: int
    algorithm: str


@dataclasses.dataclass(frozen=True)
class TuningTable:
    """Choices, and the topology on which they were measured: a group on another one ignores them.

    Args:
        topology: As ``2 hosts with 4 ranks each``.
        choices: Of each collective in ascending order of ``up_to_nbytes``; larger tensors than the
            last one's go by the static table.
    """

    topology: str
    choices: tuple[Choice, ...]

    @property
    def digest(self) -> str:
        """Equal for equal tables: ranks compare it when they meet."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The text of the file."""
        content = {
            _MARK: _VERSION,
            "topology": self.topology,
            "choices": [dataclasses.asdict(choice) for choice in self.choices],
        }
        return json.dumps(content, indent=2) + "\n"


def read_table(path: str | os.PathLike[str]) -> TuningTable:
    """Reads a table.

    Raises:
        ValueError: The file cannot be read, or is no table; the text names the file and what is
            wrong in it. Whether pycomm has the algorithms is found out when a group is made.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"the tuning table {path} cannot be read: {why}; {_AGAIN}") from None
    except ValueError as error:
        raise ValueError(f"the tuning table {path} is not JSON: {error}; {_AGAIN}") from None
    try:
        return _table_of(content)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no tuning table: {_why(error)}; {_AGAIN}") from None


def _why(error: Exception) -> str:
    return f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)


def _table_of(content: Any) -> TuningTable:
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    if content[_MARK] != _VERSION:
        raise ValueError(f"its version is {content[_MARK]!r}, this pycomm reads {_VERSION}")
    choices = []
    last: dict[str, int] = {}
    for number, entry in enumerate(content["choices"], 1):
        choice = Choice(**entry)
        limit = choice.up_to_nbytes
        if type(limit) is not int or limit <= last.get(choice.collective, -1) or limit >= 1 << 62:
            raise ValueError(
                f"choice {number} has up_to_nbytes={limit!r}, which must be a number that grows "
                "within a collective"
            )
        if not isinstance(choice.collective, str) or not isinstance(choice.algorithm, str):
            raise ValueError(
                f"choice {number} names its collective and algorithm by other than text"
            )
        last[choice.collective] = limit
        choices.append(choice)
    if not isinstance(content["topology"], str):
        raise ValueError("its topology is not text")
    return TuningTable(content["topology"], tuple(choices))

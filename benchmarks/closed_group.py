"""Groups with a secret beside groups without one, in the same processes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def new_secret() -> str:
    """The text of a new secret."""
    from pycomm._group import secrets

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "secret"
        secrets.generate_file(str(path))
        return path.read_text(encoding="ascii").strip()


@contextlib.contextmanager
def secret(text: str) -> Iterator[None]:
    """Groups that open inside have this secret; none if `text` is empty."""
    names = ("PYCOMM_SECRET", "PYCOMM_SECRET_FILE")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ.update({"PYCOMM_SECRET": text} if text else {"PYCOMM_SECRET_FILE": "none"})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

"""Finds the secret of a job.

The bytes of a secret file stay in the native part, so nothing here can print them. PYCOMM_SECRET is
text in the environment: Python code can read and print that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pycomm import errors, options
from pycomm._native import loader
from pycomm._settings import SECRET_FILE_VARIABLE

if TYPE_CHECKING:
    from pycomm import _C

_had: dict[str, tuple[_C.Secret, str]] = {}  # what this process has read, by file


def read(environ: Mapping[str, str] | None = None) -> tuple[_C.Secret, str]:
    """The secret and where it comes from, a path or the name of a variable.

    Raises:
        ValueError: There is none, it is not a secret, or other users may read its file.
        pycomm.errors.UnsupportedError: OpenSSL 3 is not installed.
    """
    text, variable = options.secret_text(environ)
    if text:
        return _native().parse(text, variable), variable
    return read_file(options.secret_file(environ))


def find(environ: Mapping[str, str] | None = None) -> tuple[_C.Secret | None, str]:
    """As ``read``, but (None, "") without a secret: no variable, and no file in the home folder, or
    ``PYCOMM_SECRET_FILE=none``.

    A process that has had a secret keeps it while the variables stay the same: if its file goes
    away, later groups are not made in plain.

    Raises:
        ValueError: There is one that cannot be used. It is never passed over: the job would be open
            although its user takes it for closed.
        pycomm.errors.UnsupportedError: OpenSSL 3 is not installed.
    """
    text, _ = options.secret_text(environ)
    if options.wants_no_secret(environ):
        return None, ""
    path = options.secret_file(environ)
    if text or options.names_secret_file(environ) or _is_there(path):
        found = read(environ)
        if not text:
            _had[path] = found
        return found
    return _had.get(path, (None, ""))


def state(environ: Mapping[str, str] | None = None) -> tuple[dict[str, str], list[str]]:
    """The parts of it that may be printed, and why it cannot be used.

    "state" is "configured", "none" or "cannot be used". If it is configured, there are also its
    public "key_id" and its "origin". Never raises.
    """
    try:
        secret, origin = find(environ)
    except errors.TorchVersionError:  # a problem that is reported already
        return {"state": "cannot be used"}, []
    except (ValueError, errors.PycommError) as error:
        return {"state": "cannot be used"}, [str(error)]
    if secret is None:
        return {"state": "none"}, []
    return {"state": "configured", "key_id": secret.key_id, "origin": origin}, []


def read_file(path: str) -> tuple[_C.Secret, str]:
    """The secret in this file, and the path. Raises as ``read``."""
    return _native().read_file(_utf8(path)), path


def generate_file(path: str) -> _C.Secret:
    """Writes a new secret to a new file that only this user may read, and returns it.

    Raises:
        ValueError: The file exists, or its path is not UTF-8.
    """
    return _native().generate_file(_utf8(path))


def sealed(key: str, value: str) -> str:
    """``value`` as only who has the secret can write it under ``key``; as it is without a secret.

    Raises what ``find`` raises.
    """
    secret, _ = find()
    return value if secret is None else secret.seal(key, value)


def opened(key: str, text: str) -> str:
    """What a process with the same secret, or none, wrote under ``key``.

    Raises:
        pycomm.errors.ConfigMismatchError: It has another secret, or only one of the two has one.
        pycomm.errors.ProtocolViolationError: Somebody without the secret has changed it.

    And what ``find`` raises.
    """
    secret, _ = find()
    if secret is not None:
        return secret.open(key, text)
    loader.load().refuse_sealed(key, text)
    return text


def _utf8(path: str) -> str:
    """The path, which the native part can print."""
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = ascii(os.fsencode(path))[1:]
        raise ValueError(
            f"the path of the secret file is not UTF-8: {shown}. Try: rename it, and set "
            f"{SECRET_FILE_VARIABLE} to the new path"
        ) from None
    return path


def _is_there(path: str) -> bool:
    """Whether there may be a secret: only a name that does not exist is none.

    A folder, a link to nothing, and a file that this user may not look at count: read() says why
    they are no secret.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _native() -> type[_C.Secret]:
    # The interpreter's own OpenSSL comes first: conda's _ssl fails if the system's is loaded.
    with contextlib.suppress(ImportError):
        import ssl  # noqa: F401
    return loader.native.Secret

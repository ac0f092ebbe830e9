"""``PYCOMM_SECURITY`` for servers and workers, before anything listens or connects.

A session obeys it, too, but it comes after the first words to a server.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from pycomm import options
from pycomm._group.secrets import find
from pycomm.errors import InvalidArgumentError


def check_policy(hosts: Iterable[str]) -> bool:
    """Returns whether it deserves a warning that there is no secret.

    False if there is one, if all ``hosts`` are loopback, or if ``PYCOMM_SECURITY=off``.

    Raises:
        pycomm.errors.InvalidArgumentError: It would be True, and ``PYCOMM_SECURITY=require``; or
            there is a secret, and ``off``.
        ValueError: The secret cannot be used.
    """
    policy = options.Options().resolve().security
    secret, origin = find()
    if secret is not None and policy == "off":
        raise InvalidArgumentError(
            f"there is a secret ({origin}) and PYCOMM_SECURITY=off. Try: for all servers and "
            "workers, unset PYCOMM_SECURITY, and the secret protects them; or "
            "PYCOMM_SECRET_FILE=none, and they run without TLS"
        )
    if secret is not None or policy == "off":
        return False
    far = next((host for host in hosts if not _is_loopback(host)), "")
    if far and policy == "require":
        raise InvalidArgumentError(
            f"PYCOMM_SECURITY=require, but there is no secret, and {far} may be reached from "
            "other hosts. Try: on one host only, run python -m pycomm secret --generate, and copy "
            "the file to the others as it says. Do not generate a second one. Or use 127.0.0.1 in "
            "--listen and on the workers, if all run on one host"
        )
    return far != ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return host == "localhost"

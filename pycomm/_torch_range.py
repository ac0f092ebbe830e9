"""The versions of torch that pycomm supports, for the package, setup.py and tools/.

Imports nothing of the package: setup.py reads it by itself.
"""

from __future__ import annotations

import sys

SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Minor versions, in order. torch's C++ interfaces change with each, so others are not tried."""


RELEASES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The newest release of each."""


TESTED = "2.13.0"
"""The one with which CI runs everything."""


LAST_FOR_PYTHON_3_10 = "2.14.1"
"""The newest of these that torch has wheels of for Python 3.10."""


FROM_SOURCES = "a newer pycomm, from its sources (it is not on PyPI)"
"""What serves a newer torch. On PyPI, the name pycomm is another package."""


OWN_ENVIRONMENT = "best in an environment of its own"
"""Where to install another torch: pip may replace a CPU build by gigabytes of CUDA."""


def newest() -> str:
    """The newest supported release that torch has wheels of for this Python."""
    return RELEASES[-1] if sys.version_info >= (3, 11) else LAST_FOR_PYTHON_3_10


def torch_minor(version: str) -> str:
    """ "2.13.0+cpu" → "2.13"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def requirement() -> str:
    """All of them, as pip writes it: "torch>=2.11,<2.16"."""
    major, minor = SUPPORTED[-1].split(".")
    return f"torch>={SUPPORTED[0]},<{major}.{int(minor) + 1}"


def is_newer(version: str) -> bool:
    """Whether this torch is newer than all supported ones."""
    return _numbers(version) > _numbers(SUPPORTED[-1])


def why_unsupported(installed: str) -> str:
    """Why a torch of this version is not supported, and what to do; empty if it is."""
    if torch_minor(installed) in SUPPORTED:
        return ""
    newer = f"{FROM_SOURCES}, or " if is_newer(installed) else ""
    return (
        f"this pycomm supports torch {SUPPORTED[0]} to {SUPPORTED[-1]}, and torch {installed} is "
        f"installed. Try: {newer}pip install 'torch=={torch_minor(newest())}.*', {OWN_ENVIRONMENT}"
    )


def module_folder(version: str) -> str:
    """The folder of the module for this torch in the package: "2.13.0+cpu" → "torch_2_13"."""
    return f"torch_{torch_minor(version).replace('.', '_')}"


def module_name(version: str) -> str:
    """The name that the module for this torch is imported by."""
    return f"pycomm.{module_folder(version)}._C"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in torch_minor(version).split(".")]

"""torch's test_c10d_fault_tolerance.py over pycomm, with torch 2.14 or later.

    FAULT_TOLERANCE_FILE=~/pytorch/test/distributed/test_c10d_fault_tolerance.py \\
        python tests/torch_suite/fault_tolerance.py [NAME ...]

No wheel has that file, so it comes from a checkout of torch's sources, of the torch that is
installed. It is run as it is, but for two places: the list of backends is pycomm's, and after
``abort()`` pycomm reports an error (COMM_ERROR), as nccl2 does and gloo does not.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

VARIABLE = "FAULT_TOLERANCE_FILE"
# The tuple of 2.14, and in later versions a dataclass, whose name is kept.
_BACKENDS = re.compile(r"^FAULT_TOLERANCE_BACKENDS = \[\n(?:.*\n)*?\]\n", re.MULTILINE)
_AFTER_ABORT = re.compile(r"^(\s*)is_nccl = self\.backend_name == \"nccl2\"$", re.MULTILINE)


def over_pycomm(source: str) -> str:
    """The source of torch's file, for pycomm on CPU tensors.

    Raises:
        ValueError: It is not the file that is known here.
    """
    found = _BACKENDS.search(source)
    if found is None:
        raise ValueError("it has no list FAULT_TOLERANCE_BACKENDS: is it a later version?")
    entry = re.search(r"^ {4}(\w*)\(", found.group(), re.MULTILINE)
    entry_class = entry.group(1) if entry else ""
    source = source.replace(
        found.group(), f'FAULT_TOLERANCE_BACKENDS = [\n    {entry_class}("pycomm", "cpu"),\n]\n'
    )
    source, times = _AFTER_ABORT.subn(r"\1is_nccl = True", source)
    if times != 1:
        raise ValueError("its test of abort() is not the one that is known here")
    return source


if os.environ.get(VARIABLE):
    import pycomm  # noqa: F401  registers the backend, also in the processes that torch spawns

    _path = Path(os.environ[VARIABLE]).expanduser()
    # In this module's own name: torch's processes import it again to find the classes, and the
    # file's main block runs the tests.
    exec(compile(over_pycomm(_path.read_text()), str(_path), "exec"))
elif __name__ == "__main__":
    sys.exit(f"{VARIABLE} names no file. Try: see the head of {__file__}")

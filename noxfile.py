"""The same names as CI's steps and as `make`, which does the work: `nox -s lint typecheck`."""

from __future__ import annotations

import nox

nox.options.sessions = ["lint", "typecheck", "cpp", "py"]

# A session's name, and the make targets that are its whole content.
SESSIONS = {
    "lint": ["lint", "layers", "stubs_check"],
    "typecheck": ["typecheck"],
    "cpp": ["cpp", "strict"],
    "cuda": ["cuda"],
    "gpu": ["gpu"],
    "asan": ["asan"],
    "tsan": ["tsan"],
    "seam": ["seam"],
    "py": ["py"],
    "tcp": ["tcp"],
    "faults": ["faults"],
    "integrations": ["integrations"],
    "bench": ["bench"],
    "torch_suite": ["torch_suite"],
    "torch_minors": ["torch_minors"],
    "docs": ["docs"],
}


def _add(name: str, targets: list[str]) -> None:
    @nox.session(name=name, venv_backend="none")
    def run(session: nox.Session) -> None:
        for target in targets:
            session.run("make", target, external=True)


for _name, _targets in SESSIONS.items():
    _add(_name, _targets)

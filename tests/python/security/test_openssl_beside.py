"""The libssl of a job with a secret: another copy beside the system's, as conda has it, or none."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import child_environment, run_python, run_ranks

from pycomm import _secret

pytestmark = pytest.mark.needs_native

_NAMES = ("libcrypto.so.3", "libssl.so.3")

# Conda's _ssl finds its libraries by a path inside itself. An earlier dlopen() of that path has the
# same effect on every later search for the name.
_LOAD_FIRST = """
import ctypes
for path in {paths!r}:
    ctypes.CDLL(path)
"""


def _mapped() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if line.split()[-1].endswith(_NAMES)}


def _system() -> list[Path]:
    """The libraries that this interpreter's ssl module loads."""
    assert ssl.OPENSSL_VERSION
    found = [path for name in _NAMES for path in sorted(_mapped()) if path.endswith(name)]
    if len(found) != len(_NAMES):
        pytest.skip("this interpreter's OpenSSL is no shared libssl.so.3")
    return [Path(path) for path in found]


def _sum(rank: int, size: int) -> set[str]:
    tensor = torch.full((300_000,), float(rank + 1))
    dist.all_reduce(tensor)
    assert float(tensor[-1]) == size * (size + 1) / 2
    return _mapped()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    _secret.generate_file(str(path))
    return path


def test_a_second_libssl_in_a_prefix_of_its_own_is_the_only_one(
    tmp_path: Path, secret: Path
) -> None:
    prefix = tmp_path / "prefix" / "lib"
    prefix.mkdir(parents=True)
    paths = [shutil.copy(path.resolve(), prefix / path.name) for path in _system()]
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_LOAD_FIRST.format(paths=[str(path) for path in paths]))
    env = {
        "PYTHONPATH": os.pathsep.join([str(site), child_environment()["PYTHONPATH"]]),
        "PYCOMM_SECRET_FILE": str(secret),
        "PYCOMM_SECURITY": "require",
        "PYCOMM_TRANSPORT": "tcp",
    }
    for mapped in run_ranks(2, _sum, env=env, fresh=True).values():
        assert mapped == {str(path) for path in paths}


_WITHOUT = """
import sys
import torch.distributed as dist, pycomm.errors
try:
    import ssl
    sys.exit("the library is still there")
except ImportError:
    pass
store = dist.HashStore()
try:
    dist.init_process_group("pycomm", store=store, rank=0, world_size=1)
    print("made")
except pycomm.errors.UnsupportedError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a mount namespace")
def test_without_libssl_a_secret_is_one_sentence_and_a_group_without_one_is_made(
    secret: Path,
) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    empty = secret.parent / "empty"
    empty.write_text("")
    hide = " && ".join(f"mount --bind {empty} {path.resolve()}" for path in _system())
    for with_secret in (True, False):
        env = {"PYCOMM_SECRET_FILE": str(secret) if with_secret else "none"}
        shown = subprocess.run(
            [
                *("unshare", "--mount", "sh", "-c", f'{hide} && exec "$0" -c "$1"'),
                *(sys.executable, _WITHOUT),
            ],
            env=child_environment(env),
            cwd=secret.parent,  # not the sources
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        if with_secret:
            assert "a secret needs OpenSSL 3, and libssl.so.3 could not be loaded" in shown.stdout
            assert "apt install libssl3" in shown.stdout
        else:
            assert shown.stdout == "made\n"


def test_the_hidden_library_would_be_used(secret: Path) -> None:
    """The control of the test above: with the library, the same program makes its group."""
    program = _WITHOUT.replace('sys.exit("the library is still there")', "pass")
    shown = run_python(["-c", program], env={"PYCOMM_SECRET_FILE": str(secret)})
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == "made\n"

"""The libssl of a job with a secret: another copy beside the system's, as conda has it, or none."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import child_environment, run_python

from pycomm._group import secrets

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]

_NAMES = ("libcrypto.so.3", "libssl.so.3")

# Stands for conda's _ssl: it finds the libraries of its own prefix, by a path inside itself, and
# fails if those of the system came first.
_CONDAS_SSL = """
import ctypes, importlib.util, sys
with open("/proc/self/maps") as maps:
    first = {{line.split()[-1] for line in maps if line.rstrip().endswith({names!r})}}
if not first <= set({paths!r}):
    raise ImportError(f"{{first}} came before those of the prefix")
for path in {paths!r}:
    ctypes.CDLL(path)
spec = importlib.util.spec_from_file_location("_ssl", {real!r})
sys.modules["_ssl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["_ssl"])
"""

# torch, too, imports ssl where it can; here it cannot, so that pycomm is the first.
_TWO_RANKS = """
import os, sys
rank = 0 if os.fork() else 1

class Hidden:
    names = {{"ssl", "_ssl", "_hashlib"}}
    def find_spec(self, name, *_):
        if name in self.names:
            raise ImportError(f"{{name}} is hidden")

sys.meta_path.insert(0, Hidden())
import torch, torch.distributed as dist
import pycomm
from pycomm._group import secrets

def mapped():
    with open("/proc/self/maps") as maps:
        return {{line.split()[-1] for line in maps if line.rstrip().endswith({names!r})}}

assert not mapped() and "_ssl" not in sys.modules, mapped()
Hidden.names = {{"_hashlib"}}
secrets._native()
assert "_ssl" in sys.modules, "pycomm would map libssl before the interpreter does"
store = dist.FileStore({store!r}, 2)
dist.init_process_group("pycomm", store=store, rank=rank, world_size=2)
tensor = torch.full((300_000,), float(rank + 1))
dist.all_reduce(tensor)
assert float(tensor[-1]) == 3
assert mapped() == set({paths!r}), mapped()
dist.destroy_process_group()
import ssl
ssl.create_default_context()
if rank == 0:
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    print("one libssl")
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


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    secrets.generate_file(str(path))
    return path


def test_a_second_libssl_in_a_prefix_of_its_own_is_the_only_one(
    tmp_path: Path, secret: Path
) -> None:
    prefix = tmp_path / "prefix" / "lib"
    prefix.mkdir(parents=True)
    paths = [str(shutil.copy(path.resolve(), prefix / path.name)) for path in _system()]
    site = tmp_path / "site"
    site.mkdir()
    real = sys.modules["_ssl"].__file__
    text = _CONDAS_SSL.format(names=_NAMES, paths=paths, real=real)
    (site / "_ssl.py").write_text(text)
    env = {
        "PYTHONPATH": os.pathsep.join([str(site), child_environment()["PYTHONPATH"]]),
        "PYCOMM_SECRET": None,
        "PYCOMM_SECRET_FILE": str(secret),
        "PYCOMM_SECURITY": "require",
        "PYCOMM_TRANSPORT": "tcp",
    }
    program = _TWO_RANKS.format(names=_NAMES, paths=paths, store=str(tmp_path / "store"))
    ran = run_python(["-c", program], env=env, timeout_s=90)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "one libssl\n"


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

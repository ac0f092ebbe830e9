"""``python -m pycomm secret``, and that a secret never shows."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import pickle
import stat
import subprocess
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import run_pycomm
from ranks import run_python
from torch._C._distributed_c10d import HashStore

from pycomm import errors, options
from pycomm._group import creation, secrets
from pycomm._native import loader

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]

_BYTES = bytes(range(32))
_CHARS = base64.urlsafe_b64encode(_BYTES).rstrip(b"=")
_CHECK = base64.urlsafe_b64encode(hashlib.sha256(_CHARS).digest()[:3])
_TEXT = f"pycomm-secret-1:{_CHARS.decode()}{_CHECK.decode()}"


def _key_id(secret: bytes) -> str:
    return hmac.new(secret, b"pycomm key id", hashlib.sha256).hexdigest()[:8]


def _file(folder: Path, text: str = _TEXT, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_generate_writes_a_private_file_that_id_reads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    made = run_pycomm(["secret", "--generate", str(path)])
    assert (made.returncode, made.stderr) == (0, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    line = path.read_text()
    assert line.startswith("pycomm-secret-1:")
    key_id = _key_id(base64.urlsafe_b64decode(line.strip()[16:59] + "="))
    assert f"wrote {path}, key id {key_id}" in made.stdout
    assert f"ssh HOST mkdir -p -m 700 {path.parent} && scp -p {path} HOST:{path}\n" in made.stdout
    assert f"export PYCOMM_SECRET_FILE={path}\n" in made.stdout
    assert line.strip()[16:] not in made.stdout
    shown = run_pycomm(["secret", "--id", str(path)])
    assert (shown.stdout, shown.stderr) == (f"{key_id}  {path}\n", "")


def test_generate_never_overwrites(tmp_path: Path) -> None:
    path = _file(tmp_path)
    made = run_pycomm(["secret", "--generate", str(path)])
    assert made.returncode == 1
    assert f"{path} exists already, and is left as it is" in made.stderr
    assert "Traceback" not in made.stderr
    assert path.read_text() == _TEXT


def test_the_place_is_the_variable_then_the_home(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    made = run_pycomm(["secret", "--generate"], env=home)
    assert made.returncode == 0
    assert (
        "  ssh HOST mkdir -p -m 700 .config/pycomm && "
        "scp -p ~/.config/pycomm/secret HOST:.config/pycomm/\n" in made.stdout
    )
    assert "export" not in made.stdout
    default = tmp_path / ".config" / "pycomm" / "secret"
    assert str(default) in run_pycomm(["secret", "--id"], env=home).stdout
    named = _file(tmp_path)
    chosen = home | {"PYCOMM_SECRET_FILE": str(named)}
    shown = run_pycomm(["secret", "--id"], env=chosen)
    assert shown.stdout == f"{_key_id(_BYTES)}  {named}\n"
    shown = run_pycomm(["secret", "--id"], env=home | {"PYCOMM_SECRET": _TEXT})
    assert shown.stdout == f"{_key_id(_BYTES)}  PYCOMM_SECRET\n"
    both = run_pycomm(["secret", "--id"], env=chosen | {"PYCOMM_SECRET": _TEXT})
    assert both.returncode == 1
    assert "both PYCOMM_SECRET and PYCOMM_SECRET_FILE are set" in both.stderr


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (
            _TEXT[:44],
            0o600,
            "not a pycomm secret (line 1, 44 of 63 characters: cut off in copying?)",
        ),
        ("swordfish", 0o600, 'does not begin with "pycomm-secret-1:"'),
        (_TEXT, 0o666, "has mode 0666: other users may"),
    ],
)
def test_a_bad_file_ends_with_1_and_one_line(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    shown = run_pycomm(["secret", "--id", str(_file(tmp_path, text, mode))])
    assert shown.returncode == 1
    assert why in shown.stderr
    assert shown.stdout == ""
    assert len(shown.stderr.splitlines()) == 1
    assert "swordfish" not in shown.stderr


def test_a_file_that_others_may_read_says_which_command_closes_it(tmp_path: Path) -> None:
    path = _file(tmp_path, _TEXT, 0o644)
    shown = run_pycomm(["secret", "--id", str(path)])
    assert shown.returncode == 1
    # root's files may be 640, since Kubernetes mounts secrets with a group
    assert f"Try: chmod {'640' if os.geteuid() == 0 else '600'} {path}; " in shown.stderr


def test_no_file_says_how_to_make_one(tmp_path: Path) -> None:
    shown = run_pycomm(["secret", "--id", str(tmp_path / "none")])
    assert shown.returncode == 1
    assert "python -m pycomm secret --generate" in shown.stderr


def test_python_cannot_show_it(tmp_path: Path) -> None:
    secret, origin = secrets.read_file(str(_file(tmp_path)))
    assert origin == str(tmp_path / "secret")
    shown = f"{secret!r} {secret} {dir(secret)} {vars(type(secret))}"
    for form in (_CHARS.decode(), _BYTES.hex(), str(_BYTES)):
        assert form not in shown
    assert secret.key_id == _key_id(_BYTES)
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(secret)


def test_the_interpreters_own_openssl_is_used() -> None:
    """Where the interpreter's is a shared libssl.so.3, no second one is loaded."""
    program = (
        "import ssl\n"
        "maps = lambda: [line.split()[-1] for line in open('/proc/self/maps')]\n"
        "mapped = lambda: {path for path in maps() if 'libssl' in path}\n"
        "before = mapped()\n"
        "from pycomm._group import secrets\n"
        f"assert secrets._native().parse({_TEXT!r}, 'it').key_id == {_key_id(_BYTES)!r}\n"
        "after = mapped()\n"
        "assert len(after) == 1, after\n"
        "assert not before or after == before, (before, after)\n"
    )
    result = run_python(["-c", program])
    assert result.returncode == 0, result.stderr


def test_env_does_not_print_it() -> None:
    shown = run_pycomm(["env", "--json"], env={"PYCOMM_SECRET": _TEXT})
    assert _CHARS.decode() not in shown.stdout + shown.stderr
    assert "PYCOMM_SECRET is not a variable" not in shown.stdout


def test_a_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert options.secret_file({}) == "/home/somebody/.config/pycomm/secret"
    assert options.secret_file({"PYCOMM_SECRET_FILE": "~/s"}) == "/home/somebody/s"
    assert options.secret_file({"PYCOMM_SECRET_FILE": "s"}) == os.path.abspath("s")


@pytest.mark.parametrize("name", ["PYCOMM_SECRET", "PYCOMM_SECRET_FILE"])
def test_a_variable_that_is_set_and_empty_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is set and empty"):
        secrets.find({name: " "})


@pytest.mark.parametrize(
    "misspelled", ["PYCOMM_SECRETFILE", "PYCOMM_SECERT_FILE", "PYCOMM_SERCET", "PYCOMM_SECRET_PATH"]
)
def test_a_misspelled_name_of_the_secret_is_an_error(misspelled: str) -> None:
    with pytest.raises(ValueError, match=r"did you mean PYCOMM_SECRET"):
        options.Options().resolve({misspelled: "/secret"})


def test_a_file_that_cannot_be_looked_at_is_not_taken_for_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As root on a home folder of NFS: neither there nor certainly not there."""

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setenv("HOME", str(tmp_path))
    assert secrets.find({}) == (None, "")
    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(ValueError, match=str(tmp_path)):
        secrets.find({})


NFS_EVERYWHERE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/magic.h>
#include <sys/vfs.h>
int fstatfs(int fd, struct statfs* found) {
  int (*real)(int, struct statfs*) = (int (*)(int, struct statfs*))dlsym(RTLD_NEXT, "fstatfs");
  int code = real(fd, found);
  found->f_type = NFS_SUPER_MAGIC;
  return code;
}
"""


def test_a_file_on_nfs_is_used_with_one_warning(tmp_path: Path) -> None:
    """This process' libc says of every file that it is on NFS."""
    path, library = _file(tmp_path), tmp_path / "nfs.so"
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(compiler, input=NFS_EVERYWHERE, text=True, check=True)
    program = """
import torch.distributed as dist, pycomm
for _ in range(3):
    dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
    print(pycomm._group.secrets.find()[0].key_id)
    dist.destroy_process_group()
"""
    preload = f"{os.environ.get('LD_PRELOAD', '')}:{library}".lstrip(":")
    env = {"PYCOMM_SECRET_FILE": str(path), "LD_PRELOAD": preload}
    done = run_python(["-c", program], env=env)
    assert done.stdout.split() == [_key_id(_BYTES)] * 3, done.stderr
    assert done.stderr.count(f"{path} is on NFS: unless Kerberos protects it") == 1, done.stderr


def test_a_file_that_goes_away_does_not_make_the_next_group_plain(tmp_path: Path) -> None:
    program = """
import os, sys
from pycomm._group import secrets
path = os.path.expanduser("~/.config/pycomm/secret")
assert secrets.find() == (None, "")
os.makedirs(os.path.dirname(path), mode=0o700)
made = secrets.generate_file(path)
assert secrets.find()[0].key_id == made.key_id
os.rename(path, path + ".old")
assert secrets.find()[0].key_id == made.key_id
os.environ["PYCOMM_SECRET_FILE"] = "none"
assert secrets.find() == (None, "")
"""
    done = run_python(["-c", program], env={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("option", ["--id", "--generate"])
def test_a_path_that_is_not_utf8_is_refused_by_name(option: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/\udcff"  # as Python has the byte ff
    shown = run_pycomm(["secret", option], env={"PYCOMM_SECRET_FILE": path})
    assert (shown.returncode, shown.stdout) == (1, "")
    assert f"the path of the secret file is not UTF-8: '{tmp_path}/\\xff'" in shown.stderr
    assert "PYCOMM_SECRET_FILE" in shown.stderr and "Traceback" not in shown.stderr


class Notices:
    """The extension, in place of its notices."""

    def __init__(self, *, store_is_gone: bool = False) -> None:
        self.posted: list[tuple[int, str]] = []
        self._store_is_gone = store_is_gone

    def post_notice(self, _: object, __: str, life: str, rank: int, ___: str, why: str) -> None:
        if self._store_is_gone:
            raise errors.StoreLostError("the store is gone")
        self.posted.append((rank, why))


def _join_as_rank_one(monkeypatch: pytest.MonkeyPatch, notices: Notices) -> None:
    native = loader.load()
    monkeypatch.setattr(native, "post_notice", notices.post_notice)
    group = SimpleNamespace(
        store=HashStore(),
        group_rank=1,
        group_size=2,
        group_id="notices",
        timeout=timedelta(seconds=2),
        global_ranks_in_group=[0, 1],
    )
    creation.create_group(group, None)


def test_a_path_that_is_not_utf8_is_told_to_the_ranks_that_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYCOMM_SECRET_FILE", f"{tmp_path}/\udcff")
    monkeypatch.delenv("PYCOMM_SECRET", raising=False)
    notices = Notices()
    with pytest.raises(ValueError, match="the path of the secret file is not UTF-8"):
        _join_as_rank_one(monkeypatch, notices)
    ((rank, why),) = notices.posted
    assert rank == 1 and "the path of the secret file is not UTF-8" in why


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TypeError("no such overload"), "no such overload"),
        (OSError(5, "no", "/tmp/\udcff"), r"[Errno 5] no: '/tmp/\udcff'"),
        (ValueError("the file /tmp/\udcff"), "the file /tmp/?"),
        (RuntimeError(), "RuntimeError"),
        (errors.SystemCallError("whole text", {"summary": "It broke."}), "It broke."),
        (
            errors.SystemCallError("", {"summary": "It broke", "cause": "EIO", "hint": "wait"}),
            "It broke (EIO). Try there: wait",
        ),
        (errors.SystemCallError("whole text"), "whole text"),
    ],
)
def test_whatever_keeps_a_rank_from_joining_is_told_and_raised(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(creation, "native_options", fails)
    notices = Notices()
    with pytest.raises(type(error)) as raised:
        _join_as_rank_one(monkeypatch, notices)
    assert raised.value is error
    assert notices.posted == [(1, told)]
    with pytest.raises(type(error)) as raised:
        _join_as_rank_one(monkeypatch, Notices(store_is_gone=True))
    assert raised.value is error

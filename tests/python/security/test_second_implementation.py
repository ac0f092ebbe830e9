"""Programs that know only a secret of pycomm: openssl s_client, gnutls-cli, openssl s_server."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import shutil
import socket
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import open_files
from ranks import run_ranks
from test_closed_group import Listening, sum_and_say

import pycomm
from pycomm._group import secrets

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]

OTHER_KEY = "5a" * 32


def _key_of(secret: Path, identity: str) -> str:
    """The key of a connection, as docs/security.md says: HKDF-SHA-256 with no salt."""
    raw = base64.urlsafe_b64decode(secret.read_text().strip()[16:59] + "=")
    extracted = hmac.digest(bytes(32), raw, hashlib.sha256)
    return hmac.digest(extracted, f"pycomm 1 psk{identity}\x01".encode(), hashlib.sha256).hex()


def _openssl(host: str, port: int, identity: str, key: str) -> list[str]:
    psk = ["-psk", key, "-psk_identity", identity] if key else []
    command = ["openssl", "s_client", "-tls1_3", "-groups", "P-256", *psk]
    return [*command, "-ciphersuites", "TLS_AES_128_GCM_SHA256", "-connect", f"{host}:{port}"]


def _gnutls(host: str, port: int, identity: str, key: str) -> list[str]:
    psk = [f"--pskusername={identity}", f"--pskkey={key}"] if key else []
    kinds = "+DHE-PSK:+ECDHE-PSK:" if key else ""
    priority = f"NORMAL:-VERS-ALL:+VERS-TLS1.3:{kinds}-GROUP-ALL:+GROUP-SECP256R1"
    command = ["gnutls-cli", "--no-ca-verification", f"--priority={priority}", *psk]
    return [*command, f"--port={port}", host]


CLIENTS = {"openssl": _openssl, "gnutls-cli": _gnutls}
UP = {
    "openssl": r"Reused, TLSv1\.3, Cipher is TLS_AES_128_GCM_SHA256",
    "gnutls-cli": "Handshake was completed",
}


def _talk(command: list[str]) -> str:
    """The output of a client until the rank has hung up: its own input stays open."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        try:
            client.stdin.write(b"this is no hello of pycomm, and it is long enough for one\n" * 4)
            client.stdin.flush()
        except BrokenPipeError:
            pass  # refused before it could speak
        try:
            client.wait(20)
        except subprocess.TimeoutExpired:
            client.kill()
            raise
        return client.stdout.read().decode(errors="replace")


class Reading(Listening):
    """A store that also remembers all that is read from it."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__(inner)
        self.got: list[bytes] = []

    def get(self, key: str) -> bytes:
        value = super().get(key)
        self.got += [key.encode(), value]
        return value


KEYS = ("good", "other", "none")  # of the ranks
NO_PROOF = (
    "the peer does not prove that it has the secret. Try: if the job runs, ignore it; otherwise "
    "see which program has that port (ss -ltnp on its host), or which one between the hosts "
    "changes bytes"
)
# Only the key leads as far as to the first bytes behind the handshake.
WHY = {
    "good": "the first bytes are not pycomm's",
    "other": NO_PROOF,
    "none": NO_PROOF,
}


def _join(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    """Makes a group. Returns what this rank has written to the store, and what it got there."""
    store = Reading(dist.FileStore(f"{folder}/store", world_size))
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=world_size)
    written, got = (
        b"\n".join(each).decode(errors="replace") for each in (store.written, store.got)
    )
    return written, got


def _port(text: str, rank: int) -> int:
    address = re.search(rf"address/{rank}\npcs1 [^\n]*\n(\S+)", text)
    assert address is not None, text
    return int(re.findall(r"\d+", address[1])[-1])


def _process_id(text: str) -> str:
    found = re.search(r"process_id=([0-9a-f]{32})", text)
    assert found is not None, text
    return found[1]


def knock(rank: int, world_size: int, folder: str, tool: str) -> str:
    """Each rank lets `tool` connect to its own port: with the right key, another one or none."""
    text, _ = _join(rank, world_size, folder)
    sum_and_say(rank, world_size)
    secret = Path(folder) / "secret"
    identity = f"pc1.{secrets.read_file(str(secret))[0].key_id}.l.{'ab' * 16}.{_process_id(text)}"
    key = {"good": _key_of(secret, identity), "other": OTHER_KEY, "none": ""}[KEYS[rank]]
    said = _talk(CLIENTS[tool]("127.0.0.1", _port(text, rank), identity, key))
    dist.barrier()
    sum_and_say(rank, world_size)
    dist.destroy_process_group()
    return said


def _environment(folder: Path) -> dict[str, str | None]:
    return {
        "PYCOMM_SECRET": None,
        "PYCOMM_SECRET_FILE": str(folder / "secret"),
        "PYCOMM_TRANSPORT": "tcp",
        "PYCOMM_SOCKET_IFNAME": "lo",
        "PYCOMM_DEBUG": "INFO",
    }


@pytest.mark.parametrize("tool", CLIENTS)
def test_another_program_with_the_key_gets_a_handshake_and_no_more(
    tmp_path: Path, tool: str
) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    secrets.generate_file(str(tmp_path / "secret"))
    env = _environment(tmp_path)
    results = run_ranks(3, knock, args=(str(tmp_path), tool), init="none", backend=None, env=env)
    for key, result in zip(KEYS, results, strict=True):
        assert bool(re.search(UP[tool], result.value)) == (key == "good"), result.value
        (line,) = [line for line in result.stderr.splitlines() if "turned away" in line]
        assert "turned away 1 connection(s)" in line
        assert line.endswith(f": {WHY[key]}"), line


def _stop_listening(port: int) -> None:
    """At a port of this process, which another process then can take."""
    for descriptor, name in open_files().items():
        if name.startswith("socket:"):
            with socket.socket(fileno=os.dup(descriptor)) as one:
                ours = one.family == socket.AF_INET and one.getsockname()[1] == port
                listens = ours and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens:
                with socket.socket() as unbound:
                    os.dup2(unbound.fileno(), descriptor)


class Replaced(Reading):
    """The store of rank 1: before its address is there, openssl s_server listens in its place."""

    def __init__(self, inner: dist.Store, secret: Path, right: bool) -> None:
        super().__init__(inner)
        self.server: subprocess.Popen[str] | None = None
        self._secret = secret
        self._right = right

    def set(self, key: str, value: str | bytes) -> None:
        super().set(key, value) if not key.endswith("/address/1") else self._serve(key, value)

    def _serve(self, key: str, value: str | bytes) -> None:
        written, got = (b"\n".join(each).decode() for each in (self.written, self.got))
        key_id = secrets.read_file(str(self._secret))[0].key_id
        identity = f"pc1.{key_id}.l.{_process_id(got)}.{_process_id(written)}"
        psk = _key_of(self._secret, identity) if self._right else OTHER_KEY
        text = value if isinstance(value, str) else value.decode()
        port = int(re.findall(r"\d+", text)[-1])
        _stop_listening(port)
        command = ["openssl", "s_server", "-tls1_3", "-nocert", "-groups", "P-256", "-psk", psk]
        command += ["-psk_identity", identity, "-accept", f"127.0.0.1:{port}"]
        self.server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert self.server.stdout is not None
        for line in self.server.stdout:
            if "ACCEPT" in line:
                break
        super().set(key, value)


def stand_in(rank: int, world_size: int, folder: str, right: bool) -> str:
    """Rank 0 connects to rank 1's address. Returns its error, and what the server there says."""
    files = dist.FileStore(f"{folder}/store", world_size)
    store = Replaced(files, Path(folder) / "secret", right) if rank == 1 else Reading(files)
    said = ""
    try:
        dist.init_process_group(
            "pycomm", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=15)
        )
        dist.all_reduce(torch.ones(3))
    except pycomm.errors.PycommError as error:
        said = f"{type(error).__name__}: {error}"
    if isinstance(store, Replaced) and store.server is not None:
        store.server.terminate()
        said, _ = store.server.communicate(timeout=20)
    return said


@pytest.mark.parametrize("right", [True, False], ids=["the key", "another key"])
def test_a_server_in_the_place_of_a_rank_needs_the_key(tmp_path: Path, right: bool) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    secrets.generate_file(str(tmp_path / "secret"))
    env = _environment(tmp_path)
    error, served = run_ranks(
        2, stand_in, args=(str(tmp_path), right), init="none", backend=None, env=env
    ).values()
    assert ("CIPHER is TLS_AES_128_GCM_SHA256" in served) == right, served
    assert ("binder does not verify" in served) == (not right), served
    refused = re.match(
        r"ConfigMismatchError: Rank 1 on \S+ cannot be reached: the TLS handshake failed on .*: "
        r"the rank with the secret of key id [0-9a-f]{8} does not listen there; .*"
        r"if they print the same, another process has taken the port",
        error,
    )
    assert (refused is not None) == (not right), error
    if right:  # a server that knows the key, but not pycomm
        assert re.match(r"\w+: Rank 1 on ", error), error

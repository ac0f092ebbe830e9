"""Clients that know nothing of pycomm but its secret: openssl s_client and gnutls-cli."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from test_closed_group import Listening, sum_and_say

from pycomm import _secret

pytestmark = pytest.mark.needs_native

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
    """What a client says until the rank has hung up: its own input stays open."""
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


def knock(rank: int, world_size: int, folder: str, tool: str) -> dict[str, str]:
    """Rank 1 lets `tool` connect to its own port: with the right key, another one and none."""
    store = Listening(dist.FileStore(f"{folder}/store", world_size))
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=world_size)
    sum_and_say(rank, world_size)
    said = {}
    if rank == 1:
        written = b"\n".join(store.written).decode(errors="replace")
        process = re.search(r"process_id=([0-9a-f]{32})", written)
        address = re.search(r"address/1\npcs1 [^\n]*\n(\S+)", written)
        assert process is not None, written
        assert address is not None, written
        port = int(re.findall(r"\d+", address[1])[-1])
        secret = Path(folder) / "secret"
        identity = f"pc1.{_secret.read_file(str(secret))[0].key_id}.l.{'ab' * 16}.{process[1]}"
        for name, key in {
            "good": _key_of(secret, identity),
            "other": OTHER_KEY,
            "none": "",
        }.items():
            said[name] = _talk(CLIENTS[tool]("127.0.0.1", port, identity, key))
    dist.barrier()
    sum_and_say(rank, world_size)
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("tool", CLIENTS)
def test_another_program_with_the_key_gets_a_handshake_and_no_more(
    tmp_path: Path, tool: str
) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    _secret.generate_file(str(tmp_path / "secret"))
    env = {
        "PYCOMM_SECRET": None,
        "PYCOMM_SECRET_FILE": str(tmp_path / "secret"),
        "PYCOMM_TRANSPORT": "tcp",
        "PYCOMM_SOCKET_IFNAME": "lo",
        "PYCOMM_DEBUG": "INFO",
    }
    results = run_ranks(2, knock, args=(str(tmp_path), tool), init="none", backend=None, env=env)
    said = results.values()[1]
    assert re.search(UP[tool], said["good"]), said["good"]
    assert not re.search(UP[tool], said["other"]), said["other"]
    assert not re.search(UP[tool], said["none"]), said["none"]
    log = list(results)[1].stderr
    assert "turned away" in log, log

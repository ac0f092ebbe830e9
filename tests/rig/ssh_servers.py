"""sshd on hosts that are network namespaces, with keys of the test's own, and a client for them.

Needs root, `ip`, `ssh` and `sshd` (package openssh-server). Nothing is read from or written to
~/.ssh, and each server ends with its namespace's processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cluster import Cluster, Node, cluster
from hosts import Host, run

SSHD = "/usr/sbin/sshd"  # it wants its absolute path


@dataclasses.dataclass
class SshHosts:
    """Hosts on one switch, a server on each, and a client's configuration that knows their keys."""

    made: Cluster
    folder: Path
    servers: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def nodes(self) -> Sequence[Node]:
        """node1, node2 ..."""
        return self.made.nodes

    @property
    def ssh(self) -> str:
        """For ``pycomm run --ssh``."""
        return f"ssh -F {self.folder}/config"

    def start(self, node: Host) -> None:
        """Starts sshd there, and waits until it listens."""
        log = self.folder / f"{node.name}.log"
        log.write_text("")
        pid = self.folder / f"{node.name}.pid"
        pid.unlink(missing_ok=True)
        # It goes into the background by itself, so it is no child of the test that starts it.
        run(*node.command(SSHD, "-E", str(log), "-f", str(self.folder / f"{node.name}.conf")))
        deadline = time.monotonic() + 20
        # The file with its number is there before the number is in it.
        while "listening on" not in log.read_text() or not (
            pid.exists() and pid.read_text().strip()
        ):
            assert time.monotonic() < deadline, f"sshd did not start: {log.read_text()}"
            time.sleep(0.02)
        self.servers[node.name] = int(pid.read_text())

    def forget_key(self, node: Host) -> None:
        """The client no longer knows the key of this host."""
        self.remember_keys(but=node.name)

    def remember_keys(self, but: str = "") -> None:
        """The client knows every key again, but that of one host."""
        lines = []
        for node in (node for node in self.nodes if node.name != but):
            public = (self.folder / f"{node.name}.pub").read_text().split()
            lines.append(f"{node.name},{node.address} {public[0]} {public[1]}\n")
        (self.folder / "known").write_text("".join(lines))


def processes_of(node: Host) -> dict[int, str]:
    """The command lines of what runs there, by pid, without sshd."""
    listed = subprocess.run(
        ["ip", "netns", "pids", node.namespace], capture_output=True, text=True, timeout=60
    )
    found = {}
    for pid in map(int, listed.stdout.split()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if command and not command.startswith(("sshd", SSHD)):
                found[pid] = command
    return found


@contextlib.contextmanager
def ssh_hosts(count: int, folder: Path) -> Iterator[SshHosts]:
    """Hosts node1, node2 ... with a server each; skips the test where that cannot be."""
    for path in (SSHD, shutil.which("ssh") or "ssh", shutil.which("ssh-keygen") or "ssh-keygen"):
        if not Path(path).exists():
            pytest.skip(f"an ssh server needs {path} (package openssh-server)")
    with cluster(count) as made:
        folder.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)  # where its unprivileged part lives
        hosts = SshHosts(made, folder)
        _write_keys(hosts)
        for node in made.nodes:
            hosts.start(node)
        yield hosts


def _write_keys(hosts: SshHosts) -> None:
    folder = hosts.folder
    for name in ("user", *(node.name for node in hosts.nodes)):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name))
    shutil.copy(folder / "user.pub", folder / "authorized")
    for node in hosts.nodes:
        (folder / f"{node.name}.conf").write_text(
            f"ListenAddress {node.address}\nHostKey {folder / node.name}\n"
            f"PidFile {folder / node.name}.pid\n"
            f"AuthorizedKeysFile {folder / 'authorized'}\nStrictModes no\nUsePAM no\n"
            "PermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        )
    (folder / "config").write_text(
        f"Host *\n  IdentityFile {folder / 'user'}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder / 'known'}\n  GlobalKnownHostsFile /dev/null\n"
    )
    hosts.remember_keys()

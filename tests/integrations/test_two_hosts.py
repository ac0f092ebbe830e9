"""Examples of other libraries by ``pycomm run``, over a real sshd, on two hosts.

The hosts are network namespaces, each with its own name at 127.0.1.1, as Debian's installer does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from documents import ROOT
from run_jobs import Job
from ssh_servers import SshHosts, ssh_hosts
from test_library_examples import PRINTS
from versions import require

LIMIT_S = 240.0
pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.namespaces,
    pytest.mark.nightly,
    pytest.mark.timeout(LIMIT_S + 60),
]

# 64 * 64 + 64 + 64 * 10 + 10 gradients a step, 22 steps an epoch.
FP32_NBYTES = 4 * 4810 * 22 * 5
REST_NBYTES = 300_000  # to meet, for the first parameters, and headers: 80,000 to 150,000
SHARES = {"fp16": 0.5, "int8": 0.25}

BEFORE = """
import os
from pathlib import Path
def sent_nbytes():
    (line,) = (each for each in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in each)
    return int(line.split()[9])
at_first = sent_nbytes()
"""
# Lightning opens a group over gloo for the first hook. pycomm takes the variable, too.
PREPARES = """
    def prepare_data(self):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"

    def setup(self, stage):
        assert "GLOO_SOCKET_IFNAME" not in os.environ

"""
AFTER = """
from training import digest
print("parameters", digest(model.parameters()), "sent", sent_nbytes() - at_first, flush=True)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(2, tmp_path_factory.mktemp("ssh")) as made:
        for node in made.nodes:
            node.name_is_loopback()
        yield made


def train(
    example: str, changes: Mapping[str, str], wire_dtype: str, hosts: SshHosts, folder: Path
) -> None:
    """Runs an example with what a user changes in it for two hosts of one rank each."""
    library, printed = PRINTS[example]
    require(library)
    script = (ROOT / "examples" / example).read_text()
    for old, new in changes.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    variables = ("-x", "HF_HUB_OFFLINE=1", "-x", f"TMPDIR={folder}")
    job = Job(hosts, folder, "-H", "node1:1,node2:1", *variables, script=BEFORE + script + AFTER)
    try:
        assert job.end(LIMIT_S) == 0, job.text
    finally:
        job.process.kill()
        job.process.wait()
    assert "pycomm INFO: 2 ranks over TCP on eth0 (10.77.0.1" in job.text
    assert re.search(rf"^\[0@node1\] {printed}$", job.text, re.M), job.text
    ends = re.findall(r"^\[(\d@node\d)\] parameters (\w+) sent (\d+)$", job.text, re.M)
    assert sorted(host for host, _, _ in ends) == ["0@node1", "1@node2"], job.text
    assert len({parameters for _, parameters, _ in ends}) == 1, job.text
    for host, _, sent in ends:
        least = SHARES[wire_dtype] * FP32_NBYTES
        assert least < int(sent) < least + REST_NBYTES, (host, sent)
    job.all_gone(5)


@pytest.mark.ci
@pytest.mark.integration("Lightning", "pycomm run, two namespaces, int8, with a prepare_data hook")
def test_lightning_on_two_hosts(hosts: SshHosts, tmp_path: Path) -> None:
    changes = {
        "devices=2,": "devices=1,\n    num_nodes=2,",
        'wire_dtype="fp16"': 'wire_dtype="int8"',
        "    def configure_optimizers": PREPARES + "    def configure_optimizers",
    }
    train("with_lightning.py", changes, "int8", hosts, tmp_path)


@pytest.mark.integration("Accelerate", "pycomm run, two namespaces, int8")
def test_accelerate_on_two_hosts(hosts: SshHosts, tmp_path: Path) -> None:
    changes = {"make_accelerator()  #": 'make_accelerator(wire_dtype="int8")  #'}
    train("with_accelerate.py", changes, "int8", hosts, tmp_path)


@pytest.mark.integration("HF Trainer", "pycomm run, two namespaces, fp16")
def test_trainer_on_two_hosts(hosts: SshHosts, tmp_path: Path) -> None:
    changes = {"make_training_arguments(\n": 'make_training_arguments(\n    wire_dtype="fp16",\n'}
    train("with_trainer.py", changes, "fp16", hosts, tmp_path)

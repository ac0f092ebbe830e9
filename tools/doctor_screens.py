"""Makes clusters of network namespaces and writes the doctor's screens into docs/doctor.md.

    python tools/doctor_screens.py            # rewrites the blocks; needs root, ip, nft and tc
    python tools/doctor_screens.py slow       # only prints one

Run it on a machine that does nothing else: the screens have rates and predicted seconds.
test_doctor_screen.py compares the form of the blocks with what the program prints today.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "rig"))

from cluster import Cluster, cluster  # noqa: E402 (it is in tests/rig)
from hosts import run_on_both  # noqa: E402
from processes import child_environment  # noqa: E402
from transcripts import replaced  # noqa: E402

DOCUMENT = ROOT / "docs" / "doctor.md"
HUNDRED = ("rate", "100mbit", "burst", "64kb", "latency", "50ms")
RANGE = {"PYCOMM_PORT_RANGE": "29600-29699"}
_NOTES = "\ngood to know\n"


def _healthy(made: Cluster) -> None:
    for node in made.nodes:
        node.add_twin()
    made.nodes[1].name_is_loopback()


def _sick(made: Cluster) -> None:
    made.nodes[0].firewall(f"ip saddr {made.nodes[3].address} tcp dport 29600-29699 drop")
    _slow(made)


def _slow(made: Cluster) -> None:
    made.shape(made.nodes[2], *HUNDRED)


# What makes the hosts so, and the variables that all of them have.
SCENARIOS: Mapping[str, tuple[Callable[[Cluster], None], Mapping[str, str]]] = {
    "healthy": (_healthy, {}),
    "sick": (_sick, RANGE),
    "slow": (_slow, {}),
}


def play(name: str) -> str:
    """The screen of rank 0 under torchrun. Only that of the healthy cluster keeps its notes."""
    make_so, env = SCENARIOS[name]
    commands = []
    with cluster(4) as made, tempfile.TemporaryDirectory(prefix="pycomm-doctor-") as folder:
        make_so(made)
        for rank, node in enumerate(made.nodes):
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=4"]
            words += [f"--node-rank={rank}", "--nproc-per-node=1", "--master-addr=node1"]
            words += ["--master-port=29500", "-m", "pycomm", "doctor"]
            commands.append((node, words, child_environment(env)))
        first, *_ = run_on_both(commands, Path(folder), 300.0)
    screen = str(first.out).rstrip()
    if not screen.startswith("pycomm doctor: 4 hosts"):
        raise RuntimeError(f"{name}: no screen, but {first}")
    return screen if name == "healthy" else screen.partition(_NOTES)[0].rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenario", nargs="?", choices=list(SCENARIOS), help="only print this one")
    wanted = parser.parse_args().scenario
    if wanted:
        print(play(wanted))
        return 0
    text = DOCUMENT.read_text()
    for name in SCENARIOS:
        text = replaced(text, name, f"```text\n{play(name)}\n```")
    DOCUMENT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What all_reduce costs on a virtual network, by its own schedules: docs/evidence/cost.md.

Builds pycomm_schedule_cost with CMake first; torch and the extension are not needed.

python benchmarks/cost.py                        # the tables
python benchmarks/cost.py --pictures docs/pictures
python benchmarks/cost.py --check table.json --hosts 0,1,0,1     # beside what was measured there
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from plot import line_chart

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Network:
    """A switch with hosts on it. The defaults are about a gigabit; ranks of a host meet by TCP."""

    latency_s: float = 50e-6
    nic_bytes_per_s: float = 119e6
    local_latency_s: float = 10e-6
    local_bytes_per_s: float = 3e9
    message_s: float = 3e-6
    reduce_bytes_per_s: float = 5e9


@dataclass(frozen=True)
class Cost:
    seconds: float
    algorithm: str
    nic_nbytes: int
    """Sent through the busiest NIC."""


@functools.cache
def program() -> Path:
    """The program that runs the schedules, built when it is first asked for."""
    sys.path.append(str(ROOT / "tools"))
    folder = importlib.import_module("cpp").build("plain", target="pycomm_schedule_cost")
    if folder is None:
        raise SystemExit("pycomm_schedule_cost could not be built: see above")
    return Path(folder) / "tests" / "cpp" / "pycomm_schedule_cost"


def cost(algorithm: str, hosts: Sequence[int], nbytes: int, network: Network) -> Cost:
    """Run an all_reduce of fp32 in virtual time."""
    words = [algorithm, ",".join(map(str, hosts)), str(nbytes), *map(str, astuple(network))]
    done = subprocess.run([program(), *words], stdout=subprocess.PIPE, text=True, check=True)
    seconds, chosen, nic_nbytes = done.stdout.split()
    return Cost(float(seconds), chosen, int(nic_nbytes))


def spread(hosts: int, ranks_a_host: int) -> list[int]:
    return [rank // ranks_a_host for rank in range(hosts * ranks_a_host)]


def shapes(most_ranks: int) -> list[tuple[int, int]]:
    """Hosts and ranks a host, from 2 hosts to `most_ranks` ranks in all."""
    return [
        (hosts, local)
        for local in (1, 8, 64)
        for hosts in (2, 4, 16, 64, 256, 1024)
        if hosts * local <= most_ranks
    ]


def small_table(most_ranks: int, network: Network) -> dict[str, list[tuple[float, float]]]:
    print("4 B: seconds until the last rank has it")
    print(f"{'hosts':>6} {'a host':>6} {'ranks':>6} {'algorithm':>20} {'us':>10}")
    lines: dict[str, list[tuple[float, float]]] = {}
    for hosts, local in shapes(most_ranks):
        found = cost("auto", spread(hosts, local), 4, network)
        print(
            f"{hosts:>6} {local:>6} {hosts * local:>6} {found.algorithm:>20} "
            f"{found.seconds * 1e6:>10.1f}"
        )
        lines.setdefault(f"{local} a host", []).append((hosts * local, found.seconds * 1e6))
    return lines


def large_table(
    most_ranks: int, nbytes: int, network: Network
) -> dict[str, list[tuple[float, float]]]:
    print(f"\n{nbytes} B: bytes through the busiest NIC, and how many that is over the bound")
    print(
        f"{'hosts':>6} {'a host':>6} {'ranks':>6} {'algorithm':>20} {'bytes':>12} {'over':>7} "
        f"{'ms':>9} {'flat ring':>10}"
    )
    lines: dict[str, list[tuple[float, float]]] = {}
    for hosts, local in shapes(most_ranks):
        where = spread(hosts, local)
        found, flat = (cost(name, where, nbytes, network) for name in ("auto", "ring"))
        bound = 2 * (hosts - 1) / hosts * nbytes
        print(
            f"{hosts:>6} {local:>6} {len(where):>6} {found.algorithm:>20} "
            f"{found.nic_nbytes:>12} {found.nic_nbytes / bound - 1:>7.2%} "
            f"{found.seconds * 1e3:>9.1f} {flat.seconds * 1e3:>10.1f}"
        )
        lines.setdefault(f"{local} a host", []).append((len(where), found.seconds * 1e3))
        if local > 1:
            lines.setdefault(f"{local} a host, flat ring", []).append(
                (len(where), flat.seconds * 1e3)
            )
    return lines


def check_table(table: Path, hosts: Sequence[int], network: Network) -> None:
    """Print what was measured beside what the model says."""
    print(f"{'bytes':>12} {'measured ms':>12} {'model ms':>10} {'ratio':>6}")
    for row in json.loads(table.read_text())["rows"]:
        if row["backend"] == "pycomm" and row["ranks"] == len(hosts):
            found = cost("auto", hosts, row["size_bytes"], network)
            measured = row["p50_us"] / 1e6
            print(
                f"{row['size_bytes']:>12} {measured * 1e3:>12.3f} {found.seconds * 1e3:>10.3f} "
                f"{measured / found.seconds:>6.2f}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--most-ranks", type=int, default=1024)
    add("--nbytes", type=int, default=64 << 20, help="of the large tensor; default: %(default)s")
    add("--pictures", type=Path, metavar="FOLDER", help="also draw them into this folder")
    add("--check", type=Path, metavar="TABLE.json", help="compare with a measured table instead")
    add("--hosts", default="0,1", help="with --check: the host of each rank, as in switch.py")
    options = parser.parse_args()
    network = Network()
    if options.check is not None:
        check_table(options.check, [int(host) for host in options.hosts.split(",")], network)
        return 0
    small = small_table(options.most_ranks, network)
    large = large_table(options.most_ranks, options.nbytes, network)
    if options.pictures is not None:
        charts = {
            "cost-small.svg": line_chart(
                "all_reduce of 4 bytes, gigabit, virtual time", "ranks", "microseconds", small
            ),
            "cost-large.svg": line_chart(
                f"all_reduce of {options.nbytes >> 20} MiB, gigabit, virtual time",
                "ranks",
                "milliseconds",
                large,
            ),
        }
        for name, chart in charts.items():
            (options.pictures / name).write_text(chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())

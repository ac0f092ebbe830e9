"""Fuzz what reads bytes from outside, guided by coverage, under AddressSanitizer and UBSan.

    python tools/fuzz.py                        # every decoder for a minute; needs clang, libFuzzer
    python tools/fuzz.py --seconds 3600 frames matching
    python tools/fuzz.py --keep 300            # and keep the smallest inputs that reach as much
    python tools/fuzz.py --until-dry           # each until 10^7 inputs in a row reach nothing new,
                                               # or it has used an hour of CPU time

The inputs that are kept, a line of hex digits each, lie in tests/cpp/fuzz/corpus; every test run
reads them again (tests/cpp/fuzz/fuzz_test.cc). Where clang is not there it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import machine

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cpp-fuzz"
CORPUS = ROOT / "tests" / "cpp" / "fuzz" / "corpus"
DECODERS = ["hello", "reply", "error", "rank", "text", "meeting"]
DECODERS += ["sealed", "secret", "door", "knock"]
DECODERS += ["control", "bulk", "frames", "matching"]
_MAX_NBYTES = 4096
# A decoder is dry if so many inputs in a row have reached no new edge.
_DRY_INPUTS = 10_000_000
_DRY_CPU_SECONDS = 3600


def find_clang() -> str | None:
    """The first clang++ that can link a fuzzer."""
    for name in ("clang++", *(f"clang++-{number}" for number in range(22, 12, -1))):
        path = shutil.which(name)
        if path is None:
            continue
        program = 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
        command = [path, "-x", "c++", "-", "-fsanitize=fuzzer,address", "-o", "/dev/null"]
        if (
            subprocess.run(
                command, input=program.encode(), capture_output=True, check=False
            ).returncode
            == 0
        ):
            return path
    return None


def build(clang: str) -> Path:
    """Build the fuzzer, and return it."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), f"-DCMAKE_CXX_COMPILER={clang}"]
    configure += ["-DPYCOMM_SANITIZE=fuzzer-no-link,address,undefined", "-DPYCOMM_TESTS=ON"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", str(BUILD), "--target", "pycomm_fuzz", "-j"]
    subprocess.run([*command, str(machine.jobs(1.0))], check=True, stdout=subprocess.DEVNULL)
    return BUILD / "tests" / "cpp" / "pycomm_fuzz"


def unpack(program: Path, name: str, folder: Path) -> None:
    """Write a sample and each kept input into a file of its own, as libFuzzer wants them."""
    folder.mkdir(parents=True, exist_ok=True)
    sample = [str(program), f"--target={name}", "--sample"]
    (folder / "sample").write_bytes(subprocess.run(sample, check=True, capture_output=True).stdout)
    kept = CORPUS / f"{name}.hex"
    for number, line in enumerate(kept.read_text().split() if kept.exists() else []):
        (folder / f"kept{number}").write_bytes(bytes.fromhex(line))


def keep(program: Path, name: str, folder: Path, most: int) -> int:
    """Keep the inputs that together reach all that was reached, and return how many."""
    fewest = folder.with_name(f"{name}-fewest")
    fewest.mkdir()
    command = [str(program), f"--target={name}", "-merge=1", str(fewest), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    inputs = sorted(
        (path.read_bytes() for path in fewest.iterdir()), key=lambda one: (len(one), one)
    )
    inputs = [one for one in inputs if one]
    inputs = inputs[:: -(-len(inputs) // most)]  # short and long ones
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.hex").write_text("".join(one.hex() + "\n" for one in inputs))
    return len(inputs)


@dataclasses.dataclass
class Found:
    """What the runs of one decoder did."""

    inputs: int = 0
    edges: int = 0
    last_new: int = 0  # the input that reached an edge for the first time, counted over all runs
    cpu_seconds: float = 0.0


def fuzz(program: Path, name: str, seconds: int, work: Path, found: Found) -> bool:
    """Fuzz one decoder for some seconds, from its folder in `work`. False where it found something.

    Adds to `found`.
    """
    limits = [f"-max_total_time={seconds}", f"-max_len={_MAX_NBYTES}", "-timeout=10"]
    limits += ["-rss_limit_mb=2048", f"-artifact_prefix={work}/"]
    command = [str(program), f"--target={name}", *limits, str(work / name)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=seconds + 300
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found.cpu_seconds += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    ran = re.search(r"Done (\d+) runs", done.stderr)
    if done.returncode != 0 or ran is None:
        failing = [path.read_bytes().hex() for path in work.glob("*-*") if path.is_file()]
        print(f"{name}: FOUND SOMETHING with {failing}\n{done.stderr[-4000:]}", flush=True)
        return False
    for number, edges in re.findall(r"^#(\d+)\s.*cov: (\d+)", done.stderr, re.MULTILINE):
        if int(edges) > found.edges:
            found.edges = int(edges)
            found.last_new = found.inputs + int(number)
    found.inputs += int(ran[1])
    return True


def run(program: Path, name: str, options: argparse.Namespace, work: Path) -> bool:
    """Fuzz one decoder as the options say; False where it found something."""
    unpack(program, name, work / name)
    found = Found()
    while True:
        if not fuzz(program, name, options.seconds, work, found):
            return False
        dry = found.inputs - found.last_new >= _DRY_INPUTS
        if dry or not options.until_dry or found.cpu_seconds >= _DRY_CPU_SECONDS:
            break
    text = f"{name:8} {found.inputs:>12,} inputs {found.cpu_seconds:>6.0f} s {found.edges:>6} edges"
    text += f"   {found.inputs - found.last_new:>12,} since the last new one"
    text += "; dry" if dry else "; not dry"
    if options.keep > 0:
        text += f"; {keep(program, name, work / name, options.keep)} inputs kept"
    print(f"{text}; nothing found", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("decoders", nargs="*", metavar="DECODER", help=f"of {', '.join(DECODERS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each; default: %(default)s")
    parser.add_argument(
        "--until-dry",
        action="store_true",
        help=f"again and again, until {_DRY_INPUTS:,} inputs in a row reached no new edge, or "
        f"{_DRY_CPU_SECONDS} s of CPU time are used",
    )
    parser.add_argument(
        "--keep", type=int, default=0, metavar="N", help="keep up to N inputs of each"
    )
    options = parser.parse_args()
    if unknown := set(options.decoders) - set(DECODERS):
        parser.error(f"no decoder {', '.join(sorted(unknown))}; there are {', '.join(DECODERS)}")
    clang = find_clang()
    if clang is None:
        print("fuzz: SKIPPED, no clang++ that links libFuzzer (apt install clang libfuzzer-14-dev)")
        return 0
    program = build(clang)
    with tempfile.TemporaryDirectory() as work:
        chosen = options.decoders or DECODERS
        failed = [name for name in chosen if not run(program, name, options, Path(work))]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

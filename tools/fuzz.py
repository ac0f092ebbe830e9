"""Fuzz what reads bytes from outside, guided by coverage, under AddressSanitizer and UBSan.

    python tools/fuzz.py                        # every target for a minute; needs clang, libFuzzer
    python tools/fuzz.py --seconds 3600 frames matching
    python tools/fuzz.py --keep 300            # and keep the smallest inputs that reach as much

A target is a function that gets bytes as somebody outside may have sent them; its name is that of a
file in tests/cpp/fuzz/corpus.

The inputs that are kept, a line of hex digits each, lie in tests/cpp/fuzz/corpus; every test run
reads them again (tests/cpp/fuzz/fuzz_test.cc). Without clang it prints SKIPPED and exits with 0.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cpp
import machine

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cpp-fuzz"
CORPUS = ROOT / "tests" / "cpp" / "fuzz" / "corpus"
TARGETS = ["hello", "reply", "error", "rank", "text", "meeting"]
TARGETS += ["sealed", "secret", "endpoint", "dial"]
TARGETS += ["control", "bulk", "frames", "matching", "agreement"]
_MAX_NBYTES = 4096


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
    machine.drop_moved_build(BUILD, ROOT)
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), f"-DCMAKE_CXX_COMPILER={clang}"]
    configure += ["-DPYCOMM_SANITIZE=fuzzer-no-link,address,undefined", "-DPYCOMM_TESTS=ON"]
    configure += cpp.googletest_arguments(BUILD)
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
    shutil.rmtree(fewest, ignore_errors=True)
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


def run(program: Path, name: str, options: argparse.Namespace, work: Path) -> bool:
    """Fuzz one target for a while; False where it found something."""
    unpack(program, name, work / name)
    limits = [f"-max_total_time={options.seconds}", f"-max_len={_MAX_NBYTES}", "-timeout=60"]
    limits += ["-rss_limit_mb=2048", f"-artifact_prefix={work}/{name}-"]
    command = [str(program), f"--target={name}", *limits, str(work / name)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=options.seconds + 300
    )
    ran = re.search(r"Done (\d+) runs", done.stderr)
    if done.returncode != 0 or ran is None:
        failing = [path.read_bytes().hex() for path in work.glob(f"{name}-*") if path.is_file()]
        print(f"{name}: FOUND SOMETHING with {failing}\n{done.stderr[-4000:]}", flush=True)
        return False
    edges = re.findall(r"^#\d+\s.*cov: (\d+)", done.stderr, re.MULTILINE) or ["0"]
    text = f"{name:8} {int(ran[1]):>12,} inputs {edges[-1]:>6} edges, {edges[0]} at the start"
    if options.keep > 0:
        text += f"; {keep(program, name, work / name, options.keep)} inputs kept"
    print(f"{text}; nothing found", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each; default: %(default)s")
    parser.add_argument(
        "--keep", type=int, default=0, metavar="N", help="keep up to N inputs of each"
    )
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    clang = find_clang()
    if clang is None:
        print("fuzz: SKIPPED, no clang++ that links libFuzzer (apt install clang libfuzzer-14-dev)")
        return 0
    program = build(clang)
    with tempfile.TemporaryDirectory() as work:
        chosen = options.targets or TARGETS
        failed = [name for name in chosen if not run(program, name, options, Path(work))]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

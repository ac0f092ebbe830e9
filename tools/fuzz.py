"""Fuzz what reads bytes from outside, guided by coverage, under AddressSanitizer and UBSan.

    python tools/fuzz.py                        # every target for a minute; needs clang, libFuzzer
    python tools/fuzz.py --seconds 3600 frames matching
    python tools/fuzz.py --keep 300            # and keep the smallest inputs that reach as much
    python tools/fuzz.py --until-dry           # each until 10^7 inputs in a row reach nothing new,
                                               # at most an hour of CPU time, and 10^8 inputs of
                                               # all targets together
    python tools/fuzz.py --until-dry --minutes 30 sealed door   # a session of half an hour

A target is a function that gets bytes as somebody outside may have sent them; its name is that of a
file in tests/cpp/fuzz/corpus. --until-dry continues where an earlier session has ended: its state
is in build/fuzz (fuzz_dry.py), and the CPU time of earlier programs counts. A session lasts a day
unless --minutes says less. It prints a table of all targets, and --results FILE also writes it
there.

The inputs that are kept, a line of hex digits each, lie in tests/cpp/fuzz/corpus; every test run
reads them again (tests/cpp/fuzz/fuzz_test.cc). Without clang it prints SKIPPED and exits with 0.
"""

from __future__ import annotations

import argparse
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cpp
import fuzz_dry
import machine
from fuzz_dry import Found

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cpp-fuzz"
CORPUS = ROOT / "tests" / "cpp" / "fuzz" / "corpus"
TARGETS = ["hello", "reply", "error", "rank", "text", "meeting"]
TARGETS += ["sealed", "secret", "door", "knock"]
TARGETS += ["control", "bulk", "frames", "matching", "agreement"]
STATE = ROOT / "build" / "fuzz"
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


def fuzz(
    program: Path, name: str, seconds: int, work: Path, found: Found, most_inputs: int = 0
) -> bool:
    """Fuzz one target for some seconds, from its folder in `work`. False where it found something.

    Adds to `found`. `most_inputs` other than 0 ends it earlier.
    """
    limits = [f"-max_total_time={seconds}", f"-max_len={_MAX_NBYTES}", "-timeout=60"]
    limits += ["-rss_limit_mb=2048", f"-artifact_prefix={work}/{name}-"]
    if most_inputs:  # what it reads again at its start is counted, too, and an empty input besides
        known = sum(1 for path in (work / name).iterdir() if path.is_file())
        limits.append(f"-runs={most_inputs + known + 1}")
    command = [str(program), f"--target={name}", *limits, str(work / name)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=seconds + 300
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found.cpu_seconds += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found.corpus = sum(1 for _ in (work / name).iterdir())
    ran = re.search(r"Done (\d+) runs", done.stderr)
    if done.returncode != 0 or ran is None:
        failing = [path.read_bytes().hex() for path in work.glob(f"{name}-*") if path.is_file()]
        print(f"{name}: FOUND SOMETHING with {failing}\n{done.stderr[-4000:]}", flush=True)
        return False
    add(found, done.stderr, int(ran[1]))
    return True


def add(found: Found, log: str, runs: int) -> None:
    """Add what libFuzzer has logged. What it only reads again at its start doesn't count."""
    began = re.search(r"^#(\d+)\s+INITED\s+cov: (\d+)", log, re.MULTILINE)
    reread = int(began[1]) if began is not None else 0
    if found.inputs == 0 and began is not None:
        found.first_edges = found.edges = int(began[2])
    for number, edges in re.findall(r"^#(\d+)\s.*cov: (\d+)", log, re.MULTILINE):
        if int(edges) > found.edges:
            found.edges = int(edges)
            found.last_new = found.inputs + max(0, int(number) - reread)
    found.inputs += max(0, runs - reread)


def run(program: Path, name: str, options: argparse.Namespace, work: Path) -> bool:
    """Fuzz one target for a while; False where it found something."""
    unpack(program, name, work / name)
    found = Found()
    if not fuzz(program, name, options.seconds, work, found):
        return False
    text = f"{name:8} {found.inputs:>12,} inputs {found.cpu_seconds:>6.0f} s {found.edges:>6} edges"
    text += f"   {found.since_new():>12,} since the last new one"
    if options.keep > 0:
        text += f"; {keep(program, name, work / name, options.keep)} inputs kept"
    print(f"{text}; nothing found", flush=True)
    return True


def until_dry(program: Path, clang: str, options: argparse.Namespace) -> int:
    """Fuzz the targets until they are dry; 1 if one found something."""

    def one_run(name: str, most_inputs: int, found: Found) -> bool:
        if found.inputs == 0:
            unpack(program, name, STATE / name)
            found.first_corpus = sum(1 for _ in (STATE / name).iterdir())
        return fuzz(program, name, options.seconds, STATE, found, most_inputs)

    chosen, at = options.targets or TARGETS, fuzz_dry.commit(ROOT)
    print(fuzz_dry.HEADING, flush=True)
    counts = fuzz_dry.run_all(chosen, TARGETS, program, STATE, one_run, options.minutes)
    text = fuzz_dry.report(counts, at, clang)
    print("\n" + text, end="", flush=True)
    if options.results is not None:
        options.results.write_text(text)
    if options.keep > 0:
        for name in chosen:
            kept = keep(program, name, STATE / name, options.keep)
            print(f"{name}: {kept} inputs kept", flush=True)
    return 1 if any(counts[name].reason == fuzz_dry.FOUND for name in chosen) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each; default: %(default)s")
    parser.add_argument(
        "--until-dry",
        action="store_true",
        help=f"again and again, until {fuzz_dry.DRY_INPUTS:,} inputs in a row reached no new edge; "
        f"at most {fuzz_dry.MOST_CPU_SECONDS} s of CPU time",
    )
    parser.add_argument(
        "--minutes", type=float, default=60 * 24, help="of this session; with --until-dry"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="with --until-dry: the table")
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
    if options.until_dry:
        return until_dry(program, clang, options)
    with tempfile.TemporaryDirectory() as work:
        chosen = options.targets or TARGETS
        failed = [name for name in chosen if not run(program, name, options, Path(work))]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

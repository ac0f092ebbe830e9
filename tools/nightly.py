"""Run what takes too long for every change, step by step: `make nightly` and `make release`.

    make nightly                         # its steps that have not passed at this commit yet
    make release                         # the same, and those without a limit
    make nightly STEPS="fuzz tests"      # these, of either, whether or not they have passed
    make nightly ARGS=--list             # names, minutes and commands

Each step's output goes to build/nightly/<step>.log, its result to build/nightly/summary.json, and
all results to build/nightly/summary.txt. A step that passed at this commit is not repeated, so a
run that was interrupted goes on where it was. A step that skipped everything, because the machine
lacks something, has not passed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable


@dataclasses.dataclass(frozen=True)
class Step:
    """One command; the last line of its output, less what make adds, is its summary."""

    name: str
    command: str
    minutes: int
    """About how long it takes on 2 cores, where it was measured; else a guess. It is ended after
    four times as long."""


# Of bytes 0 to 31: for tests.
_SECRET = "pycomm-secret-1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh86oZq"

MUTATIONS = "{python} tests/cpp/proof/programs"
# Of those with C++ tests: what one compiles is there for the next one.
WORK = "--work build/mutations"
SOAK = "{python} tests/soak"
NIGHTLY_MINUTES = 180

NIGHTLY = [
    Step("tests", "{python} tools/python_tests.py --ring=nightly", 45),
    Step("cpp_full", "{python} tools/cpp.py plain_full", 12),
    Step("asan_slow", "{python} tools/cpp.py asan --slow", 10),
    Step("tsan_slow", "{python} tools/cpp.py tsan --slow", 10),
    Step("seam", "{make} seam ARGS=--listed", 15),
    Step("tcp", "{make} tcp_all", 15),
    Step("integrations", "{make} integrations", 10),
    Step("simulator", "{python} tools/simulate.py --seeds 50000 --remember-failures", 8),
    Step("host_mutations", f"{MUTATIONS}/host_mutations.py {WORK}", 8),
    Step("fuzz", "{make} fuzz", 18),
    Step(
        "random",
        "{python} tools/python_tests.py -k 'random_programs or test_callbacks or random_training "
        "or random_elastic' --programs 1000 --callbacks 1000 --trainings 1000 "
        "--elastic-trainings 20",
        16,
    ),
    Step("kills", f"{SOAK}/kill.py --kills 100 --limit-ms 30", 3),
    Step("kills_large", f"{SOAK}/kill.py --kills 20 --resident-gb 1 --limit-ms 30", 3),
    Step("rounds", f"{SOAK}/rounds.py --rounds 100000", 5),
]

RELEASE = [
    Step("mutations", f"{MUTATIONS}/mutations.py", 120),
    Step("security_mutations", f"{MUTATIONS}/security_mutations.py {WORK}", 30),
    Step("core_mutations", f"{MUTATIONS}/core_mutations.py {WORK}", 40),
    Step("agreement_mutations", f"{MUTATIONS}/agreement_mutations.py {WORK}", 20),
    Step("driver_mutations", f"{MUTATIONS}/driver_mutations.py {WORK}", 30),
    Step("joining_mutations", f"{MUTATIONS}/joining_mutations.py {WORK}", 30),
    Step("step_mutations", f"{MUTATIONS}/step_mutations.py", 30),
    Step("agreement_long", "{python} tools/simulate.py --agreement --seeds 1000000", 5),
    Step("simulator_long", "{python} tools/simulate.py --seeds 500000 --remember-failures", 75),
    Step("release_tests", "{python} tools/python_tests.py --ring=release", 15),
    Step("faults", "{make} faults ARGS=--exact-bounds", 60),
    Step(
        "faults_tcp",
        "{make} faults TEST_TRANSPORT=tcp ARGS='--exact-bounds "
        "tests/python/faults/test_fault_matrix.py'",
        10,
    ),
    Step(
        "faults_tls",
        f"{{make}} faults TEST_TRANSPORT=tcp TEST_SECRET={_SECRET} "
        "ARGS='tests/python/faults/test_fault_matrix.py "
        "tests/python/faults/test_fault_networks.py'",
        16,
    ),
    Step("tls", f"{{make}} tcp_all TEST_SECRET={_SECRET}", 25),
    Step("fuzz_long", "{make} fuzz ARGS='--seconds 600'", 156),
    Step("asan_full", "{python} tools/cpp.py asan_full", 40),
    Step("tsan_full", "{python} tools/cpp.py tsan_full", 60),
    Step("seam_all", "{make} seam ARGS=--all", 60),
    Step("torchrec", "{make} torchrec", 15),
    Step("torch_suite", "{make} torch_suite ARGS=--all", 30),
    # Each has a checkout of its own, so the torch of .venv does not matter.
    *(
        Step(f"torch_{version.replace('.', '_')}", f"{{make}} other_torch TORCH={version}", 60)
        for version in ("2.14.1", "2.15.0")
    ),
    Step("deaths", f"{SOAK}/deaths.py --minutes 30 --faults 100", 35),
    Step("deaths_hosts", f"{SOAK}/deaths.py --minutes 30 --faults 100 --hosts 4", 35),
    Step("deaths_1mb", f"{SOAK}/deaths.py --kills 200 --model-mb 1", 8),
    Step("deaths_20mb", f"{SOAK}/deaths.py --kills 200 --model-mb 20", 12),
    Step("large", "{make} py ARGS='-k more_elements_than_32_bits --large'", 5),
    Step("given_back", "{make} py ARGS='-k test_memory_given_back --ring=all --repeats 10'", 10),
    Step("strict", "{make} strict", 15),
    Step("files", "{make} files", 20),
    Step("wheel", "{make} wheel", 15),
    Step("try_wheel", "{python} tools/try_wheel.py", 10),
    Step("sdist", "{python} tools/try_wheel.py --sdist 2.13.0", 5),
    Step("programs", "{make} py ARGS='-k random_programs --programs 5000'", 30),
    Step("callbacks", "{make} py ARGS='-k test_callbacks --callbacks 5000'", 30),
    Step("trainings", "{make} py ARGS='-k random_training --trainings 5000'", 30),
    Step("leaks", f"{SOAK}/leaks.py --kills 1000", 15),
    Step("exits", f"{SOAK}/exits.py 100", 5),
    Step("life", f"{SOAK}/life.py --repetitions 200", 20),
    Step("powersgd", f"{SOAK}/powersgd.py 50", 10),
]
STEPS = [*NIGHTLY, *RELEASE]

_MAKES_OWN = re.compile(r"make(\[\d+\])?: ")
_COUNT = re.compile(r"(\d[\d,]*) (passed|failed|skipped|xfailed|errors?|mutations|seeds|violated)")


@dataclasses.dataclass
class Result:
    """What a step came to."""

    commit: str
    code: int
    seconds: int
    summary: str
    reruns: Sequence[str]

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def skipped(self) -> bool:
        """It ended well and checked nothing: its tool says so, or pytest skipped every test."""
        only_skips = "skipped" in self.counts and "passed" not in self.counts
        return not self.failed and ("SKIPPED" in self.summary or only_skips)

    @property
    def passed(self) -> bool:
        return not self.failed and not self.skipped

    @property
    def counts(self) -> dict[str, int]:
        """The numbers that the summary names."""
        return {what: int(number.replace(",", "")) for number, what in _COUNT.findall(self.summary)}

    def line(self, name: str) -> str:
        """One line of the table."""
        how = "skipped" if self.skipped else "passed" if self.passed else f"FAILED ({self.code})"
        again = f"; run again: {', '.join(self.reruns)}" if self.reruns else ""
        return f"{name:<19} {self.seconds:>6} s  {how}: {self.summary}{again}"


def commit(root: Path = ROOT) -> str:
    """The commit; with a mark, which equals no other run's, if code differs from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    # Steps write these themselves: tables and records, and seeds that failed.
    written = ["docs", "tests/cpp/proof/seeds.txt"]
    written = [f":(exclude){each}" for each in written]
    changed = git("status", "--porcelain", "--", ".", *written)
    return git("rev-parse", "HEAD") + (f" with changes at {time.time():.0f}" if changed else "")


def run(step: Step, folder: Path, at: str) -> Result:
    """Runs one step in a process group of its own, which ends with it."""
    log, reruns = folder / f"{step.name}.log", folder / f"{step.name}.reruns"
    reruns.write_text("")
    command = step.command.format(python=PYTHON, make="make --no-print-directory")
    began_s, code = time.monotonic(), 124
    with log.open("w") as output:
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"RERUNS_FILE": str(reruns), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            code = child.wait(step.minutes * 60 * 4)
        except subprocess.TimeoutExpired:
            print(f"{step.name}: not done after {4 * step.minutes} minutes", file=output)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    lines = [line.strip(" =") for line in log.read_text(errors="replace").splitlines()]
    told = (line for line in reversed(lines) if line and not _MAKES_OWN.match(line))
    last = next(told, "no output")
    seconds = round(time.monotonic() - began_s)
    return Result(at, code, seconds, last, reruns.read_text().splitlines())


def load(folder: Path) -> dict[str, Result]:
    """What earlier runs have left."""
    path = folder / "summary.json"
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    names = [field.name for field in dataclasses.fields(Result)]
    return {each["step"]: Result(**{name: each[name] for name in names}) for each in kept}


def table(results: Mapping[str, Result], steps: Sequence[Step]) -> str:
    """One line per step in the steps' order, and the totals."""
    lines = [results[step.name].line(step.name) for step in steps if step.name in results]
    failed = [step.name for step in steps if step.name in results and results[step.name].failed]
    skipped = [step.name for step in steps if step.name in results and results[step.name].skipped]
    missing = [step.name for step in steps if step.name not in results]
    ran = [results[step.name] for step in steps if step.name in results]
    reruns = sum(len(result.reruns) for result in ran)
    lines.append(
        f"{len(ran) - len(failed) - len(skipped)} of {len(steps)} steps passed, "
        f"{reruns} tests run again"
        + (f"; FAILED: {', '.join(failed)}" if failed else "")
        + (f"; skipped: {', '.join(skipped)}" if skipped else "")
        + (f"; not run: {', '.join(missing)}" if missing else "")
    )
    return "\n".join(lines) + "\n"


def save(folder: Path, results: Mapping[str, Result], steps: Sequence[Step]) -> None:
    """Writes both summaries."""
    rows = [
        {"step": name, **dataclasses.asdict(result), "counts": result.counts}
        for name, result in results.items()
    ]
    (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "summary.txt").write_text(table(results, steps))


def nightly(steps: Sequence[Step], chosen: Sequence[str], folder: Path, at: str) -> int:
    """Runs the chosen steps, or else those that have not passed at this commit."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {name: result for name, result in load(folder).items() if result.commit == at}
    for step in steps:
        kept = results.get(step.name)
        if step.name not in chosen if chosen else kept is not None and kept.passed:
            continue
        print(f"::: {step.name}, about {step.minutes} minutes: {step.command}", flush=True)
        results[step.name] = run(step, folder, at)
        print(results[step.name].line(step.name), flush=True)
        save(folder, results, steps)
    print("\n" + table(results, steps), end="", flush=True)
    ran = {step.name for step in steps}
    return 1 if any(each.failed for name, each in results.items() if name in ran) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", help="names of steps; without any: all")
    parser.add_argument("--release", action="store_true", help="also the steps without a limit")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    options = parser.parse_args()
    if unknown := set(options.steps) - {step.name for step in STEPS}:
        parser.error(f"no step is named {', '.join(sorted(unknown))}; --list prints them")
    if options.list:
        for ring, steps in (("nightly", NIGHTLY), ("release", RELEASE)):
            for step in steps:
                print(f"{ring:<8} {step.name:<19} {step.minutes:>4} min  {step.command}")
            print(f"{ring:<8} {'in all':<19} {sum(step.minutes for step in steps):>4} min")
        return 0
    steps = STEPS if options.release or options.steps else NIGHTLY
    return nightly(steps, options.steps, ROOT / "build" / "nightly", commit())


if __name__ == "__main__":
    sys.exit(main())

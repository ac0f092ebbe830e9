"""Run what takes too long for every change, step by step: `make nightly` and `make release`.

    make nightly                         # its steps that have not passed yet
    make release                         # the same, and those without a limit
    make nightly STEPS="fuzz tests"      # these, of either, whether or not they have passed
    make nightly ARGS=--list             # names, minutes and commands
    make nightly ARGS=--record           # also writes what steps took to docs/evidence/nightly.json

Each step's output goes to build/nightly/<step>.log, its result to build/nightly/summary.json, and
all results to build/nightly/summary.txt. A step that passed is not repeated until a file changes
that can change its result; a page of docs/ counts for the steps that name it. So a run that was
interrupted goes on where it was. A step that skipped everything, because the machine lacks
something, has not passed. One that skipped some tests of pytest says how many and for what reasons.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
RECORD = ROOT / "docs" / "evidence" / "nightly.json"
# A change here voids the pass of no step but those whose `pages` name the file.
PAGES = ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/results")
SEEDS = "tests/cpp/proof/seeds.txt"  # the simulator adds those that fail


@dataclasses.dataclass(frozen=True)
class Step:
    """One command; the last line of its output, less what make adds, is its summary."""

    name: str
    command: str
    guess: int
    """Minutes on 2 cores, for a step without a record."""
    pages: tuple[str, ...] = ()
    """What its tests read or run of PAGES, as git's patterns; not what a step writes."""
    measured_s: int | None = None
    """Seconds that this command took, in the record."""

    @property
    def seconds(self) -> int:
        """How long it is expected to take."""
        return 60 * self.guess if self.measured_s is None else self.measured_s

    @property
    def minutes(self) -> int:
        """The same in minutes, rounded up."""
        return math.ceil(self.seconds / 60)

    @property
    def limit_s(self) -> int:
        """When it is ended."""
        return 4 * max(60 * self.guess, self.seconds)


def recorded(path: Path = RECORD) -> dict[str, dict[str, Any]]:
    """The rows of the record, by step."""
    if not path.exists():
        return {}
    return {row["step"]: row for row in json.loads(path.read_text())}


def is_of(row: Mapping[str, Any] | None, step: Step) -> bool:
    """A row of another command says nothing about the step."""
    return row is not None and row["command"] == step.command


def measured(steps: Sequence[Step], rows: Mapping[str, Mapping[str, Any]]) -> list[Step]:
    """The steps with their seconds in the record."""
    return [
        dataclasses.replace(step, measured_s=rows[step.name]["seconds"])
        if is_of(rows.get(step.name), step)
        else step
        for step in steps
    ]


# Of bytes 0 to 31: for tests.
_SECRET = "pycomm-secret-1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh86oZq"

MUTATIONS = "{python} tests/cpp/proof/programs"
# Of those with C++ tests: what one compiles is there for the next one.
WORK = "--work build/mutations"
SOAK = "{python} tests/soak"
NIGHTLY_MINUTES = 180
TESTED_PAGES = ("docs/errors.md", "docs/tour.md", "docs/two-machines.md")

NIGHTLY = [
    Step("tests", "{python} tools/python_tests.py --ring=nightly", 45, TESTED_PAGES),
    Step("cpp_full", "{python} tools/cpp.py plain_full", 12),
    Step("asan_slow", "{python} tools/cpp.py asan --slow", 10),
    Step("tsan_slow", "{python} tools/cpp.py tsan --slow", 10),
    Step("seam", "{make} seam ARGS=--listed", 15, ("docs/shared-memory.md",)),
    Step("tcp", "{make} tcp_all", 15, ("docs/support.md",)),
    Step("integrations", "{make} integrations", 10, ("docs/launch.md",)),
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
    Step("faults", "{make} faults ARGS=--exact-bounds", 60, ("docs/*.md",)),
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
    Step("tls", f"{{make}} tcp_all TEST_SECRET={_SECRET}", 25, ("docs/support.md",)),
    Step("fuzz_long", "{make} fuzz ARGS='--seconds 600'", 156),
    Step("asan_full", "{python} tools/cpp.py asan_full", 40),
    Step("tsan_full", "{python} tools/cpp.py tsan_full", 60),
    Step("seam_all", "{make} seam ARGS=--all", 60, ("docs/*.md",)),
    Step("torchrec", "{make} torchrec", 15, ("docs/torchrec.md",)),
    Step("torch_suite", "{make} torch_suite ARGS=--all", 30),
    # Each has a checkout of its own, so the torch of .venv does not matter.
    *(
        Step(
            f"torch_{version.replace('.', '_')}",
            f"{{make}} other_torch TORCH={version}",
            60,
            ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/results"),
        )
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
NIGHTLY, RELEASE = (measured(each, recorded()) for each in (NIGHTLY, RELEASE))
STEPS = [*NIGHTLY, *RELEASE]

_SKIPS = re.compile(r"^SKIPPED \[(\d+)\] \S+: (.*)")  # pytest's own summary
_MAKES_OWN = re.compile(r"make(\[\d+\])?: ")
_COUNT = re.compile(r"(\d[\d,]*) (passed|failed|skipped|xfailed|errors?|mutations|seeds|violated)")


@dataclasses.dataclass
class Result:
    """What a step came to."""

    commit: str
    tree: str
    """A hash of the files that can change what it came to."""
    code: int
    seconds: int
    summary: str
    reruns: Sequence[str]
    skips: Sequence[str]
    """How many tests, and the reason."""
    load: float
    """Of the last minute when it began: after another step mostly that step's."""

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

    def line(self, step: Step) -> str:
        """One line of the table."""
        how = "skipped" if self.skipped else "passed" if self.passed else f"FAILED ({self.code})"
        again = f"; run again: {', '.join(self.reruns)}" if self.reruns else ""
        took = f"{self.seconds:>6} s, expected {step.seconds:>6} s"
        left_out = f"; skipped: {'; '.join(self.skips)}" if self.skips else ""
        return f"{step.name:<19} {took}  {how}: {self.summary}{again}{left_out}"


CODE: tuple[str, ...] = (".", *(f":(exclude){each}" for each in PAGES))


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _is_changed(root: Path, paths: Sequence[str]) -> bool:
    return _git(root, "status", "--porcelain", "--", *paths, f":(exclude){SEEDS}") != ""


def commit_of(root: Path = ROOT) -> str:
    """The commit, and " with changes" if code differs from it."""
    return _git(root, "rev-parse", "HEAD") + (" with changes" if _is_changed(root, CODE) else "")


def tree_of(pages: Sequence[str], root: Path = ROOT) -> str:
    """A hash of the code and these pages. If they differ from the commit, it has a mark and equals
    no other run's."""
    read: list[tuple[str, ...]] = [CODE, *((page,) for page in pages)]
    listed = [_git(root, "ls-files", "--stage", "--", *paths) for paths in read]
    changed = any(_is_changed(root, paths) for paths in read)
    mark = f" with changes at {time.time():.0f}" if changed else ""
    return hashlib.sha256("\n".join(listed).encode()).hexdigest() + mark


def trees_of(steps: Sequence[Step], root: Path = ROOT) -> dict[str, str]:
    """The hash for each step."""
    by_pages = {pages: tree_of(pages, root) for pages in {step.pages for step in steps}}
    return {step.name: by_pages[step.pages] for step in steps}


def run(step: Step, folder: Path, commit: str, tree: str) -> Result:
    """Runs one step in a process group of its own, which ends with it."""
    load = round(os.getloadavg()[0], 2)
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
            code = child.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            print(f"{step.name}: not done after {step.limit_s} s", file=output)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    lines = [line.strip(" =") for line in log.read_text(errors="replace").splitlines()]
    told = (line for line in reversed(lines) if line and not _MAKES_OWN.match(line))
    last = next(told, "no output")
    seconds = round(time.monotonic() - began_s)
    again = reruns.read_text().splitlines()
    skips: collections.Counter[str] = collections.Counter()
    for found in filter(None, map(_SKIPS.match, lines)):
        skips[found[2]] += int(found[1])
    left_out = [f"{count} {reason}" for reason, count in skips.items()]
    return Result(commit, tree, code, seconds, last, again, left_out, load)


def load(folder: Path) -> dict[str, Result]:
    """What earlier runs of this program have left."""
    path = folder / "summary.json"
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    names = {field.name for field in dataclasses.fields(Result)}
    return {
        each["step"]: Result(**{name: each[name] for name in names})
        for each in kept
        if names <= each.keys()
    }


def table(results: Mapping[str, Result], steps: Sequence[Step]) -> str:
    """One line per step in the steps' order, and the totals."""
    lines = [results[step.name].line(step) for step in steps if step.name in results]
    failed = [step.name for step in steps if step.name in results and results[step.name].failed]
    skipped = [step.name for step in steps if step.name in results and results[step.name].skipped]
    missing = [step.name for step in steps if step.name not in results]
    ran = [results[step.name] for step in steps if step.name in results]
    expected_s = sum(step.seconds for step in steps if step.name in results)
    reruns = sum(len(result.reruns) for result in ran)
    lines.append(f"{'in all':<19} {sum(r.seconds for r in ran):>6} s, expected {expected_s:>6} s")
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


def record(path: Path, results: Mapping[str, Result], steps: Sequence[Step]) -> None:
    """Writes a row per step that passed; a step that did not keeps the row that it has."""
    rows = recorded(path)
    for step in steps:
        result = results.get(step.name)
        if result is not None and result.passed:
            rows[step.name] = {
                "step": step.name,
                "command": step.command,
                "commit": result.commit,
                "seconds": result.seconds,
                "summary": result.summary,
                "load": result.load,
            }
    kept = [rows[step.name] for step in steps if is_of(rows.get(step.name), step)]
    path.write_text(json.dumps(kept, indent=1) + "\n")


def nightly(
    steps: Sequence[Step],
    chosen: Sequence[str],
    folder: Path,
    commit: str,
    trees: Mapping[str, str],
) -> dict[str, Result]:
    """Runs the chosen steps, or else those that have not passed with these files."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {name: kept for name, kept in load(folder).items() if kept.tree == trees.get(name)}
    for step in steps:
        kept = results.get(step.name)
        if step.name not in chosen if chosen else kept is not None and kept.passed:
            continue
        print(f"::: {step.name}, about {step.minutes} minutes: {step.command}", flush=True)
        results[step.name] = run(step, folder, commit, trees[step.name])
        print(results[step.name].line(step), flush=True)
        save(folder, results, steps)
    print("\n" + table(results, steps), end="", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", help="names of steps; without any: all")
    parser.add_argument("--release", action="store_true", help="also the steps without a limit")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    written = RECORD.relative_to(ROOT)
    parser.add_argument("--record", action="store_true", help=f"write what steps took to {written}")
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
    folder = ROOT / "build" / "nightly"
    results = nightly(steps, options.steps, folder, commit_of(), trees_of(STEPS))
    if options.record:
        record(RECORD, results, STEPS)
    ran = {step.name for step in steps}
    return 1 if any(each.failed for name, each in results.items() if name in ran) else 0


if __name__ == "__main__":
    sys.exit(main())

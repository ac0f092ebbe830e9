"""Break the agreement of survivors on purpose, one rule at a time; seeds or a test must notice.

Each mutation is compiled in a copy of csrc and run over seeds of pycomm_agree, until one notices it
or all have run. docs/evidence/agreement.md has the promises. A mutation that no seed notices is a
hole in the simulation, or a line that does nothing: its entry says which and names C++ tests that
must notice it, as those of mutated_tests.py, or the program fails. It also fails, before it builds
anything, if the text of a mutation no longer stands exactly once in its file.

    python tests/cpp/proof/programs/agreement_mutations.py --check
    python tests/cpp/proof/programs/agreement_mutations.py [--seeds 20000] [--only NAME ...]

Prints two tables: how many seeds fail, and of which promise; and the tests that fail. Only the few
files that pycomm_agree needs are compiled for the first, so a mutation takes seconds there.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mutated
import mutated_tests
from mutated import Tally, Verdict

SOURCES = Path("csrc")
FOLDERS = ("csrc/elastic", "csrc/proof/elastic")
ALONE = (
    "tests/cpp/proof/programs/agree.cc",
    "csrc/base/error.cc",
    "csrc/base/printable.cc",
    "csrc/base/job_ranks.cc",
)
COMPILE = ("g++", "-std=c++20", "-O1", "-D_GNU_SOURCE", "-Icsrc", "-Itests/cpp")
LIMIT_S = 300  # of all seeds of a mutation; one can make a run endless
MEMORY_KIB = 2_000_000


class Mutation(NamedTuple):
    promise: str
    """The promise that it breaks."""
    name: str
    file: str
    old: str
    new: str
    survives: str = ""
    """Why no seed is expected to notice it."""
    tests: str = ""
    """Of tests/cpp/elastic, as in mutated_tests.Mutation: what notices it."""


_SEND_ACCEPTED = (
    "  keep();\n  Message accepted = make(Message::Kind::Accepted);\n"
    "  accepted.ballot = message.ballot;\n  send(std::move(accepted), {message.from});\n"
)

MUTATIONS = [
    # ---- membership
    Mutation(
        "M1 M2",
        "min_ranks instead of a quorum",
        "agreement.cc",
        "  if (config_.accept_split_brain && now >= proposal_->since + window()) {\n",
        "  enough = enough || voters.count() >= config_.min_ranks;\n"
        "  if (config_.accept_split_brain && now >= proposal_->since + window()) {\n",
    ),
    Mutation(
        "M1 M2",
        "any half is a quorum",
        "view.cc",
        "  return 2 * votesOf(voters & base) > votesOf(base);\n",
        "  return 2 * (voters & base).count() >= base.count();\n",
    ),
    Mutation(
        "M1 M2",
        "the lowest that lives breaks a tie",
        "view.cc",
        "  return 2 * votesOf(voters & base) > votesOf(base);\n",
        "  const size_t half = 2 * (voters & base).count();\n"
        "  return half > base.count() || (half == base.count() && half > 0 && "
        "voters.test(base._Find_first()));\n",
    ),
    Mutation(
        "M1",
        "ballots are ordered by their rounds alone",
        "view.h",
        "  friend constexpr auto operator<=>(const Ballot&, const Ballot&) = default;\n",
        "  friend constexpr bool operator==(const Ballot&, const Ballot&) = default;\n"
        "  friend constexpr auto operator<=>(const Ballot& a, const Ballot& b) {\n"
        "    return (a.number_ & 0xffffffffffff) <=> (b.number_ & 0xffffffffffff);\n  }\n",
        survives="two proposers that know of different deaths, whose quorums do not meet; "
        "ElasticQuorum.ALaterBallotMeetsEveryDecision says why it matters",
        tests="ElasticBallot.TheOneWithMoreVotesOfTheDeadIsGreater",
    ),
    Mutation(
        "M1",
        "what was accepted is not proposed again",
        "proposal.cc",
        "  if (const Accepted* last = lastAccepted(proposal, dead)) {\n",
        "  if (const Accepted* last = lastAccepted(proposal, dead); false) {\n",
    ),
    Mutation(
        "M1",
        "what the dead had accepted does not count",
        "proposal.cc",
        "    if (proposal.dead.test(static_cast<size_t>(position))) {\n",
        "    if (false && position >= 0) {\n",
    ),
    Mutation(
        "M1",
        "of several accepted views, the first",
        "proposal.cc",
        "(last == nullptr || last->ballot < accepted->ballot)",
        "last == nullptr",
    ),
    Mutation(
        "M1",
        "a smaller ballot is promised",
        "agreement.cc",
        "  if (!raisePromise(message)) {\n    return;\n  }\n  owed_",
        "  promised_ = message.ballot;\n  owed_",
    ),
    Mutation(
        "M1",
        "a smaller ballot is accepted",
        "agreement.cc",
        "  if (!raisePromise(message)) {\n    return;\n  }\n  accepted_",
        "  promised_ = message.ballot;\n  accepted_",
    ),
    Mutation(
        "M1",
        "the record is kept after the answer",
        "agreement.cc",
        _SEND_ACCEPTED,
        _SEND_ACCEPTED.replace("  keep();\n", "", 1) + "  keep();\n",
    ),
    Mutation(
        "M1",
        "a certificate proves that the dead had decided nothing",
        "agreement.cc",
        "gone_.try_emplace(peer, Gone{record.view.epoch, record.accepted}).second;\n",
        "gone_.try_emplace(peer, Gone{0, std::nullopt}).second;\n",
    ),
    Mutation(
        "M1",
        "views in the record of a dead process are not learned",
        "agreement.cc",
        "    for (const View& view : record.past) {\n      learn(view, now);\n    }\n"
        "    learn(record.view, now);\n",
        "",
    ),
    Mutation(
        "M1",
        "a goodbye of a later epoch counts its sender out",
        "agreement.cc",
        "view_.has(message.from) &&\n        message.epoch <= view_.epoch) {\n",
        "view_.has(message.from)) {\n",
        survives="no process gets one: the members of an epoch have promised in the one before",
        tests="Agreement.AGoodbyeOfALaterEpochDoesNotCountItsSenderOut",
    ),
    Mutation(
        "M1",
        "a goodbye does not say what was accepted",
        "agreement.cc",
        "  goodbye.accepted = accepted_;\n",
        "",
        survives="a process would have to accept, miss the decision and raise, and only then be "
        "counted out",
        tests="Agreement.AGoodbyeSaysWhatWasAccepted",
    ),
    Mutation(
        "M1",
        "any view is learned",
        "agreement.cc",
        "next.parent != view_id_ || next.epoch != view_.epoch + 1) {\n",
        "next.epoch <= view_.epoch) {\n",
        survives="decisions come from members of the epoch before",
        tests="Agreement.AViewThatDoesNotFollowIsNotLearned",
    ),
    Mutation(
        "M3",
        "the promise does not wait for the seal",
        "agreement.cc",
        "|| !owed_ || !sealed_ || now < promiseAt()) {\n",
        "|| !owed_) {\n",
    ),
    Mutation(
        "M4",
        "who asks in an old epoch is not answered",
        "agreement.cc",
        "  Message excluded = make(Kind::Excluded);\n",
        "  return;\n  Message excluded = make(Kind::Excluded);\n",
        survives="the others would have to go through nine epochs meanwhile",
        tests="Agreement.WhoAsksInAnEpochOfLongAgoIsNotified",
    ),
    Mutation(
        "M5",
        "whom nobody reaches is a member",
        "proposal.cc",
        "    if (missing(worst) == 0) {\n",
        "    if (true) {\n",
    ),
    Mutation(
        "M5",
        "a pong of an earlier epoch counts",
        "agreement.cc",
        "    if (phase_ == Phase::Agreeing && message.nonce == nonce_) {\n",
        "    if (phase_ == Phase::Agreeing) {\n",
        survives="a cut would have to begin while a pong of the epoch before is under way",
        tests="Agreement.APongOfAnEarlierEpochDoesNotCount",
    ),
    Mutation(
        "M6",
        "the end of a connection is a certificate",
        "agreement.cc",
        "  if (code == ErrorCode::ConnectionReset) {\n    ++resets_[peer];\n",
        "  if (code == ErrorCode::PeerDead) {\n"
        "    gone_.try_emplace(peer, Gone{view_.epoch, std::nullopt});\n  }\n"
        "  if (code == ErrorCode::ConnectionReset) {\n    ++resets_[peer];\n",
    ),
    Mutation(
        "M7",
        "a connection that breaks while members agree ends the next epoch, too",
        "agreement.cc",
        "  const bool is_late = phase_ == Phase::Agreeing && ",
        "  const bool is_late = false && ",
    ),
    Mutation(
        "M7",
        "an error of the program changes members",
        "agreement.cc",
        "  if (!changesMembers(code) || phase_ == Phase::Over || peer == config_.self) {\n",
        "  if (phase_ == Phase::Over || peer == config_.self) {\n",
    ),
    Mutation(
        "J3",
        "newcomers are tried again at once",
        "agreement.cc",
        "      how.not_before = now + how.back_off;\n",
        "",
    ),
    Mutation(
        "M8",
        "nothing is sent again",
        "agreement.cc",
        "    if (now >= retry_at_) {\n      ask(now);\n    }\n",
        "    if (now >= retry_at_) {\n      retry_at_ = TimePoint::max();\n    }\n",
    ),
    Mutation(
        "M8",
        "nobody follows a proposer that dies",
        "agreement.cc",
        "    begin(code, peer, now);\n    proposeIfLowest(now);\n",
        "    begin(code, peer, now);\n",
    ),
    Mutation(
        "M8",
        "a proposer that no message of this process reaches is waited for",
        "agreement.cc",
        "    deaf_.insert(message.from);\n",
        "    rumours_.insert(message.from);\n",
        survives="one agreement after another of a group that is cut in one direction",
        tests="Agreement.AProposerThatThisProcessCannotReachIsNotWaitedFor",
    ),
    Mutation(
        "M8",
        "whom the detector finds during the agreement is not told",
        "agreement.cc",
        "      accuse(peer, are_told ? std::vector<Incarnation>{peer} : others());\n",
        "",
        survives="the next repetition says it, which the promised time allows",
        tests="Agreement.WhoIsFoundSilentDuringTheAgreementIsNotifiedAtOnce",
    ),
    Mutation(
        "M8",
        "nobody raises without a quorum",
        "agreement.cc",
        "      raise(Action::Error::QuorumLost);\n",
        "",
    ),
    Mutation(
        "M8",
        "a quorum that answers gets no more time",
        "agreement.cc",
        "reachesQuorum() ? longestWait() : milliseconds",
        "milliseconds",
        survives="the simulation's detector finds a member that stops after it has answered; the "
        "test has none",
        tests="Agreement.AMemberThatStopsRightAfterADeathCostsALivingQuorumNothing",
    ),
    Mutation(
        "M8",
        "members take over from each other",
        "agreement.cc",
        "  if (!proposal_ && !repeats && !isLowest()) {\n",
        "  if (!repeats && false) {\n",
        survives="the same",
        tests="Agreement.AMemberThatStopsRightAfterADeathCostsALivingQuorumNothing",
    ),
    Mutation(
        "M8",
        "the dead count",
        "agreement.cc",
        "  for (const auto& [peer, last] : gone_) {\n    const int position",
        "  for (const auto& [peer, last] : std::map<Incarnation, Gone>()) {\n"
        "    const int position",
    ),
    Mutation(
        "M9",
        "whom the detector has not found is not waited for",
        "agreement.cc",
        ": milliseconds(config_.dead_after_ms) + spare);\n}\n",
        ": milliseconds(config_.dead_after_ms / 30) + 0 * spare);\n}\n",
    ),
    Mutation(
        "M9",
        "a promise is waited for no longer than the pong that it waits for",
        "agreement.cc",
        "patience(other, began_, window() / 2)",
        "patience(other, began_, window())",
        survives="a cut excuses who is left behind",
        tests="Agreement.TwoThatFallSilentAtOnceTakeNobodyWithThem",
    ),
    Mutation(
        "M9",
        "the proposer does not wait for its own promise",
        "agreement.cc",
        "  awaited.push_back(config_.self);",
        "",
    ),
    Mutation(
        "M9",
        "of a pair that one has not heard, the highest is dropped",
        "proposal.cc",
        "return other != of && !reaches(other, of); });",
        "return other != of && !(reaches(of, other) && reaches(other, of)); });",
        survives="a member has to die between its promise and another one's, of which seed 126659 "
        "is an example",
        tests="ElasticProposal.OfAPairTheOneThatWasNotHeardIsDropped",
    ),
    Mutation(
        "M9",
        "who has ended since its promise is a member",
        "proposal.cc",
        "    if (promise.leaving == leaving && dead.count(position) == 0) {\n",
        "    if (promise.leaving == leaving) {\n",
        survives="the next epoch ends at once, without it",
        tests="ElasticProposal.WhoHasEndedSinceItsPromiseIsNoMember",
    ),
    Mutation(
        "M9",
        "a newcomer promises in the epoch of which it is to be a member",
        "agreement.cc",
        "loaded_ < 0 || message.view != loaded_view_ || !contains(message.newcomers, config_.self)",
        "loaded_ < 0",
    ),
    # ---- the step
    Mutation(
        "S1 S2",
        "the commit round ends before all have entered",
        "world.cc",
        "      if (ops.entered.size() == process.members.size()) {\n",
        "      if (!ops.entered.empty()) {\n",
    ),
    Mutation(
        "S2",
        "launched counts as finished",
        "step_ledger.cc",
        "  state_.launched = round != Round::Admission;\n  state_.finished = false;\n",
        "  state_.launched = round != Round::Admission;\n  state_.finished = true;\n",
    ),
    Mutation(
        "S2",
        "what had finished in the old epoch counts in the new one",
        "step_ledger.cc",
        "  state_.finished = false; // what had ended",
        "  // what had ended",
    ),
    Mutation(
        "S2",
        "one survivor that has finished is enough",
        "proposal.cc",
        "std::all_of(of.begin(), of.end(), finished)",
        "std::any_of(of.begin(), of.end(), finished)",
    ),
    Mutation(
        "S1 S6",
        "a step that all have finished is summed again",
        "proposal.cc",
        "  next.step += counts ? 1 : 0;\n",
        "",
    ),
    Mutation(
        "S3",
        "the last step that a survivor has committed does not count",
        "proposal.cc",
        "    next.step = std::max(next.step, promise.step.committed);\n",
        "",
    ),
    Mutation(
        "M3",
        "an operation ends well after the seal",
        "step_ledger.cc",
        "  const bool counts = !sealed_ && epoch == epoch_ && round_.has_value();\n",
        "  const bool counts = epoch == epoch_ && round_.has_value();\n",
        survives="the planes have failed all operations by then",
        tests="StepLedger.NothingCountsAfterTheSeal",
    ),
    Mutation(
        "S8",
        "too few members raise before they commit",
        "agreement.cc",
        "  Action& action = actions_.emplace_back();\n  action.kind = Action::Kind::Install;\n",
        "  if (tooFew()) {\n    raise(Action::Error::TooFew);\n    farewell();\n    return;\n  }\n"
        "  Action& action = actions_.emplace_back();\n  action.kind = Action::Kind::Install;\n",
    ),
    Mutation(
        "S8",
        "a step begins with too few members",
        "agreement.h",
        "    return phase_ == Phase::Working && view_.members.size() >= config_.min_ranks;\n",
        "    return phase_ == Phase::Working;\n",
    ),
    # ---- joining and leaving
    Mutation(
        "J1",
        "a newcomer is admitted with the state of another step",
        "proposal.cc",
        "    if (promise.step.committed == next.step && by_members",
        "    if (by_members",
    ),
    Mutation(
        "J3",
        "members stop for newcomers behind any round",
        "step_ledger.cc",
        "round_ == Round::Admission && all.admits;",
        "all.admits;",
    ),
    Mutation(
        "J3",
        "members stop for a newcomer that only one of them reaches",
        "world.cc",
        "      ops.all.admits = ops.all.admits && wish->admits;\n",
        "      ops.all.admits = (ops.entered.size() > 1 && ops.all.admits) || wish->admits;\n",
    ),
    Mutation(
        "J4",
        "a newcomer that is not admitted in time founds a group",
        "agreement.cc",
        "      raise(Action::Error::NotAdmitted);\n      phase_ = Phase::Over;\n      return;\n"
        "    }\n    if (now >= retry_at_) {",
        "      View alone;\n      alone.epoch = 1;\n      alone.members = {config_.self};\n"
        "      install(alone, now);\n      return;\n    }\n    if (now >= retry_at_) {",
        tests="Agreement.ANewcomerThatNobodyAnswersFoundsNoGroup",
    ),
    Mutation(
        "R1",
        "an admission stays due in the next epoch",
        "step_ledger.cc",
        "  admission_is_due_ = false; // other members may not have heard of it\n",
        "",
    ),
    Mutation(
        "R1",
        "an admission that was due when the forward pass began is made in any epoch",
        "world.cc",
        "    if (process.ledger.admissionIsDue()) {\n      launchAll",
        "    if (true) {\n      launchAll",
    ),
    Mutation(
        "R1",
        "an admission that fails is made again",
        "step_ledger.cc",
        "  if (round_ == Round::Admission) { // all go on without it\n",
        "  if (false) {\n",
    ),
    Mutation(
        "R1",
        "an admission that is due is made by rank 0 alone",
        "world.cc",
        "process.admitting || process.ledger.admissionIsDue();\n",
        "process.admitting || (process.ledger.admissionIsDue() && "
        "process.agreement->view().position(process.self) == 0);\n",
    ),
    Mutation(
        "L1",
        "a rank leaves between steps",
        "step_ledger.cc",
        "  if (round_ == Round::Step && leaving_",
        "  if (leaving_",
    ),
    Mutation(
        "J2",
        "newcomers come first",
        "proposal.cc",
        "      next.members.push_back(newcomer);\n",
        "      next.members.insert(next.members.begin(), newcomer);\n",
    ),
    Mutation(
        "L1",
        "who leaves is a member of the next view",
        "proposal.cc",
        "  const std::set<int> stayers = promised(proposal, dead, Message::Leaving::No);\n",
        "  std::set<int> stayers = promised(proposal, dead, Message::Leaving::No);\n"
        "  stayers.merge(promised(proposal, dead, Message::Leaving::WithItsStep));\n",
    ),
    Mutation(
        "L1",
        "who leaves does not stay for a step that is summed again",
        "proposal.cc",
        "  if (!counts && std::any_of(leavers.begin(), leavers.end(), under_way)) {",
        "  if (false) {",
    ),
    Mutation(
        "L1",
        "a process that leaves gives up a step that is not decided",
        "agreement.h",
        "    return leaving_ && !step_.launched;\n",
        "    return leaving_;\n",
    ),
    Mutation(
        "S2",
        "the step counts although one that leaves has not finished it",
        "proposal.cc",
        "  bool counts = all_finished(with(members, leavers));\n",
        "  bool counts = all_finished(members.empty() ? leavers : members);\n",
        survives="a process has finished its last step when it says that it leaves",
        tests="ElasticProposal.WhoLeavesDoesSoWithItsStepAndStaysIfThatIsSummedAgain",
    ),
]


def misplaced(tree: Path) -> list[str]:
    """The mutations that do not apply to this tree, and tests that it does not have, in words."""
    found = mutated.misplaced(tree, SOURCES, MUTATIONS)
    return found + mutated_tests.missing_tests(tree, with_tests(MUTATIONS))


def with_tests(mutations: Sequence[Mutation]) -> list[mutated_tests.Mutation]:
    """Those that C++ tests notice."""
    return [
        mutated_tests.Mutation(each.name, each.file, each.old, each.new, each.tests, "elastic")
        for each in mutations
        if each.tests
    ]


class Build:
    """pycomm_agree. An object is kept by what it is made of, so that it is made once."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy
        self._objects = copy / "objects"
        self._objects.mkdir(exist_ok=True)

    def _sources(self) -> list[Path]:
        found = [path for folder in FOLDERS for path in sorted((self._copy / folder).glob("*.cc"))]
        return [*found, *(self._copy / name for name in ALONE)]

    def program(self) -> Path | None:
        """The program, or None if it does not compile."""
        headers = "".join(
            path.read_text()
            for folder in (*FOLDERS, "csrc/base", "csrc/proof/sim")
            for path in sorted((self._copy / folder).glob("*.h"))
        )

        def compiled(source: Path) -> Path | None:
            digest = hashlib.sha256((source.read_text() + headers).encode()).hexdigest()[:16]
            target = self._objects / f"{source.parent.name}_{source.stem}_{digest}.o"
            if not target.exists():
                part = target.with_suffix(".part")  # a run that is killed leaves no broken object
                command = [*COMPILE, "-c", str(source), "-o", str(part)]
                if subprocess.run(command, cwd=self._copy).returncode != 0:
                    return None
                part.replace(target)
            return target

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compiled, self._sources()))
        if None in objects:
            return None
        program = self._objects / "agree"
        subprocess.run(["g++", *map(str, objects), "-o", str(program), "-lpthread"], check=True)
        return program


class Found(NamedTuple):
    seeds: int
    count: int
    promises: str
    trouble: str = ""


def run_seeds(program: Path, seeds: int) -> Found:
    """As many seeds as it takes to notice it, in ever larger portions."""
    first, last = 1, min(seeds, 2000)
    while True:
        limits = f"ulimit -v {MEMORY_KIB}; exec timeout {LIMIT_S}"
        command = f"{limits} {program} --seeds {first}:{last} --jobs 2 --most-failures 0"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            return Found(last, 1, "", f"ended with {done.returncode}")
        told = collections.Counter(dict(re.findall(r"^(\w+): (\d+)$", done.stdout, re.MULTILINE)))
        if told or last >= seeds:
            total = sum(int(each) for each in told.values())
            return Found(last, total, ", ".join(f"{name} {told[name]}" for name in told))
        first, last = last + 1, min(seeds, 8 * last)


def verdict(mutation: Mutation, found: Found | None) -> Verdict:
    """Of the seeds."""
    start = f"| {mutation.promise} | {mutation.name} |"
    if found is None:
        return Verdict(f"{start} does not compile | |", "does not compile", False)
    told = found.promises or found.trouble
    if found.count:
        return Verdict(f"{start} {found.count} of {found.seeds:,} | {told} |")
    complaint = "" if mutation.survives else "no seed notices it"
    return Verdict(f"{start} 0 of {found.seeds:,} | {mutation.survives} |", complaint, False)


def try_seeds(copy: Path, mutations: Sequence[Mutation], seeds: int, tally: Tally) -> None:
    mutated.copy_sources(copy)
    print("| promise | broken rule | seeds that notice it | what they say |\n|---|---|---|---|")
    build = Build(copy)
    plain = build.program()
    found = run_seeds(plain, min(seeds, 2000)) if plain else None
    if found is None or found.count:
        tally.wrong.append("violations without a mutation, or it does not compile")
        return
    for mutation in mutations:
        with mutated.broken(mutated.path_of(copy / SOURCES, mutation), mutation):
            program = build.program()
            tally.add(mutation, verdict(mutation, run_seeds(program, seeds) if program else None))


def attempt(copy: Path, chosen: Sequence[Mutation], options: argparse.Namespace) -> Tally:
    tally = Tally()
    try_seeds(copy, chosen, options.seeds, tally)
    if tested := with_tests(chosen):
        print()
        mutated_tests.try_all(mutated_tests.GoogleTests(copy, with_tests(MUTATIONS)), tested, tally)
    return tally


def main() -> int:
    parser = mutated.parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=100000, help="at most, for each mutation")
    return mutated.main(parser, MUTATIONS, misplaced, attempt)


if __name__ == "__main__":
    sys.exit(main())

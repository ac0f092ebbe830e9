"""Break the agreement of survivors on purpose, one rule at a time; count the seeds that notice.

Each mutation is compiled in a copy of csrc and run over seeds of pycomm_agree, until one notices it
or all have run. docs/evidence/agreement.md has the promises. A mutation that no seed notices is a
hole in the simulation, or a line that does nothing: its entry says which, or the program fails. It
also fails, before it builds anything, if the text of a mutation no longer stands exactly once in
its file.

    python tests/cpp/proof/programs/agreement_mutations.py --check
    python tests/cpp/proof/programs/agreement_mutations.py [--seeds 20000] [--only NAME ...]

Prints a table: how many seeds fail, and of which promise. Only the few files that pycomm_agree
needs are compiled, so a mutation takes seconds.
"""

from __future__ import annotations

import collections
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mutated

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
        "ElasticBallot.TheOneWithMoreVotesOfTheDeadIsGreater and "
        "ElasticQuorum.ALaterBallotMeetsEveryDecision say why it matters",
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
        survives="no process gets one: the members of an epoch have promised in the one before; "
        "Agreement.AGoodbyeOfALaterEpochDoesNotCountItsSenderOut notices it",
    ),
    Mutation(
        "M1",
        "a goodbye does not say what was accepted",
        "agreement.cc",
        "  goodbye.accepted = accepted_;\n",
        "",
        survives="a process would have to accept, miss the decision and raise, and only then be "
        "counted out; Agreement.AGoodbyeSaysWhatWasAccepted notices it",
    ),
    Mutation(
        "M1",
        "any view is learned",
        "agreement.cc",
        "next.parent != view_id_ || next.epoch != view_.epoch + 1) {\n",
        "next.epoch <= view_.epoch) {\n",
        survives="decisions come from members of the epoch before; "
        "Agreement.AViewThatDoesNotFollowIsNotLearned notices it",
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
        survives="the others would have to go through nine epochs meanwhile; "
        "Agreement.WhoAsksInAnEpochOfLongAgoIsNotified notices it",
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
        survives="a cut would have to begin while a pong of the epoch before is under way; "
        "Agreement.APongOfAnEarlierEpochDoesNotCount notices it",
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
        survives="one agreement after another of a group that is cut in one direction; "
        "Agreement.AProposerThatThisProcessCannotReachIsNotWaitedFor notices it",
    ),
    Mutation(
        "M8",
        "whom the detector finds during the agreement is not told",
        "agreement.cc",
        "      accuse(peer, are_told ? std::vector<Incarnation>{peer} : others());\n",
        "",
        survives="the next repetition says it, which the promised time allows; "
        "Agreement.WhoIsFoundSilentDuringTheAgreementIsNotifiedAtOnce notices it",
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
        survives="the simulation's detector finds a member that stops after it has answered; "
        "Agreement.AMemberThatStopsRightAfterADeathCostsALivingQuorumNothing has none",
    ),
    Mutation(
        "M8",
        "members take over from each other",
        "agreement.cc",
        "  if (!proposal_ && !repeats && !isLowest()) {\n",
        "  if (!repeats && false) {\n",
        survives="the same",
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
        survives="a cut excuses who is left behind; "
        "Agreement.TwoThatFallSilentAtOnceTakeNobodyWithThem notices it",
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
        "is an example; ElasticProposal.OfAPairTheOneThatWasNotHeardIsDropped notices it",
    ),
    Mutation(
        "M9",
        "who has ended since its promise is a member",
        "proposal.cc",
        "    if (promise.leaving == leaving && dead.count(position) == 0) {\n",
        "    if (promise.leaving == leaving) {\n",
        survives="the next epoch ends at once, without it; "
        "ElasticProposal.WhoHasEndedSinceItsPromiseIsNoMember notices it",
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
        survives="the planes have failed all operations by then; "
        "StepLedger.NothingCountsAfterTheSeal notices it",
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
        survives="a process has finished its last step when it says that it leaves; "
        "ElasticProposal.WhoLeavesDoesSoWithItsStepAndStaysIfThatIsSummedAgain notices it",
    ),
]


def misplaced(tree: Path) -> list[str]:
    """The mutations that do not apply to this tree, in words."""
    return mutated.misplaced(tree, SOURCES, MUTATIONS)


class Build:
    """The program's objects, of which only those that a mutation changes are made again."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy
        self._objects = copy / "objects"
        self._objects.mkdir(exist_ok=True)
        self._texts: dict[Path, str] = {}

    def _sources(self) -> list[Path]:
        found = [path for folder in FOLDERS for path in sorted((self._copy / folder).glob("*.cc"))]
        return [*found, *(self._copy / name for name in ALONE)]

    def program(self) -> Path | None:
        """The program, or None if it does not compile."""
        headers = "".join(
            path.read_text()
            for folder in FOLDERS
            for path in sorted((self._copy / folder).glob("*.h"))
        )
        objects = []
        for source in self._sources():
            target = self._objects / f"{source.parent.name}_{source.stem}.o"
            objects.append(str(target))
            text = source.read_text() + headers
            if self._texts.get(source) == text:
                continue
            command = [*COMPILE, "-c", str(source), "-o", str(target)]
            if subprocess.run(command, cwd=self._copy, check=False).returncode != 0:
                return None
            self._texts[source] = text
        program = self._objects / "agree"
        subprocess.run(["g++", *objects, "-o", str(program), "-lpthread"], check=True)
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
        command = f"{limits} {program} --seeds {first}:{last} --most-failures 0"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            return Found(last, 1, "", f"ended with {done.returncode}")
        told = collections.Counter(dict(re.findall(r"^(\w+): (\d+)$", done.stdout, re.MULTILINE)))
        if told or last >= seeds:
            total = sum(int(each) for each in told.values())
            return Found(last, total, ", ".join(f"{name} {told[name]}" for name in told))
        first, last = last + 1, min(seeds, 8 * last)


def verdict(mutation: Mutation, found: Found | None) -> tuple[str, str]:
    """The row of the table, and the complaint about it: empty if it is as expected."""
    start = f"| {mutation.promise} | {mutation.name} |"
    if found is None:
        return f"{start} does not compile | |", "does not compile"
    row = f"{start} {found.count} of {found.seeds:,} | {found.promises or found.trouble} |"
    if not found.count and mutation.survives:
        return f"{start} 0 of {found.seeds:,} | {mutation.survives} |", ""
    return row, "" if found.count else "no seed notices it"


def try_all(copy: Path, mutations: Sequence[Mutation], seeds: int) -> list[str]:
    wrong = []
    build = Build(copy)
    plain = build.program()
    found = run_seeds(plain, min(seeds, 2000)) if plain else None
    if found is None or found.count:
        return ["violations without a mutation, or it does not compile"]
    for mutation in mutations:
        with mutated.broken(mutated.path_of(copy / SOURCES, mutation), mutation):
            program = build.program()
            found = run_seeds(program, seeds) if program else None
        row, complaint = verdict(mutation, found)
        print(row, flush=True)
        if complaint:
            wrong.append(f"{mutation.name}: {complaint}")
    return wrong


def main() -> int:
    parser = mutated.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100000, help="at most, for each mutation")
    options = parser.parse_args()
    wrong = misplaced(mutated.ROOT)
    if wrong or options.check:
        print("\n".join(wrong) or f"all {len(MUTATIONS)} mutations apply")
        return 1 if wrong else 0
    with tempfile.TemporaryDirectory(prefix="pycomm-mutations-") as scratch:
        copy = options.work or Path(scratch)
        for part in ("csrc/base", *FOLDERS, "csrc/proof/sim", "tests/cpp/proof/programs"):
            mutated.copy_folder(mutated.ROOT / part, copy / part)
        print("| promise | broken rule | seeds that notice it | what they say |\n|---|---|---|---|")
        chosen = mutated.chosen(MUTATIONS, options.only)
        wrong = try_all(copy, chosen, options.seeds)
    print("\n".join([*wrong, f"{len(chosen)} mutations, {len(wrong)} not as expected"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

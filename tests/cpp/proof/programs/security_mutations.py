"""Remove one check of the closed door at a time; a named test must fail.

Each mutation takes a check out of a copy of csrc: of TLS, of the store's seals, of who a process on
this host is. The tests that should notice it run without it, where they must pass, and with it,
where each must fail, die, or not end within the limit. The program fails if that is otherwise, if
a test is skipped, and, before it builds anything, if the text of a mutation no longer stands
exactly once in its file.

A mutation runs tests of one program. Two edits stand here twice, under two names: once for a test
of one connection in transport_test, and once for a test of a group in engine_test.

    python tests/cpp/proof/programs/security_mutations.py --check
    python tests/cpp/proof/programs/security_mutations.py [--work FOLDER] [--only NAME …]

Run it as root: some tests become other users. Prints a table: the tests that failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mutated

SOURCES = Path("csrc")
LIMIT_S = 300  # of one run of tests; without a check some wait for what never comes
PROGRAMS = ("transport", "engine")
"""Folders of tests/cpp whose programs have the tests."""
CONFIGURE = ("-DPYCOMM_PRECOMPILE=OFF", "-DCMAKE_UNITY_BUILD=ON")


HANGS = ("(it hangs)",)


class Mutation(NamedTuple):
    name: str
    file: str  # its name; it lies in a subfolder of csrc
    old: str
    new: str
    tests: str
    """A filter of GoogleTest's without wildcards. Each of them must fail."""
    program: str = "transport"


MUTATIONS = [
    # ---- TLS
    Mutation(
        "a client believes any certificate",
        "tls_context.cc",
        "role == Role::Client ? kVerifyPeer : kVerifyNone",
        "kVerifyNone",
        "TlsLink.AServerWithACertificateAndNoKeyIsRefused",
    ),
    Mutation(
        "a handshake need not use the secret",
        "tls_handshake.cc",
        "ssl_.SSL_session_reused(handle_) != 1 || ",
        "",
        "TlsLink.AHandshakeThatDidNotUseTheKeyIsRefused",
    ),
    Mutation(
        "any cipher will do after a handshake",
        "tls_handshake.cc",
        "ssl_.SSL_CIPHER_get_protocol_id(cipher) != kTlsCipher",
        "false",
        "TlsHandshakeAttacks.AnOpenSslOfOtherRulesGetsNoConnectionOfAnotherKind",
    ),
    Mutation(
        "a server takes a key for another process",
        "tls_handshake.cc",
        "theirs->server != context_->self()",
        "false",
        "TlsLink.AServerTakesItsOwnIdOnlyAndNeverItself",
    ),
    Mutation(
        "a process may connect to itself",
        "tls_handshake.cc",
        "theirs->client == context_->self()",
        "false",
        "TlsLink.AServerTakesItsOwnIdOnlyAndNeverItself",
    ),
    Mutation(
        "one key for all pairs of processes",
        "tls_context.cc",
        '"pycomm 1 psk" + identity.text()',
        '"pycomm 1 psk"',
        "TlsHandshakeAttacks.EachOrderedPairOfProcessesHasAKeyOfItsOwn",
    ),
    Mutation(
        "ciphers that nobody asked for",
        "tls_context.cc",
        '"TLS_AES_128_GCM_SHA256") == 1',
        '"TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") == 1',
        "TlsHandshakeAttacks.AClientWithTheKeyGetsWhatPycommOffersAndNothingElse:"
        "TlsHandshakeAttacks.AnOpenSslOfOtherRulesGetsNoConnectionOfAnotherKind",
    ),
    Mutation(
        "TLS 1.2 as well",
        "tls_context.cc",
        "kCtrlMinVersion, kTlsVersion, nullptr",
        "kCtrlMinVersion, 0x0303, nullptr",
        "TlsHandshakeAttacks.AClientWithTheKeyGetsWhatPycommOffersAndNothingElse:"
        "TlsHandshakeAttacks.AnOpenSslOfOtherRulesGetsNoConnectionOfAnotherKind",
    ),
    Mutation(
        "keys from the secret alone",
        "tls_context.cc",
        "kOptionMiddleboxCompat | kOptionAllowNoDhe | kOptionPreferNoDhe | "
        "kOptionIgnoreEof | kOptionKtls);",
        "kOptionMiddleboxCompat | kOptionIgnoreEof | kOptionKtls);\n"
        "    ssl_.SSL_CTX_set_options(context, kOptionAllowNoDhe | kOptionPreferNoDhe);",
        "TlsHandshakeAttacks.AClientWithTheKeyGetsWhatPycommOffersAndNothingElse:"
        "TlsHandshakeAttacks.AClientOffersNoKeyFromTheSecretAlone",
    ),
    Mutation(
        "early data is passed over",
        "tls_context.cc",
        "SSL_CTX_set_recv_max_early_data(context, 0)",
        "SSL_CTX_set_recv_max_early_data(context, 16384)",
        "TlsHandshakeAttacks.EarlyDataEndsTheHandshake",
    ),
    Mutation(
        "keys age",
        "tls_context.cc",
        "  (void)ssl_.SSL_SESSION_set_timeout(session, kSessionTimeoutS);\n",
        "",
        "TlsLink.KeysDoNotAge",
    ),
    Mutation(
        "a key is never changed",
        "tls_link.cc",
        "if (records_ >= context_->options().records_per_key) {",
        "if (false) {",
        "TlsLink.TheWriterChangesItsKeyAfterSoManyRecords",
    ),
    Mutation(
        "a key is never changed in a group",
        "tls_link.cc",
        "if (records_ >= context_->options().records_per_key) {",
        "if (false) {",
        "GroupSecret.KeysChangeInEveryCollective",
        "engine",
    ),
    Mutation(
        "a handshake that is cut off goes on",
        "tls_bio.cc",
        "under_ended_ = progress.closed;",
        "under_ended_ = false;",
        "TlsHandshakeCut.AHandshakeThatIsCutShortIsNoneAndIsNamed",
    ),
    Mutation(
        "a handshake must come in one piece",
        "tls_handshake.cc",
        "const bool waits = error == kHandshakeWantsRead && ",
        "const bool waits = error == kHandshakeWantsRead && hasAnswered() && ",
        "TlsHandshakeCut.AFirstMessageInSegmentsOfOneByteIsRead",
    ),
    Mutation(
        "a broken record looks like the peer's end",
        "tls_link.cc",
        "ended_ = error == kErrorZeroReturn || bio_.underEnded();",
        "ended_ = true;",
        "TlsLinkAttacks.RecordsThatAreChangedRepeatedSwappedOrLeftOutEndTheLink",
    ),
    Mutation(
        "a pause is the end",
        "tls_bio.cc",
        "retry = given == 0 && !under_ended_;",
        "retry = given == 0 && !under_ended_ && !handshake_done_;",
        "TlsLinkAttacks.ADelayChangesNothing",
    ),
    Mutation(
        "a reading end does not see the other's",
        "tls_link.cc",
        "ended_ = error == kErrorZeroReturn || bio_.underEnded();",
        "ended_ = error == kErrorZeroReturn;",
        "TlsLinkAttacks.ACutBringsABeginningAndNoMore",
    ),
    Mutation(
        "in a group, a broken record looks like the peer's end",
        "tls_link.cc",
        "ended_ = error == kErrorZeroReturn || bio_.underEnded();",
        "ended_ = true;",
        "GroupSecret.AChangedByteEndsTheOperationOnAllRanks",
        "engine",
    ),
    Mutation(
        "the sender of changed bytes names their receiver",
        "tls_link.cc",
        "changed == Changed::Sent ? ErrorRecord::kThisEnd : -1",
        "-1",
        "GroupSecret.AChangedHeartbeatEndsTheGroupAndAllRanksNameItsSender",
        "engine",
    ),
    Mutation(
        "any error of OpenSSL's means changed bytes",
        "tls_link.cc",
        "library != kLibSsl || reason == kUnexpectedEof",
        "false",
        "TlsLink.AnErrorThatIsNotAboutTheBytesIsAReset",
    ),
    # ---- the door
    Mutation(
        "first messages may be repeated",
        "tls_handshake.cc",
        "!context_->seenHellos().add(random)",
        "false",
        "TlsDoor.ARecordedFirstMessageIsAnsweredOnce",
    ),
    Mutation(
        "a process may be any rank",
        "acceptor.cc",
        "config_.processes.at(static_cast<size_t>(hello.rank)) != stranger.tls->peer()",
        "false",
        "AcceptorSecret.ARankIsTakenFromItsOwnProcessOnly",
    ),
    Mutation(
        "a peer may speak plain where there is a secret",
        "acceptor.cc",
        "if (wantsTls() && stranger.tls == nullptr) {",
        "if (false) {",
        "AcceptorSecret.APlainPeerIsToldWhy",
    ),
    Mutation(
        "strangers may stay",
        "acceptor.cc",
        "if (verdict == Verdict::Wait && now - stranger.arrived >= kPatience) {",
        "if (false) {",
        "TlsDoor.AHandshakeThatStopsIsDroppedAfterTwoSeconds",
    ),
    Mutation(
        "a crowd sends ranks away in their handshakes",
        "acceptor.cc",
        "return stranger.tls == nullptr || !stranger.tls->hasAnswered();",
        "return true;",
        "AcceptorSecret.ACrowdOfStrangersSendsNoPeerAwayInItsHandshake",
    ),
    Mutation(
        "places for strangers do not become free for others",
        "acceptor.cc",
        "    dropOldest(now);\n  }\n}",
        "    listen(false);\n    listen_again_ = now + kPatience;\n  }\n}",
        "Admission.AThousandSlowConnectionsDelayAGroupByLessThanASecond",
        "engine",
    ),
    Mutation(
        "the same, where there is a secret",
        "acceptor.cc",
        "    dropOldest(now);\n  }\n}",
        "    if (wantsTls()) {\n      listen(false);\n      listen_again_ = now + kPatience;\n"
        "      return;\n    }\n    dropOldest(now);\n  }\n}",
        "Admission.AThousandSlowConnectionsDelayAGroupByLessThanASecond",
        "engine",
    ),
    # ---- the store
    Mutation(
        "a seal need not be right",
        "seal.cc",
        "if (!equalInConstantTime(macOf(key, value), mac)) {",
        "if (false) {",
        "SealedStore.TellsAMissingSealAnotherSecretAndAForgeryApart",
    ),
    Mutation(
        "a seal is good under any key",
        "seal.cc",
        "  putSized(text, key);\n",
        "",
        "SealedStore.AValueCountsUnderItsOwnKeyOnly",
    ),
    Mutation(
        "a value without a seal is read",
        "seal.cc",
        "  if (key_id.empty()) {\n    throw badSeal(",
        "  if (key_id.empty()) {\n    return text;\n    throw badSeal(",
        "SealedStore.TellsAMissingSealAnotherSecretAndAForgeryApart",
    ),
    Mutation(
        "a list need not have one's own record",
        "store_round.cc",
        "if ((*all)[static_cast<size_t>(rank)] != texts[static_cast<size_t>(rank)]) {",
        "if (false) {",
        "SealedRendezvous.ARecordRolledBackIsNoticedByItsRank:"
        "SealedRendezvous.TheStoreOfAWholeOldJobIsNeverTakenForThisOne",
    ),
    Mutation(
        "rounds are not bound to the list of ranks",
        "rendezvous.cc",
        'return transcript.empty() ? "" : transcript + "/";',
        'return transcript.empty() ? "" : "";',
        "SealedRendezvous.ARoundAfterTheFirstIsBoundToTheJob:"
        "SealedRendezvous.AWholeOldJobCannotBeReplayed",
    ),
    Mutation(
        "a counter elects who may report an error",
        "store_round.cc",
        "    if (!store.sealed()) {\n      const bool is_first",
        "    if (true) {\n      const bool is_first",
        "SealedRendezvous.APushedErrorCounterKeepsNoErrorBack",
    ),
    # ---- this host
    Mutation(
        "any user is this one",
        "same_user.cc",
        " && peer.uid == ::geteuid() &&\n      canTellOwnUser();",
        " &&\n      canTellOwnUser();",
        "SameUser.IsTheOneOfTheProcessAndNoOther",
    ),
    Mutation(
        "unmapped users of a namespace are this one",
        "same_user.cc",
        " && peer.uid == ::geteuid() &&\n      canTellOwnUser();",
        " && peer.uid == ::geteuid();",
        "SameUser.IsNobodyForWhoRunsAsTheOverflowUserOfANamespace",
    ),
    Mutation(
        "other users connect to a rank's socket",
        "listener.cc",
        "if (fd && address_.isUnix() && !sameUser(fd.get())) {",
        "if (false) {",
        "UnixDoor.ACrowdOfAnotherUserIsDroppedAndAPeerGetsIn",
    ),
    Mutation(
        "other users are greeted",
        "host_mates.cc",
        "if (!sameUser(socket.get())) {",
        "if (false) {",
        "HostMates.AnotherUserIsSentNothing",
        "engine",
    ),
    Mutation(
        "memory is given for any key",
        "memory_offers.h",
        "found = offered == key ? &memory : found;",
        "found = &memory;\n      static_cast<void>(offered == key);",
        "HostMates.GivesMemoryForItsKeyOnly",
        "engine",
    ),
    Mutation(
        "half of a memory key is enough",
        "memory_key.h",
        "((high ^ other.high) | (low ^ other.low)) == 0",
        "(low ^ other.low) == 0",
        "HostMates.GivesMemoryForItsKeyOnly",
        "engine",
    ),
    Mutation(
        "a short question is taken for one with half of a key",
        "host_mates.cc",
        "if (got != static_cast<ssize_t>(sizeof ask) || ask.magic != Ask::kMagic) {",
        "if (got <= 0 || ask.magic != Ask::kMagic) {",
        "HostMates.HangsUpOnAQuestionOfAnotherLength",
        "engine",
    ),
    Mutation(
        "the key of memory is the nonce in the store",
        "security.cc",
        '  derive("pycomm 1 memory", roster.identity.memory_key);\n',
        "",
        "GroupSecret.TheKeyOfSharedMemoryNeedsTheSecret:"
        "GroupUnixSockets.WithASecretTheirNonceIsNotInTheStore",
        "engine",
    ),
    Mutation(
        "the key of memory is the same in each job",
        "security.cc",
        "secret->derive(purpose + transcript)",
        "secret->derive(purpose)",
        "GroupSecret.TheKeyOfSharedMemoryNeedsTheSecret",
        "engine",
    ),
    Mutation(
        "a message may have any name",
        "messages.cc",
        " || !names_.isNameOf(from, to, name)) {",
        ") {",
        "HostileMessages.TheNameOfACollectiveIsRefused",
        "engine",
    ),
    Mutation(
        "a rank may name messages of another one",
        "messages.cc",
        "header.root != from || ",
        "header.root == from && ",
        "HostileMessages.TheNameOfAnotherRanksMessageIsRefused",
        "engine",
    ),
    Mutation(
        "a frame of any rank announces a message",
        "roll_call.h",
        "return unexpected_.has(op_id, peer);",
        "return unexpected_.has(op_id);",
        "HostileMessages.ACollectiveThatHasTheNameOfAMessageDoesNotHoldItUp",
        "engine",
    ),
    Mutation(
        "an answer announces a message",
        "messages.cc",
        "header.type == FrameType::Waiting && header.aux == 0; // else it answers",
        "header.type == FrameType::Waiting;",
        "HostileMessages.AnAnswerAnnouncesNothing",
        "engine",
    ),
    Mutation(
        "a message that has ended is announced again",
        "messages.cc",
        " || protocol_.hasEnded(header.op_id)",
        "",
        "HostileMessages.OneThatHasEndedIsNotAnnouncedAgain",
        "engine",
    ),
    Mutation(
        "the nonce of Unix sockets is in the store",
        "security.cc",
        '  derive("pycomm 1 unix", roster.identity.unix_nonce);\n',
        "",
        "GroupUnixSockets.WithASecretTheirNonceIsNotInTheStore",
        "engine",
    ),
]


def misplaced(tree: Path) -> list[str]:
    """Mutations that do not apply to this tree, and tests that it does not have, in words."""
    found = mutated.misplaced(tree, SOURCES, MUTATIONS)
    there = {program: "".join(map(Path.read_text, tests_of(tree, program))) for program in PROGRAMS}
    for mutation in MUTATIONS:
        for test in mutation.tests.split(":"):
            suite, _, name = test.partition(".")
            if f"({suite}, {name})" not in there[mutation.program]:
                found.append(f"{mutation.name}: there is no test {test}")
    return found


def tests_of(tree: Path, program: str) -> list[Path]:
    return sorted((tree / "tests" / "cpp" / program).rglob("*_test.cc"))


def keep_only_wanted_tests(copy: Path) -> None:
    """Compiling the others would take most of the time."""
    for program in PROGRAMS:
        names = [each.tests for each in MUTATIONS if each.program == program]
        suites = {test.partition(".")[0] for tests in names for test in tests.split(":")}
        for path in tests_of(copy, program):
            if not any(f"({suite}, " in path.read_text() for suite in suites):
                path.unlink()


class Ran(NamedTuple):
    """What the tests of one filter said."""

    passed: int
    failed: tuple[str, ...]
    trouble: str = ""
    """Why nothing can be concluded from it."""


def run_tests(program: Path, tests: str) -> Ran:
    command = [str(program), f"--gtest_filter={tests}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Ran(0, HANGS)
    return judged(done.returncode, done.stdout)


def judged(code: int, output: str) -> Ran:
    of_each = re.findall(
        r"^\[ +(OK|FAILED|SKIPPED) +\] (\S+?),? .*\(\d+ ms\)$", output, re.MULTILINE
    )
    failed = tuple(name for how, name in of_each if how == "FAILED")
    skipped = [name for how, name in of_each if how == "SKIPPED"]
    if code not in (0, 1) and not failed:
        running = re.findall(r"^\[ RUN +\] (\S+)$", output, re.MULTILINE)
        return Ran(0, (f"{running[-1]} (died with {code})",)) if running else Ran(0, (), "died")
    if skipped:
        return Ran(0, failed, f"skipped: {', '.join(skipped)}")
    return Ran(len(of_each) - len(failed), failed, "" if of_each else "no test ran")


def verdict(mutation: Mutation, without: Ran, broken: Ran | None) -> tuple[str, str]:
    """The row of the table, and the complaint about it: empty if it is as expected."""
    if broken is None:
        return f"| {mutation.name} | does not compile |", "does not compile"
    row = f"| {mutation.name} | {', '.join(broken.failed)} |"
    if without.failed or without.trouble:
        return row, f"without it: {without.trouble or 'failed: ' + ', '.join(without.failed)}"
    if broken.trouble:
        return row, broken.trouble
    blind = set(mutation.tests.split(":")) - {name.partition(" ")[0] for name in broken.failed}
    if broken.failed == HANGS:
        blind = set()
    return row, f"{', '.join(sorted(blind))} does not notice it" if blind else ""


def try_all(copy: Path, folder: Path, mutations: Sequence[Mutation]) -> list[str]:
    """Print the table's rows; return the complaints."""
    wrong = []
    unbroken = {}
    for name in sorted({mutation.program for mutation in mutations}):
        program = mutated.build(copy, folder, f"{name}_test", CONFIGURE)
        if program is None:
            return [f"{name}_test does not compile without a mutation"]
        for tests in {each.tests for each in mutations if each.program == name}:
            unbroken[name, tests] = run_tests(program, tests)
    for mutation in sorted(mutations, key=lambda each: each.program):
        with mutated.broken(mutated.path_of(copy / SOURCES, mutation), mutation):
            program = mutated.build(copy, folder, f"{mutation.program}_test", CONFIGURE)
        ran = run_tests(program, mutation.tests) if program else None
        row, complaint = verdict(mutation, unbroken[mutation.program, mutation.tests], ran)
        print(row, flush=True)
        if complaint:
            wrong.append(f"{mutation.name}: {complaint}")
    return wrong


def main() -> int:
    options = mutated.parsed(mutated.parser((__doc__ or "").splitlines()[0]))
    wrong = misplaced(mutated.ROOT)
    if wrong or options.check:
        print("\n".join(wrong) or f"all {len(MUTATIONS)} mutations apply")
        return 1 if wrong else 0
    with tempfile.TemporaryDirectory(prefix="pycomm-mutations-") as scratch:
        copy = options.work or Path(scratch)
        mutated.copy_sources(copy)
        keep_only_wanted_tests(copy)
        print("| check that is left out | tests that fail |\n|---|---|", flush=True)
        chosen = mutated.chosen(MUTATIONS, options.only, options.share)
        wrong = try_all(copy, copy / "build" / "cpp-plain", chosen)
    print("\n".join([*wrong, f"{len(chosen)} mutations, {len(wrong)} not as expected"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

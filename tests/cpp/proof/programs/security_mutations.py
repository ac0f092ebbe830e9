"""Remove one check of what a listener lets in at a time; a named test must fail.

Each mutation takes a check out of a copy of csrc: of TLS, of the store's seals, of who a process on
this host is. See mutated_tests.py for what is expected of each. Two edits stand here twice, under
two names: once for a test of one connection in transport_test, and once for a test of a group in
engine_test.

    python tests/cpp/proof/programs/security_mutations.py --check
    python tests/cpp/proof/programs/security_mutations.py [--work FOLDER] [--only NAME …]

Run it as root: some tests become other users.
"""

from __future__ import annotations

import sys

import mutated_tests
from mutated_tests import Mutation

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
        "tls_link.cc",
        "ssl_.SSL_session_reused(handle_) != 1 || ",
        "",
        "TlsLink.AHandshakeThatDidNotUseTheKeyIsRefused",
    ),
    Mutation(
        "any cipher will do after a handshake",
        "tls_link.cc",
        "ssl_.SSL_CIPHER_get_protocol_id(cipher) != kTlsCipher",
        "false",
        "TlsHandshakeAttacks.AnOpenSslOfOtherRulesGetsNoConnectionOfAnotherKind",
    ),
    Mutation(
        "a server takes a key for another process",
        "tls_link.cc",
        "theirs->server != context_->self()",
        "false",
        "TlsLink.AServerTakesItsOwnIdOnlyAndNeverItself",
    ),
    Mutation(
        "a process may connect to itself",
        "tls_link.cc",
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
        "tls_link.cc",
        "const bool waits = error == kErrorWantRead && ",
        "const bool waits = error == kErrorWantRead && hasAnswered() && ",
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
    # ---- the endpoint
    Mutation(
        "first messages may be repeated",
        "tls_link.cc",
        "!context_->seenHellos().add(random)",
        "false",
        "TlsEndpoint.ARecordedFirstMessageIsAnsweredOnce",
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
        "if (verdict == Verdict::Wait && now - stranger.arrived >= kStrangerWithin) {",
        "if (false) {",
        "TlsEndpoint.AHandshakeThatStopsIsDroppedAfterTwoSeconds",
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
        "    listen(false);\n    listen_again_ = now + kStrangerWithin;\n  }\n}",
        "Admission.AThousandSlowConnectionsDelayAGroupByLessThanASecond",
        "engine",
    ),
    Mutation(
        "the same, where there is a secret",
        "acceptor.cc",
        "    dropOldest(now);\n  }\n}",
        "    if (wantsTls()) {\n      listen(false);\n"
        "      listen_again_ = now + kStrangerWithin;\n      return;\n    }\n"
        "    dropOldest(now);\n  }\n}",
        "Admission.AThousandSlowConnectionsDelayAGroupByLessThanASecond",
        "engine",
    ),
    # ---- the store
    Mutation(
        "a seal need not be right",
        "sealed_store.cc",
        "if (!equalInConstantTime(macOf(key, value), mac)) {",
        "if (false) {",
        "SealedStore.TellsAMissingSealAnotherSecretAndAForgeryApart",
    ),
    Mutation(
        "a seal is good under any key",
        "sealed_store.cc",
        "  putSized(text, key);\n",
        "",
        "SealedStore.AValueCountsUnderItsOwnKeyOnly",
    ),
    Mutation(
        "a value without a seal is read",
        "sealed_store.cc",
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
        "unix_peer.cc",
        " && peer.uid == ::geteuid() &&\n      canTellOwnUser();",
        " &&\n      canTellOwnUser();",
        "SameUser.IsTheOneOfTheProcessAndNoOther",
    ),
    Mutation(
        "unmapped users of a namespace are this one",
        "unix_peer.cc",
        " && peer.uid == ::geteuid() &&\n      canTellOwnUser();",
        " && peer.uid == ::geteuid();",
        "SameUser.IsNobodyForWhoRunsAsTheOverflowUserOfANamespace",
    ),
    Mutation(
        "other users connect to a rank's socket",
        "listener.cc",
        "if (fd && address_.isUnix() && !sameUser(fd.get())) {",
        "if (false) {",
        "UnixEndpoint.ACrowdOfAnotherUserIsDroppedAndAPeerGetsIn",
    ),
    Mutation(
        "other users are greeted",
        "local_peers.cc",
        "if (!sameUser(socket.get())) {",
        "if (false) {",
        "LocalPeers.AnotherUserIsSentNothing",
        "engine",
    ),
    Mutation(
        "memory is given for any key",
        "local_peers.h",
        "found = offered == key ? &memory : found;",
        "found = &memory;\n      static_cast<void>(offered == key);",
        "LocalPeers.GivesMemoryForItsKeyOnly",
        "engine",
    ),
    Mutation(
        "half of a memory key is enough",
        "memory_key.h",
        "((high ^ other.high) | (low ^ other.low)) == 0",
        "(low ^ other.low) == 0",
        "LocalPeers.GivesMemoryForItsKeyOnly",
        "engine",
    ),
    Mutation(
        "a short question is taken for one with half of a key",
        "local_peers.cc",
        "if (got != static_cast<ssize_t>(sizeof ask) || ask.magic != Ask::kMagic) {",
        "if (got <= 0 || ask.magic != Ask::kMagic) {",
        "LocalPeers.HangsUpOnAQuestionOfAnotherLength",
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
        "matching.cc",
        "(unexpected != nullptr && unexpected->peers.count(peer) != 0)",
        "(unexpected != nullptr && peer >= 0)",
        "HostileMessages.ACollectiveThatHasTheNameOfAMessageDoesNotHoldItUp",
        "engine",
    ),
    Mutation(
        "an answer announces a message",
        "messages.cc",
        "header.type == FrameType::Waiting && !waiting::answers(header);",
        "header.type == FrameType::Waiting;",
        "HostileMessages.AnAnswerAnnouncesNothing",
        "engine",
    ),
    Mutation(
        "a message that has ended is announced again",
        "messages.cc",
        " || matching::hasEnded(tables_, header.op_id)",
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

if __name__ == "__main__":
    sys.exit(mutated_tests.main(__doc__ or "", MUTATIONS))

#include "engine/report/failure_text.h"

#include <algorithm>
#include <chrono>
#include <new>

namespace pycomm {
namespace {

int64_t elapsedMs(const Operation& operation) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - operation.issuedAt()).count();
}

/// `what` knows no ranks, as of a link: with them, as this rank sees it.
ErrorRecord seenHere(const ErrorRecord& what, int peer, const GroupIdentity& identity) {
  ErrorRecord record = what;
  identity.sign(record);
  identity.blame(record, peer);
  return record;
}

ErrorRecord about(const Operation& operation, int peer, const GroupIdentity& identity) {
  ErrorRecord record = seenHere({}, peer, identity);
  const Descriptor& descriptor = operation.request().descriptor;
  record.op = operation.name();
  record.sequence = operation.request().id.sequence;
  record.dtype = dtypeName(descriptor.dtype);
  record.numel = descriptor.numel;
  record.elapsed_ms = elapsedMs(operation);
  return record;
}

} // namespace

ErrorRecord withNeed(ErrorRecord record, const GroupIdentity& identity) {
  if (record.rank < 0) { // else the other ranks' rendezvous has it from there
    record.rank = identity.jobRank();
    record.host = localHostName();
  }
  record.peer = record.rank;
  record.peer_host = record.host;
  record.group = identity.called();
  record.group_ranks = identity.job.list();
  if (record.code == ErrorCode::TooManyFiles) {
    // With every other rank a link each way, a control link with about 2 log2 of them, and what a group has once.
    record.summary += "; a group of " + std::to_string(identity.size) + " ranks takes up to " +
        std::to_string(3 * (identity.size - 1) + 8);
  }
  return record;
}

ErrorRecord cannotAccept(const ErrorRecord& trouble, const GroupIdentity& identity) {
  ErrorRecord record = withNeed(trouble, identity);
  record.phase = ErrorPhase::Connect;
  record.summary = "Rank " + std::to_string(identity.jobRank()) + " on " + record.host +
      " cannot take the connections of other ranks: " + record.summary;
  return record;
}

namespace {

// Where a peer connects to this rank; empty: by this rank's Unix socket.
SocketAddress addressFor(int peer, const GroupIdentity& identity) {
  const bool by_unix = !identity.unix_sockets[static_cast<size_t>(peer)].empty();
  return by_unix ? SocketAddress() : identity.addresses[static_cast<size_t>(identity.rank)];
}

std::string slowLine(int64_t waited_s, const GroupIdentity& identity) {
  return identity.text() + ": " + identity.rankText(identity.rank) + " has waited " + std::to_string(waited_s) +
      " s for ";
}

constexpr const char* kTryDoctor = "a firewall may block that port. Try on each host: python -m pycomm doctor";

} // namespace

std::string stillConnecting(
    int peer,
    const SocketAddress& remote,
    int64_t waited_s,
    const std::string& trouble,
    const GroupIdentity& identity) {
  return slowLine(waited_s, identity) + "its connection to " + identity.rankText(peer) + " at " + remote.text() +
      (trouble.empty() ? "" : " (" + trouble + ")") +
      (remote.isUnix() ? ": does that process still run?" : std::string(": ") + kTryDoctor);
}

std::string stillUnconnected(const std::vector<int>& missing, int64_t waited_s, const GroupIdentity& identity) {
  // The first that comes by TCP, if there is one: a firewall stops nobody at a Unix socket.
  const auto by_tcp =
      std::find_if(missing.begin(), missing.end(), [&](int each) { return !addressFor(each, identity).empty(); });
  const int peer = by_tcp == missing.end() ? missing.front() : *by_tcp;
  const SocketAddress here = addressFor(peer, identity);
  const size_t others = missing.size() - 1;
  return slowLine(waited_s, identity) + identity.rankText(peer) +
      (others == 0 ? "" : " and " + std::to_string(others) + " more") + " to connect to " +
      (here.empty() ? "its Unix socket: do those processes still run?" : here.text() + ": " + kTryDoctor);
}

ErrorRecord neverConnected(int peer, const GroupIdentity& identity) {
  ErrorRecord record;
  record.code = ErrorCode::ConnectFailed;
  identity.sign(record);
  identity.blame(record, peer);
  record.phase = ErrorPhase::Connect;
  const SocketAddress here = addressFor(peer, identity);
  record.summary = identity.rankTitle(peer) + " met us in the store but never connected to " +
      (here.empty() ? "our Unix socket" : here.text()) + ".";
  record.hint = here.empty()
      ? "look into that rank's log: it has ended, or is stopped"
      : "a firewall may block that port (python -m pycomm doctor finds it): open a range and set PYCOMM_PORT_RANGE to "
        "it, or choose another interface with PYCOMM_SOCKET_IFNAME";
  return record;
}

ErrorRecord errorOf(const ErrorRecord& cause, const GroupIdentity& identity) {
  ErrorRecord record = cause;
  if (cause.rank >= 0 && cause.rank != identity.jobRank()) {
    record.cause += (record.cause.empty() ? "" : ", ") + std::string("reported by rank ") + std::to_string(cause.rank);
  }
  const std::string sends = collectiveName(Collective::Send);
  const std::string receives = collectiveName(Collective::Recv);
  const bool other_end = cause.peer == identity.jobRank() && cause.rank != cause.peer;
  if (cause.code == ErrorCode::CollectiveMismatch && other_end && (cause.op == sends || cause.op == receives)) {
    record.op = cause.op == sends ? receives : sends; // a message is called by its end
  }
  identity.sign(record);
  if (record.peer_host.empty()) {
    record.peer_host = identity.host(identity.job.inGroup(record.peer));
  }
  return record;
}

ErrorRecord errorOf(const Operation& operation, const ErrorRecord& cause, const GroupIdentity& identity) {
  ErrorRecord record = errorOf(cause, identity);
  const ErrorRecord local = about(operation, -1, identity);
  record.elapsed_ms = local.elapsed_ms;
  if (cause.op.empty()) { // otherwise it names the operation that the ranks disagree about, or that timed out
    record.op = local.op;
    record.sequence = local.sequence;
    record.dtype = local.dtype;
    record.numel = local.numel;
  }
  return record;
}

namespace {

// Names the part of this rank that an operation waits for if it waits for no other rank.
std::string ownPart(const Operation& operation) {
  return operation.request().descriptor.algorithm == Algorithm::Nccl ? "NCCL, or its stream" : "its own memory";
}

} // namespace

ErrorRecord timedOut(
    const Operation& operation,
    int64_t bytes_done,
    int64_t bytes_total,
    int waits_for,
    const std::optional<NotEntered>& missing,
    const GroupIdentity& identity) {
  const int peer = missing ? missing->peer : waits_for;
  ErrorRecord record = about(operation, peer, identity);
  record.code = ErrorCode::Timeout;
  record.bytes_done = bytes_done;
  record.bytes_total = bytes_total;
  record.summary = operation.label(identity.job) + " timed out after " + std::to_string(record.elapsed_ms) + " ms: ";
  if (missing) {
    record.phase = ErrorPhase::NotEntered;
    record.summary += identity.rankText(missing->peer) + " has not entered it (its last: " + missing->last + ").";
    record.hint =
        "find out why that rank is late (uneven data? a slow loader? an exception?), or set a longer timeout for the group";
  } else {
    record.phase = ErrorPhase::Transfer;
    record.summary += "it waits for " + (peer >= 0 ? identity.rankText(peer) : ownPart(operation)) + ".";
    record.hint = "raise the timeout if the network is only slow";
  }
  return record;
}

ErrorRecord inputLate(const Operation& operation, int64_t bytes_total, const GroupIdentity& identity) {
  ErrorRecord record = about(operation, identity.rank, identity);
  record.code = ErrorCode::Timeout;
  record.phase = ErrorPhase::CopyToHost;
  record.bytes_total = bytes_total;
  record.summary = operation.label(identity.job) + " timed out after " + std::to_string(record.elapsed_ms) +
      " ms: the tensor of " + identity.rankText(identity.rank) + " has not left its device.";
  record.hint =
      "see what that rank's stream has to do before it (a kernel that never ends? an event that nobody records?)";
  return record;
}

bool isOwnTrouble(ErrorCode code) noexcept {
  return code == ErrorCode::OutOfMemory || code == ErrorCode::TooManyFiles || code == ErrorCode::SystemError ||
      code == ErrorCode::Internal || code == ErrorCode::NoSharedMemory;
}

ErrorRecord recordOfThrown(const std::exception_ptr& exception, const GroupIdentity& identity) {
  const std::string who = identity.rankTitle(identity.rank);
  ErrorRecord record;
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    record = error.record();
    if (isOwnTrouble(record.code)) { // other ranks read it, too
      record.summary = who + " cannot go on: " + record.summary;
    }
  } catch (const std::bad_alloc&) {
    record.code = ErrorCode::OutOfMemory;
    record.summary = who + " has no memory left.";
    record.hint = "use a smaller batch, or fewer operations at once";
  } catch (const std::exception& error) {
    record.summary = "A native thread caught an unexpected exception.";
    record.cause = error.what();
  }
  if (record.code == ErrorCode::TooManyFiles || record.code == ErrorCode::OutOfMemory) {
    return withNeed(std::move(record), identity);
  }
  if (isOwnTrouble(record.code)) {
    identity.blame(record, identity.rank);
  }
  if (record.peer_host.empty()) {
    record.peer_host = identity.host(identity.job.inGroup(record.peer));
  }
  identity.sign(record);
  return record;
}

ErrorRecord unmatched(const Operation& operation, const GroupIdentity& identity) {
  const int peer = operation.request().peer;
  ErrorRecord record = about(operation, peer, identity);
  record.code = ErrorCode::Timeout;
  record.phase = ErrorPhase::Matching;
  record.summary = operation.label(identity.job) + " timed out after " + std::to_string(record.elapsed_ms) +
      " ms without a message: ";
  if (peer < 0) {
    record.summary += "no rank has sent under that tag.";
    record.hint = "find out why no rank sends (another tag? a rank that is late?), or raise the timeout";
  } else {
    record.summary += "an earlier receive from any rank under that tag still waits, and would get the message first.";
    record.hint = "use tags of their own for receives from any rank";
  }
  return record;
}

ErrorRecord changedOnTheWay(int peer, const ErrorRecord& what, const GroupIdentity& identity) {
  const bool was_sent_here = what.peer == ErrorRecord::kThisEnd;
  const int sender = was_sent_here ? identity.rank : peer;
  ErrorRecord record = seenHere(what, sender, identity);
  record.summary = "Bytes from " + identity.rankText(sender) + " to " +
      identity.rankText(was_sent_here ? peer : identity.rank) +
      " were changed, dropped, repeated or inserted on their way.";
  record.cause = what.summary + (what.cause.empty() ? "" : ": " + what.cause);
  record.hint =
      "start the job again; if it comes back, look for what changes packets between the two hosts: a proxy, a router, a "
      "network card, or somebody on purpose";
  return record;
}

ErrorRecord peerGone(int peer, const ErrorRecord& what, const GroupIdentity& identity) {
  if (what.code == ErrorCode::DataCorrupt) {
    return changedOnTheWay(peer, what, identity);
  }
  ErrorRecord record = seenHere(what, peer, identity);
  if (what.code == ErrorCode::ConnectFailed) { // says already which addresses, and why
    record.summary = identity.rankTitle(peer) + " cannot be reached: " + what.summary;
    if (record.summary.back() != '.') {
      record.summary += '.';
    }
    if (record.hint.empty()) {
      record.hint =
          "check the cable, interface and addresses of both hosts (python -m pycomm doctor does), and that the rank "
          "still runs";
    }
    return record;
  }
  record.code = ErrorCode::PeerDead;
  record.summary = identity.rankTitle(peer) +
      " is gone: its connection ended without a goodbye (its process ended, was killed, or its host went down).";
  record.hint = kWhyItEnded;
  return record;
}

ErrorRecord linkLost(int peer, const ErrorRecord& what, const GroupIdentity& identity) {
  ErrorRecord record = peerGone(peer, what, identity);
  record.code = ErrorCode::ConnectionReset;
  record.summary = "A connection to " + identity.rankText(peer) +
      " broke although that rank is still there: what was on its way is lost.";
  record.hint = "look for what resets connections between these hosts: a firewall, a proxy, or an address used twice";
  return record;
}

ErrorRecord refusedBy(int peer, const ErrorRecord& what, const GroupIdentity& identity) {
  if (what.code == ErrorCode::DataCorrupt) {
    return changedOnTheWay(peer, what, identity);
  }
  ErrorRecord record = what;
  if (what.code == ErrorCode::ConfigMismatch || what.code == ErrorCode::VersionMismatch ||
      what.code == ErrorCode::ProtocolViolation) {
    identity.blame(record, peer);
    record.summary = identity.rankTitle(peer) + " cannot be reached: " + what.summary;
  }
  return record;
}

ErrorRecord peerLeftUs(int peer, const Operation& operation, const GroupIdentity& identity) {
  ErrorRecord record = about(operation, peer, identity);
  record.code = ErrorCode::PeerLeft;
  record.summary = identity.rankTitle(peer) + " closed its process group while " + operation.label(identity.job) +
      " still needs it.";
  record.hint =
      "that rank ran fewer steps than the others, or left early after an error of its own; with uneven data use "
      "torch DDP with join(), or give every rank the same number of batches";
  return record;
}

ErrorRecord leftInTheMiddle(const Operation& operation, const GroupIdentity& identity) {
  ErrorRecord record = about(operation, identity.rank, identity);
  record.code = ErrorCode::PeerLeft;
  record.summary = identity.rankTitle(identity.rank) + " closed its process group while its own " +
      operation.label(identity.job) + " was under way.";
  record.hint =
      "wait for every operation before destroy_process_group(); if that rank failed, its log has the first error";
  return record;
}

ErrorRecord failedBeside(const ErrorRecord& failure, const GroupIdentity& identity) {
  ErrorRecord why;
  why.code = failure.code;
  identity.sign(why);
  why.summary = GroupIdentity::text(failure.group, failure.group_ranks) + " had failed: " + failure.summary;
  why.hint = "see why that other group failed" + (failure.hint.empty() ? "" : ": " + failure.hint);
  return why;
}

ErrorRecord leftBecause(ErrorRecord left, const ErrorRecord& why) {
  if (!left.summary.empty() && left.summary.back() == '.') {
    left.summary.pop_back();
  }
  left.summary += ", after " + why.summary + (!why.summary.empty() && why.summary.back() == '.' ? "" : ".");
  left.hint = why.hint;
  return left;
}

} // namespace pycomm

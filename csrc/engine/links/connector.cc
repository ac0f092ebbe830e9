#include "engine/links/connector.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/slow_wait.h"
#include "engine/report/failure_text.h"
#include "transport/net/greeted_link.h"

namespace pycomm {

std::unique_ptr<Link> Connector::startBulk(int peer) const {
  const GroupIdentity::Endpoints ends = identity_.endpoints(peer);
  return std::make_unique<GreetedLink>(
      ends.local, ends.remote, identity_.hello(LinkPurpose::Bulk, ends), identity_.tlsTo(peer, ends));
}

std::unique_ptr<Link> Connector::startBell(int peer) const {
  const GroupIdentity::Endpoints ends = identity_.endpoints(peer);
  Hello hello = identity_.hello(LinkPurpose::Bulk, ends);
  hello.shared = true;
  return std::make_unique<GreetedLink>(ends.local, ends.remote, hello, identity_.tlsTo(peer, ends));
}

// A connection that the peer drops before its reply says nothing about that peer.
std::unique_ptr<Link> Connector::openControl(
    int peer,
    Deadline deadline,
    const AbortToken& abort,
    const std::function<void()>& look) const {
  const GroupIdentity::Endpoints ends = identity_.endpoints(peer);
  std::unique_ptr<GreetedLink> link;
  bool dropped = false;
  SlowWait slow(Clock::now());
  for (;;) {
    const Deadline patience = Deadline::at(std::min(deadline.instant(), Deadline::after(kOneTryMs).instant()));
    ErrorRecord trouble;
    trouble.code = ErrorCode::ConnectFailed;
    bool final = deadline.expired();
    bool gone =
        false; // it listened and does not now: its process has ended, or it has closed the group and may have said why
    try {
      if (link == nullptr) {
        link = std::make_unique<GreetedLink>(
            connectSocket(ends.local, ends.remote, patience, abort),
            ends.local,
            ends.remote,
            identity_.hello(LinkPurpose::Control, ends),
            identity_.tlsTo(peer, ends));
      }
      if (waitConnected(*link, patience, abort)) {
        return link;
      }
      trouble.summary = "it has not replied on " + link->describe() + " and dropped " + std::to_string(link->drops()) +
          " connections" + (link->lastDrop().empty() ? "" : ", the last one because " + link->lastDrop());
    } catch (const Error& error) {
      abort.throwIfAborted(); // its reason may be what was caught, and that has its own culprit
      trouble = error.record();
      if (trouble.code != ErrorCode::ConnectFailed) {
        throw Error(refusedBy(peer, trouble, identity_));
      }
      // A rank listens before it publishes its address.
      const bool refused = trouble.cause.rfind("ECONNREFUSED", 0) == 0;
      gone = link != nullptr && refused;
      // No time would help; or the peer has not listened for some seconds.
      final = final || gone || (link == nullptr && (!patience.expired() || dropped || refused));
      dropped = dropped || link != nullptr;
      link.reset();
    }
    look(); // there may be nobody to connect to any more
    if (const auto waited_s = slow.due(Clock::now()); waited_s && !final) {
      log(LogLevel::Warn,
          stillConnecting(
              peer, ends.remote, *waited_s, trouble.cause.empty() ? trouble.summary : trouble.cause, identity_));
    }
    if (final) {
      // A peer that accepts nobody because it lacks files says so at its own deadline, which is about the same.
      for (const Deadline end = Deadline::after(kNearlyDoneMs); (gone || link != nullptr) && !end.expired();) {
        pauseFor(kShortPauseMs, end, abort);
        look();
      }
      if (gone) {
        trouble.code = ErrorCode::ConnectionReset;
      }
      ErrorRecord record = peerGone(peer, trouble, identity_); // adds who and where
      if (gone) {
        record.hint =
            "look for the first error in that rank's log: it has ended, or closed its group while others still joined";
        record.hint +=
            ends.remote.isUnix() ? "" : "; if it still runs, see whether a firewall resets connections to its port";
      }
      throw Error(record);
    }
  }
}

} // namespace pycomm

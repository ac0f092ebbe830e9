#include "engine/data/reporter.h"

#include <string>

#include "engine/report/failure_text.h"

namespace pycomm {

void Reporter::noticeThrown(int peer, const std::exception_ptr& exception) const {
  ErrorRecord record = ownTrouble(exception, identity_);
  if (peer >= 0 && !isOwnTrouble(record.code)) {
    record.peer = peer;
    record.peer_host = identity_.host(peer);
    if (record.summary.empty()) { // of a shared link, which knows of no ranks
      record.summary = "Rank " + std::to_string(peer) + " on " + record.peer_host +
          " has broken the memory through which it talks with rank " + std::to_string(identity_.rank) + ".";
    }
  }
  notice(std::move(record));
}

} // namespace pycomm

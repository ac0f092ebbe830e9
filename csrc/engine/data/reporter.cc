#include "engine/data/reporter.h"

#include <string>

#include "engine/report/failure_text.h"

namespace pycomm {

void Reporter::noticeThrown(int peer, const std::exception_ptr& exception) const {
  ErrorRecord record = ownTrouble(exception, identity_);
  if (peer >= 0 && !isOwnTrouble(record.code)) {
    identity_.blame(record, peer);
    if (record.summary.empty()) { // of a shared link, which knows of no ranks
      record.summary = identity_.rankTitle(peer) + " has broken the memory through which it talks with " +
          identity_.job.text(identity_.rank) + ".";
    }
  }
  notice(std::move(record));
}

} // namespace pycomm

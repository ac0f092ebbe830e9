#pragma once

#include <string>

#include "base/error.h"
#include "base/job_ranks.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// The ranks that shall read why a generation of their group failed. If the store ends with a process, that process waits for them.
struct FailureReaders {
  Store& store;
  const std::string& prefix; ///< prefix of the generation's keys
  int rank = -1;
  int size = 0;
  const JobRanks& job;

  /// This rank knows the reason. If it `serves_store`, waits until the others know it too, at most 2 s. Ranks that had not come
  /// when the deadline passed, or when the job was aborted, are not waited for. Ignores a store that fails.
  void acknowledge(const ErrorRecord& record, bool serves_store) const noexcept;
};

} // namespace pycomm

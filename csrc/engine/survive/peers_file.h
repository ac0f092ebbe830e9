#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "transport/rendezvous/member_handle.h"

namespace pycomm {

/// The file by which processes find the members of an elastic training. A disk may take seconds, or for ever, so a thread writes it that
/// lives for as long as there is something to write, and nobody waits for that one. Any thread.
class PeersFile final {
 public:
  /// `writer` makes names of drafts unique.
  PeersFile(std::string path, const ProcessId& writer);
  /// close(), without a wait. Never in a child of fork().
  ~PeersFile();
  PeersFile(const PeersFile&) = delete;
  PeersFile& operator=(const PeersFile&) = delete;

  /// Has the file replaced by one with this text, and returns. Of several texts that wait the last one counts. A failure is logged.
  void write(std::string text);
  /// Waits until nothing is to be written. False at the deadline.
  [[nodiscard]] bool flush(Deadline deadline);
  /// From now on nothing begins to be written. Waits until the deadline for the end of what is under way, which may still replace the file
  /// then.
  void close(Deadline deadline) noexcept;

 private:
  struct Shared;
  const std::shared_ptr<Shared> shared_; ///< with the thread
};

} // namespace pycomm

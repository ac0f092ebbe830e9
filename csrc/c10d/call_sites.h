#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/wait_point.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// Tells equal calls apart by the line of Python that issues them (Options.check_call_sites).
///
/// A call's tag is the hash of its site: file, line and function of the nearest frames outside the folders to be skipped. Hashes travel
/// and are compared like the rest of a descriptor. A rank writes the text of a hash to the group's store when it reaches the site for
/// the first time, so that each rank can print both sites. Any thread.
class CallSites {
 public:
  /// `skipped`: folders whose files are not the user's: torch, pycomm, Python's library. `store` outlives this.
  CallSites(std::shared_ptr<Store> store, std::vector<std::string> skipped);

  /// The calling thread's site; 0 if it runs no Python code. Takes the interpreter's lock.
  [[nodiscard]] uint32_t tagHere();

  /// Replaces tags by sites in the sentence of a mismatch. May read the store, for half a second at most.
  void explain(ErrorRecord& record);

 private:
  [[nodiscard]] std::string siteHere() const;
  [[nodiscard]] std::string textOf(uint32_t tag); ///< "" if it is unknown

  const std::shared_ptr<Store> store_;
  const std::vector<std::string> skipped_;
  LeafMutex mutex_; ///< guards texts_
  std::map<uint32_t, std::string> texts_;
};

} // namespace pycomm

#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <string>

namespace pycomm {

/// The comm hook of a reducer.
struct CommHook {
  std::shared_ptr<c10d::CommHookInterface> run; ///< null: there is no hook
  std::string name; ///< for errors
  c10::intrusive_ptr<c10d::ProcessGroup> group; ///< of its collectives, as far as it is known; null: the reducer's
};

} // namespace pycomm

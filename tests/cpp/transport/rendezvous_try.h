#pragma once

#include <cstdint>

#include "transport/error_matchers.h"
#include "transport/rendezvous/rendezvous.h"

namespace pycomm::testing {

inline RendezvousConfig configOf(int rank, int size, int timeout_ms = 20000) {
  RendezvousConfig config;
  config.rank = rank;
  config.size = size;
  config.group_name = "world";
  config.store_host = "127.0.0.1";
  config.config_digest = 1;
  config.config_text = "lanes=1 codec=none";
  config.deadline = Deadline::after(timeout_ms);
  return config;
}

/// What became of one rank.
struct Outcome {
  Rendezvous met;
  ErrorRecord error;
  int64_t elapsed_ms = 0;

  [[nodiscard]] bool good() const {
    return error.code == ErrorCode::Ok;
  }
};

inline Outcome tryToMeet(Store& store, const RendezvousConfig& config, const AbortToken& abort = kNoAbort) {
  const TimePoint begin = Clock::now();
  Outcome outcome;
  outcome.error.code = ErrorCode::Ok;
  try {
    outcome.met = meet(store, config, abort);
  } catch (const Error& error) {
    outcome.error = error.record();
  }
  outcome.elapsed_ms = elapsedMs(begin);
  return outcome;
}

/// As Group::join() does: it leaves in the store what the product leaves.
inline Outcome tryToMake(Store& store, const RendezvousConfig& config) {
  Outcome outcome = tryToMeet(store, config);
  if (outcome.good()) {
    forgetMeeting(store, outcome.met.claim, config.size);
  }
  return outcome;
}

} // namespace pycomm::testing

#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "transport/error_matchers.h"
#include "transport/link_conformance.h"
#include "transport/process.h"
#include "views.h"

namespace pycomm::testing {

inline constexpr int64_t kSlackMs = 10000; // for a machine that is busy with other things; a third of soon()

inline Deadline soon() {
  return Deadline::after(30000);
}

// Bytes that a shift, a swap or a repetition changes: those of one block again and again, and in each the place where it begins. A
// sanitizer takes seconds for a number of its own for each of 64 MiB. The length of a block is prime: no ring has a multiple of it.
inline Bytes pattern(size_t nbytes, uint32_t seed) {
  constexpr size_t kBlockNbytes = 65521;
  Bytes bytes(nbytes);
  uint32_t state = seed * 2654435761U + 1;
  for (size_t i = 0; i < std::min(nbytes, kBlockNbytes); ++i) {
    state = state * 1664525U + 1013904223U;
    bytes[i] = static_cast<std::byte>(state >> 24);
  }
  for (uint64_t at = kBlockNbytes; at < nbytes; at += kBlockNbytes) {
    const size_t left = std::min(nbytes - at, kBlockNbytes);
    std::memcpy(&bytes[at], bytes.data(), left);
    std::memcpy(&bytes[at], &at, std::min(left, sizeof at));
  }
  return bytes;
}

// As ==, which compares byte by byte.
inline bool same(const Bytes& a, const Bytes& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

inline Bytes readExactly(Link& link, size_t nbytes) {
  Bytes bytes(nbytes);
  readAll(link, {bytes.data(), nbytes}, soon(), kNoAbort);
  return bytes;
}

// Waits for the end of the peer's side; false if bytes came instead.
inline bool readsEnd(Link& link) {
  std::byte byte{};
  for (const Deadline deadline = soon(); !deadline.expired();) {
    const Progress progress = link.tryRead({&byte, 1});
    if (progress.closed || progress.nbytes > 0) {
      return progress.closed;
    }
    pollfd wait{link.fd(), POLLIN, 0};
    (void)::poll(&wait, 1, 100);
  }
  return false;
}

/// The other end of a test's link, in its place. `body` gets it and says whether all was as expected.
class Peer {
 public:
  Peer(PeerPlace place, LinkPair& pair, const std::function<bool(Link&)>& body) {
    if (place == PeerPlace::Process) {
      process_.emplace([&] {
        pair.first.reset();
        const bool good = body(*pair.second);
        pair.second.reset();
        return good;
      });
      pair.second.reset();
      return;
    }
    thread_ = std::thread([this, body, link = std::move(pair.second)]() mutable {
      try {
        good_ = body(*link);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "peer: " << error.what();
      }
      link.reset();
    });
  }
  ~Peer() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  [[nodiscard]] bool join() {
    if (process_) {
      return process_->join(60000);
    }
    thread_.join();
    return good_;
  }
  void kill() const {
    process_->kill();
  }

 private:
  std::optional<Process> process_;
  std::thread thread_;
  std::atomic<bool> good_{false};
};

inline PeerPlace placeOf(const LinkConformance& test) {
  return std::get<1>(test.GetParam());
}
inline LinkPair connect(const LinkConformance& test) {
  return std::get<0>(test.GetParam()).connect();
}

} // namespace pycomm::testing

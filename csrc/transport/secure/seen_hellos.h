#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

namespace pycomm {

/// The random number of a ClientHello (RFC 8446, 4.1.2). A client draws a new one for each connection.
using ClientRandom = std::array<unsigned char, 32>;

/// The first messages of TLS that this process has taken from holders of the secret, so that one that somebody has recorded and repeats is
/// noticed. It is bounded: if there are more, the oldest is forgotten. Any thread.
class SeenHellos {
 public:
  /// More connections than a process of a group takes: of 1,000 ranks four each. 32 KiB.
  static constexpr size_t kMost = 4096;

  /// Remembers it; false if it was there already. Only for a message of which it is known that its sender knew the secret: others could
  /// fill the memory.
  [[nodiscard]] bool add(const ClientRandom& random) {
    uint64_t mark = 0; // 8 random bytes tell a few thousand apart; a client that is mistaken for another tries again
    std::memcpy(&mark, random.data(), sizeof mark);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const uint64_t seen : marks_) {
      if (seen == mark) {
        return false;
      }
    }
    if (marks_.size() < kMost) {
      marks_.push_back(mark);
    } else {
      marks_[oldest_] = mark;
      oldest_ = (oldest_ + 1) % kMost;
    }
    return true;
  }

 private:
  std::mutex mutex_;
  std::vector<uint64_t> marks_;
  size_t oldest_ = 0; ///< once there are kMost
};

} // namespace pycomm

#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "transport/net/socket_link.h"

namespace pycomm::testing {

constexpr size_t kHeaderNbytes = 5;

/// A record of TLS on its way.
struct PassedRecord {
  const size_t number;
  std::string& bytes; ///< passed on as they are left
  int delay_ms = 0; ///< it and all that follows wait so long
  bool last = false; ///< nothing is passed on after it, and the receiver's side ends
};

/// Somebody between two processes: passes bytes on from one link to another, a record at a time, and may change them.
class RecordPump {
 public:
  using Change = std::function<void(PassedRecord&)>;

  RecordPump(SocketLink& from, SocketLink& to, Change change) : from_(from), to_(to), change_(std::move(change)) {}

  /// As far as it gets without waiting.
  void run() {
    std::string bytes(1 << 16, '\0');
    Progress progress;
    try {
      progress = from_.tryRead({reinterpret_cast<std::byte*>(bytes.data()), bytes.size()});
    } catch (const Error&) {
      progress.closed = true;
    }
    in_.append(bytes, 0, progress.nbytes);
    while (!ended_ && in_.size() >= kHeaderNbytes && in_.size() >= recordNbytes() && Clock::now() >= not_before_) {
      std::string record = in_.substr(0, recordNbytes());
      PassedRecord passed{count_, record};
      if (!std::exchange(delayed_, false)) {
        change_(passed);
      }
      if (passed.delay_ms > 0) { // and is taken as it is then
        not_before_ = Clock::now() + std::chrono::milliseconds(passed.delay_ms);
        delayed_ = true;
        break;
      }
      in_.erase(0, recordNbytes());
      ++count_;
      out_ += record;
      ended_ = passed.last;
    }
    try {
      const ConstBufferView rest(reinterpret_cast<const std::byte*>(out_.data()), out_.size());
      out_.erase(0, to_.tryWrite(&rest, 1).nbytes);
    } catch (const Error&) {
      out_.clear();
    }
    if ((progress.closed || ended_) && out_.empty()) {
      to_.shutdownWrite();
    }
  }

 private:
  [[nodiscard]] size_t recordNbytes() const {
    return kHeaderNbytes + (size_t{static_cast<unsigned char>(in_[3])} << 8) + static_cast<unsigned char>(in_[4]);
  }

  SocketLink& from_;
  SocketLink& to_;
  Change change_;
  std::string in_;
  std::string out_;
  size_t count_ = 0;
  TimePoint not_before_{};
  bool delayed_ = false;
  bool ended_ = false;
};

} // namespace pycomm::testing

#pragma once

#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/reduce_op.h"
#include "device/nccl_api.h"

namespace pycomm::cuda::testing {

/// Where the ranks of one communicator, threads of this process, leave bytes for each other.
class HostWire {
 public:
  void put(int from, int to, const void* ptr, size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto* bytes = static_cast<const std::byte*>(ptr);
    sent_[{from, to}].emplace_back(bytes, bytes + nbytes);
    changed_.notify_all();
  }
  /// False if nothing came in a minute, or what came has another size.
  [[nodiscard]] bool take(int from, int to, void* ptr, size_t nbytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& queue = sent_[{from, to}];
    if (!changed_.wait_for(lock, std::chrono::seconds(60), [&] { return !queue.empty(); })) {
      return false;
    }
    const bool fits = queue.front().size() == nbytes;
    if (fits) {
      std::memcpy(ptr, queue.front().data(), nbytes);
    }
    queue.erase(queue.begin());
    return fits;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::vector<std::vector<std::byte>>> sent_;
};

/// NCCL's contract on host memory: a group's calls run at its end, all sends before all receives, as if at once.
/// Only what pycomm's own algorithms and all_to_all use; the collectives of NCCL itself are not imitated.
class HostNccl : public NcclApi {
 public:
  HostNccl(std::shared_ptr<HostWire> wire, int rank) : wire_(std::move(wire)), rank_(rank) {}

  std::string origin() const override {
    return "host memory";
  }
  NcclResult uniqueId(NcclUniqueId* id) override {
    std::strcpy(id->bytes, "host");
    return NcclResult::Success;
  }
  NcclResult init(NcclHandle* comm, int, const NcclUniqueId& id, int) override {
    *comm = this;
    return std::strcmp(id.bytes, "host") == 0 ? NcclResult::InProgress : NcclResult::InvalidArgument;
  }
  NcclResult asyncError(NcclHandle, NcclResult* state) override {
    // The first look finds the call unfinished, as NCCL's non-blocking communicators often do.
    *state = looks_++ % 2 == 0 ? NcclResult::InProgress : NcclResult::Success;
    return NcclResult::Success;
  }
  NcclResult abort(NcclHandle) override {
    ++aborts;
    return NcclResult::Success;
  }
  NcclResult destroy(NcclHandle) override {
    ++destroys;
    return NcclResult::Success;
  }
  std::string lastError(NcclHandle) override {
    return "";
  }
  NcclResult groupStart() override {
    grouped_ = true;
    return NcclResult::Success;
  }
  NcclResult groupEnd() override {
    grouped_ = false;
    NcclResult result = NcclResult::Success;
    for (const Receive& receive : receives_) {
      if (!wire_->take(receive.from, rank_, receive.ptr, receive.nbytes)) {
        result = NcclResult::RemoteError;
      }
    }
    receives_.clear();
    return result;
  }
  NcclResult allReduce(const void*, void*, size_t, int, int, NcclHandle, Stream) override {
    return NcclResult::InvalidUsage;
  }
  NcclResult reduce(const void*, void*, size_t, int, int, int, NcclHandle, Stream) override {
    return NcclResult::InvalidUsage;
  }
  NcclResult broadcast(const void*, void*, size_t, int, int, NcclHandle, Stream) override {
    return NcclResult::InvalidUsage;
  }
  NcclResult allGather(const void*, void*, size_t, int, NcclHandle, Stream) override {
    return NcclResult::InvalidUsage;
  }
  NcclResult reduceScatter(const void*, void*, size_t, int, int, NcclHandle, Stream) override {
    return NcclResult::InvalidUsage;
  }
  NcclResult send(const void* in, size_t count, int dtype, int peer, NcclHandle, Stream) override {
    if (!grouped_ || dtype != kNcclBytes || count == 0) {
      return NcclResult::InvalidUsage;
    }
    wire_->put(rank_, peer, in, count);
    return NcclResult::Success;
  }
  NcclResult recv(void* out, size_t count, int dtype, int peer, NcclHandle, Stream) override {
    if (!grouped_ || dtype != kNcclBytes || count == 0) {
      return NcclResult::InvalidUsage;
    }
    receives_.push_back({out, count, peer});
    return NcclResult::Success;
  }

  int aborts = 0;
  int destroys = 0;

 private:
  struct Receive {
    void* ptr;
    size_t nbytes;
    int from;
  };
  const std::shared_ptr<HostWire> wire_;
  const int rank_;
  bool grouped_ = false;
  int looks_ = 0;
  std::vector<Receive> receives_;
};

} // namespace pycomm::cuda::testing

#include "transport/striped_link.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

namespace pycomm {
namespace {

constexpr size_t kMaxStripeViews = 64; // more views take another call

} // namespace

StripedLink::StripedLink(std::vector<Part> parts, State state)
    : parts_(std::move(parts)), connected_(state == State::Connecting ? 0 : parts_.size()) {}

void StripedLink::Place::advance(size_t nbytes, size_t parts) noexcept {
  left -= nbytes;
  if (left == 0) {
    left = kChunkNbytes;
    part = (part + 1) % parts;
  }
}

// Runs `body` on one of the connections; an error from it names that connection.
template <typename Body>
auto StripedLink::naming(size_t part, const Body& body) {
  try {
    return body(*parts_[part].link);
  } catch (const Error& error) {
    ErrorRecord record = error.record();
    const std::string& name = parts_[part].interface_name;
    const std::string which = " (connection " + std::to_string(part + 1) + " of " + std::to_string(parts_.size()) +
        (name.empty() ? "" : ", on " + name) + ")";
    record.summary += which;
    record.cause += record.cause.empty() ? "" : which; // the summary may give way to one about the peer
    throw Error(record);
  }
}

Progress StripedLink::tryWrite(const ConstBufferView* views, size_t count) {
  // The peer reads in order, and nothing else would send what this part still holds.
  if (unsent() && (owing_ != writing_.part || count == 0)) {
    static_cast<void>(naming(owing_, [](Link& link) { return link.tryWrite(nullptr, 0); }));
    if (unsent()) {
      Progress progress;
      progress.would_block = true;
      return progress;
    }
  }
  std::array<ConstBufferView, kMaxStripeViews> chunk{};
  size_t used = 0;
  size_t room = writing_.left;
  for (size_t i = 0; i < count && used < kMaxStripeViews && room > 0; ++i) {
    const size_t nbytes = std::min(views[i].nbytes, room);
    chunk[used++] = views[i].slice(0, nbytes);
    room -= nbytes;
  }
  const Progress progress = naming(writing_.part, [&](Link& link) { return link.tryWrite(chunk.data(), used); });
  owing_ = writing_.part;
  writing_.advance(progress.nbytes, parts_.size());
  return progress;
}

Progress StripedLink::tryRead(BufferView into) {
  const BufferView chunk = into.slice(0, std::min(into.nbytes, reading_.left));
  const Progress progress = naming(reading_.part, [&](Link& link) { return link.tryRead(chunk); });
  reading_.advance(progress.nbytes, parts_.size());
  return progress;
}

void StripedLink::shutdownWrite() noexcept {
  for (const Part& part : parts_) {
    part.link->shutdownWrite();
  }
}

bool StripedLink::finishConnect() {
  // Every connection is polled, so that they connect at the same time; the caller waits for the first that is not
  // connected yet.
  bool all = true;
  for (size_t part = connected_; part < parts_.size(); ++part) {
    all = naming(part, [](Link& link) { return link.finishConnect(); }) && all;
    connected_ += all ? 1 : 0;
  }
  return all;
}

std::string StripedLink::describe() const {
  std::string all;
  for (const Part& part : parts_) {
    all += (all.empty() ? "" : " and ") + part.link->describe();
  }
  return all;
}

} // namespace pycomm

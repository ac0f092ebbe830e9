#include "proof/sim/wire_audit.h"

#include <algorithm>

#include "engine/operation/descriptor.h"

namespace pycomm::sim {
namespace {

const char* typeText(FrameType type) noexcept {
  switch (type) {
    case FrameType::Hello:
      return "hello";
    case FrameType::HelloReply:
      return "reply to hello";
    case FrameType::Data:
      return "data";
    case FrameType::Credit:
      return "credit";
    case FrameType::Waiting:
      return "waiting";
    case FrameType::NotEntered:
      return "not entered";
    case FrameType::Failure:
      return "failure";
    case FrameType::Heartbeat:
      return "heartbeat";
    case FrameType::Goodbye:
      return "goodbye";
    case FrameType::Left:
      return "news of a goodbye";
    case FrameType::Leaving:
      return "why a rank leaves";
  }
  return "unknown";
}

std::string frameText(const FrameHeader& header) {
  std::string out = typeText(header.type);
  if (header.op_id != 0) {
    out += " of call " + std::to_string(header.op_id);
  }
  if (header.type == FrameType::Data) {
    out += " #" + std::to_string(header.index) + ", " + std::to_string(header.payload_nbytes) + " B" +
        ((header.aux & kEagerFlag) != 0 ? ", eager" : "");
  } else if (header.type == FrameType::Left) {
    out += " of rank " + std::to_string(header.root);
  } else if (header.type == FrameType::Credit) {
    out += ": " + std::to_string(header.aux) + " B";
  }
  return out;
}

} // namespace

WireAudit::WireAudit(Timeline& timeline, int ranks, const Limits& limits, bool keeps_trace)
    : timeline_(timeline),
      ranks_(ranks),
      limits_(limits),
      keeps_trace_(keeps_trace),
      in_pool_(static_cast<size_t>(ranks) * static_cast<size_t>(ranks), 0) {}

void WireAudit::say(const std::string& line) {
  if (keeps_trace_) {
    std::string at = std::to_string(timeline_.elapsed().count() / 1000);
    at.insert(0, 10 - std::min<size_t>(10, at.size()), ' ');
    trace_.push_back(at + " us  " + line);
  }
}

void WireAudit::digestEvent(Event event, int from, int to, LinkPurpose purpose) {
  digest_.addNumber(static_cast<uint64_t>(timeline_.elapsed().count()));
  digest_.addNumber(
      static_cast<uint64_t>(event) << 48 | static_cast<uint64_t>(purpose) << 32 |
      static_cast<uint64_t>(from * ranks_ + to));
}

void WireAudit::note(const char* verb, int from, int to, LinkPurpose purpose, const FrameHeader& header) {
  const bool sent = verb[0] == 's';
  digestEvent(sent ? Event::Sent : Event::Arrived, from, to, purpose);
  digest_.add(header);
  if (keeps_trace_) {
    say("rank " + std::to_string(sent ? from : to) + ' ' + verb + ' ' + frameText(header) + (sent ? " to " : " from ") +
        std::to_string(sent ? to : from) + (purpose == LinkPurpose::Control ? " (control)" : ""));
  }
}

void WireAudit::violation(int from, int to, const FrameHeader& header, const std::string& what) {
  violations_.push_back(
      "rank " + std::to_string(from) + " sent rank " + std::to_string(to) + " " + frameText(header) + ": " + what);
}

void WireAudit::frameSent(int from, int to, LinkPurpose purpose, const FrameHeader& header) {
  note("sends", from, to, purpose, header);
  if (header.type == FrameType::Data) {
    Edge& books = edge(from, to, header.op_id);
    books.sent += header.payload_nbytes;
    if (header.index != books.frames++) {
      violation(from, to, header, "frames of an edge out of order");
    }
    if ((header.aux & kEagerFlag) == 0) {
      if (books.sent > books.limit) {
        violation(
            from,
            to,
            header,
            "credit is " + std::to_string(books.limit) + " B, this makes " + std::to_string(books.sent));
      }
    } else {
      int64_t& pool = in_pool_[static_cast<size_t>(from * ranks_ + to)];
      pool += header.payload_nbytes + limits_.frame_nbytes;
      if (pool > limits_.eager_pool_nbytes) {
        violation(from, to, header, "the pool would hold " + std::to_string(pool) + " B");
      }
      if (books.sent > limits_.eager_nbytes) {
        violation(from, to, header, std::to_string(books.sent) + " B of an edge went eagerly");
      }
    }
  }
  ++frames_;
  if (on_frame_) {
    on_frame_(frames_);
  }
}

void WireAudit::payloadSent(int from, int to, LinkPurpose purpose, ConstBufferView bytes) {
  digestEvent(Event::Payload, from, to, purpose);
  digest_.addBytes(bytes.ptr, bytes.nbytes);
}

void WireAudit::frameArrived(int from, int to, LinkPurpose purpose, const FrameHeader& header) {
  note("receives", from, to, purpose, header);
  if (header.type != FrameType::Credit) {
    return;
  }
  const auto nbytes = static_cast<int64_t>(header.aux);
  if (header.op_id == 0) {
    in_pool_[static_cast<size_t>(to * ranks_ + from)] -= nbytes;
  } else {
    Edge& books = edge(to, from, header.op_id);
    books.limit = std::max(books.limit, nbytes);
    // At most one window ahead of the bytes that the receiver can have used.
    if (books.limit > books.sent + limits_.window_nbytes) {
      violation(from, to, header, "credit for more than a window beyond the " + std::to_string(books.sent) + " B sent");
    }
  }
}

void WireAudit::linkChanged(int from, int to, LinkPurpose purpose, const char* what) {
  say(std::string("the ") + (purpose == LinkPurpose::Control ? "control" : "bulk") + " connection from rank " +
      std::to_string(from) + " to rank " + std::to_string(to) + ' ' + what);
}

} // namespace pycomm::sim

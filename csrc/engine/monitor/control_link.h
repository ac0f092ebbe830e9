#pragma once

#include <exception>
#include <memory>

#include "engine/links/channel.h"
#include "engine/loop/loop.h"
#include "engine/monitor/control_plane.h"
#include "transport/link.h"

namespace pycomm {

/// One neighbour's link, used in both directions.
struct ControlPlane::ControlLink final : Loop::Handler, InChannel::Receiver {
  ControlLink(ControlPlane& control_plane, int peer_rank, std::unique_ptr<Link> connected)
      : plane(control_plane),
        peer(peer_rank),
        link(std::move(connected)),
        out(*link),
        in(peer_rank, *link, *this, kBufferNbytes) {}

  void onReady(uint32_t events) override {
    plane.linkReady(*this, events);
  }
  void onThrown(const std::exception_ptr& exception) noexcept override {
    plane.onThrown(exception);
  }
  Sink onHeader(int, const FrameHeader& header) override {
    plane.checkHeader(peer, header);
    Sink sink;
    if (header.payload_nbytes > 0) {
      sink.staging = plane.staging_.take(header.payload_nbytes);
      sink.into = sink.staging.view();
    }
    return sink;
  }
  void onFrame(int, const FrameHeader& header, Sink sink) override {
    plane.onFrame(peer, header, sink.into);
  }

  static constexpr size_t kBufferNbytes = 4 << 10;

  ControlPlane& plane;
  const int peer;
  std::unique_ptr<Link> link;
  OutChannel out;
  InChannel in;
  bool waits_for_room = false;
  /// Until it brings what no pycomm sends, or cannot be watched. It is still written, as its peer has to learn why.
  bool reads = true;
  bool down = false;
  TimePoint read_again = TimePoint::max(); ///< there was no memory for what it has taken from the kernel
};

} // namespace pycomm

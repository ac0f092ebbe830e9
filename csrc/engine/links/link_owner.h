#pragma once

#include <exception>
#include <vector>

#include "base/error.h"
#include "engine/links/channel.h"

namespace pycomm {

/// Is notified of what the bulk links of one group do: onHeader() and onFrame() get the frames that arrive. All on the data loop.
class LinkOwner : public InChannel::Receiver {
 public:
  /// A link has taken these frames whole.
  virtual void onSent(const std::vector<OutFrame>& frames) = 0;
  /// The link that the peer opened has ended, without endReading() before.
  virtual void onReadingEnded(int peer, const Error& error) = 0;
  /// The link that this rank opened to the peer broke, or cannot be opened.
  virtual void onWritingBroke(int peer, const Error& error) = 0;
  /// After sayGoodbyes(): the last of them has left, or cannot.
  virtual void onGoodbyesSaid() = 0;
  /// The group fails, with `peer` to blame.
  virtual void onThrown(int peer, const std::exception_ptr& exception) noexcept = 0;
  /// Calls `body` with `context`, on behalf of `peer`: what it throws is onThrown(). Frames that it queues leave afterwards, by flush().
  virtual void run(int peer, void (*body)(const void* context), const void* context) noexcept = 0;

  /// run() of something that can be called.
  template <typename Body>
  void onBehalfOf(int peer, const Body& body) noexcept {
    run(peer, [](const void* context) { (*static_cast<const Body*>(context))(); }, &body);
  }
};

} // namespace pycomm

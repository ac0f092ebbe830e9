#pragma once

#include <poll.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "transport/link.h"
#include "transport/memory/shared_arena.h"
#include "transport/memory/shared_ring.h"

namespace pycomm {

/// A Link between two processes of one host: the bytes go through rings in memory that both have mapped, and a connection beside them
/// wakes an end that sleeps, one byte each time, and ends when the peer ends, however it does.
///
/// What was written before the end is read before it, also when the writer was killed.
///
/// Who polls need not ask the kernel: canRead() and canWrite() only look at memory. The connection tells only an end that has said
/// that it sleeps: by a try that moved nothing, or by readSleeps() and writeSleeps(). Who waits for both directions tries both after
/// each wake-up.
class SharedLink final : public Link {
 public:
  /// Which rings there are, in memory that `arena` keeps mapped. Their pages exist.
  struct Rings {
    std::shared_ptr<const SharedArena> arena;
    std::optional<RingMemory> out;
    std::optional<RingMemory> in;
  };

  enum class State { Connecting, Connected };
  /// The end that connects calls finishConnect(), which is the bell's.
  SharedLink(std::unique_ptr<Link> bell, Rings rings, State state = State::Connected);
  ~SharedLink() override;

  [[nodiscard]] int fd() const noexcept override {
    return bell_->fd();
  }
  [[nodiscard]] short roomEvent() const noexcept override {
    return connected_ ? short{POLLIN} : bell_->roomEvent();
  }
  [[nodiscard]] bool readsAreCheap() const noexcept override {
    return true;
  }
  [[nodiscard]] bool knownEmpty() const noexcept override {
    return !canRead();
  }
  [[nodiscard]] bool knownFull() const noexcept override {
    return !canWrite();
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override;
  [[nodiscard]] Progress tryRead(BufferView into) override;
  void shutdownWrite() noexcept override;
  [[nodiscard]] bool finishConnect() override;
  [[nodiscard]] std::string describe() const override;

  /// A try may move something.
  [[nodiscard]] bool canRead() const noexcept {
    return reader_ && reader_->hasBytes();
  }
  [[nodiscard]] bool canWrite() const noexcept {
    return writer_ && writer_->hasRoom();
  }
  /// fd() becomes readable when canRead() or canWrite() will be true; false if it is already.
  [[nodiscard]] bool readSleeps() noexcept {
    return reader_->sleep();
  }
  [[nodiscard]] bool writeSleeps() noexcept {
    return writer_->sleep();
  }
  /// fd() is readable, and nobody is about to try. True if the peer has closed: then a write will fail.
  bool hearBell() noexcept;

 private:
  void ringBell(bool asleep);
  void refuseWrite() const; ///< throws Error(ConnectionReset) if nobody will read it

  std::unique_ptr<Link> bell_;
  std::shared_ptr<const SharedArena> arena_;
  std::optional<RingWriter> writer_;
  std::optional<RingReader> reader_;
  bool connected_;
  bool ended_ = false; ///< the peer has ended its write side
  std::exception_ptr broken_; ///< how the connection ended otherwise
};

} // namespace pycomm

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

/// A Link between two processes of one host. The bytes go through rings in memory that both have mapped. A connection
/// beside the rings, the doorbell, wakes an end that sleeps, with one byte per wake-up. It also ends when the peer ends
/// for any reason.
///
/// The reader gets all bytes that were written before the end, also if the writer was killed.
///
/// A polling caller makes no system calls: canRead() and canWrite() only read memory. The doorbell wakes only an end
/// that has announced that it sleeps: by a try that moved nothing, or by readSleeps() and writeSleeps(). A caller that
/// waits for both directions tries both after each wake-up.
class SharedLink final : public Link {
 public:
  /// The rings of this link, in memory that `arena` keeps mapped. Their pages exist.
  struct Rings {
    std::shared_ptr<const SharedArena> arena;
    std::optional<RingMemory> out;
    std::optional<RingMemory> in;
  };

  enum class State { Connecting, Connected };
  /// The connecting end calls finishConnect(), which connects the doorbell.
  SharedLink(std::unique_ptr<Link> doorbell, Rings rings, State state = State::Connected);
  ~SharedLink() override;

  [[nodiscard]] int fd() const noexcept override {
    return doorbell_->fd();
  }
  [[nodiscard]] short roomEvent() const noexcept override {
    return connected_ ? short{POLLIN} : doorbell_->roomEvent();
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
  [[nodiscard]] bool isReset() noexcept override;
  [[nodiscard]] bool finishConnect() override;
  [[nodiscard]] std::string describe() const override;

  /// True if a try may move bytes.
  [[nodiscard]] bool canRead() const noexcept {
    return reader_ && reader_->hasBytes();
  }
  [[nodiscard]] bool canWrite() const noexcept {
    return writer_ && writer_->hasRoom();
  }
  /// Announces the sleep: fd() becomes readable when canRead() or canWrite() becomes true. Returns false if it is true
  /// already.
  [[nodiscard]] bool readSleeps() noexcept {
    return reader_->sleep();
  }
  [[nodiscard]] bool writeSleeps() noexcept {
    return writer_->sleep();
  }
  /// Call if fd() is readable and no try follows. True if the peer has closed: then a write will fail.
  bool hearBell() noexcept;

 private:
  void ringBell(bool asleep);
  void refuseWrite() const; ///< throws Error(ConnectionReset) if the peer can no longer read

  std::unique_ptr<Link> doorbell_;
  std::shared_ptr<const SharedArena> arena_;
  std::optional<RingWriter> writer_;
  std::optional<RingReader> reader_;
  bool connected_;
  bool ended_ = false; ///< the peer has ended its write side
  std::exception_ptr broken_; ///< the error that ended the connection, if it did not end in order
};

} // namespace pycomm

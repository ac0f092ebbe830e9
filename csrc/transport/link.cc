#include "transport/link.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "base/error.h"
#include "base/fault_point.h"

namespace pycomm {
namespace {

constexpr int kMaxDropTurns = 1024; // 4 MiB, more than a socket holds

struct Transfer {
  const char* what;
  size_t done = 0;
  size_t total = 0;
};

ErrorRecord broken(const Link& link, const Transfer& transfer, ErrorCode code, const std::string& why) {
  ErrorRecord record;
  record.code = code;
  record.summary = std::string(transfer.what) + " " + why + " on " + link.describe();
  record.bytes_done = static_cast<int64_t>(transfer.done);
  record.bytes_total = static_cast<int64_t>(transfer.total);
  return record;
}

// What to wait for before a tryRead(), which also sends what is unsent.
short readEvents(const Link& link) {
  return static_cast<short>(POLLIN | (link.unsent() ? POLLOUT : 0));
}

// Called between two tries: throws at the deadline or when aborted, and waits a slice if the last try moved nothing.
void wait(
    const Link& link,
    bool reads,
    bool moved,
    const Transfer& transfer,
    Deadline deadline,
    const AbortToken& abort) {
  abort.throwIfAborted();
  if (deadline.expired()) {
    throw Error(broken(link, transfer, ErrorCode::Timeout, "timed out"));
  }
  if (!moved) {
    pollfd ready{link.fd(), reads ? readEvents(link) : link.roomEvent(), 0};
    (void)::poll(&ready, 1, deadline.remainingMs(kAbortSliceMs)); // EINTR: the caller tries again
  }
}

} // namespace

bool Link::isReset() noexcept {
  std::array<std::byte, 4096> dropped; // NOLINT: only written
  try {
    for (int turn = 0; turn < kMaxDropTurns; ++turn) {
      const Progress progress = tryRead({dropped.data(), dropped.size()});
      if (progress.closed) { // TCP reports an end also if a reset came behind it
        int error_number = 0;
        socklen_t length = sizeof error_number;
        return ::getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error_number, &length) == 0 && error_number != 0;
      }
      if (progress.nbytes == 0) {
        return true; // neither bytes nor an end: the kernel has reported the error already
      }
    }
  } catch (const std::exception&) {
  }
  return true;
}

bool waitConnected(Link& link, Deadline deadline, const AbortToken& abort) {
  while (!link.finishConnect()) {
    abort.throwIfAborted();
    if (deadline.expired()) {
      return false;
    }
    pollfd ready{link.fd(), link.roomEvent(), 0};
    (void)::poll(&ready, 1, deadline.remainingMs(kAbortSliceMs)); // EINTR: the caller polls again
  }
  return true;
}

void writeAll(Link& link, ConstBufferView bytes, Deadline deadline, const AbortToken& abort) {
  Transfer transfer{"writing", 0, bytes.nbytes};
  abort.throwIfAborted();
  while (transfer.done < transfer.total || link.unsent()) {
    const ConstBufferView rest = bytes.slice(transfer.done, transfer.total - transfer.done);
    const Progress progress = link.tryWrite(&rest, 1);
    transfer.done += progress.nbytes;
    if (transfer.done < transfer.total || link.unsent()) {
      wait(link, false, progress.nbytes > 0, transfer, deadline, abort);
    }
  }
}

void readAll(Link& link, BufferView into, Deadline deadline, const AbortToken& abort) {
  Transfer transfer{"reading", 0, into.nbytes};
  abort.throwIfAborted();
  while (transfer.done < transfer.total) {
    const Progress progress = link.tryRead(into.slice(transfer.done, transfer.total - transfer.done));
    transfer.done += progress.nbytes;
    if (progress.closed) {
      throw Error(broken(link, transfer, ErrorCode::ConnectionReset, "met the end: the peer closed the connection"));
    }
    if (transfer.done < transfer.total) {
      wait(link, true, progress.nbytes > 0, transfer, deadline, abort);
    }
  }
}

void Link::closeGently() noexcept {
  // If a socket is closed with unread bytes, it sends a reset, and the peer's kernel then drops the bytes that the peer
  // has not read.
  shutdownWrite();
  const Deadline end = Deadline::after(kGoodbye.count());
  std::array<std::byte, 4096> dropped; // NOLINT: only written
  try {
    while (!end.expired()) {
      const Progress progress = tryRead({dropped.data(), dropped.size()});
      if (progress.closed) {
        return;
      }
      if (progress.would_block) {
        pollfd ready{fd(), readEvents(*this), 0};
        (void)::poll(&ready, 1, end.remainingMs(kLongestSleepMs));
      }
    }
  } catch (const std::exception&) {
    // the peer was faster
  }
}

void closeAllGently(const std::vector<std::unique_ptr<Link>>& links) noexcept {
  std::vector<pollfd> open;
  try {
    PYCOMM_FAULT_POINT("links.close");
    open.reserve(links.size());
  } catch (const std::exception&) { // without memory: one after the other
    for (const auto& link : links) {
      link->closeGently();
    }
    return;
  }
  for (const auto& link : links) {
    link->shutdownWrite();
    open.push_back(pollfd{link->fd(), POLLIN, 0});
  }
  const Deadline end = Deadline::after(kGoodbye.count());
  std::array<std::byte, 4096> dropped; // NOLINT: only written
  for (size_t left = open.size(); left > 0 && !end.expired();) {
    for (size_t i = 0; i < open.size(); ++i) {
      open[i].events = readEvents(*links[i]);
    }
    if (::poll(open.data(), open.size(), end.remainingMs(kLongestSleepMs)) <= 0) {
      continue; // interrupted, or the time is up
    }
    for (size_t i = 0; i < open.size(); ++i) {
      if (open[i].fd < 0 || open[i].revents == 0) {
        continue;
      }
      bool closed = true;
      try {
        do {
          closed = links[i]->tryRead({dropped.data(), dropped.size()}).closed;
        } while (!closed && links[i]->buffered() && !end.expired());
      } catch (const std::exception&) { // the peer was faster
      }
      if (closed) {
        open[i].fd = -1; // poll() passes over it
        --left;
      }
    }
  }
}

} // namespace pycomm

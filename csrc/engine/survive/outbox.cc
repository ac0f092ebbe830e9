#include "engine/survive/outbox.h"

#include <poll.h>

#include <array>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "engine/meeting/endpoint_words.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;

constexpr size_t kAnswerNbytes = 4 << 10; // answers are short
constexpr size_t kMostAnswer = 1 << 10;

} // namespace

Outbox::Outbox(MemberHandle to, const Visitor& from)
    : to_(std::move(to)), from_(from), ways_(waysTo(to_, from.self.host, from.unix_sockets)) {}

void Outbox::push(std::string message) {
  if (queue_.size() >= kMost) {
    queue_.erase(queue_.begin() + (asked_ && entered_ ? 1 : 0));
  }
  queue_.push_back(std::move(message));
}

void Outbox::hangUp() noexcept {
  link_.reset();
  connected_ = entered_ = asked_ = false;
  out_.clear();
  in_.clear();
  due_ = TimePoint::max();
}

void Outbox::wayFailed(TimePoint now) noexcept {
  hangUp();
  if (++way_ >= ways_.size()) {
    giveUp(now);
  }
}

void Outbox::giveUp(TimePoint now) noexcept {
  hangUp();
  refused_ = refused_ || (refusals_ > 0 && refusals_ == ways_.size());
  refusals_ = 0;
  way_ = 0;
  queue_.clear();
  not_before_ = now + milliseconds(kShortPauseMs);
}

void Outbox::lost(TimePoint now) noexcept {
  if (!entered_) {
    giveUp(now);
    return;
  }
  hangUp();
  not_before_ = now + milliseconds(kShortPauseMs);
}

void Outbox::open(TimePoint now) {
  link_ = openWay(to_, ways_[way_], from_);
  due_ = now + milliseconds(kOneTryMs);
}

short Outbox::events() const noexcept {
  if (!connected_) {
    return link_->roomEvent();
  }
  const bool writes = !out_.empty() || link_->unsent();
  return static_cast<short>(POLLIN | (writes ? link_->roomEvent() : 0));
}

TimePoint Outbox::nextTick() const noexcept {
  if (link_ == nullptr) {
    return queue_.empty() ? TimePoint::max() : not_before_;
  }
  return link_->buffered() ? TimePoint::min() : due_;
}

void Outbox::advance(TimePoint now) noexcept {
  for (;;) {
    try {
      if (link_ == nullptr) {
        if (queue_.empty() || now < not_before_) {
          return;
        }
        if (ways_.empty()) {
          giveUp(now);
          return;
        }
        open(now);
      }
      if (!connected_) {
        if (!link_->finishConnect()) {
          if (now < due_) {
            return;
          }
          wayFailed(now);
          continue;
        }
        connected_ = true;
        refusals_ = 0;
        due_ = TimePoint::max();
      }
      if (!converse(now)) {
        return;
      }
    } catch (const Error& error) { // it broke, or nobody listens there
      if (connected_) { // it had been the right way
        lost(now);
        return;
      }
      refusals_ += error.record().cause.rfind("ECONNREFUSED", 0) == 0 ? 1 : 0;
      wayFailed(now);
    } catch (const std::exception&) { // no memory
      giveUp(now);
      return;
    }
  }
}

void Outbox::ask() {
  out_ = entered_ ? packWords({endpoint_request::kSay, queue_.front()})
                  : packWords({endpoint_request::kAgree, to_.incarnation, from_.self.incarnation, from_.self.text()});
  asked_ = true;
}

bool Outbox::converse(TimePoint now) {
  if (!asked_ && !queue_.empty()) {
    ask();
    due_ = now + milliseconds(kOneTryMs);
  }
  while (!out_.empty() || link_->unsent()) {
    const ConstBufferView rest(reinterpret_cast<const std::byte*>(out_.data()), out_.size());
    const Progress progress = link_->tryWrite(&rest, out_.empty() ? 0 : 1);
    out_.erase(0, progress.nbytes);
    if (progress.nbytes == 0 && (!out_.empty() || link_->unsent())) {
      break;
    }
  }
  std::array<std::byte, kAnswerNbytes> bytes; // NOLINT: only written
  const Progress progress = link_->tryRead({bytes.data(), bytes.size()});
  in_.append(reinterpret_cast<const char*>(bytes.data()), progress.nbytes);
  uint32_t length = 0;
  if (in_.size() >= sizeof length) {
    std::memcpy(&length, in_.data(), sizeof length);
    if (length > kMostAnswer || !asked_) {
      throw Error(ErrorCode::ProtocolViolation, "the answer at an endpoint is not pycomm's");
    }
    if (in_.size() >= sizeof length + length) {
      const auto answer = unpackWords(std::string_view(in_).substr(sizeof length, length));
      in_.erase(0, sizeof length + length);
      if (!answer || answer->front() != endpoint_answer::kHere) { // it has closed, or has not begun yet
        giveUp(now);
        return false;
      }
      asked_ = false;
      if (std::exchange(entered_, true)) {
        queue_.pop_front();
      }
      due_ = now + kUnusedFor;
      return true;
    }
  }
  if (progress.closed) {
    lost(now);
    return false;
  }
  if (now >= due_) {
    giveUp(now);
    return false;
  }
  return progress.nbytes != 0;
}

} // namespace pycomm

#include "transport/rendezvous/notices.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/printable.h"

// The keys count up, so that several ranks can each leave one:
//
//   pycomm/<group>/notices = 2    pycomm/<group>/notice/1 = "3 b\n<reason>"    pycomm/<group>/notice/2 = "4 b\n<reason>"
//
// Readers do not look at the counter: anybody can add to it. They look for the next key.

namespace pycomm {
namespace {

constexpr std::chrono::milliseconds kFirstNoticeLook{100}; // a rendezvous in which nobody is late does not look
constexpr std::chrono::milliseconds kBetweenNoticeLooks{500};
constexpr int64_t kMaxNotices = 16;
constexpr size_t kNoticeHostNbytes = 255;
constexpr size_t kNoticeReasonNbytes = 512;

std::string noticeKey(const std::string& prefix, int64_t number) {
  return prefix + "notice/" + std::to_string(number);
}

std::optional<Notice> parseNotice(const std::string& text, int size) {
  const size_t blank = text.find(' ');
  const size_t end = text.find('\n');
  if (blank == 0 || blank > 7 || end == std::string::npos || end < blank ||
      text.find_first_not_of("0123456789") != blank) {
    return std::nullopt;
  }
  Notice notice;
  notice.rank = std::stoi(text.substr(0, blank));
  notice.host = printable(std::string_view(text).substr(blank + 1, end - blank - 1), kNoticeHostNbytes);
  notice.reason = printable(std::string_view(text).substr(end + 1), kNoticeReasonNbytes);
  return notice.rank < size ? std::optional<Notice>(std::move(notice)) : std::nullopt;
}

} // namespace

std::string Notice::text() const {
  return "rank " + std::to_string(rank) + " on host " + host +
      " has written into the store that it cannot join: " + reason;
}

void postNotice(Store& store, const std::string& group_name, const Notice& notice) noexcept {
  try {
    const std::string prefix = "pycomm/" + group_name + "/";
    const int64_t number = store.add(prefix + "notices", 1);
    store.setUnsealed(
        noticeKey(prefix, number), std::to_string(notice.rank) + " " + notice.host + "\n" + notice.reason);
  } catch (const std::exception&) { // this rank raises its own error in any case
  }
}

Notices::Notices(Store& store, std::string prefix, int size)
    : store_(store), prefix_(std::move(prefix)), size_(size), next_look_(Clock::now() + kFirstNoticeLook) {}

void Notices::look(bool now) {
  if (!now && Clock::now() < next_look_) {
    return;
  }
  next_look_ = Clock::now() + kBetweenNoticeLooks;
  while (read_ < kMaxNotices) {
    std::optional<std::string> text;
    try {
      text = store_.findUnsealed(noticeKey(prefix_, read_ + 1));
    } catch (const Error&) { // somebody has deleted it just now; a lost store is noticed by the caller
    }
    if (!text) {
      return;
    }
    ++read_;
    std::optional<Notice> notice = parseNotice(*text, size_);
    if (!notice) {
      continue;
    }
    log(LogLevel::Warn,
        notice->text() + ". This rank waits for it until its timeout, since a notice has no seal and may be anybody's");
    found_.push_back(*std::move(notice));
  }
}

const Notice* Notices::of(int rank) const noexcept {
  const auto found =
      std::find_if(found_.rbegin(), found_.rend(), [&](const Notice& notice) { return notice.rank == rank; });
  return found == found_.rend() ? nullptr : &*found;
}

} // namespace pycomm

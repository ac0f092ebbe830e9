#include "transport/rendezvous/notices.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/printable.h"

// Each rank has a key of its own: pycomm/<group>/notice/3 = "b\n<reason>", and notice/<life>/3 if the life is known.

namespace pycomm {
namespace {

constexpr size_t kRanksAtOnce = 32;
constexpr int kMaxLines = 16;
constexpr size_t kNoticeHostNbytes = 255;
constexpr size_t kNoticeReasonNbytes = 512;

std::string noticeKey(const std::string& prefix, const std::string& life, int rank) {
  return prefix + "notice/" + life + (life.empty() ? "" : "/") + std::to_string(rank);
}

} // namespace

std::string Notice::text() const {
  return "rank " + std::to_string(job_rank) + " on " + host +
      " has written into the store that it cannot join: " + reason;
}

void postNotice(Store& store, const std::string& group_name, const std::string& life, const Notice& notice) noexcept {
  try {
    store.setUnsealed(noticeKey("pycomm/" + group_name + "/", life, notice.rank), notice.host + "\n" + notice.reason);
  } catch (const std::exception&) {
  }
}

void removeNotice(Store& store, const std::string& prefix, const std::string& life, int rank) {
  (void)store.remove(noticeKey(prefix, life, rank));
}

Notices::Notices(Store& store, std::string prefix, std::string life, int size, JobRanks job)
    : store_(store),
      prefix_(std::move(prefix)),
      life_(std::move(life)),
      job_(std::move(job)),
      next_look_(Clock::now() + std::chrono::milliseconds(kLongPauseMs)), // where nobody is late nobody looks
      logged_(static_cast<size_t>(size)) {}

void Notices::poll(const IsMissing& is_missing, TimePoint now) {
  if (now < next_look_) {
    return;
  }
  next_look_ = now + std::chrono::milliseconds(kLookAgainMs);
  for (size_t looks = std::min(kRanksAtOnce, logged_.size()); looks > 0 && lines_ < kMaxLines; --looks) {
    const size_t rank = next_;
    next_ = (next_ + 1) % logged_.size();
    if (logged_[rank]) {
      continue;
    }
    const std::optional<Notice> notice = of(static_cast<int>(rank));
    if (notice && is_missing(notice->rank)) {
      logged_[rank] = true;
      ++lines_;
      log(LogLevel::Warn,
          notice->text() +
              ". Anybody who reaches the store can write this, so this rank waits on. If it is true, stop the job, do what "
              "follows \"Try there\", and start it again");
    }
  }
}

std::optional<Notice> Notices::of(int rank) {
  std::optional<std::string> text;
  try {
    text = store_.findUnsealed(noticeKey(prefix_, life_, rank));
  } catch (const Error&) { // somebody has deleted it just now; a lost store is noticed by the caller
  }
  const size_t end = text ? text->find('\n') : std::string::npos;
  if (end == std::string::npos) {
    return std::nullopt;
  }
  const std::string_view whole = *text;
  return Notice{
      rank,
      printable(whole.substr(0, end), kNoticeHostNbytes),
      printable(whole.substr(end + 1), kNoticeReasonNbytes),
      job_.of(rank)};
}

} // namespace pycomm

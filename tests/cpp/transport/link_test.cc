#include "transport/link.h"

#include <gtest/gtest.h>

#include "transport/error_matchers.h"

namespace pycomm {
namespace {

using testing::elapsedMs;
using testing::errorOf;

/// Moves one byte per call, always at once.
class TricklingLink final : public Link {
 public:
  [[nodiscard]] int fd() const noexcept override {
    return -1;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView*, size_t) override {
    return one();
  }
  [[nodiscard]] Progress tryRead(BufferView) override {
    return one();
  }
  void shutdownWrite() noexcept override {}
  [[nodiscard]] std::string describe() const override {
    return "trickle";
  }

 private:
  static Progress one() {
    Progress progress;
    progress.nbytes = 1;
    return progress;
  }
};

TEST(ReadAndWriteAll, EndAtTheDeadlineThoughBytesKeepMoving) {
  TricklingLink link;
  const AbortToken no_abort;
  std::byte nothing{};
  const size_t nbytes = size_t{1} << 40; // this link touches no memory
  for (const bool writing : {false, true}) {
    const TimePoint begin = Clock::now();
    const ErrorRecord record = errorOf([&] {
      writing ? writeAll(link, {&nothing, nbytes}, Deadline::after(50), no_abort)
              : readAll(link, {&nothing, nbytes}, Deadline::after(50), no_abort);
    });
    EXPECT_EQ(record.code, ErrorCode::Timeout);
    EXPECT_GT(record.bytes_done, 0);
    EXPECT_WITHIN_MS(elapsedMs(begin), 10000);
  }
}

TEST(CloseGently, EndsAlsoWhenThePeerNeverStopsSending) {
  TricklingLink link;
  const TimePoint begin = Clock::now();
  link.closeGently();
  EXPECT_GE(elapsedMs(begin), 20);
  EXPECT_WITHIN_MS(elapsedMs(begin), 10000);
}

} // namespace
} // namespace pycomm

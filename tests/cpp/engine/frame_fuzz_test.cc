// Frames of any bytes, in pieces of any size, into the channel that cuts them: see transport/fuzz_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "engine/channel.h"

namespace pycomm {
namespace {

uint64_t fromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// Gives out given bytes in pieces, then closes.
class BytesLink final : public Link {
 public:
  BytesLink(std::string bytes, std::mt19937_64& dice) : bytes_(std::move(bytes)), dice_(dice) {}
  [[nodiscard]] int fd() const noexcept override {
    return -1;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView*, size_t) override {
    return {};
  }
  [[nodiscard]] Progress tryRead(BufferView into) override {
    Progress progress;
    if (at_ == bytes_.size()) {
      progress.closed = true;
      return progress;
    }
    progress.nbytes = std::min({into.nbytes, bytes_.size() - at_, static_cast<size_t>(1 + dice_() % 200)});
    std::memcpy(into.ptr, bytes_.data() + at_, progress.nbytes);
    at_ += progress.nbytes;
    return progress;
  }
  void shutdownWrite() noexcept override {}
  [[nodiscard]] std::string describe() const override {
    return "bytes";
  }

 private:
  std::string bytes_;
  size_t at_ = 0;
  std::mt19937_64& dice_;
};

/// Counts, and gives every payload a place, or none.
class Counter final : public InChannel::Receiver {
 public:
  [[nodiscard]] Sink onHeader(int, const FrameHeader& header) override {
    EXPECT_LE(header.payload_nbytes, kMaxPayloadNbytes);
    Sink sink;
    if (header.payload_nbytes > 0 && header.payload_nbytes <= 4096 && header.index % 2 == 0) {
      sink.staging = pool.take(header.payload_nbytes);
      sink.into = sink.staging.view();
    }
    ++headers;
    return sink;
  }
  void onFrame(int, const FrameHeader&, Sink) override {
    ++frames;
  }

  StagingPool pool{1 << 20};
  int64_t headers = 0;
  int64_t frames = 0;
};

TEST(FrameFuzz, CutsAnyBytesOrRefusesThem) {
  std::mt19937_64 dice(fromEnvironment("PYCOMM_FUZZ_SEED", 1));
  const uint64_t inputs = fromEnvironment("PYCOMM_FUZZ_INPUTS", 20000);
  uint64_t refused = 0;
  int64_t frames = 0;
  for (uint64_t i = 0; i < inputs; ++i) {
    std::string bytes;
    for (uint64_t frame = dice() % 5; frame > 0; --frame) {
      FrameHeader header;
      header.type = static_cast<FrameType>(dice() % 12);
      header.index = static_cast<uint32_t>(dice());
      header.payload_nbytes = static_cast<uint32_t>(dice() % 300);
      bytes.append(reinterpret_cast<const char*>(&header), sizeof header).append(header.payload_nbytes, 'p');
    }
    for (uint64_t change = dice() % 4; change > 0 && !bytes.empty(); --change) {
      const size_t at = dice() % bytes.size();
      switch (dice() % 3) {
        case 0:
          bytes[at] = static_cast<char>(dice());
          break;
        case 1:
          bytes.resize(at);
          break;
        case 2:
          bytes.insert(at, dice() % 20, static_cast<char>(dice()));
          break;
      }
    }
    BytesLink link(bytes, dice);
    Counter counter;
    InChannel channel(1, link, counter, 256);
    try {
      while (channel.read()) {
      }
    } catch (const Error& error) {
      ++refused;
      ASSERT_EQ(error.record().code, ErrorCode::ProtocolViolation) << "input " << i;
    }
    ASSERT_LE(counter.frames, counter.headers) << "input " << i;
    frames += counter.frames;
  }
  EXPECT_GT(refused, 0U);
  EXPECT_GT(frames, 0);
}

} // namespace
} // namespace pycomm

#include "fuzz/frames.h"

#include "engine/links/channel.h"
#include "fuzz/bytes_link.h"
#include "fuzz/promise.h"

namespace pycomm::fuzz {
namespace {

constexpr size_t kStagingNbytes = 1 << 20;

/// Counts, and gives every payload a place, or none.
class Counter final : public InChannel::Receiver {
 public:
  [[nodiscard]] Sink onHeader(int, const FrameHeader& header) override {
    promise(header.payload_nbytes <= kMaxPayloadNbytes, "a payload above the limit");
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

  StagingMemory memory{kStagingNbytes};
  StagingPool pool{memory};
  int64_t headers = 0;
  int64_t frames = 0;
};

} // namespace

std::vector<uint8_t> framesSample() {
  std::vector<uint8_t> bytes = {99};
  for (uint32_t nbytes : {0U, 5U, 300U}) {
    FrameHeader header;
    header.payload_nbytes = nbytes;
    header.index = nbytes;
    const auto* at = reinterpret_cast<const uint8_t*>(&header);
    bytes.insert(bytes.end(), at, at + sizeof header);
    bytes.resize(bytes.size() + nbytes, 'p');
  }
  return bytes;
}

bool readFrames(const uint8_t* bytes, size_t nbytes) {
  if (nbytes == 0) {
    return false;
  }
  const auto memory = exactly(bytes + 1, nbytes - 1);
  BytesLink link(reinterpret_cast<const uint8_t*>(memory.get()), nbytes - 1, 1U + bytes[0]);
  Counter counter;
  InChannel channel(1, link, counter, 256);
  try {
    while (channel.read()) {
    }
  } catch (const Error& error) {
    promise(error.record().code == ErrorCode::ProtocolViolation, "another error than a violation");
  }
  promise(counter.frames <= counter.headers, "more frames than headers");
  return counter.frames > 0;
}

} // namespace pycomm::fuzz

// Frames over a link that takes and gives any number of bytes at a time: what goes in comes out, in order and whole.
#include "engine/links/channel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "transport/error_matchers.h"

namespace pycomm {
namespace {

/// A pipe in memory: writes are taken until there is no room, reads give at most `piece` bytes.
class PipeLink final : public Link {
 public:
  size_t room = 1 << 30; ///< bytes that writes may still bring
  size_t piece = 1 << 30; ///< bytes that one call moves
  bool ended = false;
  bool lost = false; ///< reads throw
  std::string bytes; ///< written and not read

  [[nodiscard]] int fd() const noexcept override {
    return -1;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    Progress progress;
    size_t left = std::min(room, piece);
    for (size_t i = 0; i < count && left > 0; ++i) {
      const size_t taken = std::min(left, views[i].nbytes);
      bytes.append(reinterpret_cast<const char*>(views[i].ptr), taken);
      progress.nbytes += taken;
      left -= taken;
    }
    room -= progress.nbytes;
    progress.would_block = room == 0;
    return progress;
  }
  [[nodiscard]] Progress tryRead(BufferView into) override {
    if (lost) {
      throw Error(ErrorCode::ConnectionReset, "the connection was lost");
    }
    Progress progress;
    progress.nbytes = std::min({into.nbytes, bytes.size(), piece});
    std::memcpy(into.ptr, bytes.data(), progress.nbytes);
    bytes.erase(0, progress.nbytes);
    progress.closed = progress.nbytes == 0 && ended;
    progress.would_block = progress.nbytes == 0 && !ended;
    return progress;
  }
  void shutdownWrite() noexcept override {}
  [[nodiscard]] std::string describe() const override {
    return "a pipe";
  }
};

OutFrame frameOf(uint64_t op_id, const std::string& payload) {
  OutFrame frame;
  frame.header.op_id = op_id;
  frame.header.payload_nbytes = static_cast<uint32_t>(payload.size());
  frame.payload = {reinterpret_cast<const std::byte*>(payload.data()), payload.size()};
  frame.step = static_cast<int64_t>(op_id);
  return frame;
}

/// Different in every byte's neighbourhood, so that a shifted or repeated piece is seen.
std::string payloadOf(size_t nbytes) {
  std::string text(nbytes, '\0');
  for (size_t i = 0; i < nbytes; ++i) {
    text[i] = static_cast<char>((i * 7 + nbytes + i / 251) % 256);
  }
  return text;
}

/// Gives each payload memory, but for the operations that it is to drop.
class Keeper final : public InChannel::Receiver {
 public:
  uint64_t dropped_op = ~uint64_t{0};
  uint64_t starved_op = ~uint64_t{0}; ///< has no memory when its header comes first
  std::vector<std::pair<uint64_t, std::string>> got;
  std::string memory; ///< of the frame that is arriving

  [[nodiscard]] Sink onHeader(int peer, const FrameHeader& header) override {
    EXPECT_EQ(peer, 3);
    if (header.op_id == starved_op) {
      starved_op = ~uint64_t{0};
      throw std::bad_alloc();
    }
    memory.assign(header.payload_nbytes, '-');
    Sink sink;
    if (header.op_id != dropped_op) {
      sink.into = {reinterpret_cast<std::byte*>(memory.data()), memory.size()};
    }
    return sink;
  }
  void onFrame(int, const FrameHeader& header, Sink) override {
    got.emplace_back(header.op_id, memory);
  }
};

/// No bytes, some bytes, sizes that use the buffer, sizes that are read straight to their place, and more than one turn.
const std::vector<size_t> kSizes = {0, 1, 300, 5000, 16 << 10, 70'000, 0, (1 << 20) + 13};

TEST(Channel, FramesOfEverySizeArriveWholeAndInOrderHoweverTheyAreCut) {
  for (const size_t piece : {size_t{1} << 30, size_t{65536}, size_t{4097}, size_t{63}}) {
    PipeLink link;
    link.piece = piece;
    OutChannel out(link);
    std::vector<std::string> payloads;
    for (const size_t nbytes : kSizes) {
      payloads.push_back(payloadOf(nbytes));
    }
    for (size_t i = 0; i < payloads.size(); ++i) {
      out.push(frameOf(i, payloads[i]));
    }
    Keeper keeper;
    InChannel in(3, link, keeper);
    std::vector<OutFrame> sent;
    for (int turns = 0; keeper.got.size() < payloads.size(); ++turns) {
      ASSERT_LT(turns, 100'000) << "it does not get on in pieces of " << piece;
      static_cast<void>(out.flush(sent));
      ASSERT_TRUE(in.read());
    }
    EXPECT_TRUE(out.empty());
    ASSERT_EQ(sent.size(), payloads.size());
    for (size_t i = 0; i < payloads.size(); ++i) {
      EXPECT_EQ(sent[i].step, static_cast<int64_t>(i));
      EXPECT_EQ(keeper.got[i].first, i);
      EXPECT_TRUE(keeper.got[i].second == payloads[i]) << "of " << kSizes[i] << " bytes in pieces of " << piece;
    }
    link.ended = true;
    EXPECT_FALSE(in.read()) << "the peer has closed its side";
  }
}

// Its payload would pass for the next header, and its sender for one that sends what is no frame.
TEST(Channel, AHeaderForWhichThereWasNoMemoryIsReadAgain) {
  for (const uint64_t starved : {0, 1, 2}) {
    for (const bool lost : {false, true}) {
      PipeLink link;
      OutChannel out(link);
      const std::vector<std::string> payloads = {payloadOf(300), payloadOf(5000), ""};
      for (size_t i = 0; i < payloads.size(); ++i) {
        out.push(frameOf(i, payloads[i]));
      }
      std::vector<OutFrame> sent;
      ASSERT_FALSE(out.flush(sent));
      Keeper keeper;
      keeper.starved_op = starved;
      InChannel in(3, link, keeper);
      EXPECT_THROW(static_cast<void>(in.read()), std::bad_alloc);
      EXPECT_EQ(keeper.got.size(), starved);
      EXPECT_EQ(link.bytes, "") << "nothing is left that would make the link readable";
      link.lost = lost;
      try {
        EXPECT_TRUE(in.read());
      } catch (const Error& error) {
        EXPECT_TRUE(lost && error.record().code == ErrorCode::ConnectionReset) << error.what();
      }
      ASSERT_EQ(keeper.got.size(), payloads.size()) << starved;
      for (size_t i = 0; i < payloads.size(); ++i) {
        EXPECT_EQ(keeper.got[i].first, i);
        EXPECT_EQ(keeper.got[i].second, payloads[i]);
      }
    }
  }
}

TEST(Channel, AFrameIsSentWhenItsLastByteIsTaken) {
  PipeLink link;
  OutChannel out(link);
  const std::string payload = payloadOf(1000);
  out.push(frameOf(7, payload));
  std::vector<OutFrame> sent;
  link.room = sizeof(FrameHeader) + payload.size() - 1;
  EXPECT_TRUE(out.flush(sent));
  EXPECT_TRUE(sent.empty()) << "a byte of it is still the operation's";
  link.room = 1;
  EXPECT_FALSE(out.flush(sent));
  ASSERT_EQ(sent.size(), 1U);
  EXPECT_EQ(sent[0].header.op_id, 7U);
}

// The operation has failed: its memory is not read again, and what the peer has of the frame is never completed.
TEST(Channel, APayloadThatIsUnderWayIsCutShort) {
  PipeLink link;
  OutChannel out(link);
  std::string payload = payloadOf(1000);
  out.push(frameOf(1, payload));
  out.push(frameOf(2, payload));
  link.room = sizeof(FrameHeader) + 10;
  std::vector<OutFrame> sent;
  EXPECT_TRUE(out.flush(sent));
  EXPECT_FALSE(out.cutShort());
  out.stopTouchingMemory();
  EXPECT_TRUE(out.cutShort());
  EXPECT_TRUE(out.empty());
  std::string().swap(payload); // AddressSanitizer: read after this it is a use after free
  link.room = 1 << 20;
  EXPECT_FALSE(out.flush(sent));
  EXPECT_EQ(link.bytes.size(), sizeof(FrameHeader) + 10);
}

TEST(Channel, AGoodbyeFollowsAHeaderThatIsUnderWay) {
  PipeLink link;
  OutChannel out(link);
  out.push(frameOf(1, ""));
  const std::string payload = payloadOf(10);
  out.push(frameOf(2, payload));
  link.room = 20;
  std::vector<OutFrame> sent;
  EXPECT_TRUE(out.flush(sent));
  out.stopTouchingMemory();
  EXPECT_FALSE(out.cutShort()) << "a frame without a payload borrows nothing";
  out.push(frameOf(3, ""));
  link.room = 1 << 20;
  EXPECT_FALSE(out.flush(sent));
  Keeper keeper;
  InChannel in(3, link, keeper);
  EXPECT_TRUE(in.read());
  ASSERT_EQ(keeper.got.size(), 2U);
  EXPECT_EQ(keeper.got[0].first, 1U);
  EXPECT_EQ(keeper.got[1].first, 3U);
}

// Of a payload in nobody's way the rest is dropped, and the next frame is found behind it.
TEST(Channel, WhatIsNotWantedIsReadAndDropped) {
  for (const size_t nbytes : {size_t{100}, size_t{200'000}}) {
    PipeLink link;
    OutChannel out(link);
    const std::vector<std::string> payloads = {payloadOf(nbytes), payloadOf(nbytes + 1), payloadOf(50)};
    for (size_t i = 0; i < payloads.size(); ++i) {
      out.push(frameOf(i, payloads[i]));
    }
    std::vector<OutFrame> sent;
    Keeper keeper;
    keeper.dropped_op = 0;
    InChannel in(3, link, keeper);
    link.room = 2 * sizeof(FrameHeader) + nbytes + nbytes / 2; // half of the second
    EXPECT_TRUE(out.flush(sent));
    EXPECT_TRUE(in.read());
    in.stopTouchingMemory();
    const std::string half = keeper.memory;
    link.room = 1 << 30;
    EXPECT_FALSE(out.flush(sent));
    EXPECT_TRUE(in.read());
    ASSERT_EQ(keeper.got.size(), 3U);
    EXPECT_EQ(keeper.got[0].second, std::string(nbytes, '-'));
    EXPECT_TRUE(keeper.got[1].second == half) << "written into after stopTouchingMemory()";
    EXPECT_NE(half.find_last_not_of('-'), std::string::npos) << "nothing had arrived: the test shows nothing";
    EXPECT_EQ(keeper.got[2].second, payloads[2]);
  }
}

TEST(Channel, BytesThatAreNoFrameAreAProtocolViolation) {
  for (const int field : {0, 1, 2}) {
    PipeLink link;
    OutChannel out(link);
    OutFrame frame = frameOf(1, "");
    if (field == 0) {
      frame.header.magic ^= 1;
    } else if (field == 1) {
      frame.header.version += 1;
    } else {
      frame.header.payload_nbytes = kMaxPayloadNbytes + 1;
    }
    link.bytes.assign(reinterpret_cast<const char*>(&frame.header), sizeof frame.header);
    Keeper keeper;
    InChannel in(3, link, keeper);
    const ErrorRecord error = testing::errorOf([&] { static_cast<void>(in.read()); });
    EXPECT_EQ(error.code, ErrorCode::ProtocolViolation);
    EXPECT_EQ(error.summary, "bytes that are no frame arrived from the peer");
    EXPECT_TRUE(keeper.got.empty());
  }
}

} // namespace
} // namespace pycomm

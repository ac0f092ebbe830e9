#include "transport/striped_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/link_conformance.h"
#include "transport/socket_pairs.h"

namespace pycomm {
namespace {

using testing::errorOf;
using ::testing::HasSubstr;
using testing::LinkCase;
using testing::LinkConformance;
using testing::LinkPair;
using testing::namelessPair;
using testing::PeerPlace;

LinkPair striped(size_t connections) {
  std::vector<StripedLink::Part> near;
  std::vector<StripedLink::Part> far;
  for (size_t i = 0; i < connections; ++i) {
    auto [one, other] = namelessPair();
    near.push_back({std::move(one), "near" + std::to_string(i)});
    far.push_back({std::move(other), "far" + std::to_string(i)});
  }
  return {
      std::make_unique<StripedLink>(std::move(near), StripedLink::State::Connected),
      std::make_unique<StripedLink>(std::move(far), StripedLink::State::Connected)};
}

INSTANTIATE_TEST_SUITE_P(
    Striped,
    LinkConformance,
    ::testing::Combine(
        ::testing::Values(LinkCase{"Of3", [] { return striped(3); }}),
        ::testing::Values(PeerPlace::Thread, PeerPlace::Process)),
    [](const auto& test) {
      return std::get<0>(test.param).name + (std::get<1>(test.param) == PeerPlace::Thread ? "Thread" : "Process");
    });

/// Remembers what is written on it, and takes so much at a time.
class Recorder final : public Link {
 public:
  /// `tries`: how often it must be asked before it is connected.
  Recorder(std::string& written, size_t at_most, std::string greeting = "", size_t tries = 0)
      : written_(written), at_most_(at_most), greeting_(std::move(greeting)), tries_(tries) {}
  [[nodiscard]] int fd() const noexcept override {
    return -1;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    Progress progress;
    for (size_t i = 0; i < count && progress.nbytes < at_most_; ++i) {
      const size_t nbytes = std::min(views[i].nbytes, at_most_ - progress.nbytes);
      written_.append(reinterpret_cast<const char*>(views[i].ptr), nbytes);
      progress.nbytes += nbytes;
    }
    return progress;
  }
  [[nodiscard]] Progress tryRead(BufferView) override {
    throw Error(ErrorCode::ConnectionReset, "reading failed");
  }
  [[nodiscard]] bool finishConnect() override {
    if (tries_ > 0 && --tries_ == 0) {
      written_ += greeting_;
    }
    return tries_ == 0;
  }
  [[nodiscard]] short roomEvent() const noexcept override {
    return tries_ == 0 ? POLLOUT : POLLIN;
  }
  void shutdownWrite() noexcept override {}
  [[nodiscard]] std::string describe() const override {
    return "a recorder";
  }

 private:
  std::string& written_;
  const size_t at_most_;
  const std::string greeting_;
  size_t tries_;
};

// Every connection greets when it is asked to connect, then gets its chunks: as many bytes as the others, give or take a chunk.
TEST(StripedLink, SpreadsChunksAfterTheGreetings) {
  std::vector<std::string> written(3);
  std::vector<StripedLink::Part> parts;
  for (size_t i = 0; i < written.size(); ++i) {
    parts.push_back({std::make_unique<Recorder>(written[i], 10000 + i, "hello " + std::to_string(i), 3 - i), "eth0"});
  }
  StripedLink link(std::move(parts), StripedLink::State::Connecting);
  EXPECT_EQ(link.roomEvent(), POLLIN);
  EXPECT_FALSE(link.finishConnect());
  EXPECT_FALSE(link.finishConnect());
  ASSERT_TRUE(link.finishConnect()); // all of them at the same time: the slowest needs three
  EXPECT_EQ(link.roomEvent(), POLLOUT);
  std::string stream;
  for (int i = 0; stream.size() < 7 * StripedLink::kChunkNbytes + 5; ++i) {
    stream += std::to_string(i) + ",";
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(stream.data());
  for (size_t done = 0; done < stream.size();) { // as two views, the first one short
    const size_t first = std::min<size_t>(64, stream.size() - done);
    const ConstBufferView views[] = {{bytes + done, first}, {bytes + done + first, stream.size() - done - first}};
    const Progress progress = link.tryWrite(views, 2);
    ASSERT_GT(progress.nbytes, 0U);
    done += progress.nbytes;
  }
  std::vector<std::string> expected = {"hello 0", "hello 1", "hello 2"};
  for (size_t chunk = 0; chunk * StripedLink::kChunkNbytes < stream.size(); ++chunk) {
    expected[chunk % 3] += stream.substr(chunk * StripedLink::kChunkNbytes, StripedLink::kChunkNbytes);
  }
  EXPECT_EQ(written, expected);
}

/// Takes everything, and sends it when it is asked again, as far as there is room: as a TlsLink does.
class Holder final : public Link {
 public:
  [[nodiscard]] int fd() const noexcept override {
    return -1;
  }
  [[nodiscard]] int writeFd() const noexcept override {
    return descriptor;
  }
  [[nodiscard]] bool unsent() const noexcept override {
    return !held.empty();
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    Progress progress;
    for (size_t i = 0; i < count; ++i) {
      held.append(reinterpret_cast<const char*>(views[i].ptr), views[i].nbytes);
      progress.nbytes += views[i].nbytes;
    }
    const size_t nbytes = std::min(room, held.size());
    sent.append(held, 0, nbytes);
    held.erase(0, nbytes);
    room -= nbytes;
    return progress;
  }
  [[nodiscard]] Progress tryRead(BufferView) override {
    return {};
  }
  void shutdownWrite() noexcept override {}
  [[nodiscard]] std::string describe() const override {
    return "a holder";
  }

  int descriptor = -1;
  size_t room = 0;
  std::string held;
  std::string sent;
};

// The peer reads the chunks in order, so nothing else may travel while the last one waits; and nobody but this link sends it.
TEST(StripedLink, SendsAllThatAConnectionHoldsBeforeTheNextOneWrites) {
  std::vector<StripedLink::Part> parts;
  std::vector<Holder*> holders; // the link's
  for (int i = 0; i < 2; ++i) {
    auto holder = std::make_unique<Holder>();
    holder->descriptor = 10 + i;
    holders.push_back(holder.get());
    parts.push_back({std::move(holder), ""});
  }
  Holder& first = *holders[0];
  Holder& second = *holders[1];
  StripedLink link(std::move(parts), StripedLink::State::Connected);
  const std::string stream(StripedLink::kChunkNbytes + 5, 'x');
  const auto write = [&](size_t offset, size_t nbytes) {
    const ConstBufferView bytes(reinterpret_cast<const std::byte*>(stream.data()) + offset, nbytes);
    return link.tryWrite(&bytes, nbytes > 0 ? 1 : 0);
  };
  EXPECT_EQ(write(0, stream.size()).nbytes, StripedLink::kChunkNbytes);
  EXPECT_TRUE(link.unsent());
  EXPECT_EQ(link.writeFd(), 10); // although the next byte leaves on the other one

  for (const size_t nbytes : {size_t{5}, size_t{0}}) {
    first.room = 100;
    const Progress blocked = write(StripedLink::kChunkNbytes, nbytes);
    EXPECT_EQ(blocked.nbytes, 0U);
    EXPECT_TRUE(blocked.would_block);
    EXPECT_EQ(first.room, 0U);
    EXPECT_EQ(second.held + second.sent, "");
    EXPECT_TRUE(link.unsent());
  }

  first.room = StripedLink::kChunkNbytes;
  EXPECT_EQ(write(StripedLink::kChunkNbytes, 5).nbytes, 5U);
  EXPECT_EQ(first.sent, stream.substr(0, StripedLink::kChunkNbytes));
  EXPECT_EQ(second.held, "xxxxx");
  EXPECT_EQ(link.writeFd(), 11);

  EXPECT_TRUE(write(0, 0).would_block);
  second.room = 5;
  EXPECT_FALSE(write(0, 0).would_block);
  EXPECT_EQ(second.sent, "xxxxx");
  EXPECT_FALSE(link.unsent());
}

TEST(StripedLink, SaysWhoseTurnItIs) {
  const LinkPair pair = striped(3);
  auto& writer = static_cast<StripedLink&>(*pair.first);
  auto& reader = static_cast<StripedLink&>(*pair.second);
  EXPECT_EQ(writer.writesTo(), "near0");
  EXPECT_EQ(reader.readsFrom(), "far0");
  std::vector<std::byte> bytes(StripedLink::kChunkNbytes + 5);
  for (size_t done = 0; done < bytes.size();) {
    const ConstBufferView rest{bytes.data() + done, bytes.size() - done};
    done += writer.tryWrite(&rest, 1).nbytes;
    for (Progress read; (read = reader.tryRead({bytes.data(), bytes.size()})).nbytes > 0;) {
    }
  }
  EXPECT_EQ(writer.writesTo(), "near1");
  EXPECT_EQ(reader.readsFrom(), "far1"); // five bytes into a chunk
}

TEST(StripedLink, SaysWhichConnectionBroke) {
  std::vector<std::string> written(2);
  std::vector<StripedLink::Part> parts;
  parts.push_back({std::make_unique<Recorder>(written[0], 1), "eth0"});
  parts.push_back({std::make_unique<Recorder>(written[1], 1), "eth1"});
  StripedLink link(std::move(parts), StripedLink::State::Connected);
  std::byte one{};
  const ErrorRecord record = errorOf([&] { static_cast<void>(link.tryRead({&one, 1})); });
  EXPECT_EQ(record.code, ErrorCode::ConnectionReset);
  EXPECT_THAT(record.summary, HasSubstr("connection 1 of 2, on eth0"));
}

} // namespace
} // namespace pycomm

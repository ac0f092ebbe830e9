// Whatever arrives from outside before anybody is trusted, decoded from random and from mutated bytes. Nothing may be read out of
// bounds (AddressSanitizer looks), nothing but Error may be thrown, and what was understood must survive being written again.
// PYCOMM_FUZZ_INPUTS in the environment says how many inputs a decoder gets; PYCOMM_FUZZ_SEED replays a run.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/address.h"
#include "transport/hello.h"
#include "transport/host_identity.h"
#include "transport/rank_record.h"
#include "transport/wire.h"

namespace pycomm {
namespace {

uint64_t fromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

class Fuzz : public ::testing::Test {
 protected:
  const uint64_t seed_ = fromEnvironment("PYCOMM_FUZZ_SEED", 1);
  const uint64_t inputs_ = fromEnvironment("PYCOMM_FUZZ_INPUTS", 20000);
  std::mt19937_64 dice_{seed_};

  uint64_t below(uint64_t bound) {
    return dice_() % bound;
  }

  // Something between the sample and noise: bits flipped, parts cut out, repeated, overwritten with extreme numbers.
  std::string mutate(const std::string& sample) {
    std::string bytes = below(8) == 0 ? std::string() : sample;
    for (uint64_t change = below(6); change > 0; --change) {
      const size_t at = bytes.empty() ? 0 : below(bytes.size());
      switch (below(7)) {
        case 0:
          if (!bytes.empty()) {
            bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
          }
          break;
        case 1:
          bytes.resize(at);
          break;
        case 2:
          bytes.insert(at, below(40), static_cast<char>(dice_()));
          break;
        case 3:
          bytes.erase(at, below(16));
          break;
        case 4:
          bytes.insert(at, bytes.substr(at / 2, below(64)));
          break;
        case 5: {
          const uint64_t extremes[] = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff, ~uint64_t{0}, uint64_t{1} << 63};
          const uint64_t number = extremes[below(7)];
          const size_t nbytes = std::min<size_t>(bytes.size() - at, below(9));
          if (nbytes > 0) {
            std::memcpy(bytes.data() + at, &number, std::min(nbytes, sizeof number));
          }
          break;
        }
        case 6: {
          const std::string digits = std::to_string(dice_());
          bytes.replace(at, std::min<size_t>(bytes.size() - at, below(6)), digits.substr(0, below(21)));
          break;
        }
      }
    }
    return bytes;
  }

  // In memory that ends where the bytes end.
  static std::unique_ptr<std::byte[]> exactly(const std::string& bytes) {
    auto copy = std::make_unique<std::byte[]>(bytes.size());
    if (!bytes.empty()) {
      std::memcpy(copy.get(), bytes.data(), bytes.size());
    }
    return copy;
  }
};

TEST_F(Fuzz, Hello) {
  Hello hello;
  hello.nonce = 0x1122334455667788U;
  hello.rank = 3;
  hello.size = 5;
  hello.group = 77;
  const std::string sample = encodeHello(hello);
  uint64_t complete = 0;
  for (uint64_t i = 0; i < inputs_; ++i) {
    std::string bytes = mutate(sample);
    bytes.resize(std::min(bytes.size(), kHelloNbytes)); // the acceptor reads no more
    const auto memory = exactly(bytes);
    const HelloReading reading = decodeHello({memory.get(), bytes.size()});
    if (reading.state == HelloReading::State::Complete) {
      ++complete;
      ASSERT_TRUE(reading.hello.rank >= 0 && reading.hello.rank < reading.hello.size) << "input " << i;
      const std::string again = encodeHello(reading.hello);
      const auto copy = exactly(again);
      ASSERT_EQ(decodeHello({copy.get(), again.size()}).hello.nonce, reading.hello.nonce) << "input " << i;
    }
  }
  EXPECT_GT(complete, 0U);
  EXPECT_LT(complete, inputs_);
}

TEST_F(Fuzz, HelloReplyAndErrorRecord) {
  ErrorRecord record;
  record.code = ErrorCode::PeerDead;
  record.summary = "Rank 2 is gone.";
  record.hint = "look there";
  record.rank = 1;
  record.peer = 2;
  record.host = "a";
  record.op = "all_reduce";
  record.numel = 1 << 20;
  const std::string sample = record.serialize();
  for (uint64_t i = 0; i < inputs_; ++i) {
    const std::string bytes = mutate(sample);
    const auto memory = exactly(bytes);
    const auto reply = decodeHelloReply({memory.get(), bytes.size()});
    if (reply) {
      const std::string text = reply->text();
      ASSERT_EQ(text.find('\n'), std::string::npos) << "input " << i;
      const ErrorRecord again = ErrorRecord::deserialize(reply->serialize());
      ASSERT_EQ(again.text(), text) << "input " << i;
    }
  }
}

TEST_F(Fuzz, RankRecord) {
  RankRecord record;
  record.version = FrameHeader::kVersion;
  record.rank = 1;
  record.size = 4;
  record.host = "node1";
  record.identity = HostIdentity::ofThisProcess();
  record.process = ProcessIdentity::ofThisProcess();
  record.route = SocketAddress::parse("10.0.0.1", 29600);
  record.config_text = "algorithm=auto transport=tcp";
  record.nonce = 99;
  record.watch_name = "0123456789abcdef";
  const std::string sample = record.wireText();
  uint64_t read = 0;
  for (uint64_t i = 0; i < inputs_; ++i) {
    const std::string bytes = mutate(sample);
    try {
      const RankRecord theirs = RankRecord::fromWireText(bytes, 1);
      ++read;
      (void)theirs.who();
      if (theirs.version == FrameHeader::kVersion) {
        ASSERT_EQ(RankRecord::fromWireText(theirs.wireText(), 1).wireText(), theirs.wireText()) << "input " << i;
      }
      checkCompatible(record, theirs);
    } catch (const Error&) { // the only thing that may come out
    }
  }
  EXPECT_GT(read, 0U);
}

TEST_F(Fuzz, ListsAndAddressesInTheStore) {
  const std::string list = joinTexts({"first", "", std::string(300, 'x')});
  const std::string address = SocketAddress::parse("fe80::1", 29600).withScopeId(2).wireText();
  const std::string host = HostIdentity::ofThisProcess().wireText();
  const std::string process = ProcessIdentity::ofThisProcess().wireText();
  for (uint64_t i = 0; i < inputs_; ++i) {
    if (const auto texts = splitTexts(mutate(list))) {
      ASSERT_EQ(splitTexts(joinTexts(*texts)), texts) << "input " << i;
    }
    if (const auto parsed = SocketAddress::fromWireText(mutate(address))) {
      ASSERT_EQ(SocketAddress::fromWireText(parsed->wireText())->wireText(), parsed->wireText()) << "input " << i;
    }
    if (const auto parsed = HostIdentity::fromWireText(mutate(host))) {
      ASSERT_EQ(parsed->wireText(), HostIdentity::fromWireText(parsed->wireText())->wireText()) << "input " << i;
    }
    if (const auto parsed = ProcessIdentity::fromWireText(mutate(process))) {
      ASSERT_GE(parsed->pid, 0) << "input " << i;
    }
  }
}

} // namespace
} // namespace pycomm

// Somebody between the two ends of a TlsLink, who can do to its records what he likes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/link_peer.h"
#include "transport/secure/record_pump.h"
#include "transport/secure/tls_contexts.h"
#include "transport/secure/tls_link.h"
#include "transport/socket_pairs.h"

namespace pycomm::testing {
namespace {

constexpr size_t kSentNbytes = 100000; // seven records

/// As an event loop asks: it does not read a link that neither holds bytes nor has a readable socket.
bool mayRead(const Link& link) {
  pollfd socket{link.readFd(), POLLIN, 0};
  return link.buffered() || ::poll(&socket, 1, 0) > 0;
}

struct Result {
  bool up = false;
  bool closed = false; ///< the server has seen the end of the client's side
  Bytes got; ///< by the server
  ErrorRecord error; ///< of the server, or of a handshake
};

/// The client sends kSentNbytes to the server, through somebody who changes what the client sends.
Result through(RecordPump::Change change) {
  const Context near = newContext();
  const Context far = newContext();
  auto [client_socket, proxy_near] = tcpPair();
  auto [proxy_far, server_socket] = tcpPair();
  const auto client = TlsLink::connect(near, std::move(client_socket), far->self());
  const auto server = TlsLink::accept(far, std::move(server_socket));
  RecordPump there(*proxy_near, *proxy_far, std::move(change));
  RecordPump back(*proxy_far, *proxy_near, [](PassedRecord&) {});

  Result result;
  result.error.code = ErrorCode::Ok;
  const Bytes sent = pattern(kSentNbytes, 1);
  size_t written = 0;
  try {
    bool client_up = false;
    bool server_up = false;
    Bytes into(1 << 16);
    const Deadline patience = Deadline::after(1000); // a record that never comes is noticed by heartbeats, not here
    while (result.got.size() < sent.size() && !patience.expired()) {
      client_up = client_up || client->finishConnect();
      there.run();
      server_up = server_up || server->finishConnect();
      back.run();
      result.up = client_up && server_up;
      if (client_up) {
        const ConstBufferView rest(sent.data() + written, sent.size() - written);
        written += client->tryWrite(&rest, 1).nbytes;
      }
      if (server_up && mayRead(*server)) {
        const Progress progress = server->tryRead({into.data(), into.size()});
        result.got.insert(result.got.end(), into.begin(), into.begin() + static_cast<std::ptrdiff_t>(progress.nbytes));
        result.closed = progress.closed;
        if (progress.closed) {
          break;
        }
      }
    }
  } catch (const Error& error) {
    result.error = error.record();
  }
  return result;
}

bool isPrefix(const Bytes& got) {
  const Bytes sent = pattern(kSentNbytes, 1);
  return got.size() <= sent.size() && std::equal(got.begin(), got.end(), sent.begin());
}

// Records 0 and 1 are the client's handshake; then come full records of data.
constexpr size_t kVictim = 4;

/// Changes one record.
RecordPump::Change atVictim(const std::function<void(PassedRecord&)>& change) {
  return [change](PassedRecord& record) {
    if (record.number == kVictim) {
      change(record);
    }
  };
}

TEST(TlsLinkAttacks, NobodyInTheMiddleIsHeard) {
  const Result result = through([](PassedRecord&) {});
  EXPECT_TRUE(result.up);
  EXPECT_EQ(result.got, pattern(kSentNbytes, 1)) << result.error.text();
}

TEST(TlsLinkAttacks, RecordsThatAreChangedRepeatedSwappedOrLeftOutEndTheLink) {
  std::string kept;
  const std::vector<std::pair<std::string, RecordPump::Change>> attacks = {
      {"flip of the first byte", atVictim([](PassedRecord& record) { record.bytes[kHeaderNbytes] ^= 1; })},
      {"flip of the last byte", atVictim([](PassedRecord& record) { record.bytes.back() ^= 1; })},
      {"another type", atVictim([](PassedRecord& record) { record.bytes[0] ^= 2; })},
      {"twice", atVictim([](PassedRecord& record) { record.bytes += std::string(record.bytes); })},
      {"left out", atVictim([](PassedRecord& record) { record.bytes.clear(); })},
      {"swapped with the next",
       [&kept](PassedRecord& record) {
         if (record.number == kVictim) {
           kept = std::exchange(record.bytes, "");
         } else if (record.number == kVictim + 1) {
           record.bytes += std::exchange(kept, "");
         }
       }},
      {"cut, and others follow", atVictim([](PassedRecord& record) { record.bytes.resize(100); })},
      {"one of our own", atVictim([](PassedRecord& record) {
         record.bytes =
             std::string("\x17\x03\x03\x00\x20", kHeaderNbytes) + std::string(32, 'x') + std::string(record.bytes);
       })},
      {"an alert in plain", atVictim([](PassedRecord& record) {
         record.bytes = std::string("\x15\x03\x03\x00\x02\x01\x00", 7) + std::string(record.bytes); // close_notify
       })},
  };
  for (const auto& [name, change] : attacks) {
    const Result result = through(change);
    EXPECT_TRUE(result.up) << name;
    EXPECT_EQ(result.error.code, ErrorCode::DataCorrupt) << name << ": " << result.error.text();
    EXPECT_TRUE(isPrefix(result.got)) << name;
    EXPECT_LT(result.got.size(), kSentNbytes) << name;
  }
}

// It looks like the peer's end, and only a goodbye inside TLS is one in order: a group whose link ends without one fails.
TEST(TlsLinkAttacks, ACutBringsABeginningAndNoMore) {
  for (const bool whole : {true, false}) { // between two records, or in the middle of one
    const Result result = through(atVictim([whole](PassedRecord& record) {
      record.bytes.resize(whole ? record.bytes.size() : 100);
      record.last = true;
    }));
    EXPECT_TRUE(result.up);
    EXPECT_TRUE(result.closed) << result.error.text();
    EXPECT_TRUE(isPrefix(result.got));
    EXPECT_LT(result.got.size(), kSentNbytes);
  }
}

TEST(TlsLinkAttacks, ADelayChangesNothing) {
  const TimePoint begin = Clock::now();
  const Result result = through([](PassedRecord& record) { record.delay_ms = record.number < kVictim ? 50 : 0; });
  EXPECT_TRUE(result.up);
  EXPECT_EQ(result.got, pattern(kSentNbytes, 1)) << result.error.text();
  EXPECT_GE(elapsedMs(begin), 200);
}

// A client's first record. The binder and the transcript cover its content: any changed byte there ends the handshake. They do not
// cover the record's header of five bytes (RFC 8446, 4.2.11.2 and 4.4.1). Its type and length must be right, or the record cannot
// be read. Receivers shall ignore its version: OpenSSL compares the first byte of that, and not the second.
TEST(TlsLinkAttacks, AChangedByteOfTheFirstMessageEndsTheHandshakeOrChangesNothing) {
  constexpr size_t kLowVersion = 2;
  size_t nbytes = 0;
  (void)through([&](PassedRecord& record) { nbytes += record.number == 0 ? record.bytes.size() : 0; });
  ASSERT_GT(nbytes, 200U);
  std::vector<size_t> harmless;
  for (size_t at = 0; at < nbytes; ++at) {
    const Result result = through([&](PassedRecord& record) {
      if (record.number == 0 && at < record.bytes.size()) {
        record.bytes[at] ^= 0x20;
      }
    });
    if (result.up && result.error.code == ErrorCode::Ok) {
      harmless.push_back(at);
      EXPECT_EQ(result.got, pattern(kSentNbytes, 1));
    } else {
      EXPECT_TRUE(result.got.empty()) << at;
    }
  }
  EXPECT_EQ(harmless, std::vector<size_t>{kLowVersion});
}

} // namespace
} // namespace pycomm::testing

// Somebody between the two ends of a TlsLink, who can do to its records what he likes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <array>
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

using ::testing::Contains;
using ::testing::IsSubsetOf;
using ::testing::IsSupersetOf;

constexpr size_t kSentNbytes = 100000; // seven records
constexpr size_t kFewestTurns = 1000; // before a link counts as stalled, so that a busy machine stalls none

/// As an event loop asks: it does not read a link that neither holds bytes nor has a readable socket.
bool mayRead(const Link& link) {
  pollfd socket{link.fd(), POLLIN, 0};
  return link.buffered() || ::poll(&socket, 1, 0) > 0;
}

struct Result {
  bool up = false;
  bool closed = false; ///< the receiver has seen the end of the sender's side
  bool stalled = false; ///< neither all data nor an end nor an error came in time
  Bytes got; ///< by the receiver
  ErrorRecord error; ///< of the receiver, or of a handshake
};

using Role = TlsContext::Role;

constexpr int kUntilStalledMs = 1000;
constexpr int kPatientMs = 30000; ///< where nothing may stall

/// One end sends kSentNbytes to the other, through somebody who changes what it sends.
Result through(Role sender, RecordPump::Change change, int patience_ms = kPatientMs) {
  const Context near = newContext();
  const Context far = newContext();
  auto [client_socket, proxy_near] = tcpPair();
  auto [proxy_far, server_socket] = tcpPair();
  const auto client = TlsLink::connect(near, std::move(client_socket), far->self());
  const auto server = TlsLink::accept(far, std::move(server_socket));
  TlsLink& writer = sender == Role::Client ? *client : *server;
  TlsLink& reader = sender == Role::Client ? *server : *client;
  const RecordPump::Change none = [](PassedRecord&) {};
  RecordPump there(*proxy_near, *proxy_far, sender == Role::Client ? change : none);
  RecordPump back(*proxy_far, *proxy_near, sender == Role::Client ? none : change);

  Result result;
  result.error.code = ErrorCode::Ok;
  const Bytes sent = pattern(kSentNbytes, 1);
  size_t written = 0;
  try {
    bool client_up = false;
    bool server_up = false;
    Bytes into(1 << 16);
    const Deadline patience =
        Deadline::after(patience_ms); // a record that never comes is noticed by heartbeats, not here
    for (size_t turn = 0; result.got.size() < sent.size() && (turn < kFewestTurns || !patience.expired()); ++turn) {
      client_up = client_up || client->finishConnect();
      there.run();
      server_up = server_up || server->finishConnect();
      back.run();
      result.up = client_up && server_up;
      if (sender == Role::Client ? client_up : server_up) {
        const ConstBufferView rest(sent.data() + written, sent.size() - written);
        written += writer.tryWrite(&rest, 1).nbytes;
      }
      if ((sender == Role::Client ? server_up : client_up) && mayRead(reader)) {
        const Progress progress = reader.tryRead({into.data(), into.size()});
        result.got.insert(result.got.end(), into.begin(), into.begin() + static_cast<std::ptrdiff_t>(progress.nbytes));
        result.closed = progress.closed;
        if (progress.closed) {
          break;
        }
      }
    }
    result.stalled = result.got.size() < sent.size() && !result.closed;
  } catch (const Error& error) {
    result.error = error.record();
  }
  return result;
}

bool isPrefix(const Bytes& got) {
  const Bytes sent = pattern(kSentNbytes, 1);
  return got.size() <= sent.size() && std::equal(got.begin(), got.end(), sent.begin());
}

// The first two records of the client are its handshake, and the first three of the server; then come full records of data.
constexpr size_t kVictim = 4;

/// Changes one record.
RecordPump::Change atVictim(const std::function<void(PassedRecord&)>& change) {
  return [change](PassedRecord& record) {
    if (record.number == kVictim) {
      change(record);
    }
  };
}

constexpr std::array<Role, 2> kSenders = {Role::Client, Role::Server};

TEST(TlsLinkAttacks, NobodyInTheMiddleIsHeard) {
  for (const Role sender : kSenders) {
    const Result result = through(sender, [](PassedRecord&) {});
    EXPECT_TRUE(result.up);
    EXPECT_EQ(result.got, pattern(kSentNbytes, 1)) << result.error.text();
  }
}

TEST(TlsLinkAttacks, RecordsThatAreChangedRepeatedSwappedOrLeftOutEndTheLink) {
  for (const Role sender : kSenders) {
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
      const Result result = through(sender, change);
      EXPECT_TRUE(result.up) << name;
      EXPECT_EQ(result.error.code, ErrorCode::DataCorrupt) << name << ": " << result.error.text();
      EXPECT_TRUE(isPrefix(result.got)) << name;
      EXPECT_LT(result.got.size(), kSentNbytes) << name;
    }
  }
}

// It looks like the peer's end, and only a goodbye inside TLS is one in order: a group whose link ends without one fails.
TEST(TlsLinkAttacks, ACutBringsABeginningAndNoMore) {
  for (const Role sender : kSenders) {
    for (const bool whole : {true, false}) { // between two records, or in the middle of one
      const Result result = through(sender, atVictim([whole](PassedRecord& record) {
                                      record.bytes.resize(whole ? record.bytes.size() : 100);
                                      record.last = true;
                                    }));
      EXPECT_TRUE(result.up);
      EXPECT_TRUE(result.closed) << result.error.text();
      EXPECT_TRUE(isPrefix(result.got));
      EXPECT_LT(result.got.size(), kSentNbytes);
    }
  }
}

TEST(TlsLinkAttacks, ADelayChangesNothing) {
  for (const Role sender : kSenders) {
    const TimePoint begin = Clock::now();
    const Result result =
        through(sender, [](PassedRecord& record) { record.delay_ms = record.number < kVictim ? 50 : 0; });
    EXPECT_TRUE(result.up);
    EXPECT_EQ(result.got, pattern(kSentNbytes, 1)) << result.error.text();
    EXPECT_GE(elapsedMs(begin), 200);
  }
}

/// Changed bytes by what becomes of the handshake: "1.3" is the fourth byte of the second record.
struct Changed {
  std::vector<std::string> harmless; ///< all data arrive
  std::vector<std::string> stalled; ///< an end waits for more bytes
};

/// Flips one bit of each byte of an end's first records, in turn. A byte that is in neither list ends the handshake, or the first read
/// behind it, with an error.
Changed flipEachByte(Role sender, size_t records) {
  std::vector<size_t> nbytes(records);
  (void)through(sender, [&](PassedRecord& record) {
    if (record.number < records) {
      nbytes[record.number] = record.bytes.size();
    }
  });
  Changed changed;
  for (size_t number = 0; number < records; ++number) {
    EXPECT_GT(nbytes[number], kHeaderNbytes);
    for (size_t at = 0; at < nbytes[number]; ++at) {
      const Result result = through(
          sender,
          [&](PassedRecord& record) {
            if (record.number == number && at < record.bytes.size()) {
              record.bytes[at] ^= 0x20;
            }
          },
          kUntilStalledMs);
      const std::string name = std::to_string(number) + "." + std::to_string(at);
      if (result.up && result.error.code == ErrorCode::Ok) {
        changed.harmless.push_back(name);
        EXPECT_EQ(result.got, pattern(kSentNbytes, 1)) << name;
        continue;
      }
      EXPECT_TRUE(result.got.empty()) << name;
      if (result.stalled) {
        changed.stalled.push_back(name);
        continue;
      }
      EXPECT_NE(result.error.code, ErrorCode::Ok) << name;
      EXPECT_NE(result.error.code, ErrorCode::DataCorrupt) << name << ": " << result.error.text();
    }
  }
  return changed;
}

// A client's first record. The binder and the transcript cover its content: any changed byte there ends the handshake. They do not
// cover the record's header of five bytes (RFC 8446, 4.2.11.2 and 4.4.1). Its type and length must be right, or the record cannot
// be read. Receivers shall ignore its version: OpenSSL compares the first byte of that, and not the second. Bytes 3 and 4 are the
// record's length, and bytes 6 to 8 the message's: if one of these is larger, the receiver waits for more bytes. A rank that listens drops
// such a connection after 2 s (TlsEndpoint).
TEST(TlsLinkHandshake, AChangedByteOfTheFirstMessageEndsItOrChangesNothing) {
  const Changed changed = flipEachByte(Role::Client, 1);
  EXPECT_EQ(changed.harmless, std::vector<std::string>{"0.2"});
  EXPECT_THAT(changed.stalled, Contains("0.3"));
  EXPECT_THAT(changed.stalled, IsSubsetOf({"0.3", "0.4", "0.6", "0.7", "0.8"}));
}

// The server's hello, in plain, and the two encrypted records behind it.
TEST(TlsLinkHandshake, AChangedByteOfTheServersAnswerEndsItOrChangesNothing) {
  const Changed changed = flipEachByte(Role::Server, 3);
  EXPECT_EQ(changed.harmless, std::vector<std::string>{"0.2"});
  EXPECT_THAT(changed.stalled, IsSupersetOf({"0.3", "1.3", "2.3"}));
  EXPECT_THAT(changed.stalled, IsSubsetOf({"0.3", "0.4", "0.6", "0.7", "0.8", "1.3", "1.4", "2.3", "2.4"}));
}

} // namespace
} // namespace pycomm::testing

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
#include "transport/secure/tls_contexts.h"
#include "transport/secure/tls_link.h"
#include "transport/socket_pairs.h"

namespace pycomm::testing {
namespace {

constexpr size_t kHeaderNbytes = 5;
constexpr size_t kSentNbytes = 100000; // seven records

/// Passes bytes on from one link to another, a record at a time.
class Pump {
 public:
  /// Gets the number of a record and the record; what it leaves there is passed on.
  using Change = std::function<void(size_t number, std::string& record)>;

  Pump(SocketLink& from, SocketLink& to, Change change) : from_(from), to_(to), change_(std::move(change)) {}

  void run() {
    std::string bytes(1 << 16, '\0');
    Progress progress;
    try {
      progress = from_.tryRead({reinterpret_cast<std::byte*>(bytes.data()), bytes.size()});
    } catch (const Error&) {
      progress.closed = true;
    }
    in_.append(bytes, 0, progress.nbytes);
    while (in_.size() >= kHeaderNbytes && in_.size() >= recordNbytes()) {
      std::string record = in_.substr(0, recordNbytes());
      in_.erase(0, record.size());
      change_(count_++, record);
      out_ += record;
    }
    try {
      const ConstBufferView rest(reinterpret_cast<const std::byte*>(out_.data()), out_.size());
      out_.erase(0, to_.tryWrite(&rest, 1).nbytes);
    } catch (const Error&) {
      out_.clear();
    }
    if (progress.closed && out_.empty()) {
      to_.shutdownWrite();
    }
  }

 private:
  [[nodiscard]] size_t recordNbytes() const {
    return kHeaderNbytes + (size_t{static_cast<unsigned char>(in_[3])} << 8) + static_cast<unsigned char>(in_[4]);
  }

  SocketLink& from_;
  SocketLink& to_;
  Change change_;
  std::string in_;
  std::string out_;
  size_t count_ = 0;
};

/// As an event loop asks: it does not read a link that neither holds bytes nor has a readable socket.
bool mayRead(const Link& link) {
  pollfd socket{link.readFd(), POLLIN, 0};
  return link.buffered() || ::poll(&socket, 1, 0) > 0;
}

struct Result {
  bool up = false;
  Bytes got; ///< by the server
  ErrorRecord error; ///< of the server, or of a handshake
};

/// The client sends kSentNbytes to the server, through somebody who changes what the client sends.
Result through(Pump::Change change) {
  const Context near = newContext();
  const Context far = newContext();
  auto [client_socket, proxy_near] = tcpPair();
  auto [proxy_far, server_socket] = tcpPair();
  const auto client = TlsLink::connect(near, std::move(client_socket), far->self());
  const auto server = TlsLink::accept(far, std::move(server_socket));
  Pump there(*proxy_near, *proxy_far, std::move(change));
  Pump back(*proxy_far, *proxy_near, [](size_t, std::string&) {});

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

TEST(TlsLinkAttacks, NobodyInTheMiddleIsHeard) {
  const Result result = through([](size_t, std::string&) {});
  EXPECT_TRUE(result.up);
  EXPECT_EQ(result.got, pattern(kSentNbytes, 1)) << result.error.text();
}

TEST(TlsLinkAttacks, RecordsThatAreChangedRepeatedSwappedOrLeftOutEndTheLink) {
  std::string kept;
  const std::vector<std::pair<std::string, Pump::Change>> attacks = {
      {"flip of the first byte",
       [](size_t number, std::string& record) { record[kHeaderNbytes] ^= number == kVictim ? 1 : 0; }},
      {"flip of the last byte", [](size_t number, std::string& record) { record.back() ^= number == kVictim ? 1 : 0; }},
      {"another type", [](size_t number, std::string& record) { record[0] ^= number == kVictim ? 2 : 0; }},
      {"twice",
       [](size_t number, std::string& record) {
         if (number == kVictim) {
           record += record;
         }
       }},
      {"left out",
       [](size_t number, std::string& record) {
         if (number == kVictim) {
           record.clear();
         }
       }},
      {"swapped with the next",
       [&kept](size_t number, std::string& record) {
         if (number == kVictim) {
           kept = std::exchange(record, "");
         } else if (number == kVictim + 1) {
           record += std::exchange(kept, "");
         }
       }},
      {"one of our own",
       [](size_t number, std::string& record) {
         if (number == kVictim) {
           record = std::string("\x17\x03\x03\x00\x20", kHeaderNbytes) + std::string(32, 'x') + record;
         }
       }},
      {"an alert in plain",
       [](size_t number, std::string& record) {
         if (number == kVictim) {
           record = std::string("\x15\x03\x03\x00\x02\x01\x00", 7) + record; // close_notify
         }
       }},
  };
  for (const auto& [name, change] : attacks) {
    const Result result = through(change);
    EXPECT_TRUE(result.up) << name;
    EXPECT_EQ(result.error.code, ErrorCode::ConnectionReset) << name << ": " << result.error.text();
    EXPECT_TRUE(isPrefix(result.got)) << name;
    EXPECT_LT(result.got.size(), kSentNbytes) << name;
  }
}

// It looks like the peer's end, and only a goodbye inside TLS is one in order.
TEST(TlsLinkAttacks, ACutBringsABeginningAndNoMore) {
  const Result result = through([](size_t number, std::string& record) {
    if (number == kVictim) {
      record.resize(100);
    } else if (number > kVictim) {
      record.clear();
    }
  });
  EXPECT_TRUE(result.up);
  EXPECT_TRUE(isPrefix(result.got));
  EXPECT_LT(result.got.size(), kSentNbytes);
}

// Bytes of the handshake that OpenSSL does not look at may change; then all that follows is as if they had not.
TEST(TlsLinkAttacks, AChangedHandshakeLeadsToNoChangedBytes) {
  size_t nbytes = 0;
  (void)through([&](size_t number, std::string& record) { nbytes += number == 0 ? record.size() : 0; });
  ASSERT_GT(nbytes, 200U);
  int failed = 0;
  for (size_t at = 0; at < nbytes; at += 7) {
    const Result result = through([&](size_t number, std::string& record) {
      if (number == 0 && at < record.size()) {
        record[at] ^= 0x20;
      }
    });
    failed += result.up && result.error.code == ErrorCode::Ok ? 0 : 1;
    EXPECT_TRUE(isPrefix(result.got)) << at;
  }
  EXPECT_GT(failed, 20);
}

} // namespace
} // namespace pycomm::testing

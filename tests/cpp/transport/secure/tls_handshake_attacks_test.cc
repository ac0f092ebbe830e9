// Peers that do not follow the handshake that pycomm wants, with the real OpenSSL at both ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/secure/client_hello.h"
#include "transport/secure/tls_pairs.h"
#include "within.h"

namespace pycomm::testing::handshake_attacks { // others compiled with this have the same names
namespace {

using ::testing::HasSubstr;

// OpenSSL's numbers.
constexpr int kCtrlGroups = 92;
constexpr int kCtrlMinVersion = 123;
constexpr int kCtrlMaxVersion = 124;
constexpr int kTls12 = 0x0303;

/// The first message of `client` to a process.
std::string firstMessage(const Context& client, const ProcessId& server) {
  SocketPair under = tcpPair();
  const auto link = TlsLink::connect(client, std::move(under.first), server);
  EXPECT_FALSE(link->finishConnect());
  std::string bytes(4096, '\0');
  EXPECT_TRUE(waitReadable(under.second->fd()));
  const Progress progress = under.second->tryRead({reinterpret_cast<std::byte*>(bytes.data()), bytes.size()});
  bytes.resize(progress.nbytes);
  return bytes;
}

void send(Link& link, std::string_view bytes) {
  writeAll(link, {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, soon(), kNoAbort);
}

/// What a server makes of a first message, and of what comes behind it.
struct Reception {
  ErrorRecord error; ///< Ok: none
  bool up = false;
  bool knows = false; ///< it takes the client for one that has the key
  std::string answer;
};

Reception receive(const Context& self, const std::string& bytes) {
  SocketPair under = tcpPair();
  const auto server = TlsLink::accept(self, std::move(under.first));
  send(*under.second, bytes);
  Reception reception;
  reception.error.code = ErrorCode::Ok;
  try {
    EXPECT_TRUE(waitReadable(server->fd()));
    for (int turn = 0; turn < 20; ++turn) {
      reception.up = server->finishConnect();
    }
  } catch (const Error& error) {
    reception.error = error.record();
  }
  reception.knows = server->hasAnswered();
  if (waitReadable(under.second->fd())) {
    reception.answer.resize(4096);
    const Progress progress =
        under.second->tryRead({reinterpret_cast<std::byte*>(reception.answer.data()), reception.answer.size()});
    reception.answer.resize(progress.nbytes);
  }
  return reception;
}

/// A client that has the key and wants something else.
struct ForgedHello {
  std::string name;
  std::function<void(ClientHello&)> change;
  std::string cause; ///< a part of the refusal's; empty: the server goes on
};

const std::string kNistGroup("\0\x17", 2);
const std::string kX25519("\0\x1d", 2);
const std::string kNoShare("\0\0", 2);
const std::string kX25519Share = std::string("\0\x24", 2) + kX25519 + std::string("\0\x20", 2) + std::string(32, '9');
constexpr uint16_t kSignatureAlgorithms = 13;

TEST(TlsHandshakeAttacks, AClientWithTheKeyGetsWhatPycommOffersAndNothingElse) {
  const Context client = newContext();
  const Context server = newContext();
  const std::string genuine = firstMessage(client, server->self());
  const PskIdentity identity{theSecret()->keyId(), client->self(), server->self()};
  const Key key = theSecret()->derive("pycomm 1 psk" + identity.text());
  const ForgedHello cases[] = {
      {"unchanged", [](ClientHello&) {}, ""},
      {"psk_ke and psk_dhe_ke",
       [](ClientHello& hello) { hello[ClientHello::kPskModes] = std::string("\x02\0\x01", 3); },
       ""},
      {"psk_ke only",
       [](ClientHello& hello) { hello[ClientHello::kPskModes] = std::string("\x01\0", 2); },
       "no suitable signature algorithm"}, // without the key only a certificate could do, and the client takes none
      {"TLS 1.2",
       [](ClientHello& hello) { hello[ClientHello::kSupportedVersions] = "\x02\x03\x03"; },
       "unsupported protocol"},
      {"no version but that of TLS 1.2",
       [](ClientHello& hello) { hello.remove(ClientHello::kSupportedVersions); },
       "unsupported protocol"},
      {"AES-256", [](ClientHello& hello) { hello.ciphers = "\x13\x02"; }, "no shared cipher"},
      {"ChaCha20", [](ClientHello& hello) { hello.ciphers = "\x13\x03"; }, "no shared cipher"},
      {"ChaCha20 rather than AES-128", [](ClientHello& hello) { hello.ciphers = "\x13\x03\x13\x01"; }, ""},
      {"X25519 only",
       [](ClientHello& hello) {
         hello[ClientHello::kSupportedGroups] = std::string("\0\x02", 2) + kX25519;
         hello[ClientHello::kKeyShare] = kX25519Share;
       },
       "no suitable key share"},
      {"X25519 rather than P-256",
       [](ClientHello& hello) {
         hello[ClientHello::kSupportedGroups] = std::string("\0\x04", 2) + kX25519 + kNistGroup;
         hello[ClientHello::kKeyShare] = kX25519Share;
       },
       ""}, // the server asks it to try again with P-256
      {"no share of a key", [](ClientHello& hello) { hello[ClientHello::kKeyShare] = kNoShare; }, ""},
      {"the same, of somebody without the key",
       [](ClientHello& hello) {
         hello[ClientHello::kKeyShare] = kNoShare;
         hello[kSignatureAlgorithms] = std::string("\0\x02\x04\x03", 4);
         hello.remove(ClientHello::kPreSharedKey);
       },
       "no suitable signature algorithm"}, // no answer either, which would take him for a rank: see hasAnswered()
      {"no key",
       [](ClientHello& hello) { hello.remove(ClientHello::kPreSharedKey); },
       "no suitable signature algorithm"},
      {"early data is announced", [](ClientHello& hello) { (void)hello[ClientHello::kEarlyData]; }, ""},
  };
  char number = 0;
  for (const ForgedHello& each : cases) {
    ClientHello hello = ClientHello::parse(genuine);
    hello.version_and_random[2] = ++number; // another connection's
    each.change(hello);
    const Reception reception = receive(server, hello.sealed(key.view()));
    EXPECT_FALSE(reception.up) << each.name;
    if (each.cause.empty()) {
      EXPECT_EQ(reception.error.code, ErrorCode::Ok) << each.name << ": " << reception.error.text();
      EXPECT_TRUE(reception.knows) << each.name;
      EXPECT_GT(reception.answer.size(), 50U) << each.name;
      // ServerHello's share of a P-256 key, or the request for one: no session has only the secret to hide behind.
      const std::string share = std::string("\0\x33\0\x45", 4) + kNistGroup;
      const std::string request = std::string("\0\x33\0\x02", 4) + kNistGroup;
      EXPECT_THAT(reception.answer, ::testing::AnyOf(HasSubstr(share), HasSubstr(request))) << each.name;
    } else {
      EXPECT_EQ(reception.error.code, ErrorCode::ProtocolViolation) << each.name;
      EXPECT_THAT(reception.error.cause, HasSubstr(each.cause)) << each.name;
      EXPECT_EQ(reception.answer.size(), 7U) << each.name << ": an alert and no more";
      EXPECT_EQ(reception.answer.substr(0, 1), "\x15") << each.name;
    }
  }
}

// The same with the data behind it: the server neither takes nor passes over it.
TEST(TlsHandshakeAttacks, EarlyDataEndsTheHandshake) {
  const Context client = newContext();
  const Context server = newContext();
  ClientHello hello = ClientHello::parse(firstMessage(client, server->self()));
  (void)hello[ClientHello::kEarlyData];
  const Key key =
      theSecret()->derive("pycomm 1 psk" + PskIdentity{theSecret()->keyId(), client->self(), server->self()}.text());
  const std::string data = std::string("\x17\x03\x03\0\x64", 5) + std::string(100, 'x');
  const Reception reception = receive(server, hello.sealed(key.view()) + data);
  EXPECT_FALSE(reception.up);
  EXPECT_EQ(reception.error.code, ErrorCode::ProtocolViolation);
  EXPECT_EQ(reception.error.cause, "OpenSSL: too much early data");
}

/// Both ends until each is up or has failed; an end that fails hangs up.
Handshake shakeAndHangUp(TlsPair& pair) {
  Handshake result;
  result.client.code = result.server.code = ErrorCode::Ok;
  bool up[2] = {false, false};
  const auto step = [](std::unique_ptr<TlsLink>& link, bool& done, ErrorRecord& record) {
    try {
      done = done || link == nullptr || link->finishConnect();
    } catch (const Error& error) {
      record = error.record();
      link.reset();
    }
  };
  for (const Deadline deadline = soon(); !(up[0] && up[1]);) {
    step(pair.client, up[0], result.client);
    step(pair.server, up[1], result.server);
    if (deadline.expired()) {
      ADD_FAILURE() << "it hangs";
      break;
    }
  }
  return result;
}

/// OpenSSL that offers the same cipher in answer to any request.
const OpenSsl* withAes256() {
  return misbehaving([](OpenSsl& table) {
    table.SSL_CTX_set_ciphersuites = [](SslContext* context, const char*) {
      return openSsl().SSL_CTX_set_ciphersuites(context, "TLS_AES_256_GCM_SHA384");
    };
  });
}

const OpenSsl* withChaCha20() {
  return misbehaving([](OpenSsl& table) {
    table.SSL_CTX_set_ciphersuites = [](SslContext* context, const char*) {
      return openSsl().SSL_CTX_set_ciphersuites(context, "TLS_CHACHA20_POLY1305_SHA256");
    };
  });
}

const OpenSsl* withX25519() {
  return misbehaving([](OpenSsl& table) {
    table.SSL_CTX_ctrl = [](SslContext* context, int command, long number, void* pointer) {
      std::array<char, 7> group = {"X25519"};
      return openSsl().SSL_CTX_ctrl(
          context, command, number, command == kCtrlGroups ? static_cast<void*>(group.data()) : pointer);
    };
  });
}

const OpenSsl* withTls12() {
  return misbehaving([](OpenSsl& table) {
    table.SSL_CTX_ctrl = [](SslContext* context, int command, long number, void* pointer) {
      const bool version = command == kCtrlMinVersion || command == kCtrlMaxVersion;
      return openSsl().SSL_CTX_ctrl(context, command, version ? kTls12 : number, pointer);
    };
  });
}

// Each end has the secret, and one or both an OpenSSL with other rules: none gets a connection of another kind.
TEST(TlsHandshakeAttacks, AnOpenSslOfOtherRulesGetsNoConnectionOfAnotherKind) {
  const char* const alert = "alert handshake failure";
  const char* const not_used = "does not use the secret: it is not trusted";
  const struct {
    std::string name;
    const OpenSsl* ssl;
    std::string at_server; ///< a part of the error of an honest server; at an honest client comes its alert
    std::string alert;
    std::string both; ///< of the server's error if neither is honest; empty: they connect
  } cases[] = {
      {"AES-256", withAes256(), "no shared cipher", alert, "no suitable signature algorithm"},
      {"ChaCha20", withChaCha20(), "no shared cipher", alert, not_used}, // a key of SHA-256 fits
      {"X25519", withX25519(), "no suitable key share", alert, ""}, // as good as P-256
      {"TLS 1.2", withTls12(), "unsupported protocol", "alert protocol version", "no shared cipher"},
  };
  for (const auto& each : cases) {
    const TimePoint begin = Clock::now();
    for (const bool bad_client : {true, false}) {
      TlsPair pair = bad_client ? unconnected(contextWith(each.ssl), newContext())
                                : unconnected(newContext(), contextWith(each.ssl));
      const Handshake result = shakeAndHangUp(pair);
      EXPECT_EQ(result.server.code, ErrorCode::ProtocolViolation) << each.name;
      EXPECT_THAT(result.server.cause, HasSubstr(each.at_server)) << each.name;
      EXPECT_EQ(result.client.code, ErrorCode::ConfigMismatch) << each.name;
      EXPECT_THAT(result.client.cause, HasSubstr(each.alert)) << each.name;
    }
    TlsPair pair = unconnected(contextWith(each.ssl), contextWith(each.ssl));
    const Handshake both = shakeAndHangUp(pair);
    EXPECT_EQ(both.good(), each.both.empty()) << each.name;
    EXPECT_THAT(both.server.text(), HasSubstr(each.both)) << each.name;
    EXPECT_WITHIN_MS(elapsedMs(begin), kSlackMs);
  }
}

// Only newer OpenSSLs have a server that prefers such keys, so none is tried here.
TEST(TlsHandshakeAttacks, AClientOffersNoKeyFromTheSecretAlone) {
  ClientHello hello = ClientHello::parse(firstMessage(newContext(), newProcessId()));
  EXPECT_EQ(hello[ClientHello::kPskModes], "\x01\x01"); // one mode, psk_dhe_ke
}

std::vector<std::string>& keysUsed() {
  static std::vector<std::string> keys;
  return keys;
}

// Who may connect as one process to another gets no key that another pair has, or that pair in the other direction.
TEST(TlsHandshakeAttacks, EachOrderedPairOfProcessesHasAKeyOfItsOwn) {
  const Context context = contextWith(misbehaving([](OpenSsl& table) {
    table.SSL_SESSION_set1_master_key = [](SslSession* session, const unsigned char* key, size_t nbytes) {
      keysUsed().emplace_back(reinterpret_cast<const char*>(key), nbytes);
      return openSsl().SSL_SESSION_set1_master_key(session, key, nbytes);
    };
  }));
  keysUsed().clear();
  Ssl* const ssl = context->newSsl(TlsContext::Role::Client);
  const std::string id = theSecret()->keyId();
  const ProcessId a = newProcessId();
  const ProcessId b = newProcessId();
  const ProcessId c = newProcessId();
  for (const PskIdentity& identity : {PskIdentity{id, a, b}, {id, b, a}, {id, a, c}, {id, c, b}}) {
    openSsl().SSL_SESSION_free(context->newSession(ssl, identity));
  }
  openSsl().SSL_free(ssl);
  EXPECT_EQ(keysUsed().size(), 4U);
  EXPECT_EQ(std::set<std::string>(keysUsed().begin(), keysUsed().end()).size(), 4U);
}

// A client offers one group with its share of the key, so that no server has a reason to ask for another hello (RFC 8446, 4.1.4).
TEST(TlsHandshakeAttacks, AClientIsNotAskedForASecondHello) {
  constexpr std::string_view kAskAgain(
      "\x16\x03\x03\x00\x38" // a record of 56 bytes
      "\x02\x00\x00\x34\x03\x03" // ServerHello
      "\xcf\x21\xad\x74\xe5\x9a\x61\x11\xbe\x1d\x8c\x02\x1e\x65\xb8\x91" // the random number of a HelloRetryRequest
      "\xc2\xa2\x11\x16\x7a\xbb\x8c\x5e\x07\x9e\x09\xe2\xc8\xa8\x33\x9c"
      "\x00\x13\x01\x00\x00\x0c" // no session, TLS_AES_128_GCM_SHA256, no compression, 12 bytes of extensions
      "\x00\x2b\x00\x02\x03\x04" // TLS 1.3
      "\x00\x33\x00\x02\x00\x17", // P-256
      61);
  SocketPair under = tcpPair();
  const auto client = TlsLink::connect(newContext(), std::move(under.first), newProcessId());
  EXPECT_FALSE(client->finishConnect());
  send(*under.second, kAskAgain);
  const ErrorRecord record = errorOf([&] { (void)waitConnected(*client, soon(), kNoAbort); });
  EXPECT_EQ(record.code, ErrorCode::ProtocolViolation) << record.text();
  EXPECT_THAT(record.cause, HasSubstr("OpenSSL: "));
}

} // namespace
} // namespace pycomm::testing::handshake_attacks

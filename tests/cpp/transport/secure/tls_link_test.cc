#include "transport/secure/tls_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/frame_header.h"
#include "transport/link_peer.h"
#include "transport/secure/tls_pairs.h"
#include "transport/socket_pairs.h"

namespace pycomm {
namespace {

using testing::Bytes;
using testing::Context;
using testing::contextWith;
using testing::errorOf;
using testing::Handshake;
using ::testing::HasSubstr;
using testing::libssl;
using testing::LinkCase;
using testing::LinkConformance;
using testing::LinkPair;
using testing::misbehaving;
using testing::newContext;
using testing::pattern;
using testing::PeerPlace;
using testing::readExactly;
using testing::shake;
using testing::SocketPair;
using testing::soon;
using testing::tcpPair;
using testing::theSecret;
using testing::TlsPair;
using testing::unconnected;

TlsPair connected(const TlsOptions& options = {}) {
  TlsPair pair = unconnected(newContext(theSecret(), options), newContext(theSecret(), options));
  const Handshake result = shake(*pair.client, *pair.server);
  if (!result.good()) {
    throw std::runtime_error(result.client.text() + "\n" + result.server.text());
  }
  return pair;
}

LinkPair connectedLinks(const TlsOptions& options = {}) {
  TlsPair pair = connected(options);
  return {std::move(pair.client), std::move(pair.server)};
}

INSTANTIATE_TEST_SUITE_P(
    Tls,
    LinkConformance,
    ::testing::Combine(
        ::testing::Values(
            LinkCase{"Tls", [] { return connectedLinks(); }},
            LinkCase{
                "TlsFromTheServer",
                [] {
                  LinkPair pair = connectedLinks();
                  return LinkPair{std::move(pair.second), std::move(pair.first)};
                }},
            LinkCase{"TlsWithANewKeyForEachRecord", [] { return connectedLinks({1}); }}),
        ::testing::Values(PeerPlace::Thread, PeerPlace::Process)),
    [](const auto& test) {
      return std::get<0>(test.param).name + (std::get<1>(test.param) == PeerPlace::Thread ? "Thread" : "Process");
    });

TEST(TlsLink, BothEndsKnowWhoThePeerIs) {
  const Context client = newContext();
  const Context server = newContext();
  TlsPair pair = unconnected(client, server);
  EXPECT_EQ(pair.client->peer(), "");
  EXPECT_TRUE(shake(*pair.client, *pair.server).good());
  EXPECT_EQ(pair.client->peer(), server->self());
  EXPECT_EQ(pair.server->peer(), client->self());
  EXPECT_NE(server->self(), client->self());
}

TEST(TlsLink, AnotherSecretIsRefusedAndNamed) {
  const auto other = std::make_shared<const Secret>(Secret::generate());
  TlsPair pair = unconnected(newContext(other), newContext());
  const Handshake result = shake(*pair.client, *pair.server);
  EXPECT_EQ(result.server.code, ErrorCode::ConfigMismatch);
  EXPECT_THAT(
      result.server.summary,
      HasSubstr("the peer has a different secret (key id " + other->keyId() + ", here " + theSecret()->keyId() + ")"));
  EXPECT_EQ(result.client.code, ErrorCode::ConfigMismatch);
  EXPECT_THAT(
      result.client.summary, HasSubstr("with the secret of key id " + other->keyId() + " does not listen there"));
}

TEST(TlsLink, AServerTakesItsOwnIdOnlyAndNeverItself) {
  const Context client = newContext();
  const Context server = newContext();
  const auto refusal = [](const Context& from, const Context& to, const ProcessId& wanted) {
    SocketPair under = tcpPair();
    const auto near = TlsLink::connect(from, std::move(under.first), wanted);
    const auto far = TlsLink::accept(to, std::move(under.second));
    const Handshake result = shake(*near, *far);
    EXPECT_EQ(result.client.code, ErrorCode::ConfigMismatch);
    return result.server;
  };
  const ErrorRecord gone = refusal(client, server, newProcessId());
  EXPECT_THAT(gone.summary, HasSubstr("the peer wanted another process than this one"));
  EXPECT_THAT(gone.hint, HasSubstr("give each job its own port"));
  EXPECT_THAT(refusal(server, server, server->self()).summary, HasSubstr("this process connected to itself"));
}

TEST(PskIdentity, ReadsItsOwnTextAndNoOther) {
  const PskIdentity identity{"be7c1379", newProcessId(), newProcessId()};
  const std::string text = identity.text();
  EXPECT_EQ(text.size(), 80U);
  const auto parsed = PskIdentity::parse(text);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->client, identity.client);
  EXPECT_EQ(parsed->server, identity.server);
  EXPECT_EQ(parsed->key_id, identity.key_id);
  for (size_t i = 0; i < text.size(); ++i) {
    std::string other = text;
    other[i] = 'X';
    EXPECT_FALSE(PskIdentity::parse(other)) << i;
    EXPECT_FALSE(PskIdentity::parse(text.substr(0, i))) << i;
  }
  EXPECT_FALSE(PskIdentity::parse(text + "0"));
}

// It knows the key id, but not the key.
TEST(TlsLink, AWrongKeyUnderTheRightIdentityIsRefused) {
  const OpenSsl* const ssl = misbehaving([](OpenSsl& table) {
    table.SSL_SESSION_set1_master_key = [](SslSession* session, const unsigned char*, size_t nbytes) {
      const std::vector<unsigned char> guess(nbytes, 0);
      return openSsl().SSL_SESSION_set1_master_key(session, guess.data(), nbytes);
    };
  });
  for (const bool client_lies : {true, false}) {
    const Context honest = newContext();
    const Context liar = contextWith(ssl);
    TlsPair pair = client_lies ? unconnected(liar, honest) : unconnected(honest, liar);
    const Handshake result = shake(*pair.client, *pair.server);
    EXPECT_EQ(result.client.code, ErrorCode::ConfigMismatch);
    EXPECT_EQ(result.server.code, ErrorCode::ProtocolViolation);
    EXPECT_THAT(result.server.cause, HasSubstr("binder does not verify"));
  }
}

// A self-signed certificate for "fake" and its key: openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 36500
constexpr unsigned char kCertificate[] = {
    0x30, 0x82, 0x01, 0x75, 0x30, 0x82, 0x01, 0x1b, 0xa0, 0x03, 0x02, 0x01, 0x02, 0x02, 0x14, 0x02, 0x52, 0xf9, 0x7f,
    0xce, 0xd4, 0x7e, 0xd0, 0x51, 0xa1, 0xa2, 0x6b, 0x0f, 0x76, 0x08, 0x0d, 0xe3, 0x6f, 0x08, 0x09, 0x30, 0x0a, 0x06,
    0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02, 0x30, 0x0f, 0x31, 0x0d, 0x30, 0x0b, 0x06, 0x03, 0x55, 0x04,
    0x03, 0x0c, 0x04, 0x66, 0x61, 0x6b, 0x65, 0x30, 0x20, 0x17, 0x0d, 0x32, 0x36, 0x31, 0x31, 0x32, 0x34, 0x30, 0x31,
    0x33, 0x31, 0x34, 0x30, 0x5a, 0x18, 0x0f, 0x32, 0x31, 0x32, 0x36, 0x31, 0x30, 0x33, 0x31, 0x30, 0x31, 0x33, 0x31,
    0x34, 0x30, 0x5a, 0x30, 0x0f, 0x31, 0x0d, 0x30, 0x0b, 0x06, 0x03, 0x55, 0x04, 0x03, 0x0c, 0x04, 0x66, 0x61, 0x6b,
    0x65, 0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48,
    0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00, 0x04, 0x06, 0x7b, 0x5b, 0x6e, 0xa7, 0x29, 0x1d, 0x30, 0x7a, 0x64,
    0x48, 0x5d, 0x35, 0xc0, 0x93, 0x25, 0x0f, 0xd5, 0xbd, 0x3b, 0x75, 0xde, 0xed, 0x79, 0x8c, 0x91, 0x3f, 0x7e, 0xd5,
    0xd4, 0x45, 0x58, 0x35, 0x00, 0xe8, 0xcf, 0x59, 0x07, 0x7a, 0xc7, 0x0b, 0xd6, 0x93, 0xd7, 0x52, 0xf8, 0xd4, 0xed,
    0xfe, 0xa0, 0x8d, 0xfa, 0x4b, 0x89, 0x5a, 0x61, 0x0d, 0x00, 0xb9, 0x8d, 0xdb, 0x2c, 0x79, 0x45, 0xa3, 0x53, 0x30,
    0x51, 0x30, 0x1d, 0x06, 0x03, 0x55, 0x1d, 0x0e, 0x04, 0x16, 0x04, 0x14, 0x05, 0x51, 0x64, 0x1c, 0x10, 0x51, 0x70,
    0xc7, 0xbd, 0xb8, 0x02, 0x57, 0xe3, 0xd1, 0xf4, 0xed, 0xf8, 0xbf, 0x08, 0x2c, 0x30, 0x1f, 0x06, 0x03, 0x55, 0x1d,
    0x23, 0x04, 0x18, 0x30, 0x16, 0x80, 0x14, 0x05, 0x51, 0x64, 0x1c, 0x10, 0x51, 0x70, 0xc7, 0xbd, 0xb8, 0x02, 0x57,
    0xe3, 0xd1, 0xf4, 0xed, 0xf8, 0xbf, 0x08, 0x2c, 0x30, 0x0f, 0x06, 0x03, 0x55, 0x1d, 0x13, 0x01, 0x01, 0xff, 0x04,
    0x05, 0x30, 0x03, 0x01, 0x01, 0xff, 0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02, 0x03,
    0x48, 0x00, 0x30, 0x45, 0x02, 0x21, 0x00, 0xfe, 0xea, 0xac, 0x1d, 0x6c, 0x7e, 0xf0, 0xd4, 0x52, 0x16, 0x1a, 0x41,
    0x9d, 0x7d, 0x64, 0xde, 0x4d, 0x07, 0xb6, 0x55, 0x6e, 0x20, 0xe9, 0xe0, 0x75, 0xb1, 0x18, 0xba, 0xc9, 0xa2, 0x65,
    0xf6, 0x02, 0x20, 0x65, 0xf3, 0x88, 0x9b, 0xb5, 0x7e, 0x3e, 0xe5, 0x56, 0xd2, 0xfe, 0xc7, 0x24, 0xfd, 0xad, 0x52,
    0x95, 0xfb, 0xbf, 0xc3, 0x70, 0x6c, 0xae, 0x0f, 0x9a, 0x7b, 0xde, 0x02, 0x21, 0x4f, 0x1c, 0x0b};
constexpr unsigned char kCertificateKey[] = {
    0x30, 0x77, 0x02, 0x01, 0x01, 0x04, 0x20, 0x63, 0x2f, 0xb9, 0x6a, 0xaa, 0x55, 0xe0, 0xc1, 0x5e, 0x77, 0xed,
    0x33, 0xf4, 0x37, 0x78, 0x46, 0xe3, 0xa7, 0x81, 0x96, 0x6d, 0x43, 0x3b, 0x74, 0x75, 0x2e, 0x52, 0xeb, 0x1e,
    0xe7, 0xd0, 0x24, 0xa0, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0xa1, 0x44, 0x03,
    0x42, 0x00, 0x04, 0x06, 0x7b, 0x5b, 0x6e, 0xa7, 0x29, 0x1d, 0x30, 0x7a, 0x64, 0x48, 0x5d, 0x35, 0xc0, 0x93,
    0x25, 0x0f, 0xd5, 0xbd, 0x3b, 0x75, 0xde, 0xed, 0x79, 0x8c, 0x91, 0x3f, 0x7e, 0xd5, 0xd4, 0x45, 0x58, 0x35,
    0x00, 0xe8, 0xcf, 0x59, 0x07, 0x7a, 0xc7, 0x0b, 0xd6, 0x93, 0xd7, 0x52, 0xf8, 0xd4, 0xed, 0xfe, 0xa0, 0x8d,
    0xfa, 0x4b, 0x89, 0x5a, 0x61, 0x0d, 0x00, 0xb9, 0x8d, 0xdb, 0x2c, 0x79, 0x45};

const OpenSsl* withCertificate() {
  return misbehaving([](OpenSsl& table) {
    table.SSL_CTX_set_psk_find_session_callback = [](SslContext* context, auto) {
      auto* const use = libssl<int(SslContext*, int, const unsigned char*)>("SSL_CTX_use_certificate_ASN1");
      auto* const use_key = libssl<int(int, SslContext*, const unsigned char*, long)>("SSL_CTX_use_PrivateKey_ASN1");
      constexpr int kEllipticCurve = 408;
      EXPECT_EQ(use(context, sizeof kCertificate, kCertificate), 1);
      EXPECT_EQ(use_key(kEllipticCurve, context, kCertificateKey, sizeof kCertificateKey), 1);
    };
  });
}

// TLS falls back to certificates if the server does not know the key, and by default a client believes any.
TEST(TlsLink, AServerWithACertificateAndNoKeyIsRefused) {
  TlsPair pair = unconnected(newContext(), contextWith(withCertificate()));
  const Handshake result = shake(*pair.client, *pair.server);
  EXPECT_EQ(result.client.code, ErrorCode::ProtocolViolation);
  EXPECT_THAT(result.client.cause, HasSubstr("certificate verify failed"));
}

// And if nothing verified the certificate, the handshake would succeed: then the second check refuses.
TEST(TlsLink, AHandshakeThatDidNotUseTheKeyIsRefused) {
  const OpenSsl* const credulous = misbehaving([](OpenSsl& table) {
    table.SSL_CTX_set_verify = [](SslContext* context, int, void*) {
      openSsl().SSL_CTX_set_verify(context, 0, nullptr);
    };
  });
  TlsPair pair = unconnected(contextWith(credulous), contextWith(withCertificate()));
  const Handshake result = shake(*pair.client, *pair.server);
  for (const ErrorRecord& record : {result.client, result.server}) {
    EXPECT_EQ(record.code, ErrorCode::ProtocolViolation);
    EXPECT_THAT(record.summary, HasSubstr("does not use the secret"));
  }
}

int& sessionsMade() {
  static int count = 0;
  return count;
}

// As 400 seconds after the start of a job, when OpenSSL's default of 304 seconds has passed for anything made at the start.
TEST(TlsLink, KeysDoNotAge) {
  const OpenSsl* const ssl = misbehaving([](OpenSsl& table) {
    table.SSL_SESSION_new = [] {
      ++sessionsMade();
      SslSession* const session = openSsl().SSL_SESSION_new();
      (void)libssl<long(SslSession*, long)>("SSL_SESSION_set_time")(
          session, static_cast<long>(std::time(nullptr)) - 400);
      return session;
    };
  });
  sessionsMade() = 0;
  const Context client = contextWith(ssl);
  const Context server = contextWith(ssl);
  for (int i = 1; i <= 3; ++i) {
    TlsPair pair = unconnected(client, server);
    const Handshake result = shake(*pair.client, *pair.server);
    EXPECT_TRUE(result.good()) << result.client.text();
    EXPECT_EQ(sessionsMade(), 2 * i); // a new one for each handshake and end
  }
}

int& keyUpdates() {
  static int count = 0;
  return count;
}

TEST(TlsLink, TheWriterChangesItsKeyAfterSoManyRecords) {
  const OpenSsl* const ssl = misbehaving([](OpenSsl& table) {
    table.SSL_key_update = [](Ssl* handle, int kind) {
      ++keyUpdates();
      EXPECT_EQ(kind, 0);
      return openSsl().SSL_key_update(handle, kind);
    };
  });
  keyUpdates() = 0;
  TlsPair pair = unconnected(contextWith(ssl, {8}), newContext());
  ASSERT_TRUE(shake(*pair.client, *pair.server).good());
  for (int i = 0; i < 801; ++i) {
    writeAll(*pair.client, testing::view(pattern(64, 1)), soon(), testing::kNoAbort);
    ASSERT_EQ(readExactly(*pair.server, 64), pattern(64, 1));
  }
  EXPECT_EQ(keyUpdates(), 100);
  EXPECT_EQ(TlsOptions().records_per_key, 4194304U);
}

// The engine drops a frame of which nothing has been taken and sends its last words instead.
TEST(TlsLink, AfterAPartialWriteOtherBytesMayFollow) {
  TlsPair pair = connected();
  const Bytes whole = pattern(32U << 20, 3);
  size_t taken = 0;
  for (bool full = false; !full && taken < whole.size();) {
    const ConstBufferView rest = testing::view(whole).slice(taken, whole.size() - taken);
    const Progress progress = pair.client->tryWrite(&rest, 1);
    taken += progress.nbytes;
    full = progress.would_block;
  }
  ASSERT_LT(taken, whole.size());
  EXPECT_TRUE(pair.client->unsent());
  const Bytes goodbye = pattern(64, 4);
  Bytes got(taken + goodbye.size());
  bool said = false;
  size_t read = 0;
  for (const Deadline deadline = soon(); read < got.size() && !deadline.expired();) {
    read += pair.server->tryRead({got.data() + read, std::min<size_t>(got.size() - read, 100000)}).nbytes;
    const ConstBufferView last = testing::view(goodbye).slice(0, said ? 0 : goodbye.size());
    said = pair.client->tryWrite(&last, 1).nbytes == goodbye.size() || said;
  }
  ASSERT_EQ(read, got.size());
  EXPECT_TRUE(std::equal(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(taken), got.begin()));
  EXPECT_TRUE(std::equal(goodbye.begin(), goodbye.end(), got.end() - static_cast<std::ptrdiff_t>(goodbye.size())));
}

TEST(TlsLink, SaysWhatItHasTakenFromTheKernel) {
  TlsPair pair = connected();
  for (int i = 0; i < 3; ++i) {
    writeAll(*pair.client, testing::view(pattern(100, 1)), soon(), testing::kNoAbort);
  }
  EXPECT_FALSE(pair.server->buffered());
  EXPECT_EQ(readExactly(*pair.server, 50), pattern(50, 1));
  EXPECT_TRUE(pair.server->buffered()); // half a record
  (void)readExactly(*pair.server, 50);
  EXPECT_TRUE(pair.server->buffered()); // two whole ones
  (void)readExactly(*pair.server, 199);
  EXPECT_TRUE(pair.server->buffered()); // OpenSSL has the last byte
  (void)readExactly(*pair.server, 1);
  EXPECT_FALSE(pair.server->buffered());
  // The beginning of a record is nothing to read.
  constexpr unsigned char kHeader[] = {0x17, 3, 3, 1, 0, 0x55};
  ASSERT_EQ(::send(pair.client->fd(), kHeader, sizeof kHeader, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof kHeader));
  std::byte byte{};
  EXPECT_TRUE(pair.server->tryRead({&byte, 1}).would_block);
  EXPECT_FALSE(pair.server->buffered());
}

TEST(TlsLink, AForgedRecordEndsTheConnection) {
  TlsPair pair = connected();
  std::string forged("\x17\x03\x03\x00\x40", 5);
  forged += std::string(64, 'x');
  ASSERT_EQ(::send(pair.client->fd(), forged.data(), forged.size(), MSG_NOSIGNAL), static_cast<ssize_t>(forged.size()));
  std::byte byte{};
  for (int i = 0; i < 2; ++i) { // and it stays ended
    const ErrorRecord record = errorOf([&] {
      for (const Deadline deadline = soon(); !deadline.expired();) {
        (void)pair.server->tryRead({&byte, 1});
      }
    });
    EXPECT_EQ(record.code, ErrorCode::DataCorrupt);
  }
  const ErrorRecord other = errorOf([&] { // the alert says it to whom the forger speaks for
    for (const Deadline deadline = soon(); !deadline.expired();) {
      (void)pair.client->tryRead({&byte, 1});
    }
  });
  EXPECT_EQ(other.code, ErrorCode::DataCorrupt);
  EXPECT_THAT(other.cause, HasSubstr("alert bad record mac"));
}

// OpenSSL's numbers of errors (openssl/err.h, openssl/sslerr.h). Only those that judge the peer's bytes say that they were changed.
TEST(TlsLink, AnErrorThatIsNotAboutTheBytesIsAReset) {
  static unsigned long error = 0;
  static bool broken = false;
  const OpenSsl* const ssl = misbehaving([](OpenSsl& table) {
    table.SSL_read = [](Ssl* handle, void* into, int nbytes) {
      return broken ? -1 : openSsl().SSL_read(handle, into, nbytes);
    };
    table.SSL_get_error = [](const Ssl* handle, int result) {
      return broken ? 1 : openSsl().SSL_get_error(handle, result);
    };
    table.ERR_peek_error = []() { return broken ? error : openSsl().ERR_peek_error(); };
  });
  constexpr unsigned long kLibSsl = 20UL << 23U;
  constexpr unsigned long kLibEvp = 6UL << 23U;
  const std::vector<std::pair<unsigned long, ErrorCode>> cases = {
      {kLibSsl | 281, ErrorCode::DataCorrupt}, // decryption failed or bad record mac
      {kLibSsl | 443, ErrorCode::DataCorrupt}, // bad record type
      {kLibSsl | 1020, ErrorCode::DataCorrupt}, // the peer's alert: bad record mac
      {kLibSsl | 1010, ErrorCode::DataCorrupt}, // the peer's alert: unexpected message
      {kLibSsl | 294, ErrorCode::ConnectionReset}, // unexpected eof while reading
      {kLibSsl | 1080, ErrorCode::ConnectionReset}, // the peer's alert: internal error
      {kLibSsl | 0xC0103, ErrorCode::ConnectionReset}, // internal error
      {kLibEvp | 100, ErrorCode::ConnectionReset},
      {0x80000000UL | ECONNRESET, ErrorCode::ConnectionReset}, // a system call
      {0, ErrorCode::ConnectionReset}};
  for (const auto& [number, code] : cases) {
    TlsPair pair = unconnected(newContext(), contextWith(ssl));
    ASSERT_TRUE(shake(*pair.client, *pair.server).good());
    error = number;
    broken = true;
    std::byte byte{};
    const ErrorRecord record = errorOf([&] { (void)pair.server->tryRead({&byte, 1}); });
    EXPECT_EQ(record.code, code) << number;
    const bool alert = code == ErrorCode::DataCorrupt && (number & 0xFFFFU) > 1000;
    EXPECT_EQ(record.peer, alert ? ErrorRecord::kThisEnd : -1) << number;
    broken = false;
  }
}

// A server of pycomm sends no tickets, and asks for no new key of the other direction. Other servers may.
TEST(TlsLink, AClientTakesTicketsAndGivesTheNewKeyThatIsAskedFor) {
  constexpr int kNewSessionTicket = 4; // RFC 8446, B.3
  constexpr int kKeyUpdate = 24;
  constexpr int kHandshake = 22;
  using OnMessage = void(int written, int version, int type, const void* bytes, size_t nbytes, Ssl*, void*);
  static int tickets = 0;
  static int answers = 0;
  const OpenSsl* const watched = misbehaving([](OpenSsl& table) {
    table.SSL_new = [](SslContext* context) {
      Ssl* const handle = openSsl().SSL_new(context);
      libssl<void(Ssl*, OnMessage*)>("SSL_set_msg_callback")(
          handle, [](int written, int, int type, const void* bytes, size_t, Ssl*, void*) {
            const int message = type == kHandshake ? *static_cast<const unsigned char*>(bytes) : 0;
            tickets += written == 0 && message == kNewSessionTicket ? 1 : 0;
            answers += written == 1 && message == kKeyUpdate ? 1 : 0;
          });
      return handle;
    };
  });
  const OpenSsl* const generous = misbehaving([](OpenSsl& table) {
    table.SSL_CTX_set_num_tickets = [](SslContext*, size_t) { return 1; }; // as many as OpenSSL sends by default
    table.SSL_key_update = [](Ssl* handle, int) { return openSsl().SSL_key_update(handle, 1); }; // requested
  });
  TlsOptions options;
  options.records_per_key = 2;
  TlsPair pair = unconnected(contextWith(watched), contextWith(generous, options));
  ASSERT_TRUE(shake(*pair.client, *pair.server).good());
  for (int round = 0; round < 5; ++round) {
    const Bytes sent = pattern(40000, round);
    writeAll(*pair.server, testing::view(sent), soon(), testing::kNoAbort);
    EXPECT_EQ(readExactly(*pair.client, sent.size()), sent);
    writeAll(*pair.client, testing::view(sent), soon(), testing::kNoAbort);
    EXPECT_EQ(readExactly(*pair.server, sent.size()), sent);
  }
  EXPECT_GE(tickets, 1);
  EXPECT_GE(answers, 5);
}

TEST(TlsLink, APeerWithoutASecretIsNamed) {
  SocketPair under = tcpPair();
  const auto server = TlsLink::accept(newContext(), std::move(under.first));
  FrameHeader hello;
  hello.type = FrameType::Hello;
  writeAll(*under.second, {reinterpret_cast<const std::byte*>(&hello), sizeof hello}, soon(), testing::kNoAbort);
  const ErrorRecord record = errorOf([&] { (void)waitConnected(*server, soon(), testing::kNoAbort); });
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_THAT(
      record.summary,
      HasSubstr("the peer has no secret, and this process has one (key id " + theSecret()->keyId() + ")"));
}

TEST(TlsLink, StrangersAreRefused) {
  const std::string large = std::string("\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03", 11) + std::string(16384, 'x');
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(300, '\0'), large, std::string()}) {
    SocketPair under = tcpPair();
    const auto server = TlsLink::accept(newContext(), std::move(under.first));
    writeAll(
        *under.second, {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, soon(), testing::kNoAbort);
    under.second->shutdownWrite();
    const TimePoint begin = Clock::now();
    const ErrorRecord record = errorOf([&] { (void)waitConnected(*server, soon(), testing::kNoAbort); });
    EXPECT_EQ(record.code, bytes.empty() ? ErrorCode::ConnectionReset : ErrorCode::ProtocolViolation);
    EXPECT_THAT(record.summary, HasSubstr("the TLS handshake failed on 127.0.0.1:"));
    EXPECT_WITHIN_MS(testing::elapsedMs(begin), testing::kSlackMs);
    EXPECT_EQ(server->peer(), "");
  }
}

// Python's ssl, for one, uses the same thread and may leave an error in its queue.
TEST(TlsLink, AnErrorOfSomebodyElseIsNotItsOwn) {
  TlsPair pair = connected();
  const auto leaveError = [] {
    SslContext* const context = openSsl().SSL_CTX_new(openSsl().TLS_method());
    EXPECT_NE(openSsl().SSL_CTX_set_ciphersuites(context, "nonsense"), 1);
    openSsl().SSL_CTX_free(context);
    EXPECT_NE(openSsl().ERR_peek_error(), 0U);
  };
  leaveError();
  std::byte byte{};
  EXPECT_TRUE(pair.server->tryRead({&byte, 1}).would_block);
  leaveError();
  writeAll(*pair.client, testing::view(pattern(10, 1)), soon(), testing::kNoAbort);
  leaveError();
  EXPECT_EQ(readExactly(*pair.server, 10), pattern(10, 1));
  TlsPair second = unconnected(newContext(), newContext());
  leaveError();
  EXPECT_TRUE(shake(*second.client, *second.server).good());
}

// The other way round: the next call of OpenSSL on this thread may be Python's.
TEST(TlsLink, LeavesNoErrorOfItsOwn) {
  TlsPair refused = unconnected(newContext(std::make_shared<const Secret>(Secret::generate())), newContext());
  EXPECT_FALSE(shake(*refused.client, *refused.server).good());
  EXPECT_EQ(openSsl().ERR_peek_error(), 0U);

  TlsPair pair = connected();
  const Bytes good = pattern(10, 1);
  writeAll(*pair.client, testing::view(good), soon(), testing::kNoAbort);
  const std::string forged = std::string("\x17\x03\x03\x00\x40", 5) + std::string(64, 'x');
  ASSERT_EQ(::send(pair.client->fd(), forged.data(), forged.size(), MSG_NOSIGNAL), static_cast<ssize_t>(forged.size()));
  Bytes into(100);
  size_t got = 0;
  for (const Deadline deadline = soon(); got < good.size() && !deadline.expired();) {
    got += pair.server->tryRead({into.data() + got, into.size() - got}).nbytes;
    EXPECT_EQ(openSsl().ERR_peek_error(), 0U);
  }
  EXPECT_EQ(got, good.size()); // what came before the forgery is good
  const ErrorRecord record = errorOf([&] {
    for (const Deadline deadline = soon(); !deadline.expired();) {
      (void)pair.server->tryRead({into.data(), into.size()});
    }
  });
  EXPECT_EQ(record.code, ErrorCode::DataCorrupt);
  EXPECT_THAT(record.cause, HasSubstr("bad record mac"));
  EXPECT_EQ(openSsl().ERR_peek_error(), 0U);
}

// It says nothing about the peer, which would be named as dead. OpenSSL gives the reason once, and does nothing more with the connection.
TEST(TlsLink, LostMemoryIsNotThePeersFault) {
  static bool lost = false;
  static bool over = false;
  lost = over = false;
  const OpenSsl* const ssl = misbehaving([](OpenSsl& table) {
    table.ERR_peek_error = []() -> unsigned long { return lost ? 1 : openSsl().ERR_peek_error(); };
    table.ERR_reason_error_string = [](unsigned long error) {
      return lost ? "malloc failure" : openSsl().ERR_reason_error_string(error);
    };
    table.SSL_write = [](Ssl* handle, const void* bytes, int nbytes) {
      return lost || over ? -1 : openSsl().SSL_write(handle, bytes, nbytes);
    };
    table.SSL_read = [](Ssl* handle, void* into, int nbytes) {
      return over ? -1 : openSsl().SSL_read(handle, into, nbytes);
    };
    table.SSL_do_handshake = [](Ssl* handle) { return lost ? -1 : openSsl().SSL_do_handshake(handle); };
    table.SSL_get_error = [](const Ssl* handle, int result) {
      return lost || over ? 1 : openSsl().SSL_get_error(handle, result);
    };
    table.SSL_SESSION_new = []() -> SslSession* { return lost ? nullptr : openSsl().SSL_SESSION_new(); };
  });
  const Context client = contextWith(ssl);
  const Context server = newContext();
  TlsPair pair = unconnected(client, server);
  lost = true;
  EXPECT_THROW((void)pair.client->finishConnect(), std::bad_alloc);
  lost = false;
  TlsPair second = unconnected(client, server);
  EXPECT_TRUE(shake(*second.client, *second.server).good());
  lost = true;
  const Bytes bytes = pattern(10, 1);
  const ConstBufferView one = testing::view(bytes);
  EXPECT_EQ(errorOf([&] { (void)second.client->tryWrite(&one, 1); }).code, ErrorCode::OutOfMemory);
  lost = false;
  over = true;
  std::byte byte{};
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(errorOf([&] { (void)second.client->tryWrite(&one, 1); }).code, ErrorCode::OutOfMemory) << i;
    EXPECT_EQ(errorOf([&] { (void)second.client->tryRead({&byte, 1}); }).code, ErrorCode::OutOfMemory) << i;
  }
  over = false;
}

thread_local bool openssl_starves = false; // its larger allocations on this thread fail
constexpr size_t kSmallNbytes = 256; // some are made for each record in any case

void* openSslAllocate(size_t nbytes, const char*, int) {
  return openssl_starves && nbytes > kSmallNbytes ? nullptr : std::malloc(nbytes);
}
void* openSslResize(void* memory, size_t nbytes, const char*, int) {
  return openssl_starves && nbytes > kSmallNbytes ? nullptr : std::realloc(memory, nbytes);
}
void openSslFree(void* memory, const char*, int) {
  std::free(memory);
}

// When the program starts: OpenSSL takes them before its first allocation only.
const bool openssl_allocates_here = [] {
  void* const library = ::dlopen("libcrypto.so.3", RTLD_NOW);
  using Set = int(decltype(&openSslAllocate), decltype(&openSslResize), decltype(&openSslFree));
  auto* const set = library == nullptr ? nullptr : reinterpret_cast<Set*>(::dlsym(library, "CRYPTO_set_mem_functions"));
  return set != nullptr && set(openSslAllocate, openSslResize, openSslFree) == 1;
}();

// Else a rank without memory could not tell its peer why it ends: OpenSSL does nothing more with such a connection.
TEST(TlsLink, NoRecordNeedsABufferOfOpenSsl) {
  ASSERT_TRUE(openssl_allocates_here);
  TlsPair pair = connected();
  const auto exchange = [&](size_t nbytes) {
    const Bytes sent = pattern(nbytes, 1);
    writeAll(*pair.client, testing::view(sent), soon(), testing::kNoAbort);
    EXPECT_EQ(readExactly(*pair.server, sent.size()), sent);
    writeAll(*pair.server, testing::view(sent), soon(), testing::kNoAbort);
    EXPECT_EQ(readExactly(*pair.client, sent.size()), sent);
  };
  exchange(100); // as the ranks greet each other
  openssl_starves = true;
  try {
    for (int i = 0; i < 3; ++i) {
      exchange(100);
      exchange(40000);
    }
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  openssl_starves = false;
}

// A callback of OpenSSL's failed: its exception arrives although it could not pass through OpenSSL.
TEST(TlsLink, AKeyThatOpenSslRefusesIsNotThePeersFault) {
  const OpenSsl* const ssl =
      misbehaving([](OpenSsl& table) { table.SSL_SESSION_new = []() -> SslSession* { return nullptr; }; });
  for (const bool at_client : {true, false}) {
    const Context keyless = contextWith(ssl);
    TlsPair pair = at_client ? unconnected(keyless, newContext()) : unconnected(newContext(), keyless);
    const ErrorRecord record = errorOf([&] {
      for (const Deadline deadline = soon(); !deadline.expired();) {
        (void)pair.client->finishConnect();
        (void)pair.server->finishConnect();
      }
    });
    EXPECT_EQ(record.code, ErrorCode::Internal);
    EXPECT_EQ(record.summary, "OpenSSL took no pre-shared key");
  }
}

// The link below lost the connection, and a link that is opened is opened again then.
TEST(TlsLink, ADropInTheHandshakeIsAReset) {
  TlsPair pair = unconnected(newContext(), newContext());
  EXPECT_FALSE(pair.client->finishConnect());
  pair.server.reset();
  const ErrorRecord record = errorOf([&] { (void)waitConnected(*pair.client, soon(), testing::kNoAbort); });
  EXPECT_EQ(record.code, ErrorCode::ConnectionReset);
  EXPECT_THAT(record.summary, HasSubstr("the TLS handshake failed on 127.0.0.1:"));
  EXPECT_THAT(record.summary, HasSubstr(": reading failed on 127.0.0.1:")); // as the link below says
  EXPECT_THAT(record.cause, HasSubstr("ECONNRESET"));
}

} // namespace
} // namespace pycomm

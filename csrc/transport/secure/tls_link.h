#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "transport/link.h"
#include "transport/secure/tls_bio.h"
#include "transport/secure/tls_context.h"

namespace pycomm {

/// A Link in TLS over another Link, which is usually a SocketLink. OpenSSL never sees the socket: it reads from and writes to a
/// TlsBio.
///
/// What tryWrite() takes is encrypted at once and no longer needed, so a caller may go on with other bytes after any partial write. It
/// takes nothing if the encrypted bytes would not fit: OpenSSL never waits in the middle of a record.
///
/// tryRead() throws Error(DataCorrupt) if what has come is not what the peer's OpenSSL has sent; or, with `peer` kThisEnd, if the peer says
/// that of what it got. Later writes throw it, too. A reset and an end without a word are alike: ConnectionReset or `closed`. An end says nothing about good order; the engine's Goodbye
/// frame does.
///
/// One thread at a time, for reading and writing together. Not to be used in a forked child.
class TlsLink final : public Link {
 public:
  /// finishConnect() of both ends makes the connection: `under` may still be connecting. The client says which process it looks for.
  [[nodiscard]] static std::unique_ptr<TlsLink> connect(
      std::shared_ptr<const TlsContext> context,
      std::unique_ptr<Link> under,
      ProcessId server);
  [[nodiscard]] static std::unique_ptr<TlsLink> accept(
      std::shared_ptr<const TlsContext> context,
      std::unique_ptr<Link> under);
  ~TlsLink() override;
  TlsLink(const TlsLink&) = delete;
  TlsLink& operator=(const TlsLink&) = delete;

  [[nodiscard]] int fd() const noexcept override {
    return under_->fd();
  }
  /// During the handshake mostly POLLIN.
  [[nodiscard]] short roomEvent() const noexcept override;
  [[nodiscard]] bool buffered() const noexcept override;
  [[nodiscard]] bool unsent() const noexcept override {
    return bio_.unsent();
  }
  /// At most 1 MiB. Of no views: sends what is unsent().
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override;
  /// Reads until `into` is full or nothing is left, so a short read means that all has been read. Also sends what is unsent().
  [[nodiscard]] Progress tryRead(BufferView into) override;
  void shutdownWrite() noexcept override;
  /// Throws Error(ConnectFailed) if the link below cannot connect, Error(ConnectionReset) if the peer dropped the connection,
  /// Error(ConfigMismatch) if the peer has no secret or another one, or is another process, and Error(ProtocolViolation) if it is no
  /// pycomm. True at the client does not mean that the server has seen the key: only an answer of the server shows that it has not
  /// refused.
  [[nodiscard]] bool finishConnect() override;
  [[nodiscard]] std::string describe() const override {
    return under_->describe() + " (TLS)";
  }

  /// This end has written something. A server does so once it has checked that the client knew the key when it wrote its first
  /// message. finishConnect() throws Error(ProtocolViolation) if another connection began with the same message, which somebody has
  /// recorded then.
  [[nodiscard]] bool hasAnswered() const noexcept {
    return bio_.hasWritten();
  }
  /// The process at the other end, which has proved that it has the secret. Empty before finishConnect() has returned true.
  [[nodiscard]] const ProcessId& peer() const noexcept {
    return peer_;
  }

 private:
  friend int useTlsSession(Ssl*, const EvpMd*, const unsigned char**, size_t*, SslSession**);
  friend int findTlsSession(Ssl*, const unsigned char*, size_t, SslSession**);

  TlsLink(
      std::shared_ptr<const TlsContext> context,
      std::unique_ptr<Link> under,
      TlsContext::Role role,
      PskIdentity identity);

  /// The key for a client that sent `identity`; null, with a refusal_, if there is none.
  [[nodiscard]] SslSession* sessionFor(std::string_view identity);

  [[nodiscard]] bool up() const noexcept {
    return bio_.handshakeDone();
  }
  void encrypt(ConstBufferView bytes);
  void checkHandshake() const;
  void refuseRepeated();
  /// Why the last call of OpenSSL failed. Leaves nothing in this thread's queue: the next user of OpenSSL on it may be Python's ssl.
  [[nodiscard]] std::string takeReason() const;
  [[nodiscard]] Error handshakeFailed(const std::string& why) const;
  /// Throws a lack of memory, and what an earlier read has thrown if it was no reset.
  void throwOwnTrouble(const std::string& why) const;
  [[noreturn]] void throwBroken(const char* what) const;
  /// Sends what OpenSSL has written while it read.
  void answer();
  /// After a SSL_read() of an open connection that found neither bytes nor an end.
  [[noreturn]] void throwUnreadable() const;

  const std::shared_ptr<const TlsContext> context_;
  const OpenSsl& ssl_; ///< the context's
  const std::unique_ptr<Link> under_;
  const TlsContext::Role role_;
  const uint32_t forks_;
  PskIdentity identity_; ///< a server's is known once the client has sent it
  std::string identity_text_; ///< OpenSSL borrows it during the handshake
  Ssl* handle_ = nullptr;

  TlsBio bio_; ///< over under_
  uint64_t records_ = 0; ///< written with the present key
  ProcessId peer_;
  std::string refusal_; ///< why this server knows no key for the client
  std::string refusal_hint_; ///< and what to try
  bool under_up_ = false; ///< the link below is connected
  bool remembered_ = false; ///< a server's: the context has seen the first message of the client
  bool ended_ = false; ///< the peer has ended its side
  bool end_reported_ = false;
};

// OpenSSL calls these while a TlsLink calls OpenSSL. The first two belong to TlsLink, which they find in ex data 0; the others pass bytes
// to and from its TlsBio, which they find in the data of the BIO.
int useTlsSession(Ssl* ssl, const EvpMd* digest, const unsigned char** identity, size_t* nbytes, SslSession** session);
int findTlsSession(Ssl* ssl, const unsigned char* identity, size_t nbytes, SslSession** session);
int writeTlsBio(Bio* bio, const char* bytes, int nbytes);
int readTlsBio(Bio* bio, char* into, int nbytes);
long controlTlsBio(Bio* bio, int command, long number, void* pointer);

} // namespace pycomm

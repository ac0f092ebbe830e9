// What a connection with a secret may bring: to the port, to the process that connects, and in the texts about it.
#include "fuzz/endpoint.h"

#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "fuzz/bytes_link.h"
#include "fuzz/consumers.h"
#include "fuzz/promise.h"
#include "fuzz/scripted_tls.h"
#include "transport/net/acceptor.h"
#include "transport/net/greeted_link.h"
#include "transport/rendezvous/sealed_store.h"
#include "transport/secure/tls_link.h"

namespace pycomm::fuzz {
namespace {

constexpr uint8_t kPlainFirst = 128; // the connection begins with a plain Hello; no bit of ScriptedTrouble
constexpr uint8_t kUntrusted = kNotReused | kOtherVersion | kOtherCipher | kHandshakeFails;

ProcessId processOf(int rank) {
  return ProcessId(32, static_cast<char>('1' + rank)); // NOLINT: braces would make a list
}

std::shared_ptr<const TlsContext> contextOfSelf() {
  static const auto context = [] {
    TlsOptions options;
    options.records_per_key = 3;
    return ScriptedTls::context(processOf(kSelf), options);
  }();
  return context;
}

std::string identityText(int client, int server) {
  return PskIdentity{fuzzSecret().keyId(), processOf(client), processOf(server)}.text();
}

/// Pauses, takes part of what is written, and breaks, as the bits of a byte say in turn.
class HesitantLink final : public Link {
 public:
  HesitantLink(const uint8_t* bytes, size_t nbytes, size_t piece, uint8_t pauses)
      : bytes_(bytes, nbytes, piece), pauses_(pauses) {}
  [[nodiscard]] int fd() const noexcept override {
    return -1;
  }
  [[nodiscard]] bool finishConnect() override {
    return !pause();
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    if (broken_) {
      throw Error(ErrorCode::ConnectionReset, "the connection broke");
    }
    if (pause()) {
      Progress progress;
      progress.would_block = true;
      return progress;
    }
    Progress progress = bytes_.tryWrite(views, count);
    if (pause()) {
      progress.nbytes /= 2;
    }
    return progress;
  }
  [[nodiscard]] Progress tryRead(BufferView into) override {
    if (pause()) {
      Progress progress;
      progress.would_block = true;
      return progress;
    }
    Progress progress = bytes_.tryRead(into);
    if (progress.closed && pauses_ % 3 == 1) { // a reset instead of an end
      broken_ = true;
      throw Error(ErrorCode::ConnectionReset, "the connection broke");
    }
    return progress;
  }
  void shutdownWrite() noexcept override {}
  [[nodiscard]] std::string describe() const override {
    return "bytes";
  }

 private:
  bool pause() {
    turn_ = (turn_ + 1) % 9;
    return turn_ < 8 && (pauses_ >> turn_ & 1) != 0;
  }

  BytesLink bytes_;
  const uint8_t pauses_;
  int turn_ = 0;
  bool broken_ = false;
};

/// Reads, writes and ends a link that is up, as the bits of `wish` say, until nothing is left to read.
void use(Link& link, uint8_t wish, size_t rounds) {
  std::string into(1 + wish * 7U, '\0');
  const std::string out(wish % 32 * 900U, 'o');
  const size_t third = out.size() / 3;
  const auto* const from = reinterpret_cast<const std::byte*>(out.data());
  const ConstBufferView views[] = {{from, third}, {from + third, 0}, {from + third, third}, {from + 2 * third, third}};
  try {
    for (size_t round = 0; round < rounds; ++round) {
      if ((wish & 1) != 0 || round % 4 == 0) {
        const Progress written = link.tryWrite(views, 4);
        promise(written.nbytes <= 3 * third && !written.closed, "more was written than there was");
        promise(written.nbytes == 0 || !written.would_block, "written, and would block");
      }
      if ((wish & 2) != 0 && round == 5) {
        link.shutdownWrite();
        link.shutdownWrite();
      }
      const bool buffered = link.buffered();
      const Progress read = link.tryRead({reinterpret_cast<std::byte*>(into.data()), into.size()});
      promise(read.nbytes <= into.size(), "more was read than there was room for");
      promise(!read.closed || read.nbytes == 0, "bytes and an end at once");
      promise(!buffered || !read.would_block || !link.buffered(), "what is buffered cannot be read");
      (void)link.roomEvent();
      (void)link.unsent();
      if (read.closed) {
        promise(!link.buffered(), "something is left after the end");
        return;
      }
    }
  } catch (const Error& error) {
    useRecord(error.record(), true);
  }
}

} // namespace

Secret fuzzSecret() {
  return Secret::parse("pycomm-secret-1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAADwBz", "the fuzzers' secret");
}

// ---- the port

std::vector<uint8_t> endpointSample() {
  const std::string bytes = std::string("\x20\x00\x05", 3) + ScriptedTls::record(0x16, identityText(0, kSelf)) +
      ScriptedTls::record(0x17, encodeHello(helloOf(0))) + ScriptedTls::record(0x17, std::string(40, 'x')) +
      ScriptedTls::record(0x18, "") + ScriptedTls::record(0x15, "");
  return bytesOf(bytes);
}

bool readEndpoint(const uint8_t* bytes, size_t nbytes) {
  static Acceptor acceptor = [] {
    AcceptorConfig config = acceptorConfig();
    config.tls = contextOfSelf();
    for (int rank = 0; rank < kRanks; ++rank) {
      config.processes.push_back(processOf(rank));
    }
    return Acceptor(Listener::bind(SocketAddress::loopback(AddressFamily::IPv4), {}), config);
  }();
  if (nbytes < 3) {
    return false;
  }
  ScriptedTls::misbehave(bytes[1]);
  const uint8_t wish = bytes[2];
  const size_t rest = nbytes - 3;
  const size_t first = std::min<size_t>(rest, bytes[0] * 4U);
  const UniqueFd socket = connectTo(acceptor);
  if ((bytes[1] & kPlainFirst) != 0) {
    const std::string plain = encodeHello(helloOf(0));
    (void)::send(socket.get(), plain.data(), plain.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  const auto send = [&](size_t begin, size_t end) {
    if (begin < end) {
      (void)::send(socket.get(), bytes + 3 + begin, end - begin, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  };
  std::vector<Accepted> accepted;
  const auto poll = [&] {
    for (Accepted& peer : acceptor.poll(Clock::now())) {
      accepted.push_back(std::move(peer));
    }
  };
  const int64_t before = acceptor.rejected();
  send(0, first);
  poll();
  send(first, rest);
  (void)::shutdown(socket.get(), SHUT_WR);
  // All bytes have arrived already. If the acceptor cannot answer a peer that it admits (kWriteFails), it drops it without counting it.
  for (int round = 0; round < 1000 && accepted.empty() && acceptor.rejected() == before; ++round) {
    if (round > 2 && ScriptedTls::open() == 0) {
      break;
    }
    poll();
  }
  promise(!accepted.empty() || acceptor.rejected() != before || (bytes[1] & kWriteFails) != 0, "a stranger who stays");
  poll(); // refused ones are read to their end
  poll();
  promise(accepted.size() <= 1, "one connection is two peers");
  for (const Accepted& peer : accepted) {
    promise((bytes[1] & kUntrusted) == 0, "a handshake that proved nothing lets somebody in");
    checkIntroduced(peer.hello);
    const auto* const tls = dynamic_cast<const TlsLink*>(peer.link.get());
    promise(tls != nullptr, "a plain connection lets somebody in");
    promise(tls->peer() == processOf(peer.hello.rank), "a process that is another rank");
    use(*peer.link, wish, nbytes + 16);
  }
  const bool introduced = !accepted.empty();
  accepted.clear();
  promise(ScriptedTls::open() == 0, "a connection is never freed");
  return introduced;
}

// ---- the process that connects

std::vector<uint8_t> dialSample() {
  const std::string bytes = std::string("\x63\x00\x00\x05", 4) + ScriptedTls::record(0x16, "hello") +
      ScriptedTls::record(0x17, encodeHelloAccepted(identity().hash)) +
      ScriptedTls::record(0x17, std::string(40, 'x')) + ScriptedTls::record(0x18, "") + ScriptedTls::record(0x15, "");
  return bytesOf(bytes);
}

bool readDial(const uint8_t* bytes, size_t nbytes) {
  if (nbytes < 4) {
    return false;
  }
  ScriptedTls::misbehave(bytes[2]);
  const auto memory = exactly(bytes + 4, nbytes - 4);
  const auto* const rest = reinterpret_cast<const uint8_t*>(memory.get());
  auto link = TlsLink::connect(
      contextOfSelf(), std::make_unique<HesitantLink>(rest, nbytes - 4, 1U + bytes[0], bytes[1]), processOf(0));
  Introduction introduction(helloOf(kSelf));
  bool up = false;
  bool accepted = false;
  const size_t rounds = 16 * nbytes + 64;
  try {
    for (size_t round = 0; round < rounds && !accepted; ++round) {
      up = up || link->finishConnect();
      accepted = up && introduction.advance(*link);
    }
    promise(!up || (bytes[2] & kUntrusted) == 0, "a handshake that proved nothing is trusted");
    promise(!up || link->peer() == processOf(0), "another process than the one that was looked for");
  } catch (const Error& error) {
    promise(error.record().code != ErrorCode::Ok, "a refusal without a reason");
    useRecord(error.record(), true);
  }
  if (accepted) {
    use(*link, bytes[3], rounds);
  }
  link.reset();
  promise(ScriptedTls::open() == 0, "a connection is never freed");
  return accepted;
}

// ---- texts

std::vector<uint8_t> secretSample() {
  return bytesOf(std::string(1, '\1') + identityText(0, kSelf));
}

bool readSecret(const uint8_t* bytes, size_t nbytes) {
  if (nbytes == 0) {
    return false;
  }
  static const Secret secret = fuzzSecret();
  static const Seal seal(secret);
  const auto memory = exactly(bytes + 1, nbytes - 1);
  const std::string_view text(reinterpret_cast<const char*>(memory.get()), nbytes - 1);
  try {
    switch (bytes[0] % 3) {
      case 0:
        return Secret::parse(text, "a file").keyId().size() == 8;
      case 1: {
        const auto found = PskIdentity::parse(text);
        promise(!found || found->text() == text, "the identity does not survive");
        return found.has_value();
      }
      default: {
        const std::string key = "pycomm/g/1/member/0";
        const std::string value = seal.opened(key, std::string(text));
        promise(seal.sealed(key, value) == text, "a seal that this secret did not make");
        return true;
      }
    }
  } catch (const Error& error) { // the only thing that may come out
    promise(error.record().code != ErrorCode::Ok, "a refusal without a reason");
    useRecord(error.record(), false);
    return false;
  }
}

} // namespace pycomm::fuzz

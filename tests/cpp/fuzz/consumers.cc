#include "fuzz/consumers.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "engine/monitor/membership.h"
#include "engine/report/failure_text.h"
#include "engine/report/flight_json.h"
#include "fuzz/promise.h"

namespace pycomm::fuzz {
namespace {

void mustBePrintable(const std::string& text) {
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    promise(code >= 0x20 && code != 0x7f, "a control character");
  }
  promise(text.find("\xc2\x9b") == std::string::npos, "a terminal's command");
  promise(text.find("\xe2\x80\xae") == std::string::npos, "a change of direction");
}

void mustBeOurs(const ErrorRecord& record) {
  promise(record.rank == kSelf && record.host == identity().hosts[kSelf], "an error of another rank's");
  promise(record.code != ErrorCode::Ok, "an error without a code");
  mustBePrintable(record.text());
  mustBePrintable(jsonOf(record));
}

} // namespace

GroupIdentity identity() {
  GroupIdentity identity;
  identity.rank = kSelf;
  identity.size = kRanks;
  identity.name = "group";
  identity.hash = 7;
  identity.nonce = 99;
  identity.hosts = {"host0", "host1", "host2"};
  identity.addresses.resize(kRanks);
  return identity;
}

Hello helloOf(int rank) {
  GroupIdentity peer = identity();
  peer.rank = rank;
  return peer.hello(LinkPurpose::Bulk);
}

AcceptorConfig acceptorConfig() {
  const GroupIdentity self = identity();
  AcceptorConfig config;
  config.nonce = self.nonce;
  config.group = self.hash;
  config.epoch = self.epochOnWire();
  config.rank = kSelf;
  config.size = kRanks;
  return config;
}

UniqueFd connectTo(const Acceptor& acceptor) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const linger at_once{1, 0}; // no connection of thousands is remembered
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  const SocketAddress& address = acceptor.address();
  int error = 0;
  // With thousands of connections a second there may be no free port: the kernel remembers each for a while.
  for (const Deadline end = Deadline::after(10000); !end.expired(); (void)::poll(nullptr, 0, 1)) {
    error = ::connect(socket.get(), address.raw(), address.rawLength()) == 0 ? 0 : errno;
    if (error != EADDRNOTAVAIL && error != EINTR) {
      break;
    }
  }
  promise(error == 0, ("nobody listens: " + errnoText(error)).c_str());
  return socket;
}

void checkIntroduced(const Hello& hello) {
  const GroupIdentity self = identity();
  promise(hello.rank >= 0 && hello.rank < kRanks && hello.rank != kSelf, "the Hello names no other rank");
  promise(hello.size == kRanks && hello.nonce == self.nonce && hello.group == self.hash, "a rank of another group");
  promise(hello.epoch == self.epochOnWire(), "a rank of another epoch");
}

void useRecord(const ErrorRecord& record, bool trusted) {
  static const GroupIdentity self = identity();
  mustBePrintable(record.text());
  if (trusted) {
    promise(record.rank >= -1 && record.rank < kRanks, "a rank that does not exist");
    promise(record.peer >= -1 && record.peer < kRanks, "a peer that does not exist");
  }
  Operation::Request request;
  request.id = {3, 3};
  request.descriptor.kind = Collective::AllReduce;
  const Operation operation(std::move(request));
  mustBeOurs(errorOf(operation, record, self));
  mustBeOurs(errorOf(record, self));
  mustBePrintable(recordOfThrown(std::make_exception_ptr(Error(record)), self).text());
  mustBePrintable(withNeed(record, self).text());
  mustBePrintable(cannotAccept(record, self).text());
  mustBeOurs(peerGone(2, record, self));
  mustBeOurs(linkLost(2, record, self));
  mustBePrintable(refusedBy(2, record, self).text());

  Membership::Config config;
  config.rank = kSelf;
  config.hosts = self.hosts;
  config.neighbours = {0, 2};
  const TimePoint start{};
  Membership membership(config, start);
  membership.reported(0, record, start);
  membership.controlClosed(2, "closed", start);
  membership.doubted(record, start);
  membership.tick(start + std::chrono::milliseconds(100));
  promise(membership.failure().has_value(), "a report without an end");
  mustBePrintable(membership.failure()->text());
}

} // namespace pycomm::fuzz

#include "fuzz/targets.h"

#include <string>

#include "base/error.h"
#include "fuzz/agreement.h"
#include "fuzz/consumers.h"
#include "fuzz/endpoint.h"
#include "fuzz/frames.h"
#include "fuzz/promise.h"
#include "transport/frame_header.h"
#include "transport/net/address.h"
#include "transport/net/host_identity.h"
#include "transport/rendezvous/rank_record.h"
#include "transport/rendezvous/store_round.h"

namespace pycomm::fuzz {
namespace {

std::string textOf(const uint8_t* bytes, size_t nbytes) {
  return {reinterpret_cast<const char*>(bytes), nbytes};
}

// ---- error record

std::vector<uint8_t> errorSample() {
  ErrorRecord record;
  record.code = ErrorCode::PeerDead;
  record.summary = "Rank 2 is gone.";
  record.hint = "look there";
  record.rank = 1;
  record.peer = 2;
  record.host = "a";
  record.op = "all_reduce";
  record.numel = 1 << 20;
  return bytesOf(record.serialize());
}

bool readError(const uint8_t* bytes, size_t nbytes) {
  const auto record = ErrorRecord::deserialize(textOf(bytes, nbytes), kMaxRanks); // as the store may hold it
  if (!record) {
    return false;
  }
  const auto again = ErrorRecord::deserialize(record->serialize(), kMaxRanks);
  promise(again && again->text() == record->text(), "the record does not survive");
  useRecord(*record, false);
  return true;
}

// ---- rank record

std::vector<uint8_t> rankSample() {
  RankRecord record;
  record.version = FrameHeader::kVersion;
  record.rank = 1;
  record.size = 4;
  record.host = "node1";
  record.identity = {"4d8ab4fc-6ae1-4f4b-9d39-0b7e2e6f6a11", 4026531840, "node1"};
  record.process = {4711, 4026531836, 123456};
  record.route = SocketAddress::parse("10.0.0.1", 29600);
  record.config_text = "algorithm=auto transport=tcp";
  record.nonce = 99;
  record.run = 5;
  record.watch_name = "0123456789abcdef";
  return bytesOf(record.wireText());
}

bool readRank(const uint8_t* bytes, size_t nbytes) {
  RankRecord record;
  record.version = FrameHeader::kVersion;
  record.rank = 0;
  record.size = 4;
  try {
    const RankRecord theirs = RankRecord::fromWireText(textOf(bytes, nbytes), 1);
    (void)theirs.who();
    if (theirs.version == FrameHeader::kVersion) {
      const RankRecord again = RankRecord::fromWireText(theirs.wireText(), 1);
      promise(again.wireText() == theirs.wireText(), "the record does not survive");
    }
    checkCompatible(record, theirs);
    return true;
  } catch (const Error&) { // the only thing that may come out
    return false;
  }
}

// ---- texts in the store: a byte that says which, then the text

std::vector<uint8_t> textSample() {
  return bytesOf('\0' + joinTexts({"first", "", std::string(300, 'x')}));
}

bool readText(const uint8_t* bytes, size_t nbytes) {
  if (nbytes == 0) {
    return false;
  }
  const std::string text = textOf(bytes + 1, nbytes - 1);
  switch (bytes[0] % 4) {
    case 0: {
      const auto texts = splitTexts(text);
      promise(!texts || splitTexts(joinTexts(*texts)) == texts, "the list does not survive");
      return texts.has_value();
    }
    case 1: {
      const auto address = SocketAddress::fromWireText(text);
      promise(
          !address || SocketAddress::fromWireText(address->wireText())->wireText() == address->wireText(),
          "the address does not survive");
      return address.has_value();
    }
    case 2: {
      const auto host = HostIdentity::fromWireText(text);
      promise(
          !host || HostIdentity::fromWireText(host->wireText())->wireText() == host->wireText(),
          "the host does not survive");
      return host.has_value();
    }
    default: {
      const auto process = ProcessIdentity::fromWireText(text);
      promise(!process || process->pid >= 0, "a process id below 0");
      return process.has_value();
    }
  }
}

} // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> all = {
      {"hello", readHello, helloSample},
      {"reply", readReply, replySample},
      {"error", readError, errorSample},
      {"rank", readRank, rankSample},
      {"text", readText, textSample},
      {"meeting", readMeeting, meetingSample},
      {"sealed", readSealed, sealedSample},
      {"secret", readSecret, secretSample},
      {"endpoint", readEndpoint, endpointSample},
      {"dial", readDial, dialSample},
      {"control", readControl, controlSample},
      {"bulk", readBulk, bulkSample},
      {"frames", readFrames, framesSample},
      {"matching", readMatching, matchingSample},
      {"agreement", readAgreement, agreementSample},
  };
  return all;
}

} // namespace pycomm::fuzz

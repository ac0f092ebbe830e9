#include "transport/net/hello.h"

#include <algorithm>
#include <cstring>

namespace pycomm {
namespace {

struct HelloPayload {
  uint64_t nonce = 0;
  int32_t rank = -1;
  int32_t size = 0;
  uint32_t reserved_word = 0;
  uint8_t purpose = 0;
  uint8_t reserved_byte = 0;
  uint8_t shared = 0;
  uint8_t reserved[9] = {};
};
static_assert(sizeof(HelloPayload) == kHelloPayloadNbytes, "the payload is part of the wire format");

std::string frame(const FrameHeader& header, const void* payload) {
  std::string out(reinterpret_cast<const char*>(&header), sizeof header);
  return header.payload_nbytes == 0 ? out : out.append(static_cast<const char*>(payload), header.payload_nbytes);
}

HelloReading refuse(HelloReading::State state, std::string why) {
  HelloReading reading;
  reading.state = state;
  reading.why = std::move(why);
  return reading;
}

} // namespace

std::string encodeHello(const Hello& hello) {
  FrameHeader header;
  header.type = FrameType::Hello;
  header.payload_nbytes = kHelloPayloadNbytes;
  header.group = hello.group;
  header.epoch = hello.epoch;
  HelloPayload payload;
  payload.nonce = hello.nonce;
  payload.rank = hello.rank;
  payload.size = hello.size;
  payload.shared = hello.shared ? 1 : 0;
  payload.purpose = static_cast<uint8_t>(hello.purpose);
  return frame(header, &payload);
}

HelloReading decodeHello(ConstBufferView bytes) {
  using State = HelloReading::State;
  FrameHeader header;
  // Bytes that have not arrived get the values of a valid Hello, so that only received bytes can be wrong.
  header.type = FrameType::Hello;
  header.payload_nbytes = kHelloPayloadNbytes;
  std::memcpy(static_cast<void*>(&header), bytes.ptr, std::min(bytes.nbytes, sizeof header));
  if (header.magic != FrameHeader::kMagic) {
    return refuse(State::ProtocolViolation, "the first bytes are not pycomm's");
  }
  if (header.version != FrameHeader::kVersion) {
    return refuse(
        State::VersionMismatch,
        "the connecting rank speaks pycomm wire version " + std::to_string(header.version) +
            " and the listening rank version " + std::to_string(FrameHeader::kVersion));
  }
  if (header.type != FrameType::Hello) {
    return refuse(
        State::ProtocolViolation,
        "the first frame is of type " + std::to_string(static_cast<int>(header.type)) + ", not a hello");
  }
  if (bytes.nbytes >= sizeof header && header.payload_nbytes != kHelloPayloadNbytes) {
    return refuse(
        State::ProtocolViolation, "a hello announces " + std::to_string(header.payload_nbytes) + " bytes of payload");
  }
  if (bytes.nbytes < kHelloNbytes) {
    return {};
  }
  HelloPayload payload;
  std::memcpy(&payload, bytes.ptr + sizeof header, sizeof payload);
  if (payload.purpose > static_cast<uint8_t>(LinkPurpose::Bulk)) {
    return refuse(State::ProtocolViolation, "a hello has unknown purpose " + std::to_string(payload.purpose));
  }
  if (payload.size < 1 || payload.rank < 0 || payload.rank >= payload.size) {
    return refuse(
        State::ProtocolViolation,
        "a hello comes from rank " + std::to_string(payload.rank) + " of " + std::to_string(payload.size));
  }
  HelloReading reading;
  reading.state = State::Complete;
  reading.hello.nonce = payload.nonce;
  reading.hello.rank = payload.rank;
  reading.hello.size = payload.size;
  reading.hello.epoch = header.epoch;
  reading.hello.group = header.group;
  reading.hello.purpose = static_cast<LinkPurpose>(payload.purpose);
  reading.hello.shared = payload.shared != 0;
  return reading;
}

std::string encodeHelloAccepted(uint32_t group) {
  FrameHeader header;
  header.type = FrameType::HelloReply;
  header.group = group;
  return frame(header, nullptr);
}

std::string encodeHelloRefused(const ErrorRecord& reason) {
  const std::string payload = reason.serialize();
  FrameHeader header;
  header.type = FrameType::HelloReply;
  header.payload_nbytes = static_cast<uint32_t>(payload.size());
  return frame(header, payload.data());
}

std::optional<ErrorRecord> decodeHelloReply(ConstBufferView payload, int size) {
  if (payload.nbytes == 0) {
    return std::nullopt;
  }
  const std::string bytes(reinterpret_cast<const char*>(payload.ptr), payload.nbytes);
  std::optional<ErrorRecord> reason = ErrorRecord::deserialize(bytes, size);
  // An acceptor gives no other reasons. One such as DataCorrupt would be taken for this rank's own finding.
  if (reason &&
      (reason->code == ErrorCode::ConfigMismatch || reason->code == ErrorCode::VersionMismatch ||
       reason->code == ErrorCode::ProtocolViolation)) {
    return reason;
  }
  ErrorRecord broken;
  broken.code = ErrorCode::ProtocolViolation;
  broken.summary = "a connection was refused for a reason that cannot be read";
  return broken;
}

} // namespace pycomm

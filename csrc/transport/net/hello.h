#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/buffer_view.h"
#include "base/error.h"
#include "transport/frame_header.h"

namespace pycomm {

/// The purpose of a connection. Part of the wire format.
enum class LinkPurpose : uint8_t { Control = 0, Bulk = 1 };

/// The first bytes of every connection: the connecting rank, its job, and the purpose of the connection.
struct Hello {
  uint64_t nonce = 0; ///< the group's, an endpoint's, or FixedPort::kNonce: keeps others out; over TCP it is no secret
  int32_t rank = -1;
  int32_t size = 0;
  uint16_t epoch = 0;
  uint32_t group = 0; ///< Rendezvous::group_hash
  LinkPurpose purpose = LinkPurpose::Control;
  bool shared = false; ///< the link's bytes go through memory that both ranks share: see SharedLink
};

/// Bytes of a Hello frame's payload, and of the whole frame. All versions share the first three bytes of the header
/// (magic, version), so either side can report a wrong version without reading the rest.
inline constexpr size_t kHelloPayloadNbytes = 32;
inline constexpr size_t kHelloNbytes = sizeof(FrameHeader) + kHelloPayloadNbytes;

/// A header of type Hello and its payload.
[[nodiscard]] std::string encodeHello(const Hello& hello);

struct HelloReading {
  enum class State : uint8_t {
    Incomplete, ///< the beginning of a Hello; more bytes are needed
    Complete,
    VersionMismatch, ///< a pycomm of another version
    ProtocolViolation, ///< not pycomm
  };
  State state = State::Incomplete;
  Hello hello; ///< valid when Complete
  std::string why; ///< one sentence, if it is a mismatch or a violation
};

/// Reads up to kHelloNbytes of any content. Never throws; decides as early as the bytes allow.
[[nodiscard]] HelloReading decodeHello(ConstBufferView bytes);

/// A HelloReply frame: accepted, or refused with the reason. A refusal may go to a stranger, so it names no group.
[[nodiscard]] std::string encodeHelloAccepted(uint32_t group);
[[nodiscard]] std::string encodeHelloRefused(const ErrorRecord& reason);
/// Reads the payload of a HelloReply frame for a rank of a group of `size`: nullopt if accepted, else the reason.
/// Accepts any bytes.
[[nodiscard]] std::optional<ErrorRecord> decodeHelloReply(ConstBufferView payload, int size);

} // namespace pycomm

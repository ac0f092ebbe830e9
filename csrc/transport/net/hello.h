#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/buffer_view.h"
#include "base/error.h"
#include "transport/wire.h"

namespace pycomm {

/// What a connection is for. Part of the wire format.
enum class LinkPurpose : uint8_t { Control = 0, Bulk = 1 };

/// Who connects, to which job, and what for: the first bytes of every connection.
struct Hello {
  uint64_t nonce = 0; ///< the job's, from the rendezvous: keeps other jobs out, is no secret
  int32_t rank = -1;
  int32_t size = 0;
  uint16_t epoch = 0;
  uint32_t group = 0; ///< Rendezvous::group_hash
  LinkPurpose purpose = LinkPurpose::Control;
  uint32_t lane = 0;
  uint8_t stream = 0; ///< which one of the connections that one link is made of
  bool shared = false; ///< the link's bytes go through memory that both ranks share: see SharedLink
};

/// Bytes of a Hello frame's payload, and of the whole frame. All versions share the first three bytes of the header
/// (magic, version), so that either side can say "wrong version" whatever follows.
inline constexpr size_t kHelloPayloadNbytes = 32;
inline constexpr size_t kHelloNbytes = sizeof(FrameHeader) + kHelloPayloadNbytes;

/// A header of type Hello and its payload, ready to be written.
[[nodiscard]] std::string encodeHello(const Hello& hello);

struct HelloReading {
  enum class State : uint8_t {
    Incomplete, ///< a beginning of a Hello; more bytes are needed
    Complete,
    VersionMismatch, ///< a pycomm of another version
    ProtocolViolation, ///< not pycomm
  };
  State state = State::Incomplete;
  Hello hello; ///< valid when Complete
  std::string why; ///< one sentence, when it is a mismatch or a violation
};

/// Reads up to kHelloNbytes of any content. Never throws; judges as early as the bytes allow.
[[nodiscard]] HelloReading decodeHello(ConstBufferView bytes);

/// A HelloReply frame: accepted, or refused with the reason. A refusal goes to strangers, so it names no group.
[[nodiscard]] std::string encodeHelloAccepted(uint32_t group);
[[nodiscard]] std::string encodeHelloRefused(const ErrorRecord& reason);
/// From the payload of a HelloReply frame, to a rank of a group of `size`: nothing when accepted, else why not. Takes any bytes.
[[nodiscard]] std::optional<ErrorRecord> decodeHelloReply(ConstBufferView payload, int size);

} // namespace pycomm

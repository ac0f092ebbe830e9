#pragma once

#include <cstdint>

namespace pycomm {

/// The purpose of a frame. Part of the wire format: never reuse a number.
enum class FrameType : uint8_t {
  Hello = 1, ///< first frame of every connection, from the side that connected; payload: see hello.h
  HelloReply = 2, ///< accepts, or carries the error record with the reason for the refusal
  Data = 3, ///< payload: one step's bytes
  Credit =
      4, ///< aux = bytes that may be sent on this edge in all; of op_id 0: bytes of the eager pool that are free again
  Waiting = 5, ///< "I wait for you in this operation": carries the descriptor, no payload; see Route
  NotEntered =
      6, ///< reply to Waiting: aux = this rank's last operation id; the operation is not posted here; see Route
  Failure = 7, ///< payload: ErrorRecord::serialize()
  Heartbeat = 8,
  Goodbye = 9, ///< orderly end: the sender sends nothing more and expects nothing more
  Left = 10, ///< on control links: rank `root` has said goodbye to a rank that passes this on
  Leaving =
      11, ///< on control links: rank `root` will say goodbye because it could not join or something else in its process has failed; payload: why, an ErrorRecord
};

/// The 64 bytes before every payload. Little-endian, as on every machine pycomm supports.
/// Frames of an operation carry its whole descriptor, so that a rank can compare any of them with its own.
struct FrameHeader {
  uint16_t magic = kMagic;
  uint8_t version = kVersion;
  FrameType type = FrameType::Data;
  uint32_t payload_nbytes = 0;
  uint64_t op_id = 0;
  int64_t numel =
      0; ///< elements of the operation, not of this frame; of an all_to_all, gather or scatter: those between the two ranks
  uint32_t group = 0; ///< hash of the group's name and nonce
  uint32_t index = 0; ///< number of this frame on its edge, counted from 0; on control links see Route
  uint8_t kind = 0; ///< Collective
  uint8_t dtype = 0; ///< DType
  uint8_t reduce_op = 0; ///< ReduceOp
  uint8_t codec = 0; ///< how values travel: the DType, or 0x80 | Codec (Descriptor::wireByte)
  uint16_t algorithm = 0; ///< Algorithm
  uint16_t epoch = 0;
  int32_t root = -1;
  uint32_t tag = 0; ///< Descriptor::tag
  uint32_t digest = 0; ///< Descriptor::digest
  uint32_t route = 0; ///< on control links, of questions and answers: see Route
  uint64_t aux =
      0; ///< by type: Credit, last operation's id; of a Waiting the lowest bit: it answers one, the others: CallbackOrigin

  static constexpr uint16_t kMagic = 0x7963; // "cy"
  /// 2: the side that connects waits for the HelloReply; Waiting may answer Waiting.
  /// 3: questions about collectives may travel over control links, from neighbour to neighbour; Left.
  /// 4: records name ranks by their numbers in the job; Leaving.
  /// 5: Waiting says which callback has issued the operation.
  /// 6: a link is one connection, and a rank listens on one address.
  static constexpr uint8_t kVersion = 6;
};
static_assert(sizeof(FrameHeader) == 64, "the header is part of the wire format");

/// Between which two ranks a question (Waiting) or its answer (NotEntered) travels over control links. A rank has control links to few
/// others, so a frame may pass through some of them (ControlPlane::towards).
struct Route {
  int from = -1;
  int to = -1;
  uint32_t hops = 0; ///< links that the frame has passed
  static constexpr int kMaxGroupSize = 1 << 16; ///< larger groups cannot use it

  [[nodiscard]] static Route of(const FrameHeader& header) noexcept {
    return {static_cast<int>(header.route & 0xffff), static_cast<int>(header.route >> 16), header.index};
  }
  void writeTo(FrameHeader& header) const noexcept {
    header.route = static_cast<uint32_t>(from) | static_cast<uint32_t>(to) << 16;
    header.index = hops;
  }
};

/// Upper bound of payload_nbytes: no more than this is ever read, also if a stranger writes a larger number.
inline constexpr uint32_t kMaxPayloadNbytes = 4U << 20;

} // namespace pycomm

#include "engine/operation/descriptor.h"

#include <tuple>

namespace pycomm {
namespace {

constexpr uint8_t kCodecBit = 0x80; // no dtype has it

} // namespace

bool Descriptor::operator==(const Descriptor& other) const noexcept {
  const auto fields = [](const Descriptor& d) {
    return std::tie(d.kind, d.dtype, d.reduce_op, d.codec, d.algorithm, d.root, d.numel, d.tag, d.digest);
  };
  return fields(*this) == fields(other);
}

uint8_t Descriptor::wireByte() const noexcept {
  return codec == Codec::None ? static_cast<uint8_t>(dtype)
                              : static_cast<uint8_t>(kCodecBit | static_cast<uint8_t>(codec));
}

void Descriptor::setWireByte(uint8_t byte) noexcept {
  const bool encoded = (byte & kCodecBit) != 0 && byte != kCodecBit;
  codec = byte == static_cast<uint8_t>(dtype) ? Codec::None
                                              : static_cast<Codec>(encoded ? byte & ~kCodecBit : byte | kCodecBit);
}

std::string Descriptor::wireName() const {
  return codec == Codec::None ? "" : codecName(codec);
}

Descriptor Descriptor::of(const ScheduleRequest& request, Algorithm algorithm) {
  Descriptor d;
  d.kind = request.kind;
  d.dtype = request.dtype;
  d.reduce_op = request.reduce_op;
  d.codec = request.codec;
  d.algorithm = algorithm;
  d.root = request.root;
  d.numel = request.numel;
  d.digest = splitsDigest(request.kind, request.counts);
  return d;
}

void Descriptor::writeTo(FrameHeader& header) const noexcept {
  header.kind = static_cast<uint8_t>(kind);
  header.dtype = static_cast<uint8_t>(dtype);
  header.reduce_op = static_cast<uint8_t>(reduce_op);
  header.codec = wireByte();
  header.algorithm = static_cast<uint16_t>(algorithm);
  header.root = root;
  header.numel = numel;
  header.tag = tag;
  header.digest = digest;
}

Descriptor Descriptor::readFrom(const FrameHeader& header) noexcept {
  Descriptor d;
  d.kind = static_cast<Collective>(header.kind);
  d.dtype = static_cast<DType>(header.dtype);
  d.reduce_op = static_cast<ReduceOp>(header.reduce_op);
  d.setWireByte(header.codec);
  d.algorithm = static_cast<Algorithm>(header.algorithm);
  d.root = header.root;
  d.numel = header.numel;
  d.tag = header.tag;
  d.digest = header.digest;
  return d;
}

std::string Descriptor::text(const JobRanks& job, int rank, int peer) const {
  std::string out = collectiveName(kindAt(rank));
  out += '(';
  if (reduce_op != ReduceOp::None) {
    out += std::string(reduceOpName(reduce_op)) + ", ";
  }
  out += std::string(dtypeName(dtype)) + " x " + std::to_string(numel);
  if (kind == Collective::Send) {
    if (rank < 0 || rank != root) {
      out += ", from " + job.text(root);
    } else if (peer >= 0) {
      out += ", to " + job.text(peer);
    }
    return out + ", tag " + std::to_string(tag) + ')';
  }
  if (root >= 0) {
    out += ", root " + std::to_string(job.of(root));
  }
  if (const std::string wire = wireName(); !wire.empty()) {
    out += ", wire " + wire;
  }
  out += std::string(", ") + algorithmName(algorithm);
  if (tag != 0) {
    out += ", tag " + std::to_string(tag);
  }
  if (digest != 0) {
    out += ", splits " + std::to_string(digest);
  }
  return out + ')';
}

// FNV-1a; never 0 for uneven splits. In an all_to_all every rank has splits of its own, and in a gather or scatter only the root
// knows all sizes; what matters there is compared pair by pair, as frames meet.
uint32_t splitsDigest(Collective kind, const std::vector<int64_t>& counts) {
  const bool own = kind == Collective::AllToAll || kind == Collective::Gather || kind == Collective::Scatter;
  if (own || counts.empty()) {
    return 0;
  }
  uint32_t hash = 2166136261U;
  for (const int64_t count : counts) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash = (hash ^ static_cast<uint32_t>((count >> shift) & 0xff)) * 16777619U;
    }
  }
  return hash == 0 ? 1 : hash;
}

} // namespace pycomm

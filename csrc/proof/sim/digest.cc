#include "proof/sim/digest.h"

#include <type_traits>

#include "engine/operation/issue_context.h"

namespace pycomm::sim {
namespace {

// Overloads for the fields of a record.

void addField(Digest& digest, const std::string& text) noexcept {
  digest.addText(text);
}

void addField(Digest& digest, ErrorPhase phase) noexcept {
  digest.addText(phase.text());
}

template <typename Number>
  requires std::is_integral_v<Number> || std::is_enum_v<Number>
void addField(Digest& digest, Number number) noexcept {
  digest.addNumber(static_cast<uint64_t>(number));
}

template <typename... Fields>
void addFields(Digest& digest, const Fields&... fields) noexcept {
  (addField(digest, fields), ...);
}

} // namespace

void Digest::addNumber(uint64_t number) noexcept {
  value_ = mix64(value_ ^ number) + 1; // 0 is no fixed point
}

// FNV-1a.
void Digest::addBytes(const std::byte* bytes, size_t nbytes) noexcept {
  for (size_t i = 0; i < nbytes; ++i) {
    value_ = (value_ ^ static_cast<uint64_t>(bytes[i])) * 0x100000001b3ULL + 1;
  }
}

void Digest::addText(const std::string& text) noexcept {
  addNumber(text.size());
  addBytes(reinterpret_cast<const std::byte*>(text.data()), text.size());
}

void Digest::add(const FrameHeader& header) noexcept {
  static_assert(std::has_unique_object_representations_v<FrameHeader>, "no padding");
  addBytes(reinterpret_cast<const std::byte*>(&header), sizeof header);
}

// The number of names on the left is that of the fields: a new field does not compile until it is added here.

void Digest::add(const Descriptor& descriptor) noexcept {
  const auto& [kind, dtype, reduce_op, codec, algorithm, root, numel, tag, digest] = descriptor;
  addFields(*this, kind, dtype, reduce_op, codec, algorithm, root, numel, tag, digest);
}

void Digest::add(const ErrorRecord& error) noexcept {
  const auto& [code, summary, hint, cause, rank, host, peer, peer_host, group, group_ranks, epoch, op, sequence, dtype, numel, bytes_done, bytes_total, phase, elapsed_ms] =
      error;
  addFields(
      *this,
      code,
      summary,
      hint,
      cause,
      rank,
      host,
      peer,
      peer_host,
      group,
      group_ranks,
      epoch,
      op,
      sequence,
      dtype,
      numel,
      bytes_done,
      bytes_total,
      phase,
      elapsed_ms);
}

} // namespace pycomm::sim

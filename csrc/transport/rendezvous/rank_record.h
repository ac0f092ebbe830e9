#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transport/net/address.h"
#include "transport/net/host_identity.h"

namespace pycomm {

/// No text that a rank leaves in the store is longer; whatever is, was not written by pycomm.
inline constexpr size_t kMaxRecordNbytes = 8192;

/// What a rank tells about itself in the store before anybody has bound a port. Lines of text: a header
/// "pycomm <wire version>", which all versions share, then key=value; unknown keys are skipped.
struct RankRecord {
  int version = 0;
  int rank = -1;
  int size = 0;
  std::string host;
  HostIdentity identity;
  ProcessIdentity process;
  SocketAddress route;
  uint32_t config_digest = 0;
  std::string config_text;
  uint64_t nonce = 0; ///< rank 0's counts
  uint64_t run = 0; ///< rank 0's counts
  std::string watch_name; ///< where processes of its host may watch it (engine/monitor/host_mates.h); empty: nowhere
  std::string remark; ///< what the floors above want all ranks to know of this one

  [[nodiscard]] std::string wireText() const;

  /// Takes any bytes. Throws Error(ProtocolViolation) saying what is wrong with the record of `rank`. Of another wire
  /// version it reads only what all versions have, and leaves the judgement to checkCompatible().
  [[nodiscard]] static RankRecord fromWireText(const std::string& text, int rank);

  /// "rank 1 (host b, pid 77)"
  [[nodiscard]] std::string who() const;
};

/// Throws Error(VersionMismatch) or Error(ConfigMismatch), with both values, when the two cannot be in one group.
void checkCompatible(const RankRecord& mine, const RankRecord& theirs);

/// Several texts as one, "5:first,6:second,". Reading takes any bytes; empty for what was not made so.
[[nodiscard]] std::string joinTexts(const std::vector<std::string>& texts);
[[nodiscard]] std::optional<std::vector<std::string>> splitTexts(const std::string& joined);

} // namespace pycomm

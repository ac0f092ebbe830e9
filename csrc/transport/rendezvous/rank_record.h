#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/job_ranks.h"
#include "transport/net/address.h"
#include "transport/net/host_identity.h"
#include "transport/secure/tls_context.h"

namespace pycomm {

/// Upper bound of any text that a rank leaves in the store. pycomm did not write a longer one.
inline constexpr size_t kMaxRecordNbytes = 8192;

/// The description of a rank that it puts into the store before any rank has bound a port. Lines of text: a header
/// "pycomm <wire version>", which all versions share, then key=value; unknown keys are skipped.
struct RankRecord {
  int version = 0;
  int rank = -1;
  int job_rank = -1; ///< JobRanks: what texts call it
  int size = 0;
  std::string host;
  HostIdentity identity;
  ProcessIdentity process;
  SocketAddress route;
  uint32_t config_digest = 0;
  std::string config_text;
  uint64_t nonce =
      0; ///< rank 0's value is used; in a sealed store every rank has one, so that no record can be prepared
  uint64_t run = 0; ///< rank 0's value is used
  ProcessId process_id; ///< in a sealed store: the name of this process in TLS; else empty
  std::string
      watch_name; ///< LocalPeers::name(): the Unix socket at which processes of its host get its death watch; empty: none
  std::string unix_socket; ///< the name of the Unix socket on which it listens for ranks of its host; empty: none
  std::string remark; ///< text that the layers above publish to all ranks

  [[nodiscard]] std::string wireText() const;

  /// Accepts any bytes. Throws Error(ProtocolViolation) naming the fault in the record of `rank`. If the record has
  /// another wire version, only the parts that all versions share are read; checkCompatible() then rejects it.
  [[nodiscard]] static RankRecord fromWireText(const std::string& text, int rank, const JobRanks& job = {});

  /// "rank 1 (host b, pid 77)"
  [[nodiscard]] std::string who() const;
};

/// Throws Error(VersionMismatch) or Error(ConfigMismatch), with both values, if the two cannot be in one group.
void checkCompatible(const RankRecord& mine, const RankRecord& theirs);

/// Several texts as one, "5:first,6:second,". splitTexts() accepts any bytes; nullopt if joinTexts() did not make them.
[[nodiscard]] std::string joinTexts(const std::vector<std::string>& texts);
[[nodiscard]] std::optional<std::vector<std::string>> splitTexts(const std::string& joined);

} // namespace pycomm

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "base/job_ranks.h"
#include "transport/net/address.h"
#include "transport/net/host_identity.h"
#include "transport/net/interfaces.h"
#include "transport/net/listener.h"
#include "transport/rendezvous/rank_claim.h"
#include "transport/rendezvous/store.h"
#include "transport/secure/tls_context.h"

namespace pycomm {

struct RendezvousConfig {
  int rank = -1;
  int size = 0;
  JobRanks job; ///< what texts and records call the ranks
  std::string group_name;
  int64_t epoch = 0; ///< the uuid of the reconfigure() that makes the group; else 0
  std::string store_host; ///< as the user wrote it (MASTER_ADDR); empty for a file store
  InterfaceSpec spec;
  AddressFamily family = AddressFamily::Any;
  PortRange ports;
  uint32_t config_digest = 0; ///< digest of every option that must be the same on all ranks
  std::string config_text; ///< "key=value key=value …", for the report of a mismatch
  bool unix_sockets =
      false; ///< connect ranks of one host by Unix sockets, where they reach each other so; the same on all ranks
  std::string watch_name; ///< see RankRecord::watch_name
  std::string remark; ///< one line that all ranks get (Member::remark)
  ProcessId process_id; ///< of this process, if the store is sealed
  Takeover takeover = Takeover::Never;
  std::string life; ///< which start of the job by a launcher this is; "": not known. No '/' in it
  bool serves_store =
      false; ///< the store ends with this process: after a failure it stays until the others know why, at most 2 s
  Deadline deadline = Deadline::never();
};

/// One rank, from its own records.
struct Member {
  int rank = -1;
  std::string host;
  HostIdentity identity;
  int64_t pid = 0;
  SocketAddress
      address; ///< listening address; empty if all ranks reach each other by Unix sockets: then nobody has a port
  SocketAddress unix_socket; ///< where this rank, the reader, reaches it within the host; empty: not by a Unix socket
  std::string watch_name;
  std::string remark;
  ProcessId process_id; ///< empty if the store is not sealed
};

struct Rendezvous {
  std::vector<Member> members; ///< one per rank, in rank order
  uint64_t nonce = 0; ///< 64 random bits, chosen by rank 0; in a sealed store those of the transcript
  uint64_t run = 0; ///< as random, but grants no access: identifies this group in files
  /// In a sealed store, the SHA-256 of all member records in the order of ranks, 64 hexadecimal digits. It is no secret; nobody could
  /// have known it before all ranks had written theirs. Empty in any other store.
  std::string transcript;
  uint32_t group_hash = 0; ///< of the group's name and the nonce
  SocketAddress local_address; ///< without a port if no rank has one
  std::string interface_name;
  std::string address_reason; ///< the reason for this address: "route to the store's host 10.0.0.1"
  Listener listener; ///< empty if no rank has a port, as in a group of one
  Listener unix_listener; ///< empty: nobody can reach this rank by a Unix socket
  RankClaim claim;
};

/// Finds the other ranks of a group through the store. Blocks until all have arrived. leave(store, claim) ends it in
/// good order (rank_claim.h).
///
/// Throws Error: InvalidArgument (rank, size), DuplicateRank, ConfigMismatch, VersionMismatch (both values printed),
/// NoInterface, PortsExhausted, RendezvousTimeout naming the missing and the present ranks, StoreLost, or the token's
/// reason. An error that one rank finds ends the rendezvous on all ranks, with the same record.
/// With `unix_sockets`, ranks of one host try each other's socket before they bind a port. If each of a group reaches all
/// others, none binds one. If a single one does not (another user, a security module), all bind, in a round of their own.
/// Cost: O(size) store calls on rank 0, O(1) plus polling on the others.
[[nodiscard]] Rendezvous meet(Store& store, const RendezvousConfig& config, const AbortToken& abort);

/// Reports a failure between meet() and the first connections: the ranks that wait for this one read it. Returns the
/// record that counts, which is another rank's if that came first.
[[nodiscard]] ErrorRecord tellFailure(Store& store, const RankClaim& claim, ErrorRecord record) noexcept;
/// For a rank that must not join because of `reason`, which it knows before meet(): the ranks of its group read it as they read an error of
/// meet(), and fail with ConfigMismatch, at once. Stays like meet() if it serves the store. After a launcher's restart this does so on rank 0 alone;
/// the launcher ends the other ranks. Ignores a store that fails, and a rank that is taken.
void refuseToJoin(Store& store, const RendezvousConfig& config, const std::string& reason) noexcept;
/// This rank knows why the group failed. If it serves the store, waits until the others know it too, at most 2 s. Ranks that had not come
/// when the deadline passed, or when the job was aborted, are not waited for. Ignores a store that fails.
void acknowledgeFailure(
    Store& store,
    const RankClaim& claim,
    const RendezvousConfig& config,
    const ErrorRecord& record) noexcept;
/// The round in which the ranks of a host agree on memory that they share.
inline constexpr const char* kSharedMemoryRound = "shared_memory";
/// One more exchange between the ranks that met: publishes `mine` under `key` and returns the texts of all ranks, in
/// rank order, printable() and at most 512 bytes each. Throws as meet() does.
[[nodiscard]] std::vector<std::string> exchangeTexts(
    Store& store,
    const RankClaim& claim,
    int size,
    const std::string& key,
    const std::string& mine,
    Deadline deadline,
    const AbortToken& abort);
/// This rank has met the others, has made the group or knows why it could not, and reads no record of it any more. The last rank deletes all
/// of them but rank 0's first one, and writes that there was a complete list (kMade). So what stays of a group in the store is these two and a
/// claim per rank. Ignores a store that fails.
void forgetMeeting(Store& store, const RankClaim& claim, int size) noexcept;
/// Throws a failure that another rank has reported with tellFailure().
void throwIfFailed(Store& store, const RankClaim& claim);

} // namespace pycomm

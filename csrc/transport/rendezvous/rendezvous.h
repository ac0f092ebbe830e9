#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "transport/net/address.h"
#include "transport/net/host_identity.h"
#include "transport/net/interfaces.h"
#include "transport/net/listener.h"
#include "transport/rendezvous/rank_claim.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

struct RendezvousConfig {
  int rank = -1;
  int size = 0;
  std::string group_name;
  std::string store_host; ///< as the user wrote it (MASTER_ADDR); empty for a file store
  InterfaceSpec spec;
  AddressFamily family = AddressFamily::Any;
  PortRange ports;
  uint32_t config_digest = 0; ///< of every option that must be the same on all ranks
  std::string config_text; ///< "key=value key=value …", for the report of a mismatch
  std::string watch_name; ///< where processes of this host may watch this one; empty: nowhere
  std::string remark; ///< one line that all ranks get (Member::remark)
  Deadline deadline = Deadline::never();
};

/// One rank, as it presented itself.
struct Member {
  int rank = -1;
  std::string host;
  HostIdentity identity;
  int64_t pid = 0;
  SocketAddress address; ///< where it listens
  std::vector<SocketAddress> further; ///< and besides, on as many interfaces as every rank has
  std::string watch_name;
  std::string remark;
};

struct Rendezvous {
  std::vector<Member> members; ///< by rank
  uint64_t nonce = 0; ///< 64 random bits, chosen by rank 0
  uint64_t run = 0; ///< as random, and no key to anything: tells this group from others in what is written to disk
  uint32_t group_hash = 0; ///< of the group's name and the nonce
  SocketAddress local_address;
  std::string interface_name;
  std::string address_reason; ///< why this address: "route to the store's host 10.0.0.1"
  Listener listener;
  /// The further interfaces that the user listed: as many as all ranks have.
  struct Further {
    std::string interface_name;
    Listener listener;
  };
  std::vector<Further> further;
  RankClaim claim;
};

/// Meets the other ranks of a group in the store. Blocks until all are there. leave(store, claim) ends it in good order
/// (rank_claim.h).
///
/// Throws Error: InvalidArgument (rank, size), DuplicateRank, ConfigMismatch, VersionMismatch (both values printed),
/// NoInterface, PortsExhausted, RendezvousTimeout naming who is missing and who is there, StoreLost, or the token's
/// reason. What one rank finds ends the rendezvous on all, with the same record.
/// Cost: O(size) store calls on rank 0, O(1) plus polling on the others.
[[nodiscard]] Rendezvous meet(Store& store, const RendezvousConfig& config, const AbortToken& abort);

/// For what comes between meet() and the first connections: a rank that cannot go on says why, and those that wait for it look.
/// `tellFailure` returns the record that counts, which is another rank's if that came first.
[[nodiscard]] ErrorRecord tellFailure(Store& store, const RankClaim& claim, const ErrorRecord& record) noexcept;
/// One more round between the ranks that met: gives `mine` under `key` and returns the texts of all, by rank, printable() and up to 512 bytes of
/// each. Throws as meet() does.
[[nodiscard]] std::vector<std::string> exchangeTexts(
    Store& store,
    const RankClaim& claim,
    int size,
    const std::string& key,
    const std::string& mine,
    Deadline deadline,
    const AbortToken& abort);
/// Throws what another rank has told.
void throwIfFailed(Store& store, const RankClaim& claim);

} // namespace pycomm

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine/operation/roster.h"
#include "transport/rendezvous/store.h"
#include "transport/secure/secret.h"
#include "transport/secure/tls_context.h"

namespace pycomm {

enum class SecurityPolicy : uint8_t { Off, Auto, Require };

/// Decides whether the links of a group are in TLS. (NCCL's connections are always plain: cudaConfig() in bindings/backend.cc decides
/// whether a group with a secret may use them.)
///
///               without a secret                           with a secret
///     off       plain                                      error
///     auto      plain, a warning if hosts differ           TLS
///     require   plain over Unix sockets, else error        TLS
///
/// Ranks that reach each other by Unix sockets use them, with a secret too: the kernel carries those bytes, between processes of one user.
/// With a secret every other link is in TLS or fails. No failure leads to a plain one.
struct Security {
  SecurityPolicy policy = SecurityPolicy::Auto; ///< the same on all ranks
  std::shared_ptr<const Secret> secret; ///< null: none
  std::string secret_origin; ///< the path or variable that it comes from
  TlsOptions tls; ///< of tests

  /// Before the ranks meet. The identity of this process in a new group, or null for plain connections. Throws Error(InvalidArgument) for
  /// the error of the table, Error(Unsupported) if a secret finds no OpenSSL, and Error(Internal) if `store` does not seal its values
  /// although there is a secret.
  [[nodiscard]] std::shared_ptr<const TlsContext> open(const Store& store) const;
  /// The same without a store.
  [[nodiscard]] std::shared_ptr<const TlsContext> open() const;
  /// When the ranks have met, before any connection. Throws Error(InvalidArgument) for the other error of the table; logs the warning on
  /// rank 0, once per process.
  void checkHosts(const Roster& roster) const;
  /// After checkHosts(). What only this group's ranks know; without a secret it is as public as the rest of the store.
  void finish(Roster& roster, const std::string& transcript, std::shared_ptr<const TlsContext> tls) const;
};

} // namespace pycomm

#pragma once

#include <memory>

#include "transport/secure/secret.h"
#include "transport/secure/tls_context.h"

namespace pycomm::testing {

using Context = std::shared_ptr<const TlsContext>;

/// The secret of all tests that need only one.
inline const std::shared_ptr<const Secret>& theSecret() {
  static const auto secret = std::make_shared<const Secret>(Secret::generate());
  return secret;
}

/// Of a process that has the secret.
inline Context newContext(const std::shared_ptr<const Secret>& secret = theSecret(), const TlsOptions& options = {}) {
  return std::make_shared<const TlsContext>(secret, newProcessId(), options);
}

} // namespace pycomm::testing

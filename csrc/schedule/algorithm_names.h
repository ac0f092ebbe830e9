#pragma once

#include <optional>
#include <string>

#include "schedule/step.h"

namespace pycomm {

/// The algorithm of this name, among those that users may select; "auto" is one.
[[nodiscard]] inline std::optional<Algorithm> algorithmNamed(const std::string& name) {
  for (const Algorithm algorithm :
       {Algorithm::Auto,
        Algorithm::Ring,
        Algorithm::RecursiveDoubling,
        Algorithm::BinomialTree,
        Algorithm::Direct,
        Algorithm::Bruck,
        Algorithm::RecursiveHalving,
        Algorithm::Hierarchical}) {
    if (name == algorithmName(algorithm)) {
      return algorithm;
    }
  }
  return std::nullopt;
}

} // namespace pycomm

#pragma once

#include <optional>
#include <string>

#include "schedule/step.h"

namespace pycomm {

/// The algorithm that users may name; "auto" is one.
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

/// The collective of several algorithms that has this name.
[[nodiscard]] inline std::optional<Collective> collectiveNamed(const std::string& name) {
  for (const Collective kind :
       {Collective::AllReduce,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::AllGather,
        Collective::ReduceScatter}) {
    if (name == collectiveName(kind)) {
      return kind;
    }
  }
  return std::nullopt;
}

} // namespace pycomm

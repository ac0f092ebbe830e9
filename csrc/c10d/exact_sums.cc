#include "c10d/exact_sums.h"

namespace pycomm {
namespace {
thread_local int t_exact_depth = 0;
} // namespace

ExactSums::ExactSums() noexcept {
  ++t_exact_depth;
}

ExactSums::~ExactSums() {
  --t_exact_depth;
}

bool ExactSums::here() noexcept {
  return t_exact_depth > 0;
}

} // namespace pycomm

#include "c10d/interruptible.h"

#include <chrono>

#include "c10d/python_errors.h"

namespace pycomm {
namespace {

constexpr std::chrono::milliseconds kSignalsEvery{100};
thread_local Interruptible* t_interruptible = nullptr;

} // namespace

Interruptible::Interruptible() : outer_(t_interruptible), next_(Clock::now() + kSignalsEvery) {
  t_interruptible = this;
}

Interruptible::~Interruptible() {
  t_interruptible = outer_;
}

bool Interruptible::look() {
  Interruptible* const here = t_interruptible;
  if (here == nullptr || here->raised_) {
    return here != nullptr;
  }
  if (const TimePoint now = Clock::now(); now >= here->next_) {
    here->next_ = now + kSignalsEvery;
    try {
      checkSignals();
    } catch (...) {
      here->raised_ = std::current_exception();
    }
  }
  return here->raised_ != nullptr;
}

void Interruptible::rethrow() const {
  if (raised_) {
    std::rethrow_exception(raised_);
  }
}

} // namespace pycomm

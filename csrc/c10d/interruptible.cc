#include "c10d/interruptible.h"

#include "c10d/python_errors.h"

namespace pycomm {
namespace {

thread_local Interruptible* t_interruptible = nullptr;

} // namespace

Interruptible::Interruptible(const void* about) : outer_(t_interruptible), about_(about), next_(Clock::now() + kEvery) {
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
    here->next_ = now + kEvery;
    try {
      checkSignals();
    } catch (...) {
      here->raised_ = std::current_exception();
    }
  }
  return here->raised_ != nullptr;
}

bool Interruptible::within(const void* about) noexcept {
  for (const Interruptible* each = t_interruptible; each != nullptr; each = each->outer_) {
    if (each->about_ == about) {
      return true;
    }
  }
  return false;
}

void Interruptible::rethrow() const {
  if (raised_) {
    std::rethrow_exception(raised_);
  }
}

} // namespace pycomm

#include "engine/data/refused_operations.h"

#include <algorithm>
#include <new>
#include <utility>

#include "engine/report/failure_text.h"

namespace pycomm {

void RefusedOperations::add(const std::shared_ptr<Operation>& operation, const std::exception_ptr& exception) noexcept {
  try {
    operations_.push_back(operation);
  } catch (...) { // no memory to remember it
    end(*operation, exception);
  }
}

void RefusedOperations::endAll(const std::function<void(Operation&)>& end) noexcept {
  for (const auto& operation : std::exchange(operations_, {})) {
    end(*operation);
  }
}

void RefusedOperations::endWith(const std::exception_ptr& exception) noexcept {
  for (const auto& operation : std::exchange(operations_, {})) {
    end(*operation, exception);
  }
}

void RefusedOperations::endLate(TimePoint now) noexcept {
  // One at a time: there may be no memory for a list of them.
  for (;;) {
    const auto at = std::find_if(operations_.begin(), operations_.end(), [&](const auto& operation) {
      return operation->request().deadline.expired(now);
    });
    if (at == operations_.end()) {
      return;
    }
    const std::shared_ptr<Operation> late = std::move(*at);
    operations_.erase(at);
    end(*late, std::make_exception_ptr(std::bad_alloc()));
  }
}

bool RefusedOperations::has(const Operation& operation) const noexcept {
  return std::any_of(
      operations_.begin(), operations_.end(), [&](const auto& entry) { return entry.get() == &operation; });
}

TimePoint RefusedOperations::nextDeadline() const noexcept {
  TimePoint next = TimePoint::max();
  for (const auto& operation : operations_) {
    next = std::min(next, operation->request().deadline.instant());
  }
  return next;
}

void RefusedOperations::end(Operation& operation, const std::exception_ptr& exception) const noexcept {
  operation.finish(
      recordInAnyCase(identity_, [&] { return errorOf(operation, ownTrouble(exception, identity_), identity_); }));
}

} // namespace pycomm

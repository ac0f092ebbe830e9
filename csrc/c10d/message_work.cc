#include "c10d/message_work.h"

#include <utility>

#include "base/wait_point.h"
#include "c10d/python_errors.h"
#include "c10d/raising.h"
#include "c10d/without_gil.h"

namespace pycomm {

MessageWork::~MessageWork() {
  if (operation_ == nullptr || operation_->done()) {
    return;
  }
  // The tensor must outlive the operation, and must not be freed on the data loop: that may take Python's lock.
  try {
    const auto task = std::make_shared<CallbackPool::Placed>([owner = owner_, tensor = tensor_, storage = storage_] {});
    CallbackPool& pool = owner_->group->engine().callbacks();
    operation_->onDone([task, &pool] { pool.submit(*task); });
  } catch (...) { // no memory: then they are never freed
    (void)tensor_.unsafeReleaseTensorImpl();
    (void)storage_.unsafeReleaseStorageImpl();
  }
}

bool MessageWork::isCompleted() {
  if (operation_->done()) {
    return true;
  }
  if (!owner_->group->engine().belongsToThisProcess()) {
    raising([&] { static_cast<void>(owner_->group->wait(*operation_, Deadline::after(0))); });
  }
  return false;
}

std::exception_ptr MessageWork::exception() const {
  const auto record = operation_->done() ? operation_->error() : std::nullopt;
  return record ? toException(*record) : nullptr;
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  const WithoutGil no_gil;
  const Deadline deadline = timeout > kNoTimeout ? Deadline::after(timeout.count()) : Deadline::never();
  waitFor(*owner_->group, *operation_, timeout, deadline);
  {
    const LeafGuard lock(mutex_);
    completed_ = true;
    if (whole_ != nullptr) {
      whole_->noteWaited();
    }
  }
  if (const auto record = operation_->error()) {
    throwToPython(*record);
  }
  return true;
}

PycommWork* MessageWork::whole() const {
  const LeafGuard lock(mutex_);
  if (whole_ == nullptr) {
    PycommWork::Content content;
    content.operations = {operation_};
    content.inputs = {tensor_};
    content.outputs = {tensor_};
    content.storages = {storage_};
    whole_ = c10::make_intrusive<PycommWork>(owner_, rank_, opType_, nullptr, std::move(content));
    if (completed_) {
      whole_->noteWaited();
    }
  }
  return whole_.get();
}

} // namespace pycomm

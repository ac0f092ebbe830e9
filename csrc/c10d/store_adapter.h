#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <optional>
#include <string>

#include "transport/rendezvous/store.h"

namespace pycomm {

/// torch's store behind the rendezvous' interface. Blocks without the interpreter's lock, which the caller must not hold: a store may
/// be written in Python. torch bounds no call but wait(): while the store's server is stopped and not ended, set(), has(), add() and remove()
/// do not return (docs/errors.md). find() never waits for a key in torch's own stores. In another one, such as one that is
/// written in Python, it waits for as long as that store's get() does if the key is deleted between wait() and get().
class StoreAdapter final : public Store {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store);

  void set(const std::string& key, const std::string& value) override;
  [[nodiscard]] std::string get(const std::string& key, Deadline deadline) override;
  [[nodiscard]] bool has(const std::string& key) override;
  [[nodiscard]] std::optional<std::string> find(const std::string& key) override;
  [[nodiscard]] int64_t add(const std::string& key, int64_t amount) override;
  bool remove(const std::string& key) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  const bool compares_; ///< compareSet() reads a key without waiting for it, and without writing it
};

} // namespace pycomm

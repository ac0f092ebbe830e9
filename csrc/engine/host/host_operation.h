#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/host/host_layout.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// One operation of a HostTransfer as this rank sees it: its tensors, the memory that the ranks share, and how elements are copied and
/// added up. Nothing here changes while the operation runs.
struct HostOperation {
  /// What one call of advance() did.
  enum class AdvanceResult {
    Blocked, ///< other ranks must go on first
    Moved,
    Done,
    Differs, ///< another rank entered something else
  };
  /// An operand of each rank, by rank.
  using Sources = std::array<const void*, kMaxHostRanks>;

  HostOperation(const HostView& shared, std::shared_ptr<Operation> of, uint64_t its_ticket);

  [[nodiscard]] const Operation::Request& request() const noexcept {
    return operation->request();
  }
  [[nodiscard]] bool isRoot() const noexcept {
    return request().descriptor.root == view.rank;
  }
  [[nodiscard]] size_t nbytesOf(int64_t elements) const noexcept {
    return static_cast<size_t>(elements) * element_nbytes;
  }
  /// Parts for or from each rank, where the operation has some.
  [[nodiscard]] const std::byte* inputPart(int of) const noexcept;
  [[nodiscard]] std::byte* outputPart(int of) const noexcept;

  /// Does nothing if both are the same memory.
  static void copy(std::byte* to, const std::byte* from, size_t nbytes) noexcept;
  /// Copies elements of this rank to where others read them: PREMUL_SUM scales here.
  void give(std::byte* to, const std::byte* from, int64_t elements) const;
  /// Reduces the operands of all ranks, lowest rank first: all ranks get the same bits.
  void fold(std::byte* to, const Sources& sources, int64_t elements) const;

  HostView view;
  std::shared_ptr<Operation> operation;
  uint64_t ticket;
  Collective kind;
  size_t element_nbytes;
  int64_t numel; ///< of the tensor, or of one part
  bool scales; ///< PREMUL_SUM
};

} // namespace pycomm

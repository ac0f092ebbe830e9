#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "engine/operation/descriptor.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/issue_context.h"

namespace pycomm {

// How it reads that two ranks do not agree, wherever it is found.

/// "#12", "issued in callback 1 of all_reduce #3 in group 2". `origin`: of a derived id, 0 if it is not known.
[[nodiscard]] std::string operationText(uint64_t op_id, uint64_t origin = 0);

/// Everything but the sentence. `mine` is this rank's operation.
[[nodiscard]] ErrorRecord mismatch(
    const GroupIdentity& identity,
    const Descriptor& mine,
    int peer,
    const OperationId& id);

/// The two have different descriptors for one operation.
[[nodiscard]] ErrorRecord disagreement(
    const GroupIdentity& identity,
    const Descriptor& mine,
    int peer,
    const Descriptor& theirs,
    const OperationId& id);

} // namespace pycomm

#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <vector>

#include "ddp/bucket.h"

namespace pycomm {

/// One bucket of `bucket_count`, as torch's comm hooks expect it: the flat gradients, not averaged, and where each
/// parameter's lies. Borrows sizes from the bucket's parameters.
[[nodiscard]] c10d::GradBucket gradBucketOf(const Bucket& bucket, size_t index, size_t bucket_count);

/// Waits for what `hook` returned for a bucket, and parses it. Blocks without the GIL; rethrows the future's error.
[[nodiscard]] at::Tensor hookResult(c10d::CommHookInterface& hook, c10::ivalue::Future& future);

} // namespace pycomm

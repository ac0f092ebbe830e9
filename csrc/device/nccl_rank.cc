#include "device/nccl_rank.h"

namespace pycomm::cuda {
namespace {

ErrorCode codeOf(NcclResult result) {
  switch (result) {
    case NcclResult::RemoteError:
      return ErrorCode::ConnectionReset;
    case NcclResult::InvalidArgument:
    case NcclResult::InvalidUsage:
      return ErrorCode::InvalidArgument;
    case NcclResult::Success:
    case NcclResult::UnhandledCudaError:
    case NcclResult::SystemError:
    case NcclResult::InternalError:
    case NcclResult::InProgress:
      break;
  }
  return ErrorCode::SystemError;
}

} // namespace

void NcclRank::check(NcclResult result, const char* call, NcclHandle comm) const {
  if (result == NcclResult::Success || result == NcclResult::InProgress) {
    return;
  }
  ErrorRecord record;
  record.code = codeOf(result);
  record.rank = job_rank;
  record.group = group;
  record.summary = std::string("NCCL: ") + call + " failed.";
  record.cause = ncclResultName(result);
  if (const std::string words = api.lastError(comm); !words.empty()) {
    record.cause += ": " + words;
  }
  record.hint = "NCCL_DEBUG=WARN prints what NCCL saw";
  throw Error(record);
}

ErrorRecord NcclRank::about(const NcclCall& call) const {
  ErrorRecord record;
  record.rank = job_rank;
  record.group = group;
  record.op = call.name;
  record.sequence = call.sequence;
  record.dtype = dtypeName(call.dtype);
  record.numel = static_cast<int64_t>(call.numel);
  return record;
}

} // namespace pycomm::cuda

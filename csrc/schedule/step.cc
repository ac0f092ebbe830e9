#include "schedule/step.h"

namespace pycomm {

const char* collectiveName(Collective kind) noexcept {
  switch (kind) {
    case Collective::AllReduce:
      return "all_reduce";
    case Collective::Broadcast:
      return "broadcast";
    case Collective::AllGather:
      return "all_gather";
    case Collective::Barrier:
      return "barrier";
    case Collective::Reduce:
      return "reduce";
    case Collective::ReduceScatter:
      return "reduce_scatter";
    case Collective::AllToAll:
      return "all_to_all";
    case Collective::Gather:
      return "gather";
    case Collective::Scatter:
      return "scatter";
    case Collective::Send:
      return "send";
    case Collective::Recv:
      return "recv";
  }
  return "unknown";
}

const char* algorithmName(Algorithm algorithm) noexcept {
  switch (algorithm) {
    case Algorithm::Auto:
      return "auto";
    case Algorithm::Ring:
      return "ring";
    case Algorithm::RecursiveDoubling:
      return "recursive_doubling";
    case Algorithm::BinomialTree:
      return "binomial_tree";
    case Algorithm::Direct:
      return "direct";
    case Algorithm::Pairwise:
      return "pairwise";
    case Algorithm::Bruck:
      return "bruck";
    case Algorithm::RecursiveHalving:
      return "recursive_halving";
    case Algorithm::SharedMemory:
      return "shared_memory";
    case Algorithm::Hierarchical:
      return "hierarchical";
    case Algorithm::Nccl:
      return "nccl";
  }
  return "unknown";
}

std::optional<Algorithm> algorithmNamed(const std::string& name) {
  for (const Algorithm algorithm :
       {Algorithm::Auto,
        Algorithm::Ring,
        Algorithm::RecursiveDoubling,
        Algorithm::BinomialTree,
        Algorithm::Direct,
        Algorithm::Bruck,
        Algorithm::RecursiveHalving,
        Algorithm::Hierarchical}) {
    if (name == algorithmName(algorithm)) {
      return algorithm;
    }
  }
  return std::nullopt;
}

const char* stepKindName(StepKind kind) noexcept {
  switch (kind) {
    case StepKind::Send:
      return "send";
    case StepKind::Recv:
      return "recv";
    case StepKind::RecvReduce:
      return "recv_reduce";
    case StepKind::RecvReduceSend:
      return "recv_reduce_send";
    case StepKind::RecvReduceCopySend:
      return "recv_reduce_copy_send";
    case StepKind::RecvCopySend:
      return "recv_copy_send";
    case StepKind::ReduceMany:
      return "reduce_many";
    case StepKind::Copy:
      return "copy";
    case StepKind::Scale:
      return "scale";
    case StepKind::Encode:
      return "encode";
    case StepKind::Decode:
      return "decode";
    case StepKind::ReduceEncoded:
      return "reduce_encoded";
  }
  return "unknown";
}

} // namespace pycomm

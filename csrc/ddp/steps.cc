#include "ddp/steps.h"

#include <c10/core/ScalarType.h>

#include <mutex>
#include <set>
#include <utility>

#include "ddp/reducer.h"

namespace pycomm {
namespace {

template <typename Items>
std::string joined(const Items& items) {
  std::string text;
  for (const auto& item : items) {
    text += (text.empty() ? "" : ", ") + item;
  }
  return text;
}

} // namespace

void StepRecorder::begin(size_t bucket_count) {
  record_ = on_ ? std::make_shared<StepTrace>(bucket_count) : nullptr;
  if (record_ != nullptr) {
    record_->began_ns = nowNs();
  }
}

void StepRecorder::gradient(size_t bucket) {
  if (record_ == nullptr) {
    return;
  }
  StepTrace::Bucket& of = record_->buckets[bucket];
  const int64_t now = nowNs();
  record_->first_gradient_ns = record_->first_gradient_ns == 0 ? now : record_->first_gradient_ns;
  of.first_gradient_ns = of.first_gradient_ns == 0 ? now : of.first_gradient_ns;
}

void StepRecorder::launched(size_t bucket, size_t gradient_nbytes, size_t wire_nbytes, c10::ivalue::Future& reduced) {
  StepTrace::Bucket& of = record_->buckets[bucket];
  of.gradient_nbytes = static_cast<int64_t>(gradient_nbytes);
  of.wire_nbytes = static_cast<int64_t>(wire_nbytes);
  of.launched_ns = nowNs();
  reduced.addCallback([record = record_, bucket](c10::ivalue::Future& /*future*/) {
    record->buckets[bucket].reduced_ns.store(nowNs(), std::memory_order_release);
  });
}

void StepRecorder::unpacked(size_t bucket) {
  if (record_ != nullptr) {
    record_->buckets[bucket].unpacked_ns = nowNs();
  }
}

void StepRecorder::backwardEnded() {
  if (record_ != nullptr) {
    record_->backward_ended_ns = nowNs();
  }
}

void StepRecorder::end() {
  if (record_ != nullptr) {
    record_->ended_ns = nowNs();
    last_ = std::exchange(record_, nullptr);
  }
}

DdpLogger::DdpLogger(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {
  const ReducerOptions& options = reducer_->options();
  int64_t nbytes = 0;
  std::set<std::string> dtypes;
  int64_t tensors = 0;
  for (const ReducedParam& param : reducer_->params()) {
    if (param.tensor.requires_grad()) {
      ++tensors;
      nbytes += static_cast<int64_t>(param.tensor.nbytes());
      dtypes.insert(c10::toString(param.tensor.scalar_type()));
    }
  }
  table_.ints_map["world_size"] = reducer_->group()->getSize();
  table_.ints_map["rank"] = reducer_->group()->getRank();
  table_.ints_map["num_parameter_tensors"] = tensors;
  table_.ints_map["total_parameter_size_bytes"] = nbytes;
  table_.ints_map["find_unused_parameters"] = options.find_unused_parameters ? 1 : 0;
  table_.ints_map["gradient_as_bucket_view"] = options.gradient_as_bucket_view ? 1 : 0;
  table_.ints_map["has_error"] = 0;
  table_.strs_map["dtypes"] = joined(dtypes);
  table_.strs_map["backend_name"] = reducer_->group()->getBackendName();
}

void DdpLogger::setConstructionData(
    const std::string& module_name,
    const std::vector<int>& device_ids,
    int output_device,
    bool broadcast_buffers,
    bool has_sync_bn,
    bool static_graph) {
  std::vector<std::string> devices;
  for (const int device : device_ids) {
    devices.push_back(std::to_string(device));
  }
  const std::lock_guard lock(mutex_);
  table_.strs_map["module_name"] = module_name;
  table_.strs_map["device_ids"] = joined(devices);
  table_.ints_map["output_device"] = output_device;
  table_.ints_map["broadcast_buffers"] = broadcast_buffers ? 1 : 0;
  table_.ints_map["has_sync_bn"] = has_sync_bn ? 1 : 0;
  table_.ints_map["static_graph"] = static_graph ? 1 : 0;
}

void DdpLogger::setCommHookName(const std::string& name) {
  const std::lock_guard lock(mutex_);
  table_.strs_map["comm_hook"] = name;
}

void DdpLogger::setStaticGraph() {
  const std::lock_guard lock(mutex_);
  table_.ints_map["static_graph"] = 1;
}

void DdpLogger::setUnevenInputJoin() {
  const std::lock_guard lock(mutex_);
  table_.ints_map["join_uneven_inputs"] = 1;
}

void DdpLogger::setError(const std::string& text) {
  const std::lock_guard lock(mutex_);
  table_.ints_map["has_error"] = 1;
  table_.strs_map["error"] = text;
}

at::DDPLoggingData DdpLogger::table() const {
  at::DDPLoggingData table = [this] {
    const std::lock_guard lock(mutex_);
    return table_;
  }();
  const ReducerStats stats = reducer_->stats();
  std::set<std::string> wire; // read now, as the buckets are: a built-in hook may set it after construction
  for (const ReducedParam& param : reducer_->params()) {
    const char* cast = param.wire_dtype.has_value() ? c10::toString(*param.wire_dtype) : "the parameters' own";
    wire.insert(param.codec == Codec::None ? cast : codecName(param.codec));
  }
  std::vector<std::string> bucket_sizes;
  for (const size_t nbytes : reducer_->bucketNbytes()) {
    bucket_sizes.push_back(std::to_string(nbytes));
  }
  table.ints_map["num_buckets"] = static_cast<int64_t>(bucket_sizes.size());
  table.strs_map["bucket_sizes"] = joined(bucket_sizes);
  table.strs_map["wire_dtype"] = joined(wire);
  table.ints_map["iteration"] = stats.steps;
  table.ints_map["wire_bytes"] = stats.wire_nbytes;
  table.ints_map["exposed_comm_time"] = stats.exposed_ns;
  table.ints_map["overflowed_buckets"] = stats.overflowed_buckets;
  table.ints_map["underflowed_buckets"] = stats.underflowed_buckets;
  table.ints_map["nonfinite_buckets"] = stats.nonfinite_buckets;
  return table;
}

} // namespace pycomm

// The C interface over this folder's classes: exceptions become codes and texts, and nothing else happens here.
#include "cuda/c_table.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cuda/c_errors.h"
#include "cuda/c_nccl.h"
#include "cuda/c_stager.h"

namespace pycomm::cuda {
namespace {

static_assert(sizeof(PycommCudaGradient) == sizeof(Gradient) && offsetof(PycommCudaGradient, numel) == 8);
static_assert(sizeof(PycommCudaPackStats) == sizeof(PackStats));

std::unique_ptr<DeviceRuntime> (*make_runtime)() = nullptr;

uint16_t checkDevice(PycommCudaError* error) {
  return guarded(error, [&] { theRuntime().checkDevice(); });
}

uint16_t deviceUuid(int device, char* text, size_t capacity, PycommCudaError* error) {
  return guarded(error, [&] {
    const std::string uuid = theRuntime().deviceUuid(device);
    const size_t length = std::min(uuid.size(), capacity - 1);
    std::memcpy(text, uuid.data(), length);
    text[length] = '\0';
  });
}

uint16_t copy(void* dst, const void* src, size_t nbytes, void* stream, PycommCudaError* error) {
  return guarded(error, [&] { theRuntime().copy(dst, src, nbytes, stream); });
}

uint16_t isCapturing(void* stream, int* capturing, PycommCudaError* error) {
  return guarded(error, [&] { *capturing = theRuntime().isCapturing(stream) ? 1 : 0; });
}

BucketPlan planOf(const PycommCudaGradient* gradients, size_t count, DType dtype) {
  std::vector<Gradient> list;
  list.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    list.push_back({gradients[i].ptr, gradients[i].numel});
  }
  return planBucket(list.data(), list.size(), dtype);
}

uint16_t pack(
    const PycommCudaGradient* gradients,
    size_t count,
    uint8_t grad,
    uint8_t wire,
    void* bucket,
    float factor,
    PycommCudaPackStats* stats,
    void* stream,
    PycommCudaError* error) {
  return guarded(error, [&] {
    const DType grad_dtype = dtypeOf(grad);
    packBucket(
        theRuntime(),
        planOf(gradients, count, grad_dtype),
        grad_dtype,
        dtypeOf(wire),
        bucket,
        factor,
        reinterpret_cast<PackStats*>(stats),
        stream);
  });
}

uint16_t unpack(
    const PycommCudaGradient* gradients,
    size_t count,
    uint8_t grad,
    uint8_t wire,
    const void* bucket,
    float factor,
    void* stream,
    PycommCudaError* error) {
  return guarded(error, [&] {
    const DType grad_dtype = dtypeOf(grad);
    unpackBucket(
        theRuntime(),
        planOf(gradients, count, grad_dtype),
        grad_dtype,
        dtypeOf(wire),
        const_cast<void*>(bucket), // which unpacking only reads
        factor,
        stream);
  });
}

uint16_t reduce(
    uint8_t dtype,
    uint8_t op,
    void* dst,
    const void* const* sources,
    size_t count,
    uint64_t numel,
    uint32_t divisor,
    void* stream,
    PycommCudaError* error) {
  return guarded(
      error, [&] { reduceInto(theRuntime(), dtypeOf(dtype), opOf(op), dst, sources, count, numel, divisor, stream); });
}

CodecArgs codecArgs(uint8_t codec, const float* values, const void* encoded, uint64_t numel, uint64_t parts) {
  CodecArgs args;
  args.codec = static_cast<Codec>(codec);
  if (args.codec == Codec::None || !isKnown(args.codec)) {
    throw Error(ErrorCode::Internal, "codec " + std::to_string(codec) + " is none that the device has");
  }
  args.numel = numel;
  args.parts = numel == 0 ? 0 : parts;
  args.values = const_cast<float*>(values); // one of the two is only read
  args.encoded = static_cast<uint8_t*>(const_cast<void*>(encoded));
  return args;
}

uint16_t encode(
    uint8_t codec,
    const float* values,
    uint64_t numel,
    uint64_t parts,
    void* encoded,
    unsigned long long* overflows,
    void* stream,
    PycommCudaError* error) {
  return guarded(error, [&] {
    CodecArgs args = codecArgs(codec, values, encoded, numel, parts);
    args.overflows = overflows;
    theRuntime().encode(args, stream);
  });
}

uint16_t decode(
    uint8_t codec,
    const void* encoded,
    uint64_t numel,
    uint64_t parts,
    float* values,
    void* stream,
    PycommCudaError* error) {
  return guarded(error, [&] { theRuntime().decode(codecArgs(codec, values, encoded, numel, parts), stream); });
}

} // namespace

DeviceRuntime& theRuntime() {
  // Never destroyed: threads of the process may use it until the very end.
  static DeviceRuntime* const runtime = make_runtime().release();
  return *runtime;
}

const PycommCudaTable* makeTable(std::unique_ptr<DeviceRuntime> (*makeRuntime)()) {
  static const PycommCudaTable table = [&] {
    make_runtime = makeRuntime;
    PycommCudaTable made = {};
    made.version = PYCOMM_CUDA_VERSION;
    made.nbytes = sizeof(PycommCudaTable);
    made.check_device = checkDevice;
    made.device_uuid = deviceUuid;
    made.copy = copy;
    made.is_capturing = isCapturing;
    made.pack = pack;
    made.unpack = unpack;
    made.reduce = reduce;
    made.encode = encode;
    made.decode = decode;
    addStager(made);
    addNccl(made);
    return made;
  }();
  return &table;
}

} // namespace pycomm::cuda

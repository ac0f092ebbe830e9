#include "device/cuda_library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <new>

#include "base/error.h"

namespace pycomm::cuda {
namespace {

[[noreturn]] void refuseLibrary(const std::string& path, const std::string& why) {
  throw Error(
      ErrorCode::Unsupported,
      "CUDA tensors need pycomm's CUDA library, " + path + ", which " + why + ".",
      "with a CUDA toolkit (nvcc) on this machine: PYCOMM_BUILD_CUDA=1 pip install --no-build-isolation . in pycomm's "
      "sources; or tensor.cpu()");
}

const CudaTable& tableAt(const std::string& path) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = ::dlerror();
    refuseLibrary(path, std::string("could not be loaded (") + (why == nullptr ? "no reason given" : why) + ")");
  }
  const auto entry = reinterpret_cast<decltype(&pycomm_cuda_table)>(::dlsym(library, kPycommCudaEntry));
  if (entry == nullptr) {
    refuseLibrary(path, std::string("is no library of pycomm's: it has no ") + kPycommCudaEntry);
  }
  return *entry();
}

/// A table's functions as DeviceRuntime's, and what they return as errors.
class LibraryRuntime final : public DeviceRuntime {
 public:
  explicit LibraryRuntime(const CudaTable& table) : table_(table) {}

  void setDevice(int device) override {
    check(table_.set_device(device), "cudaSetDevice");
  }
  void checkDevice() override {
    int has_code = 0;
    int device = 0;
    int major = 0;
    int minor = 0;
    check(table_.check_device(&has_code, &device, &major, &minor), "cudaGetDevice or cudaDeviceGetAttribute");
    if (has_code == 0) {
      throw Error(
          ErrorCode::Unsupported,
          "cuda:" + std::to_string(device) + " has compute capability " + std::to_string(major) + "." +
              std::to_string(minor) + ", and pycomm's CUDA library was built without code for it.",
          "build it on this machine with CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=native (8.0 or later), or use tensor.cpu()");
    }
  }
  std::string deviceUuid(int device) override {
    unsigned char uuid[16] = {};
    check(table_.device_uuid(device, uuid), "cudaGetDeviceProperties");
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const unsigned char byte : uuid) {
      text += kDigits[byte >> 4];
      text += kDigits[byte & 15];
    }
    return text;
  }
  void* allocatePinned(size_t nbytes) override {
    void* ptr = nullptr;
    check(table_.allocate_pinned(nbytes, &ptr), "cudaHostAlloc");
    return ptr;
  }
  void freePinned(void* ptr) noexcept override {
    table_.free_pinned(ptr);
  }
  void* allocateDevice(size_t nbytes) override {
    void* ptr = nullptr;
    check(table_.allocate_device(nbytes, &ptr), "cudaMalloc");
    return ptr;
  }
  void freeDevice(void* ptr) noexcept override {
    table_.free_device(ptr);
  }
  void copy(void* dst, const void* src, size_t nbytes, Stream stream) override {
    check(table_.copy(dst, src, nbytes, stream), "cudaMemcpyAsync");
  }
  Event createEvent() override {
    Event event = nullptr;
    check(table_.create_event(&event), "cudaEventCreateWithFlags");
    return event;
  }
  void destroyEvent(Event event) noexcept override {
    table_.destroy_event(event);
  }
  void record(Event event, Stream stream) override {
    check(table_.record(event, stream), "cudaEventRecord");
  }
  void streamWait(Stream stream, Event event) override {
    check(table_.stream_wait(stream, event), "cudaStreamWaitEvent");
  }
  Stream createStream() override {
    Stream stream = nullptr;
    check(table_.create_stream(&stream), "cudaStreamCreateWithFlags");
    return stream;
  }
  void destroyStream(Stream stream) noexcept override {
    table_.destroy_stream(stream);
  }
  void whenReached(Stream stream, Reached reached, void* context) override {
    const int result = table_.when_reached(stream, reached, context);
    if (result == kCudaNoHostMemory) {
      throw std::bad_alloc();
    }
    check(result, "cudaStreamAddCallback");
  }
  bool isCapturing(Stream stream) override {
    int capturing = 0;
    check(table_.is_capturing(stream, &capturing), "cudaStreamIsCapturing");
    return capturing != 0;
  }
  bool pack(DType grad, DType wire, const BucketArgs& args, Stream stream) override {
    return launched(table_.pack(grad, wire, &args, stream), "the launch of the pack kernel");
  }
  bool unpack(DType grad, DType wire, const BucketArgs& args, Stream stream) override {
    return launched(table_.unpack(grad, wire, &args, stream), "the launch of the unpack kernel");
  }
  void writeExponent(const ExponentArgs& args, Stream stream) override {
    check(table_.write_exponent(&args, stream), "the launch of the exponent kernel");
  }
  bool hasReduce(DType dtype, ReduceOp op) override {
    return table_.has_reduce(dtype, op) != 0;
  }
  void reduce(DType dtype, ReduceOp op, const ReduceArgs& args, Stream stream) override {
    check(table_.reduce(dtype, op, &args, stream), "the launch of the reduce kernel");
  }
  void encode(const CodecArgs& args, Stream stream) override {
    check(table_.encode(&args, stream), "the launch of the encode kernel");
  }
  void decode(const CodecArgs& args, Stream stream) override {
    check(table_.decode(&args, stream), "the launch of the decode kernel");
  }

 private:
  void check(int result, const char* call) const {
    if (result == 0) {
      return;
    }
    if (result == kCudaNoKernel) {
      throw Error(ErrorCode::Unsupported, std::string("pycomm's CUDA library has no kernel for ") + call + ".");
    }
    ErrorRecord record;
    record.summary = std::string("CUDA: ") + call + " failed.";
    record.cause = std::string(table_.error_name(result)) + " (" + table_.error_text(result) + ")";
    if (result == kCudaOutOfMemory) {
      record.code = ErrorCode::OutOfMemory;
      record.hint = "use a smaller batch or fewer buckets; torch.cuda.empty_cache() returns what torch keeps";
    } else {
      record.code = ErrorCode::SystemError;
      record.hint = "CUDA_LAUNCH_BLOCKING=1 shows which call broke the device; nvidia-smi shows whether it is there";
    }
    throw Error(record);
  }
  [[nodiscard]] bool launched(int result, const char* call) const {
    if (result == kCudaNoKernel) {
      return false;
    }
    check(result, call);
    return true;
  }

  const CudaTable& table_; ///< of a library that is never unloaded
};

} // namespace

std::unique_ptr<DeviceRuntime> runtimeOf(const CudaTable& table, const std::string& origin) {
  if (table.version != kPycommCudaVersion || table.nbytes != sizeof(CudaTable)) {
    refuseLibrary(
        origin,
        "is of another build: its interface has version " + std::to_string(table.version) + ", this extension's " +
            std::to_string(kPycommCudaVersion));
  }
  return std::make_unique<LibraryRuntime>(table);
}

DeviceRuntime& cudaLibrary(const std::string& path) {
  static std::mutex mutex;
  // Never destroyed: threads of the process may use a runtime until the very end.
  static auto* const loaded = new std::map<std::string, std::unique_ptr<DeviceRuntime>>();
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<DeviceRuntime>& runtime = (*loaded)[path];
  if (runtime == nullptr) {
    runtime = runtimeOf(tableAt(path), path);
  }
  return *runtime;
}

} // namespace pycomm::cuda

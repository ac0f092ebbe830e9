#include "c10d/cuda_library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "base/error.h"
#include "cuda/c_error_record.h"

namespace pycomm {
namespace {

const PycommCudaTable* load(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw Error(
        ErrorCode::Unsupported,
        "CUDA tensors need pycomm's CUDA library, " + path + ", which " + why + ".",
        "with a CUDA toolkit (nvcc) on this machine: PYCOMM_BUILD_CUDA=1 pip install --no-build-isolation . in pycomm's "
        "sources; or tensor.cpu()");
  };
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = ::dlerror();
    refuse(std::string("could not be loaded (") + (why == nullptr ? "no reason given" : why) + ")");
  }
  const auto entry = reinterpret_cast<PycommCudaEntry>(::dlsym(library, PYCOMM_CUDA_ENTRY));
  if (entry == nullptr) {
    refuse("is no library of pycomm's: it has no " PYCOMM_CUDA_ENTRY);
  }
  const PycommCudaTable* const table = entry();
  if (table->version != PYCOMM_CUDA_VERSION || table->nbytes != sizeof(PycommCudaTable)) {
    refuse(
        "is of another build: its interface has version " + std::to_string(table->version) + ", this extension's " +
        std::to_string(PYCOMM_CUDA_VERSION));
  }
  return table;
}

} // namespace

const PycommCudaTable& cudaLibrary(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, const PycommCudaTable*> loaded;
  const std::lock_guard<std::mutex> lock(mutex);
  const PycommCudaTable*& table = loaded[path];
  if (table == nullptr) {
    table = load(path);
  }
  return *table;
}

void throwCuda(const PycommCudaError& error) {
  throw Error(recordOf(error));
}

} // namespace pycomm

#include "cuda/c_stager.h"

#include <chrono>
#include <vector>

#include "cuda/c_errors.h"
#include "cuda/stager.h"

struct PycommCudaStager {
  pycomm::cuda::Stager stager;
};

namespace pycomm::cuda {
namespace {

uint16_t create(int device, void* out, void* in, PycommCudaStager** stager, PycommCudaError* error) {
  return guarded(error, [&] { *stager = new PycommCudaStager{{theRuntime(), device, out, in}}; });
}

void destroy(PycommCudaStager* stager) {
  delete stager;
}

void stop(PycommCudaStager* stager, int64_t drain_ms) {
  stager->stager.stop(std::chrono::milliseconds(drain_ms));
}

uint16_t take(PycommCudaStager* stager, size_t nbytes, void** block, PycommCudaError* error) {
  return guarded(error, [&] { *block = stager->stager.take(nbytes); });
}

uint16_t give(PycommCudaStager* stager, void* block, int copied, PycommCudaError* error) {
  return guarded(error, [&] { copied != 0 ? stager->stager.giveAfterCopies(block) : stager->stager.give(block); });
}

std::vector<Stager::Copy> copiesOf(const PycommCudaCopy* copies, size_t count) {
  std::vector<Stager::Copy> list;
  list.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    list.push_back({copies[i].device, copies[i].host, copies[i].nbytes});
  }
  return list;
}

uint16_t toHost(
    PycommCudaStager* stager,
    const PycommCudaCopy* copies,
    size_t count,
    void* caller,
    int apart,
    void (*ready)(void* context, size_t ended, const PycommCudaError* failure),
    void* context,
    PycommCudaError* error) {
  return guarded(error, [&] {
    const auto tell_ready = [ready, context](size_t ended, const auto& failure) {
      PycommCudaError told = {};
      if (failure) {
        static_cast<void>(fillError(*failure, &told));
      }
      ready(context, ended, failure ? &told : nullptr);
    };
    stager->stager.toHost(copiesOf(copies, count), caller, tell_ready, apart != 0);
  });
}

uint16_t toDevice(PycommCudaStager* stager, const PycommCudaCopy* copies, size_t count, PycommCudaError* error) {
  return guarded(error, [&] { stager->stager.toDevice(copiesOf(copies, count)); });
}

uint16_t waitOn(PycommCudaStager* stager, void* stream, PycommCudaError* error) {
  return guarded(error, [&] { stager->stager.waitOn(stream); });
}

} // namespace

void addStager(PycommCudaTable& table) {
  table.stager_create = create;
  table.stager_destroy = destroy;
  table.stager_stop = stop;
  table.stager_take = take;
  table.stager_give = give;
  table.stager_to_host = toHost;
  table.stager_to_device = toDevice;
  table.stager_wait_on = waitOn;
}

} // namespace pycomm::cuda

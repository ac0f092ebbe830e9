// The shared library's one exported function.
#define PYCOMM_CUDA_LIBRARY

#include "cuda/c_api.h"
#include "cuda/c_table.h"
#include "cuda/cudart_runtime.h"

const PycommCudaTable* pycomm_cuda_table(void) {
  return pycomm::cuda::makeTable(pycomm::cuda::makeCudartRuntime);
}

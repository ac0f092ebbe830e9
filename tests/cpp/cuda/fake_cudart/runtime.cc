// The library's table, compiled against this folder's CUDA.
#include "cuda/cudart_runtime.cu"

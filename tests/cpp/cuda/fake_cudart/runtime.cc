// The library's own calls of CUDA, compiled against this folder's CUDA.
#include "cuda/cudart_runtime.cu"

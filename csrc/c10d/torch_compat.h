#pragma once

// Every difference between the torch minors that pycomm builds against (2.11 to 2.13) is settled here and nowhere else.
#include <torch/version.h>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11
#error "pycomm needs torch 2.11 or later"
#endif

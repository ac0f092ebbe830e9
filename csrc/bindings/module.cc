#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "pycomm's native part. Internal: use the pycomm package.";
  pycomm::bindProcess(m);
  pycomm::bindSecret(m);
  pycomm::bindBackend(m);
  pycomm::bindFutures(m);
  pycomm::bindCodecs(m);
  pycomm::bindElastic(m);
  pycomm::bindDdp(m);
  pycomm::bindIdMap(m);
}

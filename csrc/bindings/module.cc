#include <torch/csrc/utils/pybind.h>

#include "bindings/backend.h"
#include "bindings/codecs.h"
#include "bindings/ddp.h"
#include "bindings/elastic.h"
#include "bindings/futures.h"
#include "bindings/id_map.h"
#include "bindings/process.h"
#include "bindings/secret.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "pycomm's native part. Internal: use the pycomm package.";
  pycomm::bindProcess(m);
  pycomm::bindSecret(m); // the backend's functions take one
  pycomm::bindBackend(m);
  pycomm::bindFutures(m);
  pycomm::bindCodecs(m);
  pycomm::bindElastic(m); // a reducer's arguments have one
  pycomm::bindDdp(m);
  pycomm::bindIdMap(m);
}

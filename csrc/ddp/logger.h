#pragma once

#include <c10/util/Logging.h>

#include <memory>
#include <string>
#include <vector>

#include "ddp/reducer.h"

namespace pycomm {

/// The logger that torch.nn.parallel.DistributedDataParallel calls. It keeps a table of facts about one wrapper. A fact that torch's
/// own logger has, too, has the same name there. It prints nothing.
class DdpLogger final {
 public:
  explicit DdpLogger(std::shared_ptr<Reducer> reducer);

  void setConstructionData(
      const std::string& module_name,
      const std::vector<int>& device_ids,
      int output_device,
      bool broadcast_buffers,
      bool has_sync_bn,
      bool static_graph);
  void setCommHookName(const std::string& name);
  void setStaticGraph();
  void setUnevenInputJoin();
  void setError(const std::string& text);

  /// The table, with the reducer's counters as they are now.
  [[nodiscard]] at::DDPLoggingData table() const;

 private:
  std::shared_ptr<Reducer> reducer_;
  at::DDPLoggingData table_;
};

} // namespace pycomm

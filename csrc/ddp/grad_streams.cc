#include "ddp/grad_streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace pycomm {

c10::Stream currentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void GradStreams::note() {
  const c10::Stream stream = currentStream(device_);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
    streams_.push_back(stream);
  }
}

bool GradStreams::join() {
  const c10::Stream here = currentStream(device_);
  bool differ = false;
  for (const c10::Stream& stream : streams_) {
    if (stream != here) {
      differ = true;
      c10::Event event(device_.type());
      event.record(stream);
      event.block(here);
    }
  }
  streams_.clear();
  return differ;
}

} // namespace pycomm

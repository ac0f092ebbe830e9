#pragma once

#include "transport/frame_header.h"

namespace pycomm {

/// A question or an answer about an operation (see waiting.h), for rank `to`. It travels over control links.
struct Question {
  int to = -1;
  FrameHeader header;
};

} // namespace pycomm

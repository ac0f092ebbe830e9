#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "transport/link.h"

namespace pycomm::testing {

using LinkPair = std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>>;

/// One transport in the conformance suite. A new transport instantiates LinkConformance with its own case.
struct LinkCase {
  std::string name;
  std::function<LinkPair()> connect; ///< both ends, in one process; a fork may then part them
};

/// Where the peer of a test lives.
enum class PeerPlace { Thread, Process };

/// What every Link must do, whatever it is made of, with the peer in a thread and in another process.
class LinkConformance : public ::testing::TestWithParam<std::tuple<LinkCase, PeerPlace>> {};

} // namespace pycomm::testing

#include "engine/failure_text.h"

#include <gtest/gtest.h>

namespace pycomm {
namespace {

TEST(FailureText, AnUnreachablePeerIsNamedWithAHint) {
  GroupIdentity identity;
  identity.rank = 0;
  identity.size = 2;
  identity.hosts = {"alpha", "beta"};
  ErrorRecord what;
  what.code = ErrorCode::ConnectFailed;
  what.summary = "no connection to 192.0.2.1:29600";
  what.cause = "ENETUNREACH";
  const ErrorRecord told = peerGone(1, what, identity);
  EXPECT_EQ(told.code, ErrorCode::ConnectFailed);
  EXPECT_EQ(told.peer, 1);
  EXPECT_EQ(told.summary, "Rank 1 on beta cannot be reached: no connection to 192.0.2.1:29600.");
  EXPECT_EQ(told.cause, "ENETUNREACH");
  EXPECT_FALSE(told.hint.empty());
}

} // namespace
} // namespace pycomm

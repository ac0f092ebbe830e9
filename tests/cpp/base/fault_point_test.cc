#include "base/fault_point.h"

#include <gtest/gtest.h>

#include <new>

#include "base/error.h"

namespace pycomm {
namespace {

void visit() {
  PYCOMM_FAULT_POINT("test.visit");
}

TEST(FaultPoint, OnlyOneOfASiteThatExistsCanBeArmed) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs a build with fault points";
  }
  EXPECT_THROW(armFaultPoints("test.visits:1:nomem"), Error);
  EXPECT_NO_THROW(visit());
  armFaultPoints("test.visit:1:nomem");
  EXPECT_THROW(visit(), std::bad_alloc);
  EXPECT_EQ(faultPointTallies().front().strikes, 1);
  armFaultPoints("");
}

} // namespace
} // namespace pycomm

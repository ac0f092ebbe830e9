#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "engine/ranks.h"

namespace pycomm::testing {

/// What a rank gives to a sum that floats hold exactly.
inline std::vector<float> operandOf(int rank, size_t numel) {
  std::vector<float> values(numel);
  for (size_t i = 0; i < numel; ++i) {
    values[i] = static_cast<float>(i % 1009 + static_cast<size_t>(rank));
  }
  return values;
}

inline std::vector<float> sumOver(int size, size_t numel) {
  std::vector<float> sum(numel);
  for (size_t i = 0; i < numel; ++i) {
    sum[i] = static_cast<float>(i % 1009 * static_cast<size_t>(size) + static_cast<size_t>(size * (size - 1) / 2));
  }
  return sum;
}

/// For runRanks(): sums of every size, many under way at once.
inline void sumEverySize(Rank& self) {
  const size_t sizes[] = {1, 100, 20000, 300000, 1000003, 7};
  std::vector<std::vector<float>> tensors;
  std::vector<std::shared_ptr<Operation>> operations;
  for (int round = 0; round < 4; ++round) {
    for (const size_t numel : sizes) {
      tensors.push_back(operandOf(self.rank, numel));
    }
  }
  for (std::vector<float>& values : tensors) {
    operations.push_back(self.group.start(allReduceCall(values)));
  }
  for (size_t k = 0; k < operations.size(); ++k) {
    EXPECT_TRUE(self.group.wait(*operations[k], Deadline::after(60000)));
    const auto error = operations[k]->error();
    ASSERT_FALSE(error) << error->text();
    EXPECT_EQ(tensors[k], sumOver(self.size, tensors[k].size()));
  }
}

} // namespace pycomm::testing

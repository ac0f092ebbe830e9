// Every target on mutated samples, and on the inputs that coverage-guided runs have kept (tools/fuzz.py). PYCOMM_FUZZ_INPUTS in the
// environment says how many inputs a target gets, PYCOMM_FUZZ_SEED replays a run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>

#include "fuzz/targets.h"

namespace pycomm::fuzz {
namespace {

using Bytes = std::vector<uint8_t>;

uint64_t fromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// Something between the sample and noise: bits flipped, parts cut out, repeated, overwritten with extreme numbers.
class Mutator {
 public:
  explicit Mutator(uint64_t seed) : dice_(seed) {}

  Bytes operator()(const Bytes& sample) {
    Bytes bytes = below(8) == 0 ? Bytes() : sample;
    for (uint64_t change = below(6); change > 0; --change) {
      once(bytes);
    }
    return bytes;
  }

 private:
  uint64_t below(uint64_t bound) {
    return dice_() % bound;
  }

  void once(Bytes& bytes) {
    const size_t at = bytes.empty() ? 0 : below(bytes.size());
    const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    const size_t rest = bytes.size() - at;
    switch (below(7)) {
      case 0:
        if (rest > 0) {
          *place = static_cast<uint8_t>(*place ^ (1 << below(8)));
        }
        break;
      case 1:
        bytes.resize(at);
        break;
      case 2:
        bytes.insert(place, below(40), static_cast<uint8_t>(dice_()));
        break;
      case 3:
        bytes.erase(place, place + static_cast<std::ptrdiff_t>(std::min<size_t>(rest, below(16))));
        break;
      case 4: {
        const Bytes again(bytes.begin(), place);
        bytes.insert(
            place, again.begin(), again.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(at, below(64))));
        break;
      }
      case 5: {
        const uint64_t extremes[] = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff, ~uint64_t{0}, uint64_t{1} << 63};
        const uint64_t number = extremes[below(7)];
        const size_t nbytes = std::min<size_t>(rest, below(9));
        if (nbytes > 0) {
          std::memcpy(&*place, &number, nbytes);
        }
        break;
      }
      default: {
        const std::string digits = std::to_string(dice_()).substr(0, below(21));
        const auto end = bytes.erase(place, place + static_cast<std::ptrdiff_t>(std::min<size_t>(rest, below(6))));
        bytes.insert(end, digits.begin(), digits.end());
        break;
      }
    }
  }

  std::mt19937_64 dice_;
};

class Fuzz : public ::testing::TestWithParam<Target> {};

TEST_P(Fuzz, MutatedSamples) {
  const uint64_t inputs = fromEnvironment("PYCOMM_FUZZ_INPUTS", 20000);
  Mutator mutate(fromEnvironment("PYCOMM_FUZZ_SEED", 1));
  const Bytes sample = GetParam().sample();
  ASSERT_TRUE(GetParam().read(sample.data(), sample.size()));
  uint64_t understood = 0;
  for (uint64_t i = 0; i < inputs; ++i) {
    const Bytes bytes = mutate(sample);
    try {
      understood += GetParam().read(bytes.data(), bytes.size()) ? 1 : 0;
    } catch (const std::logic_error& broken) {
      FAIL() << "input " << i << ": " << broken.what();
    }
  }
  EXPECT_GT(understood, 0U);
  EXPECT_LT(understood, inputs);
}

TEST_P(Fuzz, KeptInputs) {
  std::ifstream kept(std::string(PYCOMM_FUZZ_CORPUS) + "/" + GetParam().name + ".hex");
  ASSERT_TRUE(kept) << "no corpus";
  size_t inputs = 0;
  for (std::string line; std::getline(kept, line); ++inputs) {
    Bytes bytes;
    for (size_t at = 0; at + 1 < line.size(); at += 2) {
      bytes.push_back(static_cast<uint8_t>(std::stoul(line.substr(at, 2), nullptr, 16)));
    }
    EXPECT_NO_THROW((void)GetParam().read(bytes.data(), bytes.size())) << line;
  }
  EXPECT_GT(inputs, 10U);
}

INSTANTIATE_TEST_SUITE_P(Targets, Fuzz, ::testing::ValuesIn(targets()), [](const auto& param) {
  return param.param.name;
});

} // namespace
} // namespace pycomm::fuzz

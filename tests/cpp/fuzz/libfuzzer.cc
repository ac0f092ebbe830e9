// The targets behind libFuzzer, which looks for inputs that reach new code. tools/fuzz.py builds it with clang and runs it. The argument
// --target=NAME selects the target; with --sample it only writes that one's sample, for a corpus to begin with.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fuzz/targets.h"

namespace {

const pycomm::fuzz::Target* chosen = nullptr;

} // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  for (int i = 1; i < *argc; ++i) {
    for (const pycomm::fuzz::Target& target : pycomm::fuzz::targets()) {
      if (std::strncmp((*argv)[i], "--target=", 9) == 0 && std::strcmp((*argv)[i] + 9, target.name) == 0) {
        chosen = &target;
      }
    }
  }
  if (chosen == nullptr) {
    std::fputs("--target=NAME is missing, or there is no such target\n", stderr);
    std::exit(2);
  }
  if (std::strcmp((*argv)[*argc - 1], "--sample") == 0) {
    const auto sample = chosen->sample();
    std::exit(std::fwrite(sample.data(), 1, sample.size(), stdout) == sample.size() ? 0 : 1);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t nbytes) {
  (void)chosen->read(bytes, nbytes);
  return 0;
}

"""Allocations that fail, one at a time, in a process with torch.

``build`` compiles a library with an ``operator new`` of its own, for a rank's LD_PRELOAD. With
``Failing`` such a rank chooses which allocation of pycomm's extension fails; those of torch and of
Python never do.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

_SOURCE = """
#include <dlfcn.h>
#include <pthread.h>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {
std::atomic<long> allocations_left{0}; // before one fails
std::atomic<bool> failed{false};
char of_thread[16]; // the beginning of its name; empty: the one below
pthread_t caller;

bool counts(const void* from) {
  if (of_thread[0] == 0 && !pthread_equal(pthread_self(), caller)) {
    return false;
  }
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (std::strncmp(name, of_thread, std::strlen(of_thread)) != 0) {
    return false;
  }
  Dl_info place;
  return dladdr(from, &place) != 0 && std::strstr(place.dli_fname, "/_C.") != nullptr;
}

[[gnu::noinline]] void* allocate(std::size_t nbytes, const void* from) {
  if (allocations_left.load() > 0 && counts(from) && allocations_left.fetch_sub(1) == 1) {
    failed = true;
    throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(nbytes == 0 ? 1 : nbytes)) {
    return memory;
  }
  throw std::bad_alloc();
}
} // namespace

extern "C" void fail_allocation(const char* thread, long nth) {
  allocations_left = 0;
  std::strncpy(of_thread, thread, sizeof of_thread - 1);
  caller = pthread_self();
  failed = false;
  allocations_left = nth;
}
extern "C" bool allocation_failed() {
  return failed;
}

void* operator new(std::size_t nbytes) {
  return allocate(nbytes, __builtin_return_address(0));
}
void* operator new[](std::size_t nbytes) {
  return allocate(nbytes, __builtin_return_address(0));
}
// For sized ones, too. Those of libstdc++ free the same memory.
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
"""


def build(folder: Path) -> Path:
    """Compiles the library."""
    library = folder / "failing_memory.so"
    compiler = ["c++", "-std=c++17", "-shared", "-fPIC", "-O1", "-x", "c++", "-"]
    command = [*compiler, "-o", str(library), "-ldl", "-lpthread"]
    subprocess.run(command, input=_SOURCE, text=True, check=True)
    return library


def preloading(library: Path) -> dict[str, str]:
    """The environment of a rank that uses ``Failing``."""
    # Before a sanitizer's library, whose operator new would hide this one. Its malloc stays in use.
    return {
        "LD_PRELOAD": f"{library}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":"),
        "ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', '')}:verify_asan_link_order=0".lstrip(
            ":"
        ),
    }


class Failing:
    """The preloaded library, in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.fail_allocation.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._library.allocation_failed.restype = ctypes.c_bool

    def fail(self, nth: int, thread: str = "") -> None:
        """The ``nth`` from now, of threads with a name that begins so; by default of this one."""
        self._library.fail_allocation(thread.encode(), nth)

    def stop(self) -> bool:
        """None fails from now on. Whether one has."""
        failed = bool(self._library.allocation_failed())
        self._library.fail_allocation(b"", 0)
        return failed

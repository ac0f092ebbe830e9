// What one small all_reduce costs below torch and Python, beside the least that a round can cost: one word through shared memory, and
// 64 bytes over a loopback connection whose ends look without sleeping. Ranks are threads.
//
//   pycomm_latency [ranks] [bytes] [calls]        prints microseconds a call: p50 and p99 of each way
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "engine/ranks.h"

namespace pycomm::testing {
namespace {

using Seconds = std::chrono::duration<double>;

void print(const char* what, std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const auto at = [&](double part) {
    return seconds[static_cast<size_t>(part * static_cast<double>(seconds.size() - 1))] * 1e6;
  };
  std::printf("%-44s p50 %8.2f us   p99 %8.2f us\n", what, at(0.5), at(0.99));
  std::fflush(stdout);
}

/// Seconds of each call, on rank 0.
std::vector<double> allReduces(Transport transport, int ranks, size_t nbytes, size_t calls) {
  std::vector<double> seconds;
  const auto body = [&](Rank& self) {
    std::vector<float> values(std::max<size_t>(nbytes / sizeof(float), 1), 1.0F);
    Group::Call call = allReduceCall(values, Deadline::never());
    call.waits = true;
    for (size_t i = 0; i < calls + calls / 10; ++i) {
      const TimePoint began = Clock::now();
      const auto operation = self.group.start(call);
      while (!self.group.wait(*operation, Deadline::after(100))) {
      }
      if (self.rank == 0 && i >= calls / 10) {
        seconds.push_back(Seconds(Clock::now() - began).count());
      }
      values[0] = 1.0F;
    }
  };
  runRanks(ranks, body, [&](Group::Config& config) { config.transport = transport; });
  return seconds;
}

/// Seconds of half a round trip of one word.
std::vector<double> words(size_t calls) {
  struct alignas(64) Word {
    std::atomic<size_t> value{0};
  };
  Word there;
  Word back;
  std::vector<double> seconds;
  std::thread peer([&] {
    for (size_t i = 1; i <= calls; ++i) {
      while (there.value.load(std::memory_order_acquire) != i) {
      }
      back.value.store(i, std::memory_order_release);
    }
  });
  for (size_t i = 1; i <= calls; ++i) {
    const TimePoint began = Clock::now();
    there.value.store(i, std::memory_order_release);
    while (back.value.load(std::memory_order_acquire) != i) {
    }
    seconds.push_back(Seconds(Clock::now() - began).count() / 2);
  }
  peer.join();
  return seconds;
}

void sendAll(int fd) {
  const std::array<char, 64> frame{};
  if (::send(fd, frame.data(), frame.size(), 0) != static_cast<ssize_t>(frame.size())) {
    std::exit(1);
  }
}

void receiveAll(int fd) {
  std::array<char, 64> frame{};
  for (size_t got = 0; got < frame.size();) {
    const ssize_t n = ::recv(fd, frame.data() + got, frame.size() - got, MSG_DONTWAIT);
    if (n == 0) {
      std::exit(1);
    }
    got += n > 0 ? static_cast<size_t>(n) : 0;
  }
}

/// Seconds of half a round trip of 64 bytes over loopback.
std::vector<double> frames(size_t calls) {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* name = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), name, length) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), name, &length) != 0) {
    std::exit(1);
  }
  const UniqueFd near(::socket(AF_INET, SOCK_STREAM, 0));
  if (::connect(near.get(), name, length) != 0) {
    std::exit(1);
  }
  const UniqueFd far(::accept(listener.get(), nullptr, nullptr));
  const int on = 1;
  for (const int fd : {near.get(), far.get()}) {
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  std::thread peer([&] {
    for (size_t i = 0; i < calls; ++i) {
      receiveAll(far.get());
      sendAll(far.get());
    }
  });
  std::vector<double> seconds;
  for (size_t i = 0; i < calls; ++i) {
    const TimePoint began = Clock::now();
    sendAll(near.get());
    receiveAll(near.get());
    seconds.push_back(Seconds(Clock::now() - began).count() / 2);
  }
  peer.join();
  return seconds;
}

} // namespace
} // namespace pycomm::testing

int main(int argc, char** argv) {
  using namespace pycomm;
  using namespace pycomm::testing;
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const size_t nbytes = argc > 2 ? static_cast<size_t>(std::atoll(argv[2])) : 4;
  const size_t calls = argc > 3 ? static_cast<size_t>(std::atoll(argv[3])) : 20000;
  std::printf("%d ranks, %zu bytes, %zu calls\n", ranks, nbytes, calls);
  print("all_reduce, shared memory", allReduces(Transport::SharedMemory, ranks, nbytes, calls));
  print("all_reduce, TCP", allReduces(Transport::Tcp, ranks, nbytes, calls));
  print("one word through memory, one way", words(calls));
  print("64 bytes over loopback TCP, one way", frames(calls));
}

#include "engine/monitor/local_peers.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "engine/monitor/host_greeting.h"
#include "transport/net/address.h"
#include "transport/net/unix_peer.h"

namespace pycomm {
namespace {

constexpr int kBacklog = 1024;

void tell(const std::string& why) {
  log(LogLevel::Info, "no watch over the processes of this host, deaths are noticed by their connections: " + why);
}

/// Whether a greeting has come, and its words: none if this process could not open their descriptor.
bool readGreeting(int socket, Greeting& greeting, UniqueFd& words) {
  return takeMessage(socket, &greeting, sizeof greeting, words) == static_cast<ssize_t>(sizeof greeting) &&
      greeting.magic == Greeting::kMagic;
}

} // namespace

/// The socket that other processes connect to.
struct LocalPeers::Server final : EventLoop::Handler {
  explicit Server(LocalPeers& owner) : local_peers(owner) {}
  void onReady(uint32_t) override {
    local_peers.admit();
  }
  void onThrown(const std::exception_ptr& exception) noexcept override {
    local_peers.onThrown(exception);
  }
  LocalPeers& local_peers; ///< holds this
  UniqueFd socket;
};

/// A process that watches us. It may ask for the memory of groups; when it hangs up, its word is free.
struct LocalPeers::Watcher final : EventLoop::Handler {
  explicit Watcher(LocalPeers& owner) : local_peers(owner) {}
  void onReady(uint32_t) override {
    local_peers.hearWatcher(*this);
  }
  void onThrown(const std::exception_ptr& exception) noexcept override {
    local_peers.onThrown(exception);
  }
  std::optional<MemoryKey> asks; ///< for what is not offered yet
  LocalPeers& local_peers; ///< holds this
  UniqueFd socket;
  uint32_t word = 0;
};

/// A process that we watch.
struct LocalPeers::Watched final : EventLoop::Handler {
  explicit Watched(LocalPeers& owner) : local_peers(owner) {}
  void onReady(uint32_t) override {
    local_peers.heard(*this);
  }
  void onThrown(const std::exception_ptr& exception) noexcept override {
    local_peers.onThrown(exception);
  }
  LocalPeers& local_peers; ///< holds this
  std::string name;
  UniqueFd socket;
  uint64_t watch = 0; ///< 0 until its greeting has come
  bool dead = false;
  std::unordered_map<uint64_t, Died> interests;
};

LocalPeers::LocalPeers(EventLoop& loop, Report report) : loop_(loop), report_(std::move(report)) {}

LocalPeers::~LocalPeers() {
  close();
}

std::string LocalPeers::name() {
  const std::lock_guard<std::mutex> lock(name_mutex_);
  if (!std::exchange(opened_, true)) {
    try {
      loop_.run([&] { open(); });
    } catch (const std::exception& error) {
      name_.clear();
      tell(error.what());
    }
  }
  return name_;
}

void LocalPeers::open() {
  const std::string name = randomUnixName();
  auto server = std::make_unique<Server>(*this);
  server->socket = UniqueFd::from([] { return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  if (!server->socket) {
    throw Error(systemError(ErrorCode::SystemError, "no Unix socket", errno));
  }
  const SocketAddress address = SocketAddress::unixSocket(name);
  if (::bind(server->socket.get(), address.raw(), address.rawLength()) != 0 ||
      ::listen(server->socket.get(), kBacklog) != 0) {
    throw Error(systemError(ErrorCode::SystemError, "no Unix socket in the abstract namespace", errno));
  }
  (void)deathWatch(); // a name that promises nothing would only be connected to in vain
  name_ = name;
  loop_.watch(server->socket.get(), EPOLLIN, *server);
  server_ = std::move(server); // which close() unwatches, whatever fails
  loop_.addTicker(*this);
}

DeathWatch& LocalPeers::deathWatch() {
  if (death_watch_ == nullptr) {
    death_watch_ = std::make_unique<DeathWatch>([this](uint64_t watch) {
      Loop::guarded(*this, [&] { loop_.post(Loop::owned(*this, [this, watch] { onDeath(watch); })); });
    });
  }
  return *death_watch_;
}

void LocalPeers::onThrown(const std::exception_ptr& exception) noexcept {
  try {
    std::rethrow_exception(exception);
  } catch (const std::bad_alloc&) { // nor is there memory for a line
  } catch (const std::exception& error) {
    try {
      tell(error.what());
    } catch (const std::bad_alloc&) {
    }
  }
}

void LocalPeers::admit() {
  for (int i = 0; i < kBacklog; ++i) {
    UniqueFd socket = UniqueFd::from(
        [&] { return ::accept4(server_->socket.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        // The processes that wait there would keep the socket readable and this loop awake: they wait until files are free again.
        loop_.unwatch(server_->socket.get());
        admit_again_ = Clock::now() + std::chrono::milliseconds(kLongPauseMs);
        return;
      }
      if (errno == EAGAIN) {
        return;
      }
      continue; // of that connection, not of the socket
    }
    if (!sameUser(socket.get())) {
      continue;
    }
    const std::optional<uint32_t> word = deathWatch().lend();
    if (!word) {
      continue;
    }
    try {
      auto watcher = std::make_unique<Watcher>(*this);
      Greeting greeting;
      greeting.word = *word;
      if (!passMessage(socket.get(), &greeting, sizeof greeting, deathWatch().wordsFd())) {
        deathWatch().takeBack(*word);
        continue;
      }
      const int fd = socket.get();
      watcher->socket = std::move(socket);
      watcher->word = *word;
      Watcher& kept = *watchers_.emplace(fd, std::move(watcher)).first->second; // first: this may lack memory
      try {
        loop_.watch(fd, EPOLLIN, kept);
      } catch (...) { // the loop must not know a handler that is gone
        watchers_.erase(fd);
        throw;
      }
    } catch (const std::exception& error) {
      deathWatch().takeBack(*word);
      tell(error.what());
    }
  }
}

void LocalPeers::tick(TimePoint now) noexcept {
  if (server_ == nullptr || now < admit_again_) {
    return;
  }
  admit_again_ = TimePoint::max();
  try {
    loop_.watch(server_->socket.get(), EPOLLIN, *server_);
  } catch (const std::exception&) { // no memory: later
    admit_again_ = now + std::chrono::milliseconds(kLongPauseMs);
  }
}

void LocalPeers::hearWatcher(Watcher& watcher) {
  Ask ask;
  UniqueFd none;
  const ssize_t got = takeMessage(watcher.socket.get(), &ask, sizeof ask, none);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    return;
  }
  if (got == static_cast<ssize_t>(sizeof(AskReport)) && ask.magic == AskReport::kMagic) {
    answerReport(watcher.socket.get());
    return;
  }
  if (got != static_cast<ssize_t>(sizeof ask) || ask.magic != Ask::kMagic) {
    dismiss(watcher.socket.get());
    return;
  }
  watcher.asks = ask.key;
  answer(watcher);
}

void LocalPeers::answer(Watcher& watcher) noexcept {
  const MemoryOffers::Memory* const memory = offers_.find(*watcher.asks);
  if (memory == nullptr) {
    return; // the group is not so far yet here
  }
  Ask reply;
  reply.key = *watcher.asks;
  reply.there = *memory != nullptr ? 1 : 0;
  watcher.asks.reset();
  const int fd = *memory == nullptr ? -1 : (*memory)->fd();
  (void)passMessage(watcher.socket.get(), &reply, sizeof reply, fd); // a watcher may miss it
}

void LocalPeers::offer(const MemoryKey& key, MemoryOffers::Memory memory) {
  offers_.set(key, std::move(memory));
  for (const auto& entry : watchers_) {
    if (entry.second->asks == key) {
      answer(*entry.second);
    }
  }
}

void LocalPeers::withdraw(const MemoryKey& key) noexcept {
  offers_.remove(key);
}

void LocalPeers::dismiss(int fd) noexcept {
  const auto watcher = watchers_.find(fd);
  loop_.unwatch(fd);
  deathWatch().takeBack(watcher->second->word);
  watchers_.erase(watcher);
}

uint64_t LocalPeers::watch(const std::string& name, Died died) {
  const uint64_t interest = next_interest_++;
  if (closed_ || name.empty() || name.size() > kMaxUnixName) {
    return interest;
  }
  auto found = watched_.find(name);
  if (found == watched_.end()) {
    auto made = std::make_unique<Watched>(*this);
    made->name = name;
    found = watched_.emplace(name, std::move(made)).first;
  }
  Watched& watched = *found->second;
  try {
    connect(watched);
    watched.interests.emplace(interest, std::move(died));
    if (watched.dead) { // died for another group, which still looks
      loop_.post([this, name, interest] {
        const auto again = watched_.find(name);
        if (again != watched_.end()) {
          const auto entry = again->second->interests.find(interest);
          if (entry != again->second->interests.end()) {
            Died(entry->second)();
          }
        }
      });
    }
  } catch (...) { // nobody knows the number to unwatch it
    watched.interests.erase(interest);
    if (watched.interests.empty()) {
      forget(found);
    }
    throw;
  }
  return interest;
}

// Also once more, where there was no descriptor before. If that process has ended in order, nothing changes.
void LocalPeers::connect(Watched& watched) {
  if (watched.socket || watched.watch != 0 || watched.dead) {
    return;
  }
  watched.socket = connectToLocalPeer(watched.name);
  try {
    if (watched.socket) {
      loop_.watch(watched.socket.get(), EPOLLIN, watched);
    } else {
      tell("no connection to a process of this host, " + errnoText(errno));
    }
  } catch (const std::exception& error) {
    watched.socket.reset();
    tell(error.what());
  }
}

void LocalPeers::unwatch(uint64_t interest) noexcept {
  for (auto watched = watched_.begin(); watched != watched_.end(); ++watched) {
    if (watched->second->interests.erase(interest) != 0) {
      if (watched->second->interests.empty()) {
        forget(watched);
      }
      return;
    }
  }
}

void LocalPeers::forget(WatchedByName::iterator watched) noexcept {
  if (watched->second->socket) {
    loop_.unwatch(watched->second->socket.get());
  }
  if (watched->second->watch != 0) {
    deathWatch().unwatch(watched->second->watch);
  }
  watched_.erase(watched);
}

void LocalPeers::heard(Watched& watched) {
  if (watched.watch == 0) {
    Greeting greeting;
    UniqueFd words;
    errno = 0;
    const bool greeted = readGreeting(watched.socket.get(), greeting, words);
    if (!greeted && errno == EAGAIN) {
      return;
    }
    if (greeted && !words) { // the kernel drops what the process has no room for
      tell("no descriptor was free for it, in this process or that one (ulimit -n); the next group tries again");
    } else if (greeted) {
      try {
        watched.watch = deathWatch().watch(words, greeting.word);
        return;
      } catch (const std::exception& error) {
        tell(error.what());
      }
    }
  }
  // It has hung up, in order or not; the word tells which. Nothing else is ever said here.
  loop_.unwatch(watched.socket.get());
  watched.socket.reset();
}

void LocalPeers::onDeath(uint64_t watch) {
  for (const auto& entry : watched_) {
    Watched& watched = *entry.second;
    if (watched.watch != watch) {
      continue;
    }
    watched.dead = true;
    const std::unordered_map<uint64_t, Died> told = watched.interests; // a copy: a callback may end its own interest
    for (const auto& interest : told) {
      interest.second();
    }
    return;
  }
}

void LocalPeers::close() noexcept {
  {
    const std::lock_guard<std::mutex> lock(name_mutex_);
    opened_ = true; // a name that was never asked for is not opened any more
    name_.clear();
  }
  DeathWatch* watch = nullptr;
  loop_.run([&] {
    closed_ = true;
    watch = death_watch_.get();
  });
  if (watch != nullptr) {
    watch->stop(); // not on the loop: its thread may be posting to it
  }
  loop_.run([&] {
    for (const auto& watcher : watchers_) {
      loop_.unwatch(watcher.first);
    }
    for (const auto& watched : watched_) {
      if (watched.second->socket) {
        loop_.unwatch(watched.second->socket.get());
      }
    }
    if (server_ != nullptr) {
      loop_.unwatch(server_->socket.get());
      loop_.removeTicker(*this);
      admit_again_ = TimePoint::max();
    }
    watchers_.clear();
    watched_.clear();
    server_.reset();
  });
}

} // namespace pycomm

#include "engine/survive/kept_record.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "transport/net/host_identity.h"

namespace pycomm {
namespace {

constexpr size_t kRecordPlaceNbytes = 64 << 10; // a record of 256 members and all their past views takes 42 KB

struct RecordHeader {
  static constexpr uint64_t kMagic = 0x3164726f63657270; // "precord1"
  uint64_t magic = kMagic;
  std::array<char, 96> process{}; ///< ProcessIdentity::wireText(), with a zero behind it
  std::atomic<uint64_t> kept{0}; ///< how many records were written; the place of the last is this modulo 2
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "it lies in memory of two processes");

struct RecordPlace {
  uint64_t nbytes = 0;
  std::array<char, kRecordPlaceNbytes - sizeof(uint64_t)> bytes;
};
struct RecordMemory {
  RecordHeader header;
  std::array<RecordPlace, 2> places;
};

RecordMemory& contentsOf(const SharedArena& memory) noexcept {
  return *reinterpret_cast<RecordMemory*>(memory.at(0));
}

std::shared_ptr<const SharedArena> makeMemory() {
  SharedArena memory = SharedArena::create(sizeof(RecordMemory));
  memory.commit(0, sizeof(RecordMemory)); // a lack of memory is an error here, and nowhere else
  RecordMemory& contents = contentsOf(memory);
  contents.header.magic = RecordHeader::kMagic;
  const std::string self = ProcessIdentity::ofThisProcess().wireText();
  std::copy_n(self.data(), std::min(self.size(), contents.header.process.size() - 1), contents.header.process.data());
  return std::make_shared<const SharedArena>(std::move(memory));
}

} // namespace

MemoryKey recordKey(const ProcessId& incarnation, const Secret* secret) {
  MemoryKey key;
  if (secret != nullptr) {
    const Key derived = secret->derive("pycomm 1 record " + incarnation);
    std::memcpy(&key, derived.bytes(), sizeof key);
    return key;
  }
  const auto half = [&](size_t from) { return std::stoull(incarnation.substr(from, 16), nullptr, 16); };
  key.high = half(0) ^ RecordHeader::kMagic; // not the key of a group
  key.low = half(16) ^ RecordHeader::kMagic;
  return key;
}

KeptRecord::KeptRecord(Engine& engine, const MemoryKey& key) : engine_(engine), key_(key), memory_(makeMemory()) {
  engine_.control().run([this] { engine_.localPeers().offer(key_, memory_); });
}

KeptRecord::~KeptRecord() {
  try {
    engine_.control().run([this] { engine_.localPeers().withdraw(key_); });
  } catch (const std::exception&) { // no memory: it stays on offer, and who asks reads what was kept last
  }
}

void KeptRecord::keep(const elastic::Record& record) {
  const std::string bytes = encode(record);
  RecordMemory& contents = contentsOf(*memory_);
  RecordPlace& place = contents.places[(kept_ + 1) % 2];
  if (bytes.size() > place.bytes.size()) {
    throw Error(ErrorCode::Internal, "a record of the agreement has " + std::to_string(bytes.size()) + " bytes");
  }
  place.nbytes = bytes.size();
  std::memcpy(place.bytes.data(), bytes.data(), bytes.size());
  contents.header.kept.store(++kept_, std::memory_order_release);
}

Witness Witness::of(
    const MemberHandle& process,
    const std::string& watch_name,
    const MemoryKey& key,
    Deadline deadline) {
  // First the descriptor, then the answer: so it is not of a later process with that pid.
  UniqueFd descriptor =
      UniqueFd::from([&] { return static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(process.pid), 0)); });
  if (!descriptor) {
    throw Error(systemError(ErrorCode::SystemError, "the kernel does not say when a process ends", errno));
  }
  SharedArena memory =
      SharedArena::attach(LocalPeers::ask(watch_name, key, deadline, AbortToken()), sizeof(RecordMemory));
  const RecordHeader& header = contentsOf(memory).header;
  const std::string_view text(header.process.data(), strnlen(header.process.data(), header.process.size()));
  const auto identity = ProcessIdentity::fromWireText(std::string(text));
  if (header.magic != RecordHeader::kMagic || !identity) {
    throw Error(ErrorCode::ProtocolViolation, "its record is not pycomm's");
  }
  if (identity->pid != process.pid || identity->pid_namespace != ProcessIdentity::ofThisProcess().pid_namespace) {
    throw Error(ErrorCode::Unsupported, "it has another pid namespace");
  }
  memory.closeFd();
  return {std::move(descriptor), std::move(memory)};
}

std::optional<elastic::Record> Witness::record() const {
  const RecordMemory& contents = contentsOf(memory_);
  const uint64_t kept = contents.header.kept.load(std::memory_order_acquire);
  const RecordPlace& place = contents.places[kept % 2];
  if (kept == 0 || place.nbytes > place.bytes.size()) {
    return std::nullopt;
  }
  return elastic::decodeRecord(std::string(place.bytes.data(), place.nbytes));
}

} // namespace pycomm

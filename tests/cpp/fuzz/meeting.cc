// What a store holds, into the rendezvous of a rank.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "fuzz/consumers.h"
#include "fuzz/endpoint.h"
#include "fuzz/promise.h"
#include "transport/memory_store.h"
#include "transport/rendezvous/rank_record.h"
#include "transport/rendezvous/rendezvous.h"
#include "transport/rendezvous/sealed_store.h"

namespace pycomm::fuzz {
namespace {

const std::string kPrefix = "pycomm/g/1/";
constexpr std::array<const char*, 8> kKeys =
    {"member/0", "member/all", "address/0", "address/all", "error", "vote/0", "vote/all", "../owner/1/1"};

RankRecord recordOf(int rank, bool sealed = false) {
  RankRecord record;
  record.version = FrameHeader::kVersion;
  record.rank = rank;
  record.size = 2;
  record.host = "node" + std::to_string(rank);
  record.identity = HostIdentity::ofThisProcess();
  record.process = {4711, 4026531836, 123456};
  record.route = SocketAddress::parse("127.0.0.1", 0);
  record.nonce = 99;
  record.run = 5;
  record.watch_name = "0123456789abcdef";
  record.process_id = sealed ? ProcessId(32, static_cast<char>('a' + rank)) : ProcessId();
  return record;
}

constexpr const char* kOwn = "own";

/// A store whose lists were complete before the rank came. A rank takes only a list with the very record that it wrote, and its port is
/// not known before: the list has kOwn there. In a sealed store, later records lie under a hash of the list, which is not known either:
/// what is found there lies here without it.
class StoreOfSample final : public Store {
 public:
  explicit StoreOfSample(const Secret* secret) {
    if (secret != nullptr) {
      sealed_ = std::make_unique<SealedStore>(memory_, *secret);
    }
  }

  void set(const std::string& key, const std::string& value) override {
    store().set(key, value);
  }
  /// As somebody writes who does not have the secret.
  void setRaw(const std::string& key, const std::string& value) {
    memory_.set(key, value);
  }
  [[nodiscard]] std::string get(const std::string& key, Deadline deadline) override {
    std::string value = store().get(placeOf(key), deadline);
    const size_t round = key.rfind("/all");
    if (round == std::string::npos || round + 4 != key.size()) {
      return value;
    }
    const auto texts = splitTexts(value);
    const std::string own = key.substr(0, round) + "/1";
    if (!texts || texts->size() != 2 || (*texts)[1] != kOwn || !store().has(own)) {
      return value;
    }
    return joinTexts({(*texts)[0], store().get(own, deadline)});
  }
  [[nodiscard]] bool has(const std::string& key) override {
    return store().has(placeOf(key));
  }
  [[nodiscard]] int64_t add(const std::string& key, int64_t amount) override {
    return store().add(key, amount);
  }
  [[nodiscard]] bool sealed() const noexcept override {
    return sealed_ != nullptr;
  }
  [[nodiscard]] std::optional<std::string> find(const std::string& key) override {
    return store().find(placeOf(key));
  }

 private:
  [[nodiscard]] Store& store() noexcept {
    return sealed_ == nullptr ? static_cast<Store&>(memory_) : *sealed_;
  }
  [[nodiscard]] std::string placeOf(const std::string& key) {
    constexpr size_t kHashChars = 64;
    const bool hashed = key.size() > kPrefix.size() + kHashChars && key.compare(0, kPrefix.size(), kPrefix) == 0 &&
        key[kPrefix.size() + kHashChars] == '/';
    if (!sealed() || !hashed || memory_.has(key)) {
      return key;
    }
    return kPrefix + key.substr(kPrefix.size() + kHashChars + 1);
  }

  testing::MemoryStore memory_;
  std::unique_ptr<SealedStore> sealed_;
};

std::string entry(size_t key, const std::string& text) {
  std::string out(1, static_cast<char>(key));
  out += static_cast<char>(text.size() & 0xff);
  out += static_cast<char>(text.size() >> 8);
  return out + text;
}

// Byte by byte: which key (from kRaw on: as somebody writes who does not have the secret), two of the text's length, the text.
bool meetAmong(const uint8_t* bytes, size_t nbytes, const Secret* secret) {
  constexpr size_t kChoices = kKeys.size() + 1;
  constexpr size_t kRaw = 14 * kChoices;
  StoreOfSample store(secret);
  Choices choices(bytes, nbytes);
  bool counted = false;
  while (!choices.over()) {
    const uint8_t choice = choices.byte();
    const bool raw = choice >= kRaw;
    const size_t key = choice % kChoices;
    std::string text;
    uint16_t length = 0;
    choices.take(&length, sizeof length);
    text.resize(length % 20000);
    choices.take(text.data(), text.size());
    if (key == kKeys.size()) {
      int64_t claims = 0;
      std::memcpy(&claims, text.data(), std::min(text.size(), sizeof claims));
      claims = claims == INT64_MAX ? 0 : claims; // a store that overflows is another program's fault
      (void)store.add("pycomm/g/claim/1", std::exchange(counted, true) ? 0 : claims % 4 == 0 ? claims : claims % 4);
    } else {
      const std::string name = key == 7 ? "pycomm/g/owner/1/1" : kPrefix + kKeys[key];
      raw ? store.setRaw(name, text) : store.set(name, text);
    }
  }
  RendezvousConfig config;
  config.rank = 1;
  config.size = 2;
  config.group_name = "g";
  config.store_host = "127.0.0.1";
  config.deadline = Deadline::after(0);
  config.process_id = secret != nullptr ? ProcessId(32, '1') : ProcessId();
  const AbortToken none;
  try {
    const Rendezvous met = meet(store, config, none);
    promise(met.members.size() == 2, "another number of ranks");
    promise(met.transcript.empty() == (secret == nullptr), "a sealed meeting has a transcript, and no other");
    for (const Member& member : met.members) {
      promise(member.address.port() != 0, "a rank without an address");
      ErrorRecord record; // what is printed of a rank
      record.code = ErrorCode::PeerDead;
      record.host = member.host;
      record.summary = member.remark + member.watch_name;
      useRecord(record, true);
    }
    for (const std::string& text : exchangeTexts(store, met.claim, 2, "vote", "yes", config.deadline, none)) {
      ErrorRecord record;
      record.summary = text;
      useRecord(record, true);
    }
    throwIfFailed(store, met.claim);
    return true;
  } catch (const Error& error) { // the only thing that may come out
    promise(error.record().code != ErrorCode::Ok, "an error without a code");
    useRecord(error.record(), false);
    return false;
  }
}

} // namespace

std::vector<uint8_t> meetingSample() {
  const std::string bytes = entry(1, joinTexts({recordOf(0).wireText(), kOwn})) +
      entry(3, joinTexts({"127.0.0.1:29600", kOwn})) + entry(6, joinTexts({"no memory", kOwn}));
  return {bytes.begin(), bytes.end()};
}

bool readMeeting(const uint8_t* bytes, size_t nbytes) {
  return meetAmong(bytes, nbytes, nullptr);
}

std::vector<uint8_t> sealedSample() {
  const std::string bytes = entry(1, joinTexts({recordOf(0, true).wireText(), kOwn})) +
      entry(3, joinTexts({"127.0.0.1:29600", kOwn})) + entry(6, joinTexts({"no memory", kOwn}));
  return {bytes.begin(), bytes.end()};
}

bool readSealed(const uint8_t* bytes, size_t nbytes) {
  static const Secret secret = fuzzSecret();
  return meetAmong(bytes, nbytes, &secret);
}

} // namespace pycomm::fuzz

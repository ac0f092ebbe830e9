// What a store holds, into the rendezvous of a rank.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "fuzz/consumers.h"
#include "fuzz/promise.h"
#include "transport/memory_store.h"
#include "transport/rendezvous/rank_record.h"
#include "transport/rendezvous/rendezvous.h"

namespace pycomm::fuzz {
namespace {

const std::string kPrefix = "pycomm/g/1/";
constexpr std::array<const char*, 8> kKeys =
    {"member/0", "member/all", "address/0", "address/all", "error", "vote/0", "vote/all", "../owner/1/1"};

RankRecord recordOf(int rank) {
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
  return record;
}

constexpr const char* kOwn = "own";

/// A store whose lists were complete before the rank came. A rank takes only a list with the very record that it wrote, and its port is
/// not known before: the list has kOwn there.
class StoreOfSample final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    store_.set(key, value);
  }
  [[nodiscard]] std::string get(const std::string& key, Deadline deadline) override {
    std::string value = store_.get(key, deadline);
    const size_t round = key.rfind("/all");
    if (round == std::string::npos || round + 4 != key.size()) {
      return value;
    }
    const auto texts = splitTexts(value);
    const std::string own = key.substr(0, round) + "/1";
    if (!texts || texts->size() != 2 || (*texts)[1] != kOwn || !store_.has(own)) {
      return value;
    }
    return joinTexts({(*texts)[0], store_.get(own, deadline)});
  }
  [[nodiscard]] bool has(const std::string& key) override {
    return store_.has(key);
  }
  [[nodiscard]] int64_t add(const std::string& key, int64_t amount) override {
    return store_.add(key, amount);
  }

 private:
  testing::MemoryStore store_;
};

std::string entry(size_t key, const std::string& text) {
  std::string out(1, static_cast<char>(key));
  out += static_cast<char>(text.size() & 0xff);
  out += static_cast<char>(text.size() >> 8);
  return out + text;
}

} // namespace

std::vector<uint8_t> meetingSample() {
  const std::string bytes = entry(1, joinTexts({recordOf(0).wireText(), kOwn})) +
      entry(3, joinTexts({"127.0.0.1:29600", kOwn})) + entry(6, joinTexts({"no memory", kOwn}));
  return {bytes.begin(), bytes.end()};
}

bool readMeeting(const uint8_t* bytes, size_t nbytes) {
  StoreOfSample store;
  Choices choices(bytes, nbytes);
  bool counted = false;
  while (!choices.over()) {
    const size_t key = choices.byte() % (kKeys.size() + 1);
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
    } else if (key == 7) {
      store.set("pycomm/g/owner/1/1", text);
    } else {
      store.set(kPrefix + kKeys[key], text);
    }
  }
  RendezvousConfig config;
  config.rank = 1;
  config.size = 2;
  config.group_name = "g";
  config.store_host = "127.0.0.1";
  config.deadline = Deadline::after(0);
  const AbortToken none;
  try {
    const Rendezvous met = meet(store, config, none);
    promise(met.members.size() == 2, "another number of ranks");
    for (const Member& member : met.members) {
      promise(member.address.port() != 0 && member.further.size() == met.further.size(), "a rank without an address");
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

} // namespace pycomm::fuzz

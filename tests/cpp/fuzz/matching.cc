#include <algorithm>
#include <array>

#include "engine/data/rank_tables.h"
#include "fuzz/frames.h"
#include "fuzz/promise.h"
#include "schedule/make_schedule.h"

namespace pycomm::fuzz {
namespace {

constexpr int kSize = 3;
constexpr uint32_t kGroup = 7;
constexpr int64_t kEagerNbytes = 1 << 20;
enum Event : uint8_t { Post, Arrive, Tick, Consume, End, Send, kEvents };

struct Call {
  OperationId id;
  Descriptor descriptor;
  std::shared_ptr<const PreparedSchedule> schedule;
};

Call callOf(int64_t sequence, Collective kind, int64_t numel, int root) {
  ScheduleRequest request;
  request.kind = kind;
  request.dtype = DType::Float32;
  request.size = kSize;
  request.root = root;
  request.numel = numel;
  request.reduce_op = kind == Collective::AllReduce ? ReduceOp::Sum : ReduceOp::None;
  Call call;
  call.id = {static_cast<uint64_t>(sequence), sequence};
  call.schedule = prepare(makeSchedule(request));
  call.descriptor = Descriptor::of(request, call.schedule->schedule.algorithm);
  return call;
}

/// What this rank may enter, in this order: with and without credit, with and without a root.
const std::array<Call, 4>& calls() {
  static const std::array<Call, 4> all = {
      callOf(1, Collective::AllReduce, 1000, -1),
      callOf(2, Collective::Broadcast, 4 << 20, 1),
      callOf(3, Collective::AllReduce, 4 << 20, -1),
      callOf(4, Collective::Broadcast, 10, 0)};
  return all;
}

struct Taken {
  uint64_t op_id;
  int peer;
  int64_t nbytes;
  bool eager;
};

/// A group of three as this rank sees it, which does whatever the input says.
class Run {
 public:
  explicit Run(Choices& choices) : choices_(choices), tables_(config()) {}

  void step() {
    switch (choices_.byte() % kEvents) {
      case Post:
        if (posted_ < calls().size() && !tables_.failed()) {
          const Call& call = calls()[posted_++];
          tables_.posted(call.id, call.descriptor, *call.schedule, now_);
        }
        break;
      case Arrive:
        arrive();
        break;
      case Tick:
        now_ += std::chrono::milliseconds(choices_.byte() * 50);
        tables_.tick(now_);
        break;
      case Consume:
        if (!accepted_.empty()) {
          const Taken used = accepted_.back();
          accepted_.pop_back();
          tables_.consumed(used.op_id, used.peer, used.nbytes, used.eager);
        }
        break;
      case End:
        tables_.ended(1 + choices_.byte() % calls().size());
        break;
      case Send:
        send();
        break;
      default:
        break;
    }
    for (const Action& action : tables_.takeActions()) {
      check(action);
    }
    const int64_t pooled = tables_.usage().eager_in;
    promise(tables_.failed() || (pooled >= 0 && pooled <= (kSize - 1) * kEagerNbytes), "more than the pool holds");
  }

  [[nodiscard]] bool understood() const noexcept {
    return understood_;
  }

 private:
  static testing::RankTables::Config config() {
    testing::RankTables::Config config;
    config.rank = 0;
    config.size = kSize;
    config.group = kGroup;
    config.hosts = {"host0", "host1", "host2"};
    return config;
  }

  // The frame that an honest peer would send, of which the input may overwrite any part.
  void arrive() {
    const int peer = 1 + choices_.byte() % (kSize - 1);
    const Call& call = calls()[choices_.byte() % calls().size()];
    FrameHeader header;
    header.type = static_cast<FrameType>(3 + choices_.byte() % 4);
    header.group = kGroup;
    header.op_id = call.id.id;
    call.descriptor.writeTo(header);
    choices_.take(&header.aux, sizeof header.aux);
    choices_.take(&header.payload_nbytes, sizeof header.payload_nbytes);
    const uint8_t broken = choices_.byte();
    if (broken < sizeof header) {
      choices_.take(reinterpret_cast<uint8_t*>(&header) + broken, std::min<size_t>(4, sizeof header - broken));
    }
    header.payload_nbytes %= kMaxPayloadNbytes + 1; // the channel lets no more through
    const bool failed = tables_.failed();
    const testing::RankTables::Verdict verdict = tables_.arrived(peer, header, now_);
    promise(!failed || verdict == testing::RankTables::Verdict::Ignore, "something is taken after the end");
    if (verdict == testing::RankTables::Verdict::Accept || verdict == testing::RankTables::Verdict::Keep) {
      understood_ = true;
      promise(header.type == FrameType::Data, "only data has a payload");
      accepted_.push_back({header.op_id, peer, header.payload_nbytes, (header.aux & kEagerFlag) != 0});
    }
  }

  void send() {
    const uint64_t op_id = 1 + choices_.byte() % calls().size();
    const int peer = 1 + choices_.byte() % (kSize - 1);
    const int64_t nbytes = 1 + choices_.byte() * int64_t{1000};
    const testing::RankTables::Permission permission = tables_.maySend(op_id, peer, nbytes);
    if (permission != testing::RankTables::Permission::No) {
      promise(!tables_.failed(), "something is sent after the end");
      tables_.sent(op_id, peer, nbytes, permission);
    }
  }

  void check(const Action& action) {
    if (action.kind == Action::Kind::Notice) {
      promise(!told_, "two errors");
      told_ = true;
      promise(action.record.rank >= 0 && !action.record.summary.empty(), "an error that says nothing");
      promise(action.record.text().find('\n') == std::string::npos, "an error of more than one line");
      return;
    }
    promise(action.peer > 0 && action.peer < kSize, "a rank that is not there");
  }

  Choices& choices_;
  testing::RankTables tables_;
  TimePoint now_{};
  size_t posted_ = 0;
  std::vector<Taken> accepted_;
  bool understood_ = false;
  bool told_ = false;
};

} // namespace

std::vector<uint8_t> matchingSample() {
  return {Post, Post, Tick, 10, Arrive, 0, 0,   0,       1,    0, 0, 0, 0,   0,
          0,    0,    100,  0,  0,      0, 255, Consume, Send, 0, 1, 3, End, 0};
}

bool readMatching(const uint8_t* bytes, size_t nbytes) {
  Choices choices(bytes, nbytes);
  Run run(choices);
  while (!choices.over()) {
    run.step();
  }
  return run.understood();
}

} // namespace pycomm::fuzz

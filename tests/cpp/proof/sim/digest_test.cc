// What two builds of the engine are compared by: pycomm_simulate prints the digest of all runs.
#include "proof/sim/digest.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "proof/sim/plan.h"
#include "proof/sim/run.h"
#include "proof/sim/verdict.h"
#include "proof/sim/wire_audit.h"

namespace pycomm::sim {
namespace {

template <typename Record>
uint64_t digestOfOne(const Record& record) {
  Digest digest;
  digest.add(record);
  return digest.value();
}

/// Each change alone gives another digest.
template <typename Record>
void expectAllCount(const std::vector<std::function<void(Record&)>>& changes) {
  std::set<uint64_t> digests{digestOfOne(Record())};
  for (const auto& change : changes) {
    Record record;
    change(record);
    digests.insert(digestOfOne(record));
  }
  EXPECT_EQ(digests.size(), changes.size() + 1);
}

TEST(Digest, EveryFieldOfADescriptorCounts) {
  expectAllCount<Descriptor>({
      [](Descriptor& d) { d.kind = Collective::Reduce; },
      [](Descriptor& d) { d.dtype = DType::Int32; },
      [](Descriptor& d) { d.reduce_op = ReduceOp::Max; },
      [](Descriptor& d) { d.codec = Codec::Int8; },
      [](Descriptor& d) { d.algorithm = Algorithm::Pairwise; },
      [](Descriptor& d) { d.root = 1; },
      [](Descriptor& d) { d.numel = 99; },
      [](Descriptor& d) { d.tag = 5; },
      [](Descriptor& d) { d.digest = 5; },
  });
}

TEST(Digest, EveryFieldOfAnErrorCounts) {
  expectAllCount<ErrorRecord>({
      [](ErrorRecord& e) { e.code = ErrorCode::PeerDead; },
      [](ErrorRecord& e) { e.summary = "a"; },
      [](ErrorRecord& e) { e.hint = "a"; },
      [](ErrorRecord& e) { e.cause = "a"; },
      [](ErrorRecord& e) { e.rank = 1; },
      [](ErrorRecord& e) { e.host = "a"; },
      [](ErrorRecord& e) { e.peer = 1; },
      [](ErrorRecord& e) { e.peer_host = "a"; },
      [](ErrorRecord& e) { e.group = "a"; },
      [](ErrorRecord& e) { e.group_ranks = "a"; },
      [](ErrorRecord& e) { e.epoch = 1; },
      [](ErrorRecord& e) { e.op = "a"; },
      [](ErrorRecord& e) { e.sequence = 1; },
      [](ErrorRecord& e) { e.dtype = "a"; },
      [](ErrorRecord& e) { e.numel = 1; },
      [](ErrorRecord& e) { e.bytes_done = 1; },
      [](ErrorRecord& e) { e.bytes_total = 1; },
      [](ErrorRecord& e) { e.phase = ErrorPhase::Matching; },
      [](ErrorRecord& e) { e.elapsed_ms = 1; },
  });
}

TEST(Digest, AStreamHasOneDigestHoweverItIsCut) {
  std::vector<std::byte> bytes(100);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(i);
  }
  Digest whole;
  whole.addBytes(bytes.data(), bytes.size());
  Digest cut;
  cut.addBytes(bytes.data(), 1);
  cut.addBytes(bytes.data() + 1, 60);
  cut.addBytes(bytes.data() + 61, 39);
  EXPECT_EQ(whole.value(), cut.value());
  std::swap(bytes[3], bytes[4]);
  Digest swapped;
  swapped.addBytes(bytes.data(), bytes.size());
  EXPECT_NE(whole.value(), swapped.value());
}

uint64_t digestOfFrame(const std::function<void(FrameHeader&)>& change, const std::string& payload) {
  Timeline timeline;
  WireAudit audit(timeline, 4, Limits(), false);
  FrameHeader header;
  header.type = FrameType::Failure;
  Route{0, 3}.writeTo(header);
  change(header);
  audit.frameSent(0, 1, LinkPurpose::Control, header);
  audit.payloadSent(0, 1, LinkPurpose::Control, {reinterpret_cast<const std::byte*>(payload.data()), payload.size()});
  return audit.digest();
}

TEST(Digest, OfARunHasTheHeadersOfItsFramesAndTheirPayloads) {
  const auto same = [](FrameHeader&) {};
  const std::vector<std::function<void(FrameHeader&)>> changes = {
      same,
      [](FrameHeader& h) { Route{0, 2}.writeTo(h); }, // questions that go another way
      [](FrameHeader& h) { h.root = 1; }, // another rank's goodbye is passed on
      [](FrameHeader& h) { h.type = FrameType::Leaving; },
      [](FrameHeader& h) { h.op_id = 1; },
      [](FrameHeader& h) { h.numel = 1; },
      [](FrameHeader& h) { h.kind = 1; },
      [](FrameHeader& h) { h.dtype = 1; },
      [](FrameHeader& h) { h.reduce_op = 1; },
      [](FrameHeader& h) { h.codec = 1; },
      [](FrameHeader& h) { h.algorithm = 1; },
      [](FrameHeader& h) { h.tag = 1; },
      [](FrameHeader& h) { h.digest = 1; },
      [](FrameHeader& h) { h.aux = 1; },
      [](FrameHeader& h) { h.payload_nbytes = 1; },
  };
  std::set<uint64_t> digests;
  for (const auto& change : changes) {
    digests.insert(digestOfFrame(change, "rank 1 died"));
  }
  digests.insert(digestOfFrame(same, "rank 2 died"));
  EXPECT_EQ(digests.size(), changes.size() + 1);
  EXPECT_EQ(digestOfFrame(same, "rank 1 died"), digestOfFrame(same, "rank 1 died"));
}

class DigestOfAnOutcome : public ::testing::Test {
 protected:
  /// Looks for an outcome in the first seeds, and expects that `change` to it changes the digest of its run.
  static void expectCounts(bool failed, const std::function<void(Outcome&)>& change) {
    for (uint64_t seed = 1; seed <= 100; ++seed) {
      sim::Run run(makePlan(seed), false); // Run is one of the fixture's, too
      run.execute();
      for (const auto& outcome : run.ranks()[0].user->outcomes()) {
        const bool ended = outcome->ended != TimePoint::max();
        if (!ended || outcome->error.has_value() != failed || outcome->output.empty()) {
          continue;
        }
        const uint64_t before = digestOf(run);
        EXPECT_EQ(digestOf(run), before) << "looking on changes nothing";
        change(*outcome);
        EXPECT_NE(digestOf(run), before) << "seed " << seed;
        return;
      }
    }
    FAIL() << "no seed has such an outcome";
  }
};

TEST_F(DigestOfAnOutcome, HasEachByteOfItsResult) {
  expectCounts(false, [](Outcome& outcome) { outcome.output.back() ^= std::byte{1}; });
}

TEST_F(DigestOfAnOutcome, HasItsInput) {
  expectCounts(false, [](Outcome& outcome) { ++outcome.call.key; });
}

TEST_F(DigestOfAnOutcome, HasItsDescriptorAndItsName) {
  expectCounts(false, [](Outcome& outcome) { ++outcome.descriptor.tag; });
  expectCounts(false, [](Outcome& outcome) { ++outcome.name; });
}

TEST_F(DigestOfAnOutcome, HasItsError) {
  expectCounts(true, [](Outcome& outcome) { ++outcome.error->peer; });
  expectCounts(true, [](Outcome& outcome) { outcome.error->summary += '.'; });
  expectCounts(true, [](Outcome& outcome) { outcome.error.reset(); });
}

TEST_F(DigestOfAnOutcome, HasTheTimeOfItsEnd) {
  expectCounts(false, [](Outcome& outcome) { outcome.ended += Nanos(1); });
}

} // namespace
} // namespace pycomm::sim

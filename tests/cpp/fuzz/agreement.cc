#include "fuzz/agreement.h"

#include "elastic/agreement.h"
#include "fuzz/promise.h"

namespace pycomm::fuzz {
namespace {

using elastic::Agreement;
using elastic::Incarnation;
using elastic::Message;
using elastic::View;

View firstView() {
  View first;
  first.members = {{1, 1}, {1, 2}, {1, 3}};
  return first;
}

Agreement agreementOf(bool newcomer, TimePoint now) {
  Agreement::Config config;
  config.self = newcomer ? Incarnation{1, 4} : Incarnation{1, 1};
  return newcomer ? Agreement(config, firstView().members, now) : Agreement(config, firstView(), now);
}

} // namespace

std::vector<uint8_t> agreementSample() {
  Message message;
  message.kind = Message::Kind::Promise;
  message.from = {1, 2};
  message.view = firstView().id();
  message.ballot = elastic::Ballot(0, 1, 0);
  message.step = {4, true, true};
  message.reach.set(0);
  message.reach.set(1);
  View next = firstView();
  next.epoch = 1;
  next.parent = firstView().id();
  message.accepted = elastic::Accepted{elastic::Ballot(0, 1, 1), next};
  message.testaments = {{2, std::nullopt}};
  return bytesOf('\x02' + elastic::encode(message));
}

bool readAgreement(const uint8_t* bytes, size_t nbytes) {
  if (nbytes == 0) {
    return false;
  }
  const auto memory = exactly(bytes + 1, nbytes - 1);
  const std::string text(reinterpret_cast<const char*>(memory.get()), nbytes - 1);
  TimePoint now{std::chrono::hours(1)};
  Agreement agreement = agreementOf((bytes[0] & 1) != 0, now);
  if ((bytes[0] & 2) != 0) {
    agreement.failed(ErrorCode::ConnectionReset, {1, 3}, now); // in the middle of an agreement, as the proposer
    agreement.sealed(now);
  }
  if ((bytes[0] & 4) != 0) {
    agreement.loaded(0, 0, now);
  }
  if ((bytes[0] & 8) != 0) {
    const auto record = elastic::decodeRecord(text);
    if (!record) {
      return false;
    }
    promise(elastic::encode(*record) == text, "the record does not survive");
    agreement.certified({1, 2}, *record, now);
  } else {
    const auto message = elastic::decodeMessage(text);
    if (!message) {
      return false;
    }
    promise(elastic::encode(*message) == text, "the message does not survive");
    agreement.received(*message, now);
  }
  size_t actions = 0;
  for (int times = 0; times < 40 && agreement.nextTick() != TimePoint::max(); ++times) {
    now = std::max(now, agreement.nextTick());
    agreement.tick(now);
    for (const Agreement::Action& action : agreement.takeActions()) {
      ++actions;
      promise(action.kind != Agreement::Action::Kind::Send || !action.to.empty(), "a message for nobody");
      if (action.kind == Agreement::Action::Kind::Send) {
        promise(elastic::decodeMessage(elastic::encode(*action.message)).has_value(), "a message that nobody can read");
      }
    }
  }
  promise(actions < 2000, "one message makes thousands");
  return true;
}

} // namespace pycomm::fuzz

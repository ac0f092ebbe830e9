#include "engine/data/outgoing.h"

#include <utility>

namespace pycomm {

void Outgoing::push(int peer, OutFrame&& frame) {
  if (!end_.running()) {
    return;
  }
  if (peer == rank_) {
    to_self_.push_back(std::move(frame));
  } else {
    links_.send(peer, std::move(frame));
  }
}

void Outgoing::send(int peer, const FrameHeader& header, bool needs) {
  OutFrame frame;
  frame.header = header;
  if (needs || peer == rank_) {
    push(peer, std::move(frame));
  } else if (end_.running()) {
    links_.ask(peer, std::move(frame));
  }
}

void Outgoing::ask(int peer, const FrameHeader& question) {
  if (!links_.isWriting(peer)) {
    questions_.push_back(Question{peer, question});
  } else if (end_.running()) {
    OutFrame frame;
    frame.header = question;
    links_.ask(peer, std::move(frame));
  }
}

void Outgoing::sendQuestions() {
  if (!questions_.empty() && end_.running()) {
    reporter_.ask(std::exchange(questions_, {}));
  }
}

OutFrame Outgoing::takeOwn() {
  OutFrame frame = std::move(to_self_.front());
  to_self_.pop_front();
  return frame;
}

} // namespace pycomm

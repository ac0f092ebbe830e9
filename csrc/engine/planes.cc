#include "engine/planes.h"

#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// The data loop may be busy for long while peers ask: what it cannot take meanwhile is dropped, and asked again (waiting.h).
constexpr size_t kMostQuestions = 64 << 10;

} // namespace

/// Counts a question for as long as it lives.
class Planes::QuestionInFlight {
 public:
  explicit QuestionInFlight(std::atomic<size_t>& count) noexcept : count_(&count) {
    count_->fetch_add(1, std::memory_order_relaxed);
  }
  QuestionInFlight(QuestionInFlight&& other) noexcept : count_(std::exchange(other.count_, nullptr)) {}
  QuestionInFlight& operator=(QuestionInFlight&&) = delete;
  ~QuestionInFlight() {
    if (count_ != nullptr) {
      count_->fetch_sub(1, std::memory_order_relaxed);
    }
  }

 private:
  std::atomic<size_t>* count_; ///< the planes', which outlive their tasks
};

Planes::Planes(const GroupIdentity& identity, TaskLoop& data_loop, TaskLoop& control, Events events)
    : identity_(identity), data_loop_(data_loop), control_loop_(control), events_(std::move(events)) {}

Planes::~Planes() = default;

void Planes::openData(DataPlane::Options options) {
  DataPlane::Events events;
  events.noticed = [this](ErrorRecord record) {
    onControl([record = std::move(record)](ControlPlane& control) { control.notice(record); });
  };
  events.doubted = [this](ErrorRecord record) {
    onControl([record = std::move(record)](ControlPlane& control) { control.doubt(record); });
  };
  events.ask = [this](std::vector<Question> questions) {
    onControl([questions = std::move(questions)](ControlPlane& control) { control.ask(questions); });
  };
  events.left = [this](int peer) { onControl([peer](ControlPlane& control) { control.peerLeft(peer); }); };
  data_ = std::make_unique<DataPlane>(identity_, data_loop_, std::move(events), std::move(options));
}

void Planes::openControl(std::vector<Listener> listeners, Membership::Config membership) {
  ControlPlane::Events events;
  events.failed = [this](const ErrorRecord& cause) { onFailed(cause); };
  events.bulk_link = [this](const Hello& hello, std::unique_ptr<Link> link) { adoptBulkLink(hello, std::move(link)); };
  events.asked = [this](int from, const FrameHeader& question) { onAsked(from, question); };
  events.left = [this](int peer) { onData([peer](DataPlane& data) { data.peerLeft(peer); }); };
  control_ = std::make_unique<ControlPlane>(
      identity_, control_loop_, std::move(listeners), std::move(membership), std::move(events));
  control_->open();
}

void Planes::openHost(std::shared_ptr<const SharedArena> arena, HostHeaps heaps, HostPlane::Config config) {
  HostPlane::Events events;
  events.noticed = [this](ErrorRecord record) {
    onControl([record = std::move(record)](ControlPlane& control) { control.notice(record); });
  };
  events.stuck = [this](std::shared_ptr<Operation> operation, uint64_t lacking) {
    onData([operation = std::move(operation), lacking](DataPlane& data) { data.hostStuck(operation, lacking); });
  };
  events.ended = [this](const OperationId& id, const Descriptor& descriptor) {
    onData([id, descriptor](DataPlane& data) { data.hostEnded(id, descriptor); });
  };
  auto host = std::make_unique<HostPlane>(identity_, std::move(arena), std::move(heaps), config, std::move(events));
  onData([host = host.get()](DataPlane& data) { data.accompany(host); });
  host_ = std::move(host);
}

// The plane of shared memory first: the control plane may end the group with this.
void Planes::died(int peer) {
  if (host_ != nullptr) {
    host_->died(peer);
  }
  control_->died(peer);
}

void Planes::onAsked(int from, const FrameHeader& question) {
  if (questions_.load(std::memory_order_relaxed) < kMostQuestions) {
    onData([from, question, counted = QuestionInFlight(questions_)](DataPlane& data) {
      data.heardQuestion(from, question);
    });
  }
}

void Planes::adoptBulkLink(const Hello& hello, std::unique_ptr<Link> link) {
  onData([hello, link = std::move(link)](DataPlane& data) mutable {
    data.adopt(hello.rank, std::move(link), hello.shared);
  });
}

// The data loop first: an operation that the host plane takes no more goes there, to end with the cause (Group::startOnHost). That post is also the
// last that can fail; the closures after it are so small that a std::function needs no memory for them.
void Planes::onFailed(const ErrorRecord& cause) {
  if (!told_failed_) { // if the post below finds no memory, this runs again, and others may read what was written with the failure
    events_.failed(cause);
    told_failed_ = true;
  }
  unended_.store(host_ == nullptr ? 1 : 2, std::memory_order_relaxed); // before the locks of both queues
  data_loop_.post(Loop::owned(*this, [this, cause] {
    if (data_ != nullptr) {
      data_->fail(cause, events_.ending);
    }
    onEnded();
  }));
  if (host_ != nullptr) {
    if (cause.code == ErrorCode::PeerDead &&
        cause.cause == kEndedByKernel) { // of a rank that this one may have no watch on
      host_->died(identity_.job.inGroup(cause.peer));
    }
    host_->fail(cause, events_.ending, [this] { onEnded(); });
  }
}

void Planes::onEnded() {
  if (unended_.fetch_sub(1, std::memory_order_acq_rel) == 1 && events_.ended) {
    events_.ended();
  }
}

// The task is small, and the queue keeps its memory: so this needs none as a rule.
void Planes::onThrown(const std::exception_ptr& exception) noexcept {
  try {
    control_loop_.post([this, exception] {
      if (control_ != nullptr) {
        control_->onThrown(exception);
      }
    });
  } catch (...) { // operations end at their deadline
  }
}

void Planes::run(DataStep step, const std::shared_ptr<Operation>& operation) {
  if (data_ != nullptr) {
    ((*data_).*step)(operation);
    return;
  }
  operation->finish(recordInAnyCase(identity_, [&] {
    ErrorRecord record;
    record.code = ErrorCode::ShutDown;
    record.summary = "The process group is closed.";
    record.hint = "destroy_process_group() was called before this operation";
    return errorOf(*operation, record, identity_);
  }));
}

void Planes::dropControl() noexcept {
  control_.reset();
}

void Planes::dropData() noexcept {
  data_.reset();
}

void Planes::abandon() noexcept {
  static_cast<void>(control_.release());
  static_cast<void>(data_.release());
  static_cast<void>(host_.release());
}

} // namespace pycomm

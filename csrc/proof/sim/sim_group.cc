#include "proof/sim/sim_group.h"

#include <sys/epoll.h>

#include <array>
#include <utility>

namespace pycomm::sim {
namespace {

constexpr Nanos kGoodbyeTime =
    milliseconds(20); // closeAllGently() waits this long for the readers of the control links

} // namespace

/// A connection whose Hello has not been read yet; does the work of Acceptor for it.
class SimGroup::Stranger final : public Loop::Handler {
 public:
  Stranger(SimGroup& group, std::unique_ptr<Link> accepted) : link(std::move(accepted)), group_(group) {}
  void onThrown(const std::exception_ptr& exception) noexcept override {
    group_.planes_.onThrown(exception);
  }
  void onReady(uint32_t) override {
    try {
      while (nbytes_ < bytes_.size()) {
        const Progress progress = link->tryRead({bytes_.data() + nbytes_, bytes_.size() - nbytes_});
        nbytes_ += progress.nbytes;
        gone = progress.closed;
        if (progress.closed || progress.would_block) {
          break;
        }
      }
    } catch (const Error&) {
      gone = true;
    }
    if (nbytes_ == bytes_.size() || gone) {
      group_.introduce(*this);
    }
  }
  [[nodiscard]] HelloReading reading() const {
    return decodeHello({bytes_.data(), nbytes_});
  }

  std::unique_ptr<Link> link;
  bool gone = false;

 private:
  SimGroup& group_; ///< holds this
  std::array<std::byte, kHelloNbytes> bytes_{};
  size_t nbytes_ = 0;
};

SimGroup::SimGroup(Timeline& timeline, Network& network, SimProcess& process, Settings settings)
    : timeline_(timeline),
      network_(network),
      settings_(std::move(settings)),
      identity_(settings_.identity),
      process_(process),
      data_loop_(process.data_loop),
      control_loop_(process.control),
      planes_(identity_, data_loop_, control_loop_, planeEvents()) {
  data_loop_.setPace(settings_.data_loop_pace);
  DataPlane::Options options;
  options.connect = [this](int peer) { return network_.connect(identity_.rank, peer); };
  options.limits = settings_.limits;
  options.read_buffer_nbytes = 1024;
  planes_.openData(std::move(options));
  planes_.openControl({}, settings_.membership);
  network_.listen(identity_.rank, [this](std::unique_ptr<Link> link) { accept(std::move(link)); });
}

Planes::Events SimGroup::planeEvents() {
  Planes::Events events;
  events.failed = [this](const ErrorRecord& cause) {
    failure_ = cause;
    failed_at_ = timeline_.now();
    if (on_failure_) {
      on_failure_(cause);
    }
  };
  return events;
}

SimGroup::~SimGroup() {
  network_.listen(identity_.rank, nullptr);
}

void SimGroup::adopt(int peer, std::unique_ptr<Link> link) {
  planes_.control()->adopt(peer, std::move(link));
}

void SimGroup::accept(std::unique_ptr<Link> link) {
  const int fd = link->fd();
  auto stranger = std::make_unique<Stranger>(*this, std::move(link));
  control_loop_.watch(fd, EPOLLIN, *stranger);
  strangers_.emplace(fd, std::move(stranger));
}

void SimGroup::introduce(Stranger& stranger) {
  const int fd = stranger.link->fd();
  control_loop_.unwatch(fd);
  auto found = strangers_.find(fd);
  const std::unique_ptr<Stranger> known =
      std::move(found->second); // its handler is running: destroyed at the end of this function
  strangers_.erase(found);
  const HelloReading reading = known->reading();
  const bool ours = reading.state == HelloReading::State::Complete && reading.hello.nonce == identity_.nonce &&
      reading.hello.group == identity_.hash && reading.hello.size == identity_.size;
  if (ours && planes_.control() != nullptr) {
    planes_.control()->welcome(Accepted{reading.hello, std::move(known->link)});
  }
}

void SimGroup::post(std::shared_ptr<Operation> operation) {
  data_loop_.post(Loop::owned(planes_, [this, operation] { planes_.run(&DataPlane::post, operation); }));
}

void SimGroup::abort(ErrorRecord reason) {
  planes_.onControl([reason = std::move(reason)](ControlPlane& control) { control.notice(reason); });
}

void SimGroup::close(std::function<void()> closed) {
  ErrorRecord reason;
  reason.code = ErrorCode::ShutDown;
  reason.rank = identity_.rank;
  closed_ = std::move(closed);
  closing_.emplace(planes_, failure_.has_value(), std::move(reason), [] {});
  post(0);
}

void SimGroup::post(size_t step) {
  if (step == closing_->steps().size()) {
    closed_();
    return;
  }
  const auto& run = closing_->steps()[step].run;
  const Closing::Body then = [this, step] { post(step + 1); };
  const auto run_to_its_end = [&run, then] {
    run([] {});
    then();
  };
  switch (closing_->steps()[step].on) {
    case Closing::Step::On::Caller:
      run_to_its_end();
      return;
    case Closing::Step::On::DataLoop:
      data_loop_.post(Loop::owned(planes_, run_to_its_end));
      return;
    case Closing::Step::On::DataLoopUntilOver:
      data_loop_.post(Loop::owned(planes_, [&run, then] { run(then); }));
      return;
    case Closing::Step::On::Control:
      control_loop_.post(Loop::owned(planes_, run_to_its_end));
      return;
    case Closing::Step::On::ControlLinks:
      closeControlLinksGently(then);
      return;
  }
}

void SimGroup::closeControlLinksGently(Closing::Body then) {
  for (const std::unique_ptr<Link>& link : closing_->control_links) {
    link->closeGently();
  }
  closing_->control_links.clear();
  network_.listen(identity_.rank, nullptr);
  for (const auto& entry : strangers_) {
    control_loop_.unwatch(entry.first);
  }
  strangers_.clear();
  timeline_.after(kGoodbyeTime, std::move(then));
}

void SimGroup::stop() {
  process_.stop();
}

void SimGroup::resume() {
  process_.resume();
}

void SimGroup::kill() {
  dead_ = true;
  process_.kill();
}

std::optional<DataPlane::Usage> SimGroup::usage() const {
  const DataPlane* const data = planes_.data();
  return data == nullptr ? std::nullopt : std::optional<DataPlane::Usage>(data->usage());
}

} // namespace pycomm::sim

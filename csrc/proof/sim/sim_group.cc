#include "proof/sim/sim_group.h"

#include <sys/epoll.h>

#include <array>
#include <utility>

namespace pycomm::sim {
namespace {

constexpr Nanos kGoodbyeTime = milliseconds(20); // Group::close waits so long for the readers of the control links

} // namespace

/// A connection whose Hello has not been read yet: what Acceptor does for one.
class SimGroup::Stranger final : public Loop::Handler {
 public:
  Stranger(SimGroup& group, std::unique_ptr<Link> accepted) : link(std::move(accepted)), group_(group) {}
  void onThrown(const std::exception_ptr& exception) noexcept override {
    group_.onThrown(exception);
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
      lane_(process.lane),
      control_loop_(process.control) {
  lane_.setPace(settings_.lane_pace);
  DataPlane::Options options;
  options.connect = [this](int peer) { return network_.connect(identity_.rank, peer); };
  options.limits = settings_.limits;
  options.read_buffer_nbytes = 1024;
  DataPlane::Events data_events;
  data_events.noticed = [this](ErrorRecord record) {
    soon(control_loop_, [this, record = std::move(record)] {
      if (control_ != nullptr) {
        control_->notice(record);
      }
    });
  };
  data_events.doubted = [this](ErrorRecord record) {
    soon(control_loop_, [this, record = std::move(record)] {
      if (control_ != nullptr) {
        control_->doubt(record);
      }
    });
  };
  data_events.left = [this](int peer) {
    soon(control_loop_, [this, peer] {
      if (control_ != nullptr) {
        control_->peerLeft(peer);
      }
    });
  };
  data_ = std::make_unique<DataPlane>(identity_, lane_, std::move(data_events), std::move(options));
  ControlPlane::Events events;
  events.failed = [this](const ErrorRecord& cause) {
    failure_ = cause;
    failed_at_ = timeline_.now();
    soon(lane_, [this, cause] {
      if (data_ != nullptr) {
        data_->fail(cause, [](const ErrorRecord&) {});
      }
    });
    if (on_failure_) {
      on_failure_(cause);
    }
  };
  events.bulk_link = [this](const Hello& hello, std::unique_ptr<Link> link) {
    auto shared = std::make_shared<std::unique_ptr<Link>>(std::move(link));
    soon(lane_, [this, peer = hello.rank, shared] {
      if (data_ != nullptr) {
        data_->adopt(peer, std::move(*shared));
      }
    });
  };
  events.left = [this](int peer) {
    soon(lane_, [this, peer] {
      if (data_ != nullptr) {
        data_->peerLeft(peer);
      }
    });
  };
  control_ = std::make_unique<ControlPlane>(
      identity_, control_loop_, std::vector<Listener>(), settings_.membership, std::move(events));
  control_->open();
  network_.listen(identity_.rank, [this](std::unique_ptr<Link> link) { accept(std::move(link)); });
}

SimGroup::~SimGroup() {
  network_.listen(identity_.rank, nullptr);
}

void SimGroup::adopt(int peer, std::unique_ptr<Link> link) {
  control_->adopt(peer, std::move(link));
}

void SimGroup::onThrown(const std::exception_ptr& exception) noexcept {
  control_loop_.post([this, exception] {
    if (control_ != nullptr) {
      control_->onThrown(exception);
    }
  });
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
      std::move(found->second); // its handler runs: it goes at the end of this function
  strangers_.erase(found);
  const HelloReading reading = known->reading();
  const bool ours = reading.state == HelloReading::State::Complete && reading.hello.nonce == identity_.nonce &&
      reading.hello.group == identity_.hash && reading.hello.size == identity_.size;
  if (ours && control_ != nullptr) {
    control_->welcome(Accepted{reading.hello, std::move(known->link)});
  }
}

void SimGroup::post(std::shared_ptr<Operation> operation) {
  soon(lane_, [this, operation] {
    if (data_ != nullptr) {
      data_->post(operation);
      return;
    }
    ErrorRecord record;
    record.code = ErrorCode::ShutDown;
    operation->finish(record);
  });
}

void SimGroup::abort(ErrorRecord reason) {
  soon(control_loop_, [this, reason = std::move(reason)] {
    if (control_ != nullptr) {
      control_->notice(reason);
    }
  });
}

void SimGroup::close(std::function<void()> closed) {
  soon(lane_, [this, closed = std::move(closed)] {
    ErrorRecord reason;
    reason.code = ErrorCode::ShutDown;
    reason.rank = identity_.rank;
    data_->close(reason, [this, closed] {
      soon(control_loop_, [this, closed] {
        for (const std::unique_ptr<Link>& link : control_->close()) {
          link->closeGently();
        }
        control_.reset();
        network_.listen(identity_.rank, nullptr);
        for (const auto& entry : strangers_) {
          control_loop_.unwatch(entry.first);
        }
        strangers_.clear();
        timeline_.after(kGoodbyeTime, [this, closed] {
          soon(lane_, [this, closed] {
            data_.reset();
            closed();
          });
        });
      });
    });
  });
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
  return data_ == nullptr ? std::nullopt : std::optional<DataPlane::Usage>(data_->usage());
}

} // namespace pycomm::sim

#include "engine/group.h"

#include <algorithm>
#include <future>
#include <thread>
#include <utility>

#include "engine/failure_text.h"
#include "schedule/make_schedule.h"
#include "schedule/select.h"

namespace pycomm {
namespace {

// A training step has a few tens of distinct calls; a schedule of a large ring takes some hundred kilobytes.
constexpr size_t kCachedSchedules = 64;

// A round trip on loopback, or to a host on the same switch, takes less; a longer wait is not worth a core.
constexpr int kSpinUs = 50;

bool same(const ScheduleRequest& a, const ScheduleRequest& b) {
  return a.kind == b.kind && a.algorithm == b.algorithm && a.root == b.root && a.dtype == b.dtype &&
      a.wire_dtype == b.wire_dtype && a.reduce_op == b.reduce_op && a.numel == b.numel &&
      a.segment_nbytes == b.segment_nbytes && a.counts == b.counts && a.recv_counts == b.recv_counts &&
      a.pipeline_frames == b.pipeline_frames;
}

// FNV-1a over the split sizes: 0 for even splits, so that error texts stay short where there are none.
uint32_t splitsDigest(const std::vector<int64_t>& counts) {
  if (counts.empty()) {
    return 0;
  }
  uint32_t hash = 2166136261U;
  for (const int64_t count : counts) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash = (hash ^ static_cast<uint32_t>((count >> shift) & 0xff)) * 16777619U;
    }
  }
  return hash == 0 ? 1 : hash;
}

} // namespace

std::shared_ptr<Group> Group::join(Engine& engine, Store& store, const Config& config) {
  AbortToken none;
  std::shared_ptr<Group> group(new Group(engine, store, config, meet(store, config.rendezvous, none)));
  try {
    group->connect(config);
  } catch (...) {
    group->close();
    throw;
  }
  engine.add(group);
  return group;
}

Group::Group(Engine& engine, Store& store, const Config& config, Rendezvous&& rendezvous)
    : engine_(engine),
      store_(store),
      claim_(rendezvous.claim),
      address_reason_(rendezvous.address_reason),
      interface_name_(rendezvous.interface_name),
      listener_(std::move(rendezvous.listener)) {
  identity_.rank = config.rendezvous.rank;
  identity_.size = config.rendezvous.size;
  identity_.name = config.rendezvous.group_name;
  identity_.hash = rendezvous.group_hash;
  identity_.nonce = rendezvous.nonce;
  identity_.local_address = rendezvous.local_address;
  for (const Member& member : rendezvous.members) {
    identity_.hosts.push_back(member.host);
    identity_.addresses.push_back(member.address);
  }
}

void Group::connect(const Config& config) {
  // Spinning pays only where every rank of this host can have a core.
  const auto local =
      std::count(identity_.hosts.begin(), identity_.hosts.end(), identity_.hosts[static_cast<size_t>(identity_.rank)]);
  engine_.lane().setSpin(
      std::chrono::microseconds(static_cast<unsigned>(local) <= std::thread::hardware_concurrency() ? kSpinUs : 0));
  Membership::Config membership;
  membership.rank = identity_.rank;
  membership.hosts = identity_.hosts;
  membership.neighbours = controlNeighbours(identity_.rank, identity_.size);
  membership.group = identity_.name;
  membership.heartbeat_every_ms = config.heartbeat_every_ms;
  membership.dead_after_ms = config.dead_after_ms;

  // The planes are closed on their own threads by close(), before this object goes: `this` is alive in every call.
  engine_.lane().run([&] {
    data_ = std::make_unique<DataPlane>(identity_, engine_.lane(), [this](ErrorRecord record) {
      engine_.control().post([this, record = std::move(record)] {
        if (control_ != nullptr) {
          control_->notice(record);
        }
      });
    });
  });
  ControlPlane::Events events;
  events.failed = [this](const ErrorRecord& cause) { onFailed(cause); };
  events.bulk_link = [this](int peer, std::unique_ptr<Link> link) {
    auto shared = std::make_shared<std::unique_ptr<Link>>(std::move(link)); // a std::function must be copyable
    engine_.lane().post([this, peer, shared] {
      if (data_ != nullptr) {
        data_->adopt(peer, std::move(*shared));
      }
    });
  };
  events.left = [this](int peer) {
    engine_.lane().post([this, peer] {
      if (data_ != nullptr) {
        data_->peerLeft(peer);
      }
    });
  };
  engine_.control().run([&] {
    control_ = std::make_unique<ControlPlane>(
        identity_, engine_.control(), std::move(listener_), membership, std::move(events));
    control_->open();
  });

  // Of each pair the lower rank connects.
  const Deadline deadline = config.rendezvous.deadline;
  for (const int peer : membership.neighbours) {
    if (peer < identity_.rank) {
      continue;
    }
    std::unique_ptr<Link> link;
    try {
      link = connectTcp(identity_.local_address, identity_.addresses[static_cast<size_t>(peer)], deadline, abort_);
    } catch (const Error& error) {
      if (error.record().code != ErrorCode::ConnectFailed) {
        throw;
      }
      throw Error(peerGone(peer, error.record(), identity_)); // adds who and where
    }
    Hello hello;
    hello.nonce = identity_.nonce;
    hello.rank = identity_.rank;
    hello.size = identity_.size;
    hello.epoch = identity_.epoch;
    hello.group = identity_.hash;
    hello.purpose = LinkPurpose::Control;
    const std::string bytes = encodeHello(hello);
    writeAll(*link, {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, deadline, abort_);
    engine_.control().run([&] { control_->adopt(peer, std::move(link)); });
  }
  const std::vector<int> missing = control_->waitForNeighbours(deadline, abort_);
  abort_.throwIfAborted();
  if (!missing.empty()) {
    ErrorRecord record;
    record.code = ErrorCode::ConnectFailed;
    record.rank = identity_.rank;
    record.host = identity_.hosts[static_cast<size_t>(identity_.rank)];
    record.peer = missing.front();
    record.peer_host = identity_.hosts[static_cast<size_t>(missing.front())];
    record.group = identity_.name;
    record.phase = "connect";
    record.summary = "Rank " + std::to_string(missing.front()) + " on " + record.peer_host +
        " met us in the store but never connected to " +
        identity_.addresses[static_cast<size_t>(identity_.rank)].text() + ".";
    record.hint =
        "a firewall may block that port: open a range and set PYCOMM_PORT_RANGE to it, or choose another interface "
        "with PYCOMM_SOCKET_IFNAME";
    throw Error(record);
  }
}

Group::~Group() {
  close();
}

std::shared_ptr<const PreparedSchedule> Group::scheduleFor(const ScheduleRequest& request) {
  const std::lock_guard<std::mutex> lock(cache_mutex_);
  const auto found = std::find_if(
      cache_.begin(), cache_.end(), [&](const CachedSchedule& entry) { return same(entry.request, request); });
  if (found != cache_.end()) {
    cache_.splice(cache_.begin(), cache_, found);
    return cache_.front().prepared;
  }
  cache_.push_front(CachedSchedule{request, prepare(makeSchedule(request))});
  if (cache_.size() > kCachedSchedules) {
    cache_.pop_back();
  }
  return cache_.front().prepared;
}

ScheduleRequest Group::ours(const ScheduleRequest& schedule) const {
  ScheduleRequest filled = schedule;
  filled.rank = identity_.rank;
  filled.size = identity_.size;
  return filled;
}

bool Group::keepsParts(const ScheduleRequest& schedule) {
  return pycomm::keepsParts(schedule.kind, scheduleFor(ours(schedule))->schedule.algorithm);
}

void Group::fillCollective(Operation::Request& request, const Call& call) {
  const ScheduleRequest schedule = ours(call.schedule);
  request.schedule = scheduleFor(schedule);
  request.descriptor.algorithm = request.schedule->schedule.algorithm;
  request.descriptor.root = schedule.root;
  // In an all_to_all every rank has splits of its own; what matters there is compared pair by pair, as frames meet.
  request.descriptor.digest = schedule.kind == Collective::AllToAll ? 0 : splitsDigest(schedule.counts);
  request.id = takeOperationId(counter_, identity_.hash);
}

// Messages are named on the lane, in the order in which it sees them: they take no number from the group's counter, as not all ranks
// take part.
void Group::fillMessage(Operation::Request& request, const Call& call) {
  request.receives = call.schedule.kind == Collective::Recv;
  request.peer = call.peer;
  request.descriptor.kind = Collective::Send;
  request.descriptor.algorithm = Algorithm::Direct;
  if (request.receives && call.peer == PointToPoint::kAnyRank) {
    return;
  }
  ScheduleRequest schedule = ours(call.schedule);
  schedule.root = call.peer;
  schedule.segment_nbytes = ScheduleRequest().segment_nbytes; // both sides must cut alike, whatever their options
  request.schedule = scheduleFor(schedule);
}

std::shared_ptr<Operation> Group::start(const Call& call) {
  if (!engine_.belongsToThisProcess()) {
    throw Error(
        ErrorCode::Forked,
        "A process group cannot be used in a child of fork(): its threads and connections belong to the parent.",
        "start workers with the spawn method, or make a new process group in the child");
  }
  Operation::Request request;
  request.descriptor.kind = call.schedule.kind;
  request.descriptor.dtype = call.schedule.dtype;
  request.descriptor.reduce_op = call.schedule.reduce_op;
  request.descriptor.wire_dtype = call.schedule.wire_dtype;
  request.descriptor.numel = call.schedule.numel;
  request.descriptor.tag = call.tag;
  request.input = call.input;
  request.output = call.output;
  request.input_parts = call.input_parts;
  request.output_parts = call.output_parts;
  request.deadline = call.deadline;
  request.premul_factor = call.premul_factor;
  if (call.schedule.kind == Collective::Send || call.schedule.kind == Collective::Recv) {
    fillMessage(request, call);
  } else {
    fillCollective(request, call);
  }
  auto operation = std::make_shared<Operation>(std::move(request));
  auto begin = [self = shared_from_this(), operation] {
    if (self->data_ != nullptr) {
      self->data_->post(operation);
      return;
    }
    ErrorRecord record;
    record.code = ErrorCode::ShutDown;
    record.summary = "The process group is closed.";
    record.hint = "destroy_process_group() was called before this operation";
    operation->finish(record);
  };
  if (call.waits) {
    engine_.lane().postQuietly(std::move(begin));
  } else {
    engine_.lane().post(std::move(begin));
  }
  return operation;
}

bool Group::wait(const Operation& operation, Deadline deadline) {
  EventLoop& lane = engine_.lane();
  if (operation.done() || lane.drive([&] { return operation.done(); }, deadline)) {
    return operation.done();
  }
  lane.nudge();
  return operation.wait(deadline);
}

void Group::onFailed(const ErrorRecord& cause) {
  abort_.abort(cause);
  engine_.lane().post([this, cause] {
    if (data_ != nullptr) {
      data_->fail(cause);
    }
  });
}

void Group::abort(const ErrorRecord& reason) {
  const std::lock_guard<std::mutex> lock(close_mutex_);
  if (closed_ || !engine_.belongsToThisProcess()) {
    return;
  }
  ErrorRecord record = reason;
  record.rank = identity_.rank;
  record.host = identity_.hosts[static_cast<size_t>(identity_.rank)];
  record.group = identity_.name;
  engine_.control().run([&] {
    if (control_ != nullptr) {
      control_->notice(record);
    }
  });
}

std::optional<ErrorRecord> Group::failure() const {
  if (!abort_.aborted()) {
    return std::nullopt;
  }
  return abort_.reason();
}

void Group::close() {
  const std::lock_guard<std::mutex> lock(close_mutex_);
  if (std::exchange(closed_, true)) {
    return;
  }
  if (!engine_.belongsToThisProcess()) {
    static_cast<void>(control_.release()); // see Engine::shutdown
    static_cast<void>(data_.release());
    return;
  }
  ErrorRecord reason;
  reason.code = ErrorCode::ShutDown;
  reason.rank = identity_.rank;
  reason.summary = "The process group was closed while the operation was under way.";
  reason.hint = "wait for every operation before destroy_process_group()";
  if (data_ != nullptr) {
    std::promise<void> down;
    engine_.lane().post([&] { data_->close(reason, [&] { down.set_value(); }); });
    down.get_future().get();
    engine_.lane().run([&] { data_.reset(); });
  }
  if (control_ != nullptr) {
    engine_.control().run([&] {
      control_->close();
      control_.reset();
    });
  }
  // The lane may still hold tasks of ours that look at data_: after this run they have been.
  engine_.lane().run([] {});
  leave(store_, claim_);
}

} // namespace pycomm

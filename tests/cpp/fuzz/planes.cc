// Bytes of connections, into what reads them in a group: the acceptor, the control plane, the data plane.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "engine/monitor/control_plane.h"
#include "engine/report/failure_text.h"
#include "fuzz/bytes_link.h"
#include "fuzz/consumers.h"
#include "fuzz/promise.h"
#include "schedule/make_schedule.h"
#include "transport/net/acceptor.h"
#include "transport/net/greeted_link.h"

namespace pycomm::fuzz {
namespace {

constexpr int kFd = 1000;

std::string frame(FrameHeader header, const std::string& payload = "") {
  header.group = identity().hash;
  header.payload_nbytes = static_cast<uint32_t>(payload.size());
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload;
}

FrameHeader headerOf(FrameType type) {
  FrameHeader header;
  header.type = type;
  return header;
}

/// What the planes say, looked at afterwards: inside of them an exception would become the group's failure.
struct Said {
  std::vector<ErrorRecord> records;
  int links = 0;

  void check() const {
    for (const ErrorRecord& record : records) {
      const auto says = [&](const char* text) { return record.summary.find(text) != std::string::npos; };
      const bool own = says("cannot go on") ||
          says("caught an unexpected exception"); // recordOfThrown(); a peer may report any code
      promise(record.code != ErrorCode::Internal || !own, "an exception that nobody knows");
      useRecord(record, true);
    }
  }
};

/// The control plane of rank kSelf.
struct Control {
  explicit Control(Said& said, std::function<void(const Hello&, std::unique_ptr<Link>)> bulk = {}) {
    Membership::Config membership;
    membership.rank = kSelf;
    membership.hosts = identity().hosts;
    membership.neighbours = {0, 2};
    ControlPlane::Events events;
    events.failed = [&said](const ErrorRecord& record) { said.records.push_back(record); };
    events.bulk_link = [&said, bulk = std::move(bulk)](const Hello& hello, std::unique_ptr<Link> link) {
      ++said.links;
      if (bulk) {
        bulk(hello, std::move(link));
      }
    };
    events.left = [](int) {};
    events.asked = [](int from, const FrameHeader& question) {
      promise(from >= 0 && from < kRanks && from != kSelf, "a question of nobody");
      promise(
          question.type == FrameType::Waiting || question.type == FrameType::NotEntered,
          "a frame that is not a question");
      promise(question.payload_nbytes == 0, "a question with a payload");
    };
    plane = std::make_unique<ControlPlane>(identity(), loop, std::vector<Listener>(), membership, std::move(events));
    plane->open();
  }
  HandLoop loop;
  std::unique_ptr<ControlPlane> plane;
};

Operation::Request call(Collective kind, int64_t numel, int root) {
  ScheduleRequest wish;
  wish.kind = kind;
  wish.dtype = DType::Float32;
  wish.rank = kSelf;
  wish.size = kRanks;
  wish.root = root;
  wish.numel = numel;
  wish.reduce_op = kind == Collective::AllReduce ? ReduceOp::Sum : ReduceOp::None;
  Operation::Request request;
  request.schedule = prepare(makeSchedule(wish));
  request.descriptor = Descriptor::of(wish, request.schedule->schedule.algorithm);
  return request;
}

Operation::Request receive(int from) {
  Operation::Request request;
  if (from != PointToPoint::kAnyRank) {
    request.schedule = call(Collective::Recv, 5, from).schedule;
  }
  request.descriptor.kind = Collective::Send; // as the sender has it
  request.descriptor.dtype = DType::Float32;
  request.descriptor.algorithm = Algorithm::Direct;
  request.descriptor.numel = 5;
  request.descriptor.tag = 3;
  request.receives = true;
  request.peer = from;
  return request;
}

const std::array<Operation::Request, 6>& postedCalls() {
  static const std::array<Operation::Request, 6> all = [] {
    std::array<Operation::Request, 6> made = {
        call(Collective::Broadcast, 10, 0),
        call(Collective::AllReduce, 1000, -1),
        call(Collective::Broadcast, 20000, 0),
        call(Collective::AllReduce, 7, -1),
        receive(PointToPoint::kAnyRank),
        receive(0)};
    for (int64_t k = 0; k < 4; ++k) {
      made[static_cast<size_t>(k)].id = {static_cast<uint64_t>(k + 1), k + 1};
    }
    return made;
  }();
  return all;
}

/// The data plane of rank kSelf, with operations of its own.
struct Data {
  explicit Data(Said& said) {
    DataPlane::Events events;
    events.noticed = [&said](ErrorRecord record) { said.records.push_back(std::move(record)); };
    events.left = [](int) {};
    events.doubted = events.noticed;
    events.ask = [](const std::vector<Question>& questions) {
      for (const Question& question : questions) {
        promise(question.to >= 0 && question.to < kRanks && question.to != kSelf, "a question to nobody");
      }
    };
    DataPlane::Options options;
    options.connect = [this](int) { return std::make_unique<BytesLink>(nullptr, 0, 1, --next_fd_); };
    options.read_buffer_nbytes = 256;
    plane = std::make_unique<DataPlane>(identity(), loop, std::move(events), std::move(options));
  }
  ~Data() {
    plane.reset();
  }

  // Operation k of those that all ranks would call; and messages.
  void post(int k) {
    const Operation::Request& wish = postedCalls()[static_cast<size_t>(k)];
    Operation::Request request;
    request.id = wish.id;
    request.descriptor = wish.descriptor;
    request.schedule = wish.schedule;
    request.receives = wish.receives;
    request.peer = wish.peer;
    auto& memory = memory_.emplace_back(static_cast<size_t>(request.descriptor.numel), 1.0F);
    request.input = request.output =
        BufferView(reinterpret_cast<std::byte*>(memory.data()), memory.size() * sizeof(float));
    operations.push_back(std::make_shared<Operation>(std::move(request)));
    plane->post(operations.back());
  }

  HandLoop loop;
  std::unique_ptr<DataPlane> plane;
  std::vector<std::shared_ptr<Operation>> operations;

 private:
  std::deque<std::vector<float>> memory_;
  int next_fd_ = -1;
};

} // namespace

// ---- control links

FrameHeader routed(int from, int to) {
  FrameHeader header = headerOf(FrameType::Waiting);
  header.op_id = 5;
  Route{from, to}.writeTo(header);
  return header;
}

std::vector<uint8_t> controlSample() {
  ErrorRecord record;
  record.code = ErrorCode::PeerDead;
  record.rank = 0;
  record.peer = 2;
  record.summary = "Rank 2 is gone.";
  record.host = "host0";
  return bytesOf(
      std::string("\x63\0", 2) + frame(headerOf(FrameType::Heartbeat)) +
      frame(headerOf(FrameType::Failure), record.serialize()) + frame(routed(0, kSelf)) + frame(routed(0, 2)) +
      frame(headerOf(FrameType::Goodbye)));
}

bool readControl(const uint8_t* bytes, size_t nbytes) {
  if (nbytes < 2) {
    return false;
  }
  Said said;
  const auto memory = exactly(bytes + 2, nbytes - 2);
  {
    Control control(said);
    control.plane->adopt(
        0, std::make_unique<BytesLink>(reinterpret_cast<uint8_t*>(memory.get()), nbytes - 2, 1U + bytes[0], kFd));
    while (control.loop.ready(kFd, EPOLLIN)) {
    }
    control.plane->tick(Clock::now() + std::chrono::milliseconds(400));
  }
  promise(said.records.size() <= 1, "a group that fails twice");
  said.check();
  return !said.records.empty() && said.records[0].code != ErrorCode::ProtocolViolation;
}

// ---- bulk links

std::vector<uint8_t> bulkSample() {
  std::string bytes("\x63\x3f", 2);
  FrameHeader data = headerOf(FrameType::Data);
  postedCalls()[0].descriptor.writeTo(data);
  data.op_id = 1;
  data.aux = kEagerFlag;
  bytes += frame(data, std::string(40, 'x'));
  FrameHeader waiting = data;
  waiting.type = FrameType::Waiting;
  waiting.op_id = 9;
  bytes += frame(waiting);
  FrameHeader credit = headerOf(FrameType::Credit);
  credit.aux = 4096;
  bytes += frame(credit);
  FrameHeader message = headerOf(FrameType::Data);
  Descriptor descriptor = postedCalls()[4].descriptor;
  descriptor.root = 0;
  descriptor.writeTo(message);
  GroupIdentity sender = identity();
  sender.rank = 0;
  Tables tables(sender, Limits());
  message.op_id = PointToPoint(tables).nameSend(kSelf).id;
  message.aux = kEagerFlag;
  bytes += frame(message, std::string(20, 'm'));
  return bytesOf(bytes + frame(headerOf(FrameType::Goodbye)));
}

bool readBulk(const uint8_t* bytes, size_t nbytes) {
  if (nbytes < 2) {
    return false;
  }
  Said said;
  bool understood = false;
  const auto memory = exactly(bytes + 2, nbytes - 2);
  {
    Data data(said);
    for (int k = 0; k < 6; ++k) {
      if ((bytes[1] >> k & 1) != 0) {
        data.post(k);
      }
    }
    data.plane->adopt(
        0, std::make_unique<BytesLink>(reinterpret_cast<uint8_t*>(memory.get()), nbytes - 2, 1U + bytes[0], kFd));
    for (int round = 0; data.loop.ready(kFd, EPOLLIN); ++round) {
      if (round < 6 && (bytes[1] >> round & 1) == 0) {
        data.post(round);
      }
    }
    data.plane->tick(Clock::now());
    for (const auto& operation : data.operations) {
      understood = understood || (operation->done() && !operation->error());
    }
    ErrorRecord cause;
    cause.code = ErrorCode::Aborted;
    data.plane->fail(said.records.empty() ? cause : said.records.front());
    for (const auto& operation : data.operations) {
      promise(operation->done(), "an operation that never ends");
      if (const auto error = operation->error()) {
        useRecord(*error, true);
      }
    }
  }
  said.check();
  return understood;
}

// ---- connections

std::vector<uint8_t> helloSample() {
  return bytesOf(encodeHello(helloOf(0)));
}

bool readHello(const uint8_t* bytes, size_t nbytes) {
  static Acceptor acceptor(Listener::bind(SocketAddress::loopback(AddressFamily::IPv4), {}), acceptorConfig());
  const UniqueFd socket = connectTo(acceptor);
  if (nbytes > 0) {
    (void)::send(socket.get(), bytes, nbytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  (void)::shutdown(socket.get(), SHUT_WR);
  Said said;
  bool introduced = false;
  Data data(said);
  Control control(said, [&](const Hello& hello, std::unique_ptr<Link> link) {
    data.plane->adopt(hello.rank, std::move(link), hello.shared);
  });
  for (const int64_t before = acceptor.rejected(); acceptor.rejected() == before && !introduced;) {
    for (Accepted& accepted : acceptor.poll(Clock::now())) {
      introduced = true;
      checkIntroduced(accepted.hello);
      control.plane->welcome(std::move(accepted));
    }
  }
  for (int round = 0; round < 2; ++round) { // refused ones are read to their end
    promise(acceptor.poll(Clock::now()).empty(), "one connection is two peers");
  }
  said.check();
  return introduced;
}

std::vector<uint8_t> replySample() {
  return bytesOf(std::string("\x63", 1) + encodeHelloAccepted(identity().hash));
}

bool readReply(const uint8_t* bytes, size_t nbytes) {
  if (nbytes == 0) {
    return false;
  }
  const auto memory = exactly(bytes + 1, nbytes - 1);
  BytesLink link(reinterpret_cast<const uint8_t*>(memory.get()), nbytes - 1, 1U + bytes[0]);
  Introduction introduction(identity().hello(LinkPurpose::Bulk));
  try {
    for (;;) {
      if (introduction.advance(link)) {
        return true;
      }
    }
  } catch (const Error& error) {
    promise(error.record().code != ErrorCode::Ok, "a refusal without a reason");
    useRecord(error.record(), true);
    return false;
  }
}

} // namespace pycomm::fuzz

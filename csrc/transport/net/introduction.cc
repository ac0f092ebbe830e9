#include "transport/net/introduction.h"

#include <cstring>

#include "base/error.h"
#include "base/fault_point.h"

namespace pycomm {
namespace {

[[noreturn]] void throwNoReply(const Link& link) {
  throw Error(
      ErrorCode::ProtocolViolation,
      "the reply to a hello on " + link.describe() + " is not pycomm's",
      "does another program listen there? Check that all ranks run the same build of pycomm");
}

} // namespace

bool Introduction::read(Link& link, std::byte* into, size_t nbytes, size_t& got) const {
  while (got < nbytes) {
    const Progress progress = link.tryRead({into + got, nbytes - got});
    got += progress.nbytes;
    if (progress.closed) {
      throw Error(ErrorCode::ConnectionReset, "the peer closed " + link.describe() + " before it replied to the hello");
    }
    if (progress.would_block) {
      return false;
    }
  }
  return true;
}

bool Introduction::advance(Link& link) {
  if (written_ == 0) {
    PYCOMM_FAULT_POINT("hello.send");
  }
  while (!refused_ && written_ < bytes_.size()) {
    const ConstBufferView rest(reinterpret_cast<const std::byte*>(bytes_.data()) + written_, bytes_.size() - written_);
    const Progress progress = link.tryWrite(&rest, 1);
    written_ += progress.nbytes;
    if (written_ == bytes_.size()) {
      PYCOMM_FAULT_POINT("hello.sent");
    } else if (progress.nbytes == 0) {
      return false;
    }
  }
  if (!read(link, header_.data(), header_.size(), header_got_)) {
    return false;
  }
  FrameHeader header;
  std::memcpy(static_cast<void*>(&header), header_.data(), sizeof header);
  if (!refused_) {
    if (header.magic == FrameHeader::kMagic &&
        header.version != FrameHeader::kVersion) { // the rest may mean something else
      throw Error(
          ErrorCode::VersionMismatch,
          "on " + link.describe() + " the peer speaks pycomm wire version " + std::to_string(header.version) +
              " and this rank version " + std::to_string(FrameHeader::kVersion),
          "install the same pycomm on all hosts");
    }
    const bool reply = header.magic == FrameHeader::kMagic && header.type == FrameType::HelloReply;
    if (!reply || header.payload_nbytes > ErrorRecord::kMaxSerializedNbytes) {
      throwNoReply(link);
    }
    if (header.payload_nbytes == 0) {
      if (header.group != group_) {
        throwNoReply(link);
      }
      return true;
    }
    refused_ = true;
    bytes_.assign(header.payload_nbytes, '\0');
  }
  if (!read(link, reinterpret_cast<std::byte*>(bytes_.data()), bytes_.size(), payload_got_)) {
    return false;
  }
  throw Error(*decodeHelloReply({reinterpret_cast<const std::byte*>(bytes_.data()), bytes_.size()}, size_));
}

} // namespace pycomm

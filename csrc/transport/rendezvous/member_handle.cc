#include "transport/rendezvous/member_handle.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/printable.h"
#include "transport/frame_header.h"

namespace pycomm {
namespace {

constexpr std::string_view kBegin = "pycomm1:";
constexpr size_t kShown = 40; // bytes of a wrong handle in an error

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw Error(
      ErrorCode::InvalidArgument,
      "This is no reconfigure handle of pycomm: " + why + " (\"" + printable(text.substr(0, kShown), kShown) +
          (text.size() > kShown ? "…" : "") + "\").",
      "pass what get_reconfigure_handle() or pycomm.reconfigure_handle() returned on each member, unchanged");
}

template <typename Number>
std::optional<Number> numberIn(std::string_view text, int base) {
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  return error == std::errc() && end == text.data() + text.size() && !text.empty() ? std::optional<Number>(number)
                                                                                   : std::nullopt;
}

std::string hexText(uint64_t number) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text(16, '0');
  for (size_t i = text.size(); i-- > 0; number >>= 4) {
    text[i] = kDigits[number & 15];
  }
  return text;
}

// FNV-1a with 64 bits, from a start of its own: two of them are one name of 128 bits. It separates instances, it protects nothing.
uint64_t hashOf(std::string_view text, uint64_t begin) {
  uint64_t hash = 0xcbf29ce484222325U ^ begin;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
    hash ^= hash >> 29;
  }
  return hash;
}

void readAddresses(MemberHandle& handle, std::string_view list, const std::string& text) {
  while (!list.empty()) {
    const std::string_view one = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), one.size() + 1));
    const auto address = SocketAddress::fromWireText(std::string(one));
    if (!address || address->isUnix() || address->port() == 0 || address->isUnspecified() ||
        handle.addresses.size() == MemberHandle::kMaxAddresses) {
      refuse(text, "it has an address that no pycomm wrote");
    }
    handle.addresses.push_back(*address);
  }
}

} // namespace

std::string MemberHandle::text() const {
  std::string out = std::string(kBegin) + "v=" + std::to_string(version) + ";i=" + incarnation + ";d=" + endpoint +
      ";n=" + hexText(nonce) + ";k=" + key_id + ";h=" + host.wireText() + ";p=" + std::to_string(pid) +
      (job_rank < 0 ? "" : ";r=" + std::to_string(job_rank)) + ";u=" + unix_socket + ";w=" + watch_name + ";a=";
  for (size_t i = 0; i < addresses.size(); ++i) {
    out += (i == 0 ? "" : ",") + addresses[i].wireText();
  }
  return out + ";"; // so that a text that was cut is seen
}

MemberHandle MemberHandle::parse(const std::string& text) {
  if (text.rfind(kBegin, 0) != 0) {
    refuse(text, "it does not begin with \"" + std::string(kBegin) + "\"");
  }
  if (text.size() > kMaxNbytes) {
    refuse(text, "it has " + std::to_string(text.size()) + " bytes, more than " + std::to_string(kMaxNbytes));
  }
  if (std::any_of(text.begin(), text.end(), [](char c) { return c <= ' ' || c > '~'; })) {
    refuse(text, "it has a space, a control character, or one that is not ASCII");
  }
  MemberHandle handle;
  std::string_view rest = std::string_view(text).substr(kBegin.size());
  bool has_host = false;
  bool has_nonce = false;
  bool has_addresses = false;
  while (!rest.empty()) {
    const std::string_view field = rest.substr(0, rest.find(';'));
    rest.remove_prefix(std::min(rest.size(), field.size() + 1));
    if (field.size() < 2 || field[1] != '=') {
      continue; // of a later version
    }
    const std::string value(field.substr(2));
    switch (field[0]) {
      case 'v':
        handle.version = numberIn<int>(value, 10).value_or(0);
        if (handle.version == 0) {
          refuse(text, "a part of it is missing or was changed");
        }
        if (handle.version != FrameHeader::kVersion) { // the rest may mean something else
          throw Error(
              ErrorCode::VersionMismatch,
              "A reconfigure handle is of pycomm wire version " + printable(value, kShown) +
                  ", and this process has version " + std::to_string(FrameHeader::kVersion),
              "install the same pycomm on all hosts");
        }
        break;
      case 'i':
        handle.incarnation = value;
        break;
      case 'd':
        handle.endpoint = value;
        break;
      case 'n': {
        const auto nonce = numberIn<uint64_t>(value, 16);
        has_nonce = nonce.has_value();
        handle.nonce = nonce.value_or(0);
        break;
      }
      case 'k':
        handle.key_id = value;
        break;
      case 'h': {
        const auto host = HostIdentity::fromWireText(value);
        has_host = host.has_value();
        handle.host = host.value_or(HostIdentity());
        break;
      }
      case 'p':
        handle.pid = numberIn<int32_t>(value, 10).value_or(0);
        break;
      case 'r':
        handle.job_rank = numberIn<int32_t>(value, 10).value_or(-1);
        if (handle.job_rank < 0) {
          refuse(text, "a part of it is missing or was changed");
        }
        break;
      case 'u':
        handle.unix_socket = value;
        break;
      case 'w':
        handle.watch_name = value;
        break;
      case 'a':
        readAddresses(handle, value, text);
        has_addresses = true;
        break;
      default: // of a later version
        break;
    }
  }
  if (handle.version == 0 || !isProcessId(handle.incarnation) || !isProcessId(handle.endpoint) || !has_nonce ||
      !has_host || !has_addresses || text.back() != ';' || handle.unix_socket.size() > kMaxUnixName ||
      handle.watch_name.size() > kMaxUnixName || (handle.unix_socket.empty() && handle.addresses.empty())) {
    refuse(text, "a part of it is missing or was changed");
  }
  return handle;
}

std::string MemberHandle::who() const {
  return "host " + printable(host.hostname, kMaxNbytes) + ", pid " + std::to_string(pid);
}

std::vector<SocketAddress> waysTo(const MemberHandle& to, const HostIdentity& from, bool unix_sockets) {
  const bool same_host = to.host == from;
  std::vector<SocketAddress> ways;
  if (same_host && unix_sockets && !to.unix_socket.empty()) {
    ways.push_back(SocketAddress::unixSocket(to.unix_socket));
  }
  for (const bool loopback : {same_host, !same_host}) {
    for (const SocketAddress& address : to.addresses) {
      if (address.isLoopback() == loopback && (same_host || !address.isLoopback())) {
        ways.push_back(address);
      }
    }
  }
  return ways;
}

std::string routeHint(const std::vector<MemberHandle>& members, size_t self) {
  for (const MemberHandle& member : members) {
    if (member.host == members[self].host) {
      continue;
    }
    for (const SocketAddress& address : member.addresses) {
      if (!address.isLoopback()) {
        return address.ip();
      }
    }
  }
  return "";
}

std::string instanceOf(int64_t uuid, const std::vector<MemberHandle>& members) {
  std::string text = std::to_string(uuid);
  for (const MemberHandle& member : members) {
    text += " " + member.incarnation;
  }
  return hexText(hashOf(text, 0)) + hexText(hashOf(text, 0x9e3779b97f4a7c15U));
}

} // namespace pycomm

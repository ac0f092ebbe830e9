#include "elastic/view.h"

#include <algorithm>

namespace pycomm::elastic {

uint64_t mixed(uint64_t digest, uint64_t value) noexcept {
  uint64_t z = digest + 0x9e3779b97f4a7c15ULL + value * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

uint64_t View::id() const noexcept {
  uint64_t digest =
      mixed(mixed(mixed(mixed(0, epoch), parent), static_cast<uint64_t>(step)), static_cast<uint64_t>(cause));
  for (const Incarnation& member : members) {
    digest = mixed(mixed(digest, member.high), member.low);
  }
  for (size_t i = left._Find_first(); i < kMaxMembers; i = left._Find_next(i)) {
    digest = mixed(digest, i);
  }
  return digest;
}

int View::position(const Incarnation& of) const noexcept {
  const auto at = std::find(members.begin(), members.end(), of);
  return at == members.end() ? -1 : static_cast<int>(at - members.begin());
}

void Changes::count(const View& before, const View& next) noexcept {
  for (size_t i = 0; i < before.members.size(); ++i) {
    if (!next.has(before.members[i])) {
      ++(next.left.test(i) ? left : lost);
    }
  }
  for (const Incarnation& member : next.members) {
    joined += before.has(member) ? 0 : 1;
  }
}

int votesOf(const MemberSet& voters) noexcept {
  return static_cast<int>(2 * voters.count()) + (voters.test(0) ? 1 : 0);
}

bool isQuorum(const MemberSet& voters, size_t size, const MemberSet& dead) noexcept {
  MemberSet base;
  for (size_t i = 0; i < size; ++i) {
    base.set(i);
  }
  base &= ~dead;
  return 2 * votesOf(voters & base) > votesOf(base);
}

} // namespace pycomm::elastic

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/error.h"
#include "base/unique_fd.h"
#include "engine/data/data_plane.h"
#include "transport/net/acceptor.h"

namespace pycomm::fuzz {

inline constexpr int kRanks = 3; ///< of the group that this process plays a rank of
inline constexpr int kSelf = 1;

/// Rank kSelf of a group of kRanks.
[[nodiscard]] GroupIdentity identity();

/// What rank `rank` of that group says when it connects.
[[nodiscard]] Hello helloOf(int rank);
/// For an Acceptor of that group.
[[nodiscard]] AcceptorConfig acceptorConfig();
/// A connection to that acceptor; nothing has been sent.
[[nodiscard]] UniqueFd connectTo(const Acceptor& acceptor);
/// Promises about whom an acceptor with acceptorConfig() lets in.
void checkIntroduced(const Hello& hello);

/// Everything that is done with an error record of another rank or of the store: it becomes the error of operations, is reported on,
/// chosen, printed and written to disk. `trusted`: by somebody whose ranks exist.
void useRecord(const ErrorRecord& record, bool trusted);

/// Two bytes that say in what pieces they come and which operations begin before them, then the bytes of a control link (of a bulk link)
/// from rank 0, into the plane that reads them.
[[nodiscard]] bool readControl(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> controlSample();
[[nodiscard]] bool readBulk(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> bulkSample();

/// The bytes of a connection into an Acceptor, and the peers that it lets in into both planes.
[[nodiscard]] bool readHello(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> helloSample();
/// The bytes of a reply to the Hello of this rank.
[[nodiscard]] bool readReply(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> replySample();

/// What the store of a group of two holds when rank 1 comes: a byte that says which key, two of the text's length, the text, and so on.
[[nodiscard]] bool readMeeting(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> meetingSample();
/// The same with a secret. The first byte of each text also says whether its writer has the secret.
[[nodiscard]] bool readSealed(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> sealedSample();

} // namespace pycomm::fuzz

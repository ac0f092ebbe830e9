// An all_reduce without a library, to compare with: plain sockets and plain additions, nothing else. No headers, no checks, no threads.
//
//   large   a ring. Each rank sends 2 (N - 1) / N of the tensor to its right neighbour and receives as much from its left
//           one, both at once; of what it receives it adds the first half and stores the other. What has been added goes
//           on at once, so the link never waits for a round.
//   small   log2(N) rounds: send the partial sum to the rank 2^k to the right, add the one from 2^k to the left.
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>

enum { kPieceNbytes = 256 << 10 };

static int64_t chunkBegin(int64_t numel, int size, int chunk) {
  return numel * chunk / size;
}

// One direction of the ring: which chunk is under way, and how much of it has passed.
typedef struct {
  int chunk; // of the tensor
  int left; // chunks to go, this one included
  int64_t done; // bytes of this chunk
  int64_t total; // bytes of all chunks so far
} Stream;

static int64_t chunkNbytes(int64_t numel, int size, int chunk) {
  return 4 * (chunkBegin(numel, size, chunk + 1) - chunkBegin(numel, size, chunk));
}

static void advance(Stream* stream, int64_t nbytes, int64_t numel, int size) {
  stream->done += nbytes;
  stream->total += nbytes;
  while (stream->left > 0 && stream->done == chunkNbytes(numel, size, stream->chunk)) {
    stream->done = 0;
    stream->chunk = (stream->chunk + size - 1) % size;
    --stream->left;
  }
}

static int retry(void) {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

// Returns 0, or an errno. Both sockets are non-blocking.
int raw_ring(float* tensor, int64_t numel, int rank, int size, int right, int left) {
  static __thread char piece[kPieceNbytes];
  int64_t held = 0; // bytes of a number that has not arrived whole
  const int rounds = 2 * (size - 1);
  Stream out = {rank, rounds, 0, 0};
  Stream in = {(rank + size - 1) % size, rounds, 0, 0};
  advance(&out, 0, numel, size); // over empty chunks
  advance(&in, 0, numel, size);
  const int64_t first = chunkNbytes(numel, size, rank);
  while (out.left > 0 || in.left > 0) {
    char* base = (char*)tensor;
    int moved = 0;
    if (out.left > 0) {
      int64_t room = chunkNbytes(numel, size, out.chunk) - out.done;
      const int64_t ready = first + in.total - out.total;
      room = room < ready ? room : ready;
      if (room > 0) {
        const ssize_t sent =
            send(right, base + 4 * chunkBegin(numel, size, out.chunk) + out.done, (size_t)room, MSG_NOSIGNAL);
        if (sent < 0 && !retry()) {
          return errno;
        }
        if (sent > 0) {
          advance(&out, sent, numel, size);
          moved = 1;
        }
      }
    }
    if (in.left > 0) {
      const int adds = in.left > size - 1;
      char* place = base + 4 * chunkBegin(numel, size, in.chunk) + in.done;
      int64_t room = chunkNbytes(numel, size, in.chunk) - in.done - (adds ? held : 0);
      if (adds && room > kPieceNbytes - held) {
        room = kPieceNbytes - held;
      }
      const ssize_t got = recv(left, adds ? piece + held : place, (size_t)room, 0);
      if (got == 0) {
        return ECONNRESET;
      }
      if (got < 0 && !retry()) {
        return errno;
      }
      if (got > 0 && adds) {
        const int64_t whole = (held + got) / 4;
        float* sum = (float*)place;
        const float* arrived = (const float*)piece;
        for (int64_t i = 0; i < whole; ++i) {
          sum[i] += arrived[i];
        }
        held = held + got - 4 * whole;
        memmove(piece, piece + 4 * whole, (size_t)held);
        advance(&in, 4 * whole, numel, size);
        moved = 1;
      } else if (got > 0) {
        advance(&in, got, numel, size);
        moved = 1;
      }
    }
    if (!moved) {
      const int can_send = out.left > 0 && first + in.total > out.total;
      struct pollfd fds[2] = {{left, in.left > 0 ? POLLIN : 0, 0}, {right, can_send ? POLLOUT : 0, 0}};
      if (poll(fds, 2, -1) < 0 && errno != EINTR) {
        return errno;
      }
    }
  }
  return 0;
}

// As many rounds as there are sockets; numel floats fit a socket's buffer.
int raw_rounds(float* tensor, int64_t numel, int rounds, const int* to, const int* from) {
  static __thread char piece[kPieceNbytes];
  const int64_t nbytes = 4 * numel;
  for (int k = 0; k < rounds; ++k) {
    int64_t sent = 0;
    int64_t got = 0;
    while (sent < nbytes || got < nbytes) {
      if (sent < nbytes) {
        const ssize_t n = send(to[k], (char*)tensor + sent, (size_t)(nbytes - sent), MSG_NOSIGNAL);
        if (n < 0 && !retry()) {
          return errno;
        }
        sent += n > 0 ? n : 0;
      }
      if (got < nbytes) {
        const ssize_t n = recv(from[k], piece + got, (size_t)(nbytes - got), 0);
        if (n == 0) {
          return ECONNRESET;
        }
        if (n < 0 && !retry()) {
          return errno;
        }
        got += n > 0 ? n : 0;
        if (n < 0) {
          struct pollfd fds[2] = {{from[k], POLLIN, 0}, {to[k], sent < nbytes ? POLLOUT : 0, 0}};
          if (poll(fds, 2, -1) < 0 && errno != EINTR) {
            return errno;
          }
        }
      }
    }
    for (int64_t i = 0; i < numel; ++i) {
      tensor[i] += ((float*)piece)[i];
    }
  }
  return 0;
}

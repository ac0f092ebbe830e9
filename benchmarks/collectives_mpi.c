/* One block of one collective over MPI, for openmpi.py:
 *
 *     mpirun -np 2 collectives_mpi all_reduce 1024 100 7
 *                                  workload   |    |   seed
 *                                     elements of the larger buffer, operations
 *
 * As the harness does: a tenth of the operations to warm up, the timed ones without a pause, then checked ones on
 * fresh inputs. Rank 0 prints "cpu_seconds wrong checked", then the seconds of each timed operation, the longest over
 * the ranks. Elements are float; sums are of small whole numbers, so that one bit pattern is right.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { PERIOD = 8191, CHECKED = 4, ROOT_RANK = 0 };

static int rank, ranks;
static long numel, part;
static float *input, *output;
static const char* name;

static int is(const char* workload) {
  return strcmp(name, workload) == 0;
}

static void must(int code, const char* what) {
  if (code != MPI_SUCCESS) {
    fprintf(stderr, "%s failed with %d\n", what, code);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

static void operate(void) {
  const MPI_Comm all = MPI_COMM_WORLD;
  const int n = (int)numel, p = (int)part, peer = rank ^ 1;
  int code = MPI_SUCCESS;
  if (is("broadcast")) {
    code = MPI_Bcast(input, n, MPI_FLOAT, ROOT_RANK, all);
  } else if (is("all_reduce")) {
    code = MPI_Allreduce(MPI_IN_PLACE, input, n, MPI_FLOAT, MPI_SUM, all);
  } else if (is("reduce")) {
    code = rank == ROOT_RANK ? MPI_Reduce(MPI_IN_PLACE, input, n, MPI_FLOAT, MPI_SUM, ROOT_RANK, all)
                             : MPI_Reduce(input, NULL, n, MPI_FLOAT, MPI_SUM, ROOT_RANK, all);
  } else if (is("all_gather")) {
    code = MPI_Allgather(input, p, MPI_FLOAT, output, p, MPI_FLOAT, all);
  } else if (is("gather")) {
    code = MPI_Gather(input, p, MPI_FLOAT, output, p, MPI_FLOAT, ROOT_RANK, all);
  } else if (is("scatter")) {
    code = MPI_Scatter(input, p, MPI_FLOAT, output, p, MPI_FLOAT, ROOT_RANK, all);
  } else if (is("reduce_scatter")) {
    code = MPI_Reduce_scatter_block(input, output, p, MPI_FLOAT, MPI_SUM, all);
  } else if (is("all_to_all")) {
    code = MPI_Alltoall(input, p, MPI_FLOAT, output, p, MPI_FLOAT, all);
  } else if (is("send_recv")) {
    if (peer < ranks && rank < peer) {
      must(MPI_Send(input, n, MPI_FLOAT, peer, 0, all), "MPI_Send");
      code = MPI_Recv(output, n, MPI_FLOAT, peer, 0, all, MPI_STATUS_IGNORE);
    } else if (peer < ranks) {
      must(MPI_Recv(output, n, MPI_FLOAT, peer, 0, all, MPI_STATUS_IGNORE), "MPI_Recv");
      code = MPI_Send(input, n, MPI_FLOAT, peer, 0, all);
    }
  } else {
    code = MPI_Barrier(all);
  }
  must(code, name);
}

static float value(int of, long index, int seed) {
  return (float)(1 + ((index % PERIOD) * 7 + of * 13 + seed) % 6);
}

/* What output element `index` must be; 0 where nothing is said of it. */
static float wanted(long index, int seed) {
  float sum = 0;
  for (int of = 0; of < ranks; ++of) {
    sum += value(of, index + (is("reduce_scatter") ? rank * part : 0), seed);
  }
  if (is("all_reduce") || is("reduce_scatter") || (is("reduce") && rank == ROOT_RANK)) {
    return sum;
  }
  if (is("broadcast")) {
    return value(ROOT_RANK, index, seed);
  }
  if (is("scatter")) {
    return value(ROOT_RANK, rank * part + index, seed);
  }
  if (is("all_gather") || (is("gather") && rank == ROOT_RANK)) {
    return value((int)(index / part), index % part, seed);
  }
  if (is("all_to_all")) {
    return value((int)(index / part), rank * part + index % part, seed);
  }
  if (is("send_recv") && (rank ^ 1) < ranks) {
    return value(rank ^ 1, index, seed);
  }
  return 0;
}

static double now(clockid_t clock) {
  struct timespec at;
  clock_gettime(clock, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static double cpuSeconds(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
      1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

static void check(int seed, double* wrong, double* checked) {
  const int in_place = is("broadcast") || is("all_reduce") || is("reduce");
  const int to_part = is("scatter") || is("reduce_scatter");
  for (int round = 0; round < CHECKED; ++round, ++seed) {
    for (long i = 0; i < numel; ++i) {
      input[i] = value(rank, i, seed);
      output[i] = 111;
    }
    if (is("barrier")) {
      struct timespec pause = {0, rank == round % ranks ? 2000000 : 0};
      nanosleep(&pause, NULL);
      double entered = now(CLOCK_MONOTONIC), last = 0;
      operate();
      const double left = now(CLOCK_MONOTONIC);
      MPI_Allreduce(&entered, &last, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      *wrong += left < last;
      *checked += 1;
      continue;
    }
    operate();
    const float* got = in_place ? input : output;
    for (long i = 0; i < (to_part ? part : numel); ++i) {
      const float right = wanted(i, seed);
      *checked += right != 0;
      *wrong += right != 0 && got[i] != right;
    }
  }
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc != 5) {
    fprintf(stderr, "usage: %s WORKLOAD ELEMENTS OPERATIONS SEED\n", argv[0]);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  name = argv[1];
  numel = atol(argv[2]);
  part = numel / ranks;
  const int operations = atoi(argv[3]);
  input = calloc((size_t)numel + 1, sizeof *input);
  output = calloc((size_t)numel + 1, sizeof *output);
  double* times = calloc((size_t)operations, sizeof *times);
  double* longest = calloc((size_t)operations, sizeof *longest);
  if (input == NULL || output == NULL || times == NULL || longest == NULL) {
    MPI_Abort(MPI_COMM_WORLD, 3);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  for (int i = 0; i < (operations >= 10 ? operations / 10 : 1); ++i) {
    operate();
  }
  double sums[3] = {-cpuSeconds(), 0, 0}, all[3];
  for (int i = 0; i < operations; ++i) {
    const double begin = now(CLOCK_MONOTONIC);
    operate();
    times[i] = now(CLOCK_MONOTONIC) - begin;
  }
  sums[0] += cpuSeconds();
  check(atoi(argv[4]), &sums[1], &sums[2]);
  MPI_Reduce(sums, all, 3, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  MPI_Reduce(times, longest, operations, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    printf("%.9f %.0f %.0f\n", all[0], all[1], all[2]);
    for (int i = 0; i < operations; ++i) {
      printf("%.9f\n", longest[i]);
    }
  }
  MPI_Finalize();
  return 0;
}

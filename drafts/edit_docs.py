def sub(path, *pairs):
    s = open(path).read()
    for a, b in pairs:
        assert s.count(a) == 1, (path, a, s.count(a))
        s = s.replace(a, b)
    open(path, "w").write(s)


sub(
    "tests/python/conftest.py",
    (
        '''@pytest.fixture
def free_port() -> int:
''',
        '''@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of tests/python/fake_cuda, compiled once."""
    import fake_cuda_device

    return fake_cuda_device.build_or_skip(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture
def free_port() -> int:
''',
    ),
)
sub(
    "docs/options.md",
    (
        "`auto`, `tcp`: how CUDA tensors travel; the same today. [CUDA tensors](cuda.md)",
        "`auto`, `nccl`, `tcp`: how CUDA tensors travel; `auto`: NCCL where every rank has a GPU of its own and NCCL loads. "
        "[CUDA tensors](cuda.md)",
    ),
)
sub(
    "docs/cuda.md",
    (
        '''## How they travel

`cuda_mode` ([options](options.md)) is `auto` or `tcp`; both are the same today. A CUDA tensor is copied to pinned memory of the host,
goes through the same engine as a CPU tensor (same algorithms, bits, codecs and errors) and is copied back:
''',
        '''## Which way they travel

`cuda_mode` ([options](options.md)), the same on all ranks:

| | |
|---|---|
| `auto`, the default | by NCCL where every rank has a GPU of its own and NCCL, else through the host |
| `nccl` | by NCCL, or an error that names the rank and what it lacks |
| `tcp` | through the host |

All ranks take the same way. When a group is made, each tells whether torch has a GPU there and whether the CUDA library is beside the
extension. If all say yes, they meet once more at the group's first collective of a CUDA tensor: which GPU, and whether NCCL loads
(the one in the process, torch's `nvidia/nccl`, the system's; 2.14 or later). Ranks that share a GPU go through the host, as NCCL
refuses that. `wire_dtype` and the algorithms that NCCL lacks also lead there, or are an error with `nccl`.

## By NCCL

- `wait()` does not block: the current stream goes on behind NCCL's kernels, which run on a side stream behind what the caller's stream
  held. `get_future()` is complete at once, behind an event.
- NCCL moves the bytes; the group's engine numbers, compares, records and watches over the operations as over all others. A rank that
  calls another collective, or passes a CPU tensor, is a `COLLECTIVE_MISMATCH` on all ranks (seen after 200 ms); one that does not
  call is named at the deadline; what NCCL reports becomes the group's error on all ranks, and the group's error aborts the
  communicator. Since `wait()` only orders streams, an error may be raised by a later call.
- NCCL's unique id goes by a broadcast of the group, not through the store: it fails with the group and leaves no key behind.
- `algorithm` is `auto` (`ncclAllReduce`), `ring` or `direct`, the latter two with pycomm's reduce kernel, `direct` with fp32
  accumulation. Uneven all_gather and reduce_scatter, gather and scatter are several of NCCL's calls in one group.
- `barrier()` is the engine's, and says nothing of the device. Messages (`send`, `recv`) go through the host. One device a rank and
  group. `destroy_process_group()` waits up to 5 s for what is still on the device.
- PREMUL_SUM and dtypes that NCCL does not have raise `UnsupportedError`: `cuda_mode="tcp"` has them.

## Through the host

A CUDA tensor is copied to pinned memory of the host, goes through the same engine as a CPU tensor (same algorithms, shared memory
included, same bits, codecs and errors) and is copied back:
''',
    ),
    (
        '''  time. Operations take their place in the group's order when they are called, and begin when their bytes are on the host.
''',
        '''  time. Operations take their place in the group's order when they are called, and begin when their bytes are on the host. To the other
  ranks this one is late until then, so they need not know whose tensors are on GPUs, over TCP and in shared memory alike; in shared
  memory an operation also waits for those that were called before it. An operation whose bytes never leave the device, because its
  stream is stuck, does not end.
''',
    ),
    (
        '''- **NCCL**, loaded at run time (torch's own first, 2.14 or later): all collectives on a side stream behind events, non-blocking
  communicators, deadlines, abort; all_reduce as `ncclAllReduce`, as a ring, or `direct` with fp32 accumulation, the latter two on
  `ncclSend` and `ncclRecv` with the reduce kernel. Tested against an NCCL on host memory for 2 to 5 ranks.
''',
        "",
    ),
    (
        '''- `cuda_mode="nccl"`: the communicator is there, its way into torch's collectives is not.
''',
        '''- A coalescing manager's collectives are NCCL calls one by one, not one NCCL group.
''',
    ),
    (
        '''- One operation is copied as a whole''',
        '''- Through the host, one operation is copied as a whole''',
    ),
)

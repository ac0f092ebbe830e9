import shutil


def sub(path, *pairs):
    s = open(path).read()
    for a, b in pairs:
        assert s.count(a) == 1, (path, a, s.count(a))
        s = s.replace(a, b)
    open(path, "w").write(s)


shutil.copy("/tmp/cuda-nccl/fake_nccl.cc", "tests/python/fake_cuda/fake_nccl.cc")
shutil.copy("/tmp/cuda-nccl/test_cuda_nccl.py", "tests/python/test_cuda_nccl.py")
sub(
    "tests/cpp/cuda/async_device.h",
    (
        "  /// Until everything put onto the stream so far has been done.\n",
        '''  /// Does `task` when the stream has come to it.
  void run(Stream stream, std::function<void()> task) {
    put(stream, std::move(task));
  }
  /// Until everything put onto the stream so far has been done.
''',
    ),
)
sub(
    "tests/python/fake_cuda/fake_cuda.cc",
    (
        '''  bool isCapturing(pycomm::cuda::Stream stream) override {
    return device().isCapturing(stream);
  }
''',
        '''  bool isCapturing(pycomm::cuda::Stream stream) override {
    return device().isCapturing(stream);
  }
  std::string deviceUuid(int) override {
    return uuid;
  }
''',
    ),
    (
        "thread_local bool capturing = false;\n",
        '''thread_local bool capturing = false;
std::string uuid = "process " + std::to_string(getpid()); // each rank has a GPU of its own unless a test says otherwise
''',
    ),
    ("#include <c10/core/DeviceGuard.h>\n", "#include <unistd.h>\n\n#include <c10/core/DeviceGuard.h>\n"),
    ("#include <memory>\n", "#include <functional>\n#include <memory>\n#include <string>\n"),
    (
        'extern "C" {\n',
        '''void putOnFakeStream(void* stream, std::function<void()> task) {
  device().run(stream, std::move(task));
}

extern "C" {
''',
    ),
    (
        "/// How often memory was marked",
        '''/// Which GPU this process says it has.
FAKE_EXPORT void fake_set_uuid(const char* text) {
  uuid = text;
}
/// How often memory was marked''',
    ),
)
sub(
    "tests/python/fake_cuda_device.py",
    (
        '''        ROOT / "tests/python/fake_cuda/fake_cuda.cc",
''',
        '''        *sorted((ROOT / "tests/python/fake_cuda").glob("*.cc")),
''',
    ),
    (
        '''    """The fake library in this process. Make one before the group whose tensors it serves."""

    def __init__(self, library: Path) -> None:
''',
        '''    """The fake library in this process. Make one before the group whose tensors it serves.

    ``nccl``: the library is also the NCCL that pycomm finds.
    """

    def __init__(self, library: Path, nccl: bool = False) -> None:
''',
    ),
    (
        '''        _extension.CUDA_LIBRARY = library
''',
        '''        _extension.CUDA_LIBRARY = library
        if nccl:
            _extension.NCCL_LIBRARIES = [library]
            torch.cuda.is_available = lambda: True
''',
    ),
    (
        '''import numpy as np
import torch
''',
        '''import numpy as np
import pytest
import torch
''',
    ),
    (
        '''def _finish(compiler''',
        '''def build_or_skip(folder: Path) -> Path:
    """``build``, where it has a use."""
    if torch.cuda.is_available():
        pytest.skip("this torch has real CUDA devices: test_cuda.py uses them")
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return build(folder)


def _finish(compiler''',
    ),
    ("import shlex\n", "import shlex\nimport shutil\n"),
)
sub(
    "tests/python/test_cuda_staging.py",
    (
        '''@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.cuda.is_available():
        pytest.skip("this torch has real CUDA devices: test_cuda.py uses them")
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return build(tmp_path_factory.mktemp("fake_cuda"))


''',
        "",
    ),
    ("from fake_cuda_device import Device, build\n", "from fake_cuda_device import Device\n"),
    ("import shutil\n", ""),
)
path = "tests/python/test_cuda_staging.py"
s = open(path).read()
s = s.replace("(library: Path)", "(fake_cuda: Path)").replace("(library: Path, tmp_path: Path)", "(fake_cuda: Path, tmp_path: Path)")
s = s.replace("args=(str(library),)", "args=(str(fake_cuda),)").replace("args=(str(library), missing)", "args=(str(fake_cuda), missing)")
s = s.replace("CudaTable(library)", "CudaTable(fake_cuda)")
open(path, "w").write(s)
print("now add the session fixture fake_cuda to tests/python/conftest.py")

#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "fake_cudart/cuda_runtime_api.h"

/// CUDA's runtime without a GPU, as strict as CUDA may be:
///
/// - Memory of the device is read and written by kernels and copies alone (memory.h); pointers that were not given out are refused.
/// - Streams are queues. One thread does what is at their heads, in an order, and after pauses, drawn from a seed ($FAKE_CUDA_SEED, else
///   a new one a process, printed). Nothing but events orders two streams.
/// - While a thread captures in global mode, the calls that CUDA calls unsafe fail on every thread that has not exchanged its capture
///   mode, and break the capture.
/// - An event is not queried while another thread waits for the device: the query waits, too, as it may in CUDA's driver.
/// - Each thread has a current device. Kernels go onto streams of that one, events onto streams of their own.
/// - A stream's callback may call nothing of CUDA's.
namespace fake_cuda {

inline constexpr int kDevices = 2;

/// A stream by number: CUDA's default stream of the device is 0, which has no handle of its own.
[[nodiscard]] cudaStream_t streamOf(int device, int64_t number);

/// Runs when the stream has come to it: false means not yet, and it is called again. `broken`: the device is, nothing is to be done.
using Task = std::function<bool(bool broken)>;
void put(cudaStream_t stream, Task task);

/// Memory as torch's allocator hands it out: free, to the stream that was current when it was made, at once when it is given back; and
/// when the streams that recordUse() named have finished their work so far. Its bytes are wrong from there on.
[[nodiscard]] void* allocate(size_t nbytes, cudaStream_t stream);
void giveBack(void* ptr);
void recordUse(const void* ptr, cudaStream_t stream);
/// Whether recordUse() ever named this stream for the memory that begins here. No address is given out twice.
[[nodiscard]] bool wasUsedOn(const void* ptr, cudaStream_t stream);

// What tests do to the device, and ask it.
void hold(cudaStream_t stream); ///< nothing more happens on it, as behind a kernel that does not end, until letGo()
void holdCopies(int count); ///< the stream that copies next does so many copies, and no more until letGo()
void letGo();
void breakDown(); ///< every call fails from here on, and every callback gets the error
void mend(); ///< for the next test
void beginCapture(cudaStreamCaptureMode mode); ///< of the calling thread, on its current stream
[[nodiscard]] bool endCapture(); ///< whether it was not broken
void setCapability(int major);
void setUuid(const std::string& text);
[[nodiscard]] bool hasContext(int device); ///< something was done that makes one
[[nodiscard]] int launches(); ///< kernels that were put onto streams
[[nodiscard]] long copiedNbytes();
[[nodiscard]] int queries(); ///< calls of cudaEventQuery
[[nodiscard]] uint64_t seed();
/// For the collectives of a library that is not CUDA's: where kernels find these bytes, or null, and what is wrong goes to stderr.
[[nodiscard]] char* kernelBytes(const void* ptr, size_t nbytes);
/// A number below `limit`, of the seed.
[[nodiscard]] uint32_t draw(uint32_t limit);

} // namespace fake_cuda

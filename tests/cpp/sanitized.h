#pragma once

#if defined(__has_feature) // clang's way of saying it
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PYCOMM_TEST_SANITIZED 1
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PYCOMM_TEST_SANITIZED 1
#endif

namespace pycomm::testing {

/// Whether each access to memory is watched, and costs ten to twenty times as much.
#if defined(PYCOMM_TEST_SANITIZED)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// Tests with many cases try all of them if kInFull (tools/cpp.py's flavours *_full), and far fewer if kFewerSizes.
#if defined(PYCOMM_TEST_IN_FULL)
inline constexpr bool kInFull = true;
#else
inline constexpr bool kInFull = false;
#endif
inline constexpr bool kFewerSizes = kSanitized && !kInFull;

} // namespace pycomm::testing

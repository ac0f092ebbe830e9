#pragma once

#include <exception>

#include "base/error.h"

namespace pycomm {

// From a torch-free error to a Python exception. A C++ exception class would arrive in Python as torch's bare base class, and pybind
// calls no translator for an exception out of loss.backward(): so these functions make the Python object.

/// The exception to throw, or to put into a future, for a record. Takes the interpreter's lock: call it with no lock held and never
/// on a data loop. While the process is ending it is a plain C++ exception.
[[nodiscard]] std::exception_ptr toException(const ErrorRecord& record);

/// Whether this is the Python exception for `code`.
[[nodiscard]] bool standsFor(const std::exception& error, ErrorCode code);

/// Whether this is one of pycomm's own Python exceptions: no signal handler's, nor a hook's.
[[nodiscard]] bool standsForSome(const std::exception& error);

/// As BaseException.add_note() of Python 3.11; older tracebacks do not show it. Does nothing to an exception that is not Python's.
void addNote(const std::exception& error, const std::string& note);

/// Throws toException(record).
[[noreturn]] void throwToPython(const ErrorRecord& record);

/// Signals reach Python's handlers on this thread only.
[[nodiscard]] bool onMainThread() noexcept;

/// Runs Python's signal handlers if a signal is pending and this is the main thread. Raises their exception, such as KeyboardInterrupt.
void checkSignals();

/// Whether the interpreter's lock can be taken: the interpreter runs, and is not ending.
[[nodiscard]] bool interpreterIsUsable();

/// Remembers the classes (name of code -> class) that pycomm.errors defines; a Python dict, borrowed. Needs the lock.
void setExceptionTypes(void* dict);

} // namespace pycomm

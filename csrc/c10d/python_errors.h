#pragma once

#include <exception>

#include "base/error.h"

namespace pycomm {

// Where a torch-free error meets Python. A C++ exception class would arrive in Python as torch's bare base class, and a pybind
// translator is not asked when the exception comes out of loss.backward(): so the Python object is made here.

/// The exception to throw, or to put into a future, for a record. Takes the interpreter's lock: call it with no lock held and never
/// on a lane. While the interpreter is ending it is a plain C++ exception.
[[nodiscard]] std::exception_ptr toException(const ErrorRecord& record);

/// Whether this is the exception of Python's that stands for `code`.
[[nodiscard]] bool standsFor(const std::exception& error, ErrorCode code);

/// What BaseException.add_note() does since Python 3.11; before, tracebacks do not show it. Nothing if it is none of Python's.
void addNote(const std::exception& error, const std::string& note);

/// Throws toException(record).
[[noreturn]] void throwToPython(const ErrorRecord& record);

/// Raises KeyboardInterrupt (or whatever a signal handler raised) if a signal waits and this is the main thread.
void checkSignals();

/// Whether the interpreter's lock can be asked for: it runs, and is not ending.
[[nodiscard]] bool interpreterIsUsable();

/// Remembers the classes (name of code -> class) that pycomm.errors defines; a Python dict, borrowed. Needs the lock.
void setExceptionTypes(void* dict);

} // namespace pycomm

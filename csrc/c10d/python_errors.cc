#include "c10d/python_errors.h"

#include <pybind11/pybind11.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

#include "c10d/process_end.h"
#include "c10d/record_dict.h"

namespace py = pybind11;

namespace pycomm {
namespace {

// Never freed: native threads may look at it until the process ends.
py::object& exceptionTypes() {
  static py::object* types = new py::object();
  return *types;
}

} // namespace

bool interpreterIsUsable() {
  if (Py_IsInitialized() == 0) {
    return false;
  }
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() == 0;
#else
  return _Py_IsFinalizing() == 0;
#endif
}

void setExceptionTypes(void* dict) {
  exceptionTypes() = py::reinterpret_borrow<py::object>(static_cast<PyObject*>(dict));
}

std::exception_ptr toException(const ErrorRecord& record) {
  if (!mayTakeGil()) {
    return std::make_exception_ptr(std::runtime_error(record.text()));
  }
  const py::gil_scoped_acquire lock;
  try {
    const py::object& types = exceptionTypes();
    const py::str code(errorCodeName(record.code));
    if (!types || !types.contains(code)) {
      return std::make_exception_ptr(std::runtime_error(record.text()));
    }
    const py::object type = types[code];
    const py::object error = type(record.text(), recordDict(record));
    PyErr_SetObject(type.ptr(), error.ptr());
    return std::make_exception_ptr(py::error_already_set());
  } catch (py::error_already_set& error) { // the class itself failed: tell that
    return std::make_exception_ptr(error);
  }
}

bool standsFor(const std::exception& error, ErrorCode code) {
  const auto* python = dynamic_cast<const py::error_already_set*>(&error);
  if (python == nullptr || !mayTakeGil()) {
    return false;
  }
  const py::gil_scoped_acquire lock;
  const py::object& types = exceptionTypes();
  const py::str name(errorCodeName(code));
  return types && types.contains(name) && py::isinstance(python->value(), types[name]);
}

bool standsForSome(const std::exception& error) {
  const auto* python = dynamic_cast<const py::error_already_set*>(&error);
  if (python == nullptr || !mayTakeGil()) {
    return false;
  }
  const py::gil_scoped_acquire lock;
  const py::object& types = exceptionTypes();
  return types && py::isinstance(python->value(), py::tuple(types.attr("values")()));
}

void addNote(const std::exception& error, const std::string& note) {
  const auto* python = dynamic_cast<const py::error_already_set*>(&error);
  if (python == nullptr || !mayTakeGil()) {
    return;
  }
  const py::gil_scoped_acquire lock;
  const py::object value = python->value();
  py::list notes(py::getattr(value, "__notes__", py::list()));
  notes.append(note);
  py::setattr(value, "__notes__", notes);
}

void throwToPython(const ErrorRecord& record) {
  std::rethrow_exception(toException(record));
}

bool onMainThread() noexcept {
  return ::syscall(SYS_gettid) == ::getpid();
}

void checkSignals() {
  // Python runs signal handlers on the main thread only, so no other one needs to ask for the lock.
  if (!onMainThread() || !interpreterIsUsable()) {
    return;
  }
  const py::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

} // namespace pycomm

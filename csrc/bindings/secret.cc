#include "bindings/secret.h"

#include <memory>
#include <string>

#include "c10d/raising.h"
#include "transport/secure/secret.h"

namespace py = pybind11;

namespace pycomm {

// The bytes of a secret never become a Python object: those cannot be wiped, and a traceback's variables, a pickle or a debugger
// shows them.
void bindSecret(py::module_& m) {
  py::class_<Secret, std::shared_ptr<Secret>>(m, "Secret")
      .def_static(
          "read_file",
          [](const std::string& path) {
            return raising([&] {
              const py::gil_scoped_release no_gil; // a file server may be slow
              return std::make_shared<Secret>(Secret::readFile(path));
            });
          },
          py::arg("path"))
      .def_static(
          "parse",
          [](const std::string& text, const std::string& where) {
            return raising([&] { return std::make_shared<Secret>(Secret::parse(text, where)); });
          },
          py::arg("text"),
          py::arg("where"))
      .def_static(
          "generate_file",
          [](const std::string& path) {
            return raising([&] {
              const py::gil_scoped_release no_gil;
              auto secret = std::make_shared<Secret>(Secret::generate());
              secret->writeFile(path);
              return secret;
            });
          },
          py::arg("path"))
      .def_property_readonly("key_id", &Secret::keyId);
}

} // namespace pycomm

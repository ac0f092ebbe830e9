#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "bindings/bindings.h"
#include "c10d/raising.h"
#include "c10d/store_adapter.h"
#include "c10d/without_gil.h"
#include "transport/rendezvous/notices.h"
#include "transport/rendezvous/sealed_store.h"
#include "transport/secure/secret.h"

namespace py = pybind11;

namespace pycomm {

// The bytes of a secret file never become a Python object: Python cannot wipe those, and a traceback's variables, a pickle or a
// debugger shows them. parse() takes a str, for PYCOMM_SECRET, which is in the environment of the process anyway.
void bindSecret(py::module_& m) {
  py::class_<Secret, std::shared_ptr<Secret>>(m, "Secret")
      .def_static(
          "read_file",
          [](const std::string& path) {
            return raising([&] {
              const WithoutGil no_gil; // a file server may be slow
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
              const WithoutGil no_gil;
              auto secret = std::make_shared<Secret>(Secret::generate());
              secret->writeFile(path);
              return secret;
            });
          },
          py::arg("path"))
      .def(
          "seal",
          [](const Secret& secret, const std::string& key, const std::string& value) {
            return raising([&] { return Seal(secret).sealed(key, value); });
          },
          py::arg("key"),
          py::arg("value"))
      .def(
          "open",
          [](const Secret& secret, const std::string& key, const std::string& text) {
            return raising([&] { return Seal(secret).opened(key, text); });
          },
          py::arg("key"),
          py::arg("text"))
      .def_property_readonly("key_id", &Secret::keyId);
  m.def(
      "post_notice",
      [](const c10::intrusive_ptr<c10d::Store>& store,
         const std::string& group_name,
         const std::string& life,
         int rank,
         const std::string& host,
         const std::string& reason) {
        raising([&] {
          StoreAdapter adapter(store);
          postNotice(adapter, group_name, life, {rank, host, reason});
        });
      },
      py::arg("store"),
      py::arg("group_name"),
      py::arg("life"),
      py::arg("rank"),
      py::arg("host"),
      py::arg("reason"),
      py::call_guard<WithoutGil>());
  m.def(
      "refuse_sealed",
      [](const std::string& key, const std::string& value) { raising([&] { refuseSealed(key, value); }); },
      py::arg("key"),
      py::arg("value"));
}

} // namespace pycomm

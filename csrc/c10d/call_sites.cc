#include "c10d/call_sites.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <utility>

#include "base/printable.h"
#include "c10d/call_tag.h"
#include "c10d/process_end.h"
#include "c10d/python_errors.h"

namespace py = pybind11;

namespace pycomm {
namespace {

// Enough to tell calls apart that go through a helper of the user's own, and few enough that how a rank was launched (a script, a
// child of multiprocessing) is rarely among them.
constexpr int kFrames = 3;
constexpr int64_t kAskMs = 500;
constexpr size_t kMaxTextNbytes = 512;
const std::string kTagText = ", tag ";

std::string keyOf(uint32_t tag) {
  return "call_site/" + std::to_string(tag);
}

/// Packages that are installed inside a folder are not part of it.
bool liesIn(const std::string& folder, const std::string& file) {
  return file.rfind(folder, 0) == 0 && file.find("-packages/", folder.size()) == std::string::npos;
}

std::string textOfFrame(PyFrameObject* frame, const py::object& code, const std::string& file) {
  const size_t slash = file.rfind('/');
  return (slash == std::string::npos ? file : file.substr(slash + 1)) + ':' +
      std::to_string(PyFrame_GetLineNumber(frame)) + " in " + py::str(code.attr("co_name")).cast<std::string>();
}

} // namespace

CallSites::CallSites(std::shared_ptr<Store> store, std::vector<std::string> skipped)
    : store_(std::move(store)), skipped_(std::move(skipped)) {}

std::string CallSites::siteHere() const {
  if (!mayTakeGil()) {
    return "";
  }
  const py::gil_scoped_acquire lock;
  std::string site;
  int taken = 0;
  auto frame =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  while (frame && taken < kFrames) {
    auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    const auto file = py::str(code.attr("co_filename")).cast<std::string>();
    const bool skip = file.empty() || file[0] == '<' ||
        std::any_of(skipped_.begin(), skipped_.end(), [&](const std::string& folder) { return liesIn(folder, file); });
    if (!skip) {
      site += (taken == 0 ? "" : ", from ") + textOfFrame(raw, code, file);
      ++taken;
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return site;
}

uint32_t CallSites::tagHere() {
  const std::string site = siteHere();
  if (site.empty()) {
    return 0;
  }
  const uint32_t tag = CallTag::of(site);
  {
    const std::lock_guard lock(mutex_);
    if (!texts_.emplace(tag, site).second) {
      return tag;
    }
  }
  try {
    store_->set(keyOf(tag), site); // before the operation starts, so before anybody can ask
  } catch (const Error&) { // the store is gone: the others print the number
  }
  return tag;
}

std::string CallSites::textOf(uint32_t tag) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = texts_.find(tag);
    if (found != texts_.end()) {
      return found->second;
    }
  }
  std::string text;
  try {
    text = printable(store_->get(keyOf(tag), Deadline::after(kAskMs)), kMaxTextNbytes);
  } catch (const Error&) { // a DDP bucket's, or the store is gone
  }
  const std::lock_guard lock(mutex_);
  return texts_.emplace(tag, text).first->second;
}

void CallSites::explain(ErrorRecord& record) {
  if (record.code != ErrorCode::CollectiveMismatch) {
    return;
  }
  for (size_t at = record.summary.find(kTagText); at != std::string::npos; at = record.summary.find(kTagText, at + 1)) {
    const size_t begin = at + kTagText.size();
    const size_t end = std::min(record.summary.find_first_not_of("0123456789", begin), record.summary.size());
    if (end == begin || end - begin > 10) {
      continue;
    }
    const std::string text = textOf(static_cast<uint32_t>(std::stoull(record.summary.substr(begin, end - begin))));
    if (!text.empty()) {
      record.summary.replace(at, end - at, ", called at " + text);
    }
  }
}

} // namespace pycomm

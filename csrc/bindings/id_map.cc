#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "c10d/raising.h"
#include "c10d/without_gil.h"
#include "idmap/id_map.h"
#include "idmap/mix.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// IdMap over tensors, which it keeps alive. One thread at a time.
class TensorIdMap {
 public:
  TensorIdMap(const IdMap::Shape& shape, std::vector<at::Tensor> state) : state_(std::move(state)) {
    raising([&] {
      for (const at::Tensor& tensor : state_) {
        int64_t* const data = words(tensor);
        if (tensor.numel() != shape.rows) {
          throw Error(ErrorCode::InvalidArgument, "A tensor of an id map's state has another number of rows.", "");
        }
        arrays_.push_back(data);
      }
      arrays_.resize(5); // the candidates' are not needed if there are none
      map_ = std::make_unique<IdMap>(shape, IdMap::State{arrays_[0], arrays_[1], arrays_[2], arrays_[3], arrays_[4]});
    });
  }

  void learn(const at::Tensor& mixed) {
    const WithoutGil no_gil;
    raising([&] { map_->learn(words(mixed), static_cast<size_t>(mixed.numel())); });
  }

  [[nodiscard]] at::Tensor find(const at::Tensor& mixed) const {
    const WithoutGil no_gil;
    at::Tensor rows;
    raising([&] {
      rows = at::empty_like(mixed);
      map_->find(words(mixed), static_cast<size_t>(mixed.numel()), words(rows));
    });
    return rows;
  }

  [[nodiscard]] at::Tensor takeReplaced() {
    const std::vector<int64_t> rows = map_->takeReplaced();
    at::Tensor tensor = at::empty({static_cast<int64_t>(rows.size())}, at::kLong);
    std::copy(rows.begin(), rows.end(), tensor.mutable_data_ptr<int64_t>());
    return tensor;
  }

  [[nodiscard]] int64_t used() const noexcept {
    return map_->used();
  }
  [[nodiscard]] int64_t turnedAway() const noexcept {
    return map_->turnedAway();
  }

  static int64_t* words(const at::Tensor& tensor) {
    if (!tensor.device().is_cpu() || tensor.scalar_type() != at::kLong || !tensor.is_contiguous()) {
      throw Error(ErrorCode::InvalidArgument, "An id map takes contiguous int64 tensors on the CPU.", "");
    }
    return tensor.mutable_data_ptr<int64_t>();
  }

 private:
  const std::vector<at::Tensor> state_;
  std::vector<int64_t*> arrays_;
  std::unique_ptr<IdMap> map_;
};

template <typename Mix>
at::Tensor eachOf(const at::Tensor& ids, const Mix& mix) {
  const WithoutGil no_gil;
  at::Tensor mixed;
  raising([&] {
    const int64_t* const from = TensorIdMap::words(ids);
    mixed = at::empty_like(ids);
    int64_t* const into = TensorIdMap::words(mixed);
    for (int64_t at = 0; at < ids.numel(); ++at) {
      if (from[at] < 0) {
        throw Error(
            ErrorCode::InvalidArgument,
            "Id " + std::to_string(from[at]) + " is negative.",
            "ids from 0 to 2**63 - 1; of hashes, ids & (2**63 - 1)");
      }
      into[at] = static_cast<int64_t>(mix(static_cast<uint64_t>(from[at])));
    }
  });
  return mixed;
}

} // namespace

void bindIdMap(py::module_& m) {
  py::class_<TensorIdMap>(m, "IdMap")
      .def(
          py::init([](std::vector<at::Tensor> state,
                      int64_t rows,
                      int32_t buckets,
                      int32_t first_bucket,
                      int32_t all_buckets,
                      int64_t admit_after) {
            if (state.size() != (admit_after > 1 ? 5 : 2)) {
              throw py::value_error("an id map's state is two tensors, or five if admit_after is more than 1");
            }
            IdMap::Shape shape;
            shape.rows = rows;
            shape.buckets = buckets;
            shape.first_bucket = first_bucket;
            shape.all_buckets = all_buckets;
            shape.admit_after = admit_after;
            return std::make_unique<TensorIdMap>(shape, std::move(state));
          }),
          py::arg("state"),
          py::kw_only(),
          py::arg("rows"),
          py::arg("buckets"),
          py::arg("first_bucket"),
          py::arg("all_buckets"),
          py::arg("admit_after"))
      .def("learn", &TensorIdMap::learn, py::arg("mixed"))
      .def("find", &TensorIdMap::find, py::arg("mixed"))
      .def("take_replaced", &TensorIdMap::takeReplaced)
      .def_property_readonly("used", &TensorIdMap::used)
      .def_property_readonly("turned_away", &TensorIdMap::turnedAway);
  m.def("mix_ids", [](const at::Tensor& ids) { return eachOf(ids, mixId); }, py::arg("ids"));
  m.def("unmix_ids", [](const at::Tensor& mixed) { return eachOf(mixed, unmixId); }, py::arg("mixed"));
}

} // namespace pycomm

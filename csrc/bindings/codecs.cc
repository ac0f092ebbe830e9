#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "c10d/call_tag.h"
#include "c10d/dtypes.h"
#include "c10d/exact_sums.h"
#include "c10d/raising.h"
#include "c10d/without_gil.h"
#include "numeric/codec.h"

namespace py = pybind11;

namespace pycomm {
namespace {

Codec lossyCodec(const std::string& name) {
  const auto codec = codecNamed(name);
  if (!codec || *codec == Codec::None) {
    throw Error(ErrorCode::InvalidArgument, "'" + name + "' is not a codec.", "bf16, fp16 or int8");
  }
  return *codec;
}

void require(bool holds, const char* what) {
  if (!holds) {
    throw Error(ErrorCode::InvalidArgument, what, "pass contiguous CPU tensors of the size that the codec needs");
  }
}

bool isPlain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous();
}

/// The codes of `values`, and how many of them overflowed. `error`: where given, takes what the codes lose; it may be `values`.
py::tuple encodeTensor(const std::string& name, const at::Tensor& values, const std::optional<at::Tensor>& error) {
  at::Tensor codes;
  size_t overflows = 0;
  {
    const WithoutGil no_gil;
    raising([&] {
      const Codec codec = lossyCodec(name);
      require(isPlain(values), "the values must be a contiguous CPU tensor.");
      codes = at::empty({encodedNbytes(codec, values.numel())}, at::kByte);
      const auto numel = static_cast<size_t>(values.numel());
      if (!error) {
        overflows = encode(codec, codes.data_ptr(), toDType(values.scalar_type()), values.data_ptr(), numel);
        return;
      }
      require(
          isPlain(*error) && error->scalar_type() == at::kFloat && values.scalar_type() == at::kFloat &&
              error->numel() == values.numel(),
          "values and error are not both float32 and of one size.");
      overflows = encodeWithError(
          codec, codes.data_ptr(), values.const_data_ptr<float>(), error->mutable_data_ptr<float>(), numel);
    });
  }
  return py::make_tuple(codes, overflows);
}

/// output = the sum of the decoded rows of `codes`, in their order, divided by `divisor`.
void sumDecodedTensors(
    const std::string& name,
    const std::vector<at::Tensor>& codes,
    const at::Tensor& output,
    int64_t divisor) {
  raising([&] {
    const Codec codec = lossyCodec(name);
    require(isPlain(output), "the output is not contiguous, or not on the CPU.");
    std::vector<const void*> sources;
    for (const at::Tensor& row : codes) {
      require(
          isPlain(row) && row.scalar_type() == at::kByte && row.numel() == encodedNbytes(codec, output.numel()),
          "a row of codes does not have the output's size.");
      sources.push_back(row.const_data_ptr());
    }
    static_cast<void>(sumDecoded(
        codec,
        toDType(output.scalar_type()),
        output.data_ptr(),
        sources.data(),
        sources.size(),
        static_cast<size_t>(output.numel()),
        divisor));
  });
}

/// `with ExactSumsScope(about):` see ExactSums. `about`: the subject of the sums, which ranks compare; empty: none. See CallTag.
class ExactSumsScope {
 public:
  explicit ExactSumsScope(const std::string& about) : tag_(about.empty() ? 0 : CallTag::of(about)) {}

  void enter() {
    about_ = tag_ == 0 ? nullptr : std::make_unique<CallTag>(tag_);
    scope_ = std::make_unique<ExactSums>();
  }
  void exit() {
    scope_.reset();
    about_.reset();
  }

 private:
  uint32_t tag_;
  std::unique_ptr<CallTag> about_; ///< entered and left on one thread, as is the next
  std::unique_ptr<ExactSums> scope_;
};

} // namespace

void bindCodecs(py::module_& m) {
  py::class_<ExactSumsScope>(m, "ExactSums")
      .def(py::init<const std::string&>(), py::arg("about") = "")
      .def(
          "__enter__",
          [](py::object self) {
            self.cast<ExactSumsScope&>().enter();
            return self;
          })
      .def("__exit__", [](ExactSumsScope& self, const py::args&) { self.exit(); });
  m.attr("CODEC_BLOCK") = kCodecBlock;
  m.def(
      "encoded_nbytes",
      [](const std::string& name, int64_t numel) {
        return raising([&] { return encodedNbytes(lossyCodec(name), numel); });
      },
      py::arg("codec"),
      py::arg("numel"));
  m.def("encode", &encodeTensor, py::arg("codec"), py::arg("values"), py::arg("error") = py::none());
  m.def(
      "sum_decoded",
      &sumDecodedTensors,
      py::arg("codec"),
      py::arg("codes"),
      py::arg("output"),
      py::arg("divisor") = 1,
      py::call_guard<WithoutGil>());
}

} // namespace pycomm

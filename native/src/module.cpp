// The Python module `headstart._native`: plain addresses in, no torch. The caller keeps tensors alive and contiguous.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "operations.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headstart;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "Headstart's CPU kernels. Addresses are integers (`Tensor.data_ptr()`), 0 for none; strides count elements.";
  module.def("instruction_sets", &Runtime::instruction_sets, "What this machine runs, best first.");

  nb::class_<Runtime>(module, "Runtime", "Compute threads and their kernels. One call at a time.")
      .def(nb::init<int, std::vector<int>, const std::string&>(), "num_threads"_a, "cpus"_a = std::vector<int>{},
           "instruction_set"_a = "")
      .def_prop_ro("num_threads", [](Runtime& runtime) { return runtime.threads().size(); })
      .def_prop_ro("instruction_set", [](const Runtime& runtime) { return std::string(runtime.kernels().name); });

  nb::enum_<Mix>(module, "Mix", "The multiplications that linear layers are made of, with what sums them.")
      .value("FLOAT32", Mix::kFloat32)
      .value("INT8", Mix::kInt8)
      .value("INT4", Mix::kInt4);

  module.def("multiply_most",
             [](Runtime& runtime, Mix mix, int items, int64_t rounds) {
               return runtime.kernels().multiply_most(runtime.threads(), mix, items, rounds);
             },
             nb::call_guard<nb::gil_scoped_release>(), "runtime"_a, "mix"_a, "items"_a, "rounds"_a,
             "Multiply in registers, as fast as the instruction set can. Returns how many multiplications it did.");
  module.def("read_most",
             [](Runtime& runtime, uintptr_t data, size_t slice_bytes, int num_slices, int repeats, int streams) {
               const ReadArgs args{at<const uint8_t>(data), slice_bytes, num_slices, repeats, streams};
               runtime.kernels().read_most(runtime.threads(), args);
             },
             nb::call_guard<nb::gil_scoped_release>(), "runtime"_a, "data"_a, "slice_bytes"_a, "num_slices"_a,
             "repeats"_a, "streams"_a, "Read slices of memory, each several times by one thread, and do nothing else.");

  nb::enum_<Placement>(module, "Placement", "Where rows go: one after the other, or gate and up panels in turns.")
      .value("PLAIN", Placement::kPlain)
      .value("GATE", Placement::kGate)
      .value("UP", Placement::kUp);

  nb::enum_<Format>(module, "Format")
      .value("FLOAT32", Format::kFloat32)
      .value("BFLOAT16", Format::kBfloat16)
      .value("FP8", Format::kFp8)
      .value("Q8_0", Format::kQ8_0)
      .value("Q4_0", Format::kQ4_0)
      .value("Q4_1", Format::kQ4_1);

  nb::class_<PackedWeight>(module, "PackedWeight", "A matrix [num_outputs, num_inputs] as the kernels read it.")
      .def(nb::init<Format, int, int>(), "format"_a, "num_outputs"_a, "num_inputs"_a)
      .def_prop_ro("num_bytes", &PackedWeight::num_bytes)
      .def("pack_floats",
           [](PackedWeight& self, Runtime& runtime, uintptr_t rows, int num_rows, int first_output, Placement placement) {
             self.pack_floats(runtime, at<const float>(rows), num_rows, first_output, placement);
           },
           nb::call_guard<nb::gil_scoped_release>(), "runtime"_a, "rows"_a, "num_rows"_a, "first_output"_a, "placement"_a)
      .def("pack_bfloats",
           [](PackedWeight& self, Runtime& runtime, uintptr_t rows, int num_rows, int first_output, Placement placement) {
             self.pack_bfloats(runtime, at<const uint16_t>(rows), num_rows, first_output, placement);
           },
           nb::call_guard<nb::gil_scoped_release>(), "runtime"_a, "rows"_a, "num_rows"_a, "first_output"_a, "placement"_a)
      .def("pack_fp8",
           [](PackedWeight& self, Runtime& runtime, uintptr_t codes, uintptr_t scales, int num_rows, int first_output,
              Placement placement) {
             self.pack_fp8(runtime, at<const uint8_t>(codes), at<const float>(scales), num_rows, first_output, placement);
           },
           nb::call_guard<nb::gil_scoped_release>(), "runtime"_a, "codes"_a, "scales"_a, "num_rows"_a, "first_output"_a,
           "placement"_a)
      .def("pack_groups",
           [](PackedWeight& self, Runtime& runtime, uintptr_t codes, uintptr_t scales, uintptr_t minimums, int num_rows,
              int first_output, Placement placement) {
             self.pack_groups(runtime, at<const uint8_t>(codes), at<const uint16_t>(scales), at<const uint16_t>(minimums),
                              num_rows, first_output, placement);
           },
           nb::call_guard<nb::gil_scoped_release>(), "runtime"_a, "codes"_a, "scales"_a, "minimums"_a, "num_rows"_a,
           "first_output"_a, "placement"_a)
      .def("unpack",
           [](const PackedWeight& self, Runtime& runtime, uintptr_t rows, int count, uintptr_t out) {
             self.unpack(runtime, at<const int64_t>(rows), count, at<float>(out));
           },
           nb::call_guard<nb::gil_scoped_release>(), "runtime"_a, "rows"_a, "count"_a, "out"_a);

  nb::class_<LinearLayer>(module, "LinearLayer", "out (+)= weight * norm(x) + bias")
      .def("__init__",
           [](LinearLayer* self, std::shared_ptr<PackedWeight> weight, uintptr_t bias, uintptr_t norm, float eps) {
             new (self) LinearLayer(std::move(weight), at<const float>(bias), at<const float>(norm), eps);
           },
           "weight"_a, "bias"_a, "norm"_a, "eps"_a)
      .def("run",
           [](const LinearLayer& self, Runtime& runtime, uintptr_t x, size_t x_stride, int rows, uintptr_t out,
              size_t out_stride, bool accumulate) {
             self.run(runtime, at<const float>(x), x_stride, rows, at<float>(out), out_stride, accumulate);
           },
           nb::call_guard<nb::gil_scoped_release>());

  nb::class_<GatedMlpLayer>(module, "GatedMlpLayer", "out (+)= down(silu(gate(norm(x))) * up(norm(x)))")
      .def("__init__",
           [](GatedMlpLayer* self, std::shared_ptr<PackedWeight> gate_up, uintptr_t gate_bias, uintptr_t up_bias,
              std::shared_ptr<PackedWeight> down, uintptr_t down_bias, uintptr_t norm, float eps) {
             new (self) GatedMlpLayer(std::move(gate_up), at<const float>(gate_bias), at<const float>(up_bias),
                                      std::move(down), at<const float>(down_bias), at<const float>(norm), eps);
           },
           "gate_up"_a, "gate_bias"_a, "up_bias"_a, "down"_a, "down_bias"_a, "norm"_a, "eps"_a)
      .def("run",
           [](const GatedMlpLayer& self, Runtime& runtime, uintptr_t x, size_t x_stride, int rows, uintptr_t out,
              size_t out_stride, bool accumulate) {
             self.run(runtime, at<const float>(x), x_stride, rows, at<float>(out), out_stride, accumulate);
           },
           nb::call_guard<nb::gil_scoped_release>());

  nb::enum_<KvFormat>(module, "KvFormat")
      .value("FLOAT32", KvFormat::kFloat32)
      .value("FLOAT16", KvFormat::kFloat16)
      .value("BFLOAT16", KvFormat::kBfloat16)
      .value("INT8", KvFormat::kInt8)
      .value("FP8", KvFormat::kFp8);

  nb::class_<AttentionShape>(module, "AttentionShape", "The attention layers of a model over one kind of KV pool.")
      .def(nb::init<KvFormat, int, int, int, int>(), "format"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
           "block_size"_a)
      .def_prop_ro("padded_dim", &AttentionShape::padded_dim)
      .def_prop_ro("block_bytes", &AttentionShape::block_bytes, "Bytes of one block of one layer.");

  nb::class_<QkNorm>(module, "QkNorm", "RMS norms of each query and key head.")
      .def("__init__",
           [](QkNorm* self, uintptr_t query, uintptr_t key, int head_dim, float eps) {
             new (self) QkNorm{std::vector<float>(at<const float>(query), at<const float>(query) + head_dim),
                               std::vector<float>(at<const float>(key), at<const float>(key) + head_dim), eps};
           },
           "query"_a, "key"_a, "head_dim"_a, "eps"_a);

  nb::class_<AttentionStep>(module, "AttentionStep", "Where a step's rows go and what they see.")
      .def("__init__",
           [](AttentionStep* self, const AttentionShape& shape, int num_rows, uintptr_t spans, int num_spans, uintptr_t cos,
              uintptr_t sin, uintptr_t slots, float query_scale, uintptr_t queries) {
             new (self) AttentionStep(shape, num_rows, at<const int64_t>(spans), num_spans, at<const float>(cos),
                                      at<const float>(sin), at<const int64_t>(slots), query_scale, at<float>(queries));
           },
           "shape"_a, "num_rows"_a, "spans"_a, "num_spans"_a, "cos"_a, "sin"_a, "slots"_a, "query_scale"_a, "queries"_a)
      .def("rotate_and_write",
           [](const AttentionStep& self, Runtime& runtime, uintptr_t layer, uintptr_t qkv, size_t qkv_stride, bool rotate,
              const QkNorm* norm) {
             self.rotate_and_write(runtime, at<uint8_t>(layer), at<const float>(qkv), qkv_stride, rotate, norm);
           },
           nb::call_guard<nb::gil_scoped_release>(), "runtime"_a, "layer"_a, "qkv"_a, "qkv_stride"_a, "rotate"_a,
           "norm"_a.none())
      .def("attend",
           [](const AttentionStep& self, Runtime& runtime, uintptr_t layer, uintptr_t out, size_t out_stride) {
             self.attend(runtime, at<const uint8_t>(layer), at<float>(out), out_stride);
           },
           nb::call_guard<nb::gil_scoped_release>(), "runtime"_a, "layer"_a, "out"_a, "out_stride"_a);
}

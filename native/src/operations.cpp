#include "operations.h"

#include <cstring>
#include <stdexcept>

#include <sys/mman.h>

#include "dispatch.h"

namespace headstart {

namespace {

constexpr size_t kHugePage = size_t(2) << 20;

const Kernels& find_kernels(const std::string& name) {
  for (const Kernels* kernels : usable_kernels()) {
    if (!name.empty() && name != kernels->name) continue;
    if (std::string(kernels->name) == "portable" || agrees_with_portable(*kernels)) return *kernels;
    if (!name.empty()) throw std::invalid_argument("the kernels for " + name + " compute wrong results on this machine");
  }
  throw std::invalid_argument("this machine does not run the instruction set " + name);
}

std::vector<float> copied(const float* from, size_t count, size_t padded) {
  if (from == nullptr) return {};
  std::vector<float> to(padded, 0.f);
  std::memcpy(to.data(), from, count * sizeof(float));
  return to;
}

const float* data_or_null(const std::vector<float>& values) { return values.empty() ? nullptr : values.data(); }

int padded_to_panels(int outputs) { return (outputs + kPanelOutputs - 1) / kPanelOutputs * kPanelOutputs; }

// The output at which row `row` is packed.
int output_of(int row, int first_output, Placement placement) {
  if (placement == Placement::kPlain) return first_output + row;
  const int panel = row / kPanelOutputs * 2 + (placement == Placement::kUp ? 1 : 0);
  return panel * kPanelOutputs + row % kPanelOutputs;
}

}  // namespace

Runtime::Runtime(int num_threads, std::vector<int> cpus, const std::string& instruction_set)
    : threads_(num_threads, std::move(cpus)), kernels_(&find_kernels(instruction_set)) {}

std::vector<std::string> Runtime::instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable_kernels()) names.emplace_back(kernels->name);
  return names;
}

PackedWeight::PackedWeight(Format format, int num_outputs, int num_inputs)
    : weight_{format, num_outputs, num_inputs, nullptr} {
  if (num_outputs < 1 || num_inputs < 1) throw std::invalid_argument("a weight has outputs and inputs");
  num_bytes_ = size_t(weight_.num_panels()) * weight_.panel_bytes();
  // Whole huge pages where it is worth it: a step reads every weight, and each small page costs an address translation.
  const size_t alignment = num_bytes_ >= kHugePage ? kHugePage : 64;
  const size_t size = (num_bytes_ + alignment - 1) / alignment * alignment;
  weight_.data = static_cast<uint8_t*>(std::aligned_alloc(alignment, size));
  if (weight_.data == nullptr) throw std::bad_alloc();
  if (alignment == kHugePage) madvise(weight_.data, size, MADV_HUGEPAGE);
  std::memset(weight_.data, 0, size);
}

PackedWeight::~PackedWeight() { std::free(weight_.data); }

template <class PackRow>
void PackedWeight::pack(Runtime& runtime, int num_rows, int first_output, Placement placement, PackRow&& pack_row) {
  if (num_rows < 0 || first_output < 0 ||
      (num_rows > 0 && output_of(num_rows - 1, first_output, placement) >= padded_to_panels(weight_.num_outputs))) {
    throw std::invalid_argument("the rows do not fit the packed weight");
  }
  // By panels, since the rows of one share bytes.
  const int lead = placement == Placement::kPlain ? first_output % kPanelOutputs : 0;
  runtime.threads().parallel((lead + num_rows + kPanelOutputs - 1) / kPanelOutputs, [&](int panel, int) {
    const int begin = std::max(0, panel * kPanelOutputs - lead);
    const int end = std::min(num_rows, (panel + 1) * kPanelOutputs - lead);
    for (int row = begin; row < end; row++) pack_row(row, output_of(row, first_output, placement));
  });
}

void PackedWeight::pack_floats(Runtime& runtime, const float* rows, int num_rows, int first_output,
                               Placement placement) {
  pack(runtime, num_rows, first_output, placement, [&](int row, int output) {
    pack_float_row(weight_, output, rows + size_t(row) * size_t(weight_.num_inputs));
  });
}

void PackedWeight::pack_bfloats(Runtime& runtime, const uint16_t* rows, int num_rows, int first_output,
                                Placement placement) {
  pack(runtime, num_rows, first_output, placement, [&](int row, int output) {
    pack_bfloat_row(weight_, output, rows + size_t(row) * size_t(weight_.num_inputs));
  });
}

void PackedWeight::pack_fp8(Runtime& runtime, const uint8_t* codes, const float* scales, int num_rows,
                            int first_output, Placement placement) {
  pack(runtime, num_rows, first_output, placement, [&](int row, int output) {
    pack_fp8_row(weight_, output, codes + size_t(row) * size_t(weight_.num_inputs), scales[row]);
  });
}

void PackedWeight::pack_groups(Runtime& runtime, const uint8_t* codes, const uint16_t* scales,
                               const uint16_t* minimums, int num_rows, int first_output, Placement placement) {
  const size_t groups = size_t(weight_.num_groups());
  const size_t row_bytes = groups * (is_nibbles(weight_.format) ? kGroup / 2 : kGroup);
  pack(runtime, num_rows, first_output, placement, [&](int row, int output) {
    const uint16_t* my_minimums = minimums == nullptr ? nullptr : minimums + size_t(row) * groups;
    pack_group_row(weight_, output, codes + size_t(row) * row_bytes, scales + size_t(row) * groups, my_minimums);
  });
}

void PackedWeight::unpack(Runtime& runtime, const int64_t* rows, int count, float* out) const {
  constexpr int kAtOnce = 8;
  runtime.threads().parallel((count + kAtOnce - 1) / kAtOnce, [&](int item, int) {
    for (int i = item * kAtOnce; i < std::min(count, (item + 1) * kAtOnce); i++) {
      unpack_row(weight_, int(rows[i]), out + size_t(i) * size_t(weight_.num_inputs));
    }
  });
}

LinearLayer::LinearLayer(std::shared_ptr<PackedWeight> weight, const float* bias, const float* norm, float eps)
    : weight_(std::move(weight)), eps_(eps) {
  const Weight& w = weight_->weight();
  bias_ = copied(bias, size_t(w.num_outputs), size_t(padded_to_panels(w.num_outputs)));
  norm_ = copied(norm, size_t(w.num_inputs), size_t(w.num_inputs));
}

void LinearLayer::run(Runtime& runtime, const float* x, size_t x_stride, int rows, float* out, size_t out_stride,
                      bool accumulate) const {
  if (rows <= 0) return;
  runtime.kernels().linear(runtime.threads(),
                           LinearArgs{&weight_->weight(), data_or_null(bias_), RowNorm{data_or_null(norm_), eps_}, x,
                                      x_stride, rows, out, out_stride, accumulate});
}

GatedMlpLayer::GatedMlpLayer(std::shared_ptr<PackedWeight> gate_up, const float* gate_bias, const float* up_bias,
                             std::shared_ptr<PackedWeight> down, const float* down_bias, const float* norm, float eps)
    : gate_up_(std::move(gate_up)), down_(std::move(down)), eps_(eps) {
  const Weight &first = gate_up_->weight(), &second = down_->weight();
  const int width = second.num_inputs;
  if (first.num_outputs != 2 * padded_to_panels(width)) throw std::invalid_argument("gate, up and down do not fit");
  if (gate_bias != nullptr || up_bias != nullptr) {
    gate_up_bias_.assign(size_t(first.num_outputs), 0.f);
    for (int row = 0; row < width; row++) {
      if (gate_bias != nullptr) gate_up_bias_[size_t(output_of(row, 0, Placement::kGate))] = gate_bias[row];
      if (up_bias != nullptr) gate_up_bias_[size_t(output_of(row, 0, Placement::kUp))] = up_bias[row];
    }
  }
  down_bias_ = copied(down_bias, size_t(second.num_outputs), size_t(padded_to_panels(second.num_outputs)));
  norm_ = copied(norm, size_t(first.num_inputs), size_t(first.num_inputs));
}

void GatedMlpLayer::run(Runtime& runtime, const float* x, size_t x_stride, int rows, float* out, size_t out_stride,
                        bool accumulate) const {
  if (rows <= 0) return;
  runtime.kernels().gated_mlp(
      runtime.threads(),
      MlpArgs{&gate_up_->weight(), data_or_null(gate_up_bias_), &down_->weight(), data_or_null(down_bias_),
              RowNorm{data_or_null(norm_), eps_}, x, x_stride, rows, out, out_stride, accumulate});
}

AttentionShape::AttentionShape(KvFormat format, int num_heads, int num_kv_heads, int head_dim, int block_size)
    : kv{format, num_kv_heads, head_dim, block_size}, num_heads(num_heads) {
  if (head_dim < 2 || head_dim > kMaxHeadDim || head_dim % 2 != 0) {
    throw std::invalid_argument("the head size must be an even number up to 256");
  }
  if (num_kv_heads < 1 || num_heads % num_kv_heads != 0 || block_size < 1) {
    throw std::invalid_argument("the query heads must be a multiple of the KV heads, the block size positive");
  }
}

AttentionStep::AttentionStep(const AttentionShape& shape, int num_rows, const int64_t* spans, int num_spans,
                             const float* cos, const float* sin, const int64_t* slots, float query_scale,
                             float* queries)
    : shape_(shape), num_rows_(num_rows), cos_(cos), sin_(sin), slots_(slots), query_scale_(query_scale),
      queries_(queries) {
  spans_.reserve(size_t(num_spans));
  for (int i = 0; i < num_spans; i++, spans += 4) {
    spans_.push_back(Span{int(spans[0]), int(spans[1]), int(spans[2]), reinterpret_cast<const int64_t*>(spans[3])});
  }
}

void AttentionStep::rotate_and_write(Runtime& runtime, uint8_t* layer, const float* qkv, size_t qkv_stride,
                                     bool rotate, const QkNorm* norm) const {
  runtime.kernels().rotate_and_write(
      runtime.threads(), shape_.kv, layer,
      RotateArgs{qkv, qkv_stride, num_rows_, shape_.num_heads, shape_.kv.num_kv_heads, shape_.kv.head_dim,
                 norm == nullptr ? nullptr : norm->query.data(), norm == nullptr ? nullptr : norm->key.data(),
                 norm == nullptr ? 0.f : norm->eps, rotate ? cos_ : nullptr, rotate ? sin_ : nullptr, slots_,
                 query_scale_, queries_});
}

void AttentionStep::attend(Runtime& runtime, const uint8_t* layer, float* out, size_t out_stride) const {
  runtime.kernels().attend(
      runtime.threads(), shape_.kv, layer,
      AttendArgs{queries_, shape_.num_heads, int(spans_.size()), spans_.data(), out, out_stride});
}

}  // namespace headstart

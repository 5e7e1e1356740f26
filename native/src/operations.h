// What Python holds: the compute threads with their instruction set, packed weights, prepared layers. Own their memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "kv.h"

namespace headstart {

// The compute threads and the kernels that run on them.
class Runtime {
 public:
  // `instruction_set`: a name from `instruction_sets()`, or empty for the best. Throws std::invalid_argument.
  Runtime(int num_threads, std::vector<int> cpus, const std::string& instruction_set);

  ThreadPool& threads() { return threads_; }
  const Kernels& kernels() const { return *kernels_; }

  static std::vector<std::string> instruction_sets();

 private:
  ThreadPool threads_;
  const Kernels* kernels_;
};

// Where the rows of a matrix go: one after the other, or a gate's and an up's panels in turns.
enum class Placement : int { kPlain = 0, kGate = 1, kUp = 2 };

class PackedWeight {
 public:
  // `num_outputs`: with gate and up in turns, of both together, each padded to whole panels.
  PackedWeight(Format format, int num_outputs, int num_inputs);
  ~PackedWeight();
  PackedWeight(const PackedWeight&) = delete;
  PackedWeight& operator=(const PackedWeight&) = delete;

  const Weight& weight() const { return weight_; }
  size_t num_bytes() const { return num_bytes_; }

  // Rows [0, rows) of a dense matrix. `first_output`: where they begin (kPlain), in outputs.
  void pack_floats(Runtime& runtime, const float* rows, int num_rows, int first_output, Placement placement);
  void pack_bfloats(Runtime& runtime, const uint16_t* rows, int num_rows, int first_output, Placement placement);
  void pack_fp8(Runtime& runtime, const uint8_t* codes, const float* scales, int num_rows, int first_output,
                Placement placement);
  void pack_groups(Runtime& runtime, const uint8_t* codes, const uint16_t* scales, const uint16_t* minimums,
                   int num_rows, int first_output, Placement placement);
  // Rows by index (token embeddings), as floats, to `out` [count][num_inputs].
  void unpack(Runtime& runtime, const int64_t* rows, int count, float* out) const;

 private:
  template <class PackRow>
  void pack(Runtime& runtime, int num_rows, int first_output, Placement placement, PackRow&& pack_row);

  Weight weight_;
  size_t num_bytes_;
};

class LinearLayer {
 public:
  // bias: [num_outputs] or null; norm: [num_inputs] or null. Both are copied.
  LinearLayer(std::shared_ptr<PackedWeight> weight, const float* bias, const float* norm, float eps);
  void run(Runtime& runtime, const float* x, size_t x_stride, int rows, float* out, size_t out_stride,
           bool accumulate) const;

 private:
  std::shared_ptr<PackedWeight> weight_;
  std::vector<float> bias_, norm_;
  float eps_;
};

class GatedMlpLayer {
 public:
  GatedMlpLayer(std::shared_ptr<PackedWeight> gate_up, const float* gate_bias, const float* up_bias,
                std::shared_ptr<PackedWeight> down, const float* down_bias, const float* norm, float eps);
  void run(Runtime& runtime, const float* x, size_t x_stride, int rows, float* out, size_t out_stride,
           bool accumulate) const;

 private:
  std::shared_ptr<PackedWeight> gate_up_, down_;
  std::vector<float> gate_up_bias_, down_bias_, norm_;
  float eps_;
};

// The attention layers of a model over one kind of KV pool.
struct AttentionShape {
  KvLayout kv;
  int num_heads;

  AttentionShape(KvFormat format, int num_heads, int num_kv_heads, int head_dim, int block_size);
  int padded_dim() const { return kv.padded_dim(); }
  size_t block_bytes() const { return kv.block_bytes(); }
};

// RMS norms of each query and key head, copied.
struct QkNorm {
  std::vector<float> query, key;
  float eps;
};

// One step: where its rows go and what they see; used by every layer. The memory behind the addresses is the caller's.
class AttentionStep {
 public:
  // spans: [num_spans][4] first row, rows, context, address of the block table (int64 each).
  // cos, sin: [rows][head_dim / 2]; slots: [rows]; queries: [rows][num_heads][padded_dim], scratch.
  AttentionStep(const AttentionShape& shape, int num_rows, const int64_t* spans, int num_spans, const float* cos,
                const float* sin, const int64_t* slots, float query_scale, float* queries);
  void rotate_and_write(Runtime& runtime, uint8_t* layer, const float* qkv, size_t qkv_stride, bool rotate,
                        const QkNorm* norm) const;
  void attend(Runtime& runtime, const uint8_t* layer, float* out, size_t out_stride) const;

 private:
  AttentionShape shape_;
  int num_rows_;
  std::vector<Span> spans_;
  const float *cos_, *sin_;
  const int64_t* slots_;
  float query_scale_;
  float* queries_;
};

}  // namespace headstart

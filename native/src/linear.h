// The linear layers of a decoder, each with what comes before and after it: norm and quantization, bias, residual, gate.
//
// Many rows: blocks of rows are shared out; a block's activations stay in its thread's second-level cache while the
// weights stream past. Few rows: the outputs are shared out, since reading the weights is what takes the time.
#pragma once

#include "gemm.h"
#include "linear_args.h"

namespace headstart {
namespace HS_ISA {

constexpr int kBlockRows = 64;
constexpr int kRowsPerThread = 16;  // from here on rows are shared out instead of outputs

// A thread's arenas by use.
enum ArenaUse { kCodes = 0, kNormed = 1, kExpanded = 2, kHidden = 3 };

// Rows a block, a multiple of the micro-kernels' rows where it can be, so that every thread gets as many blocks.
static inline int block_rows(int rows, int threads) {
  int blocks = std::max(threads, (rows + kBlockRows - 1) / kBlockRows);
  blocks = (blocks + threads - 1) / threads * threads;
  const int each = (rows + blocks - 1) / blocks;
  return std::min(kBlockRows, (each + 3) / 4 * 4);
}

// Rows [0, rows) of x, normed if asked, in the form that the weight multiplies; memory of the given thread.
static inline Activations prepare(ThreadPool& threads, int thread, const Weight& weight, const RowNorm& norm,
                                  const float* x, size_t stride, int rows) {
  const int columns = weight.num_inputs;
  Activations a;
  if (!is_grouped(weight.format)) {
    a.floats = x;
    a.stride = stride;
    if (norm.weight == nullptr) return a;
    float* normed = threads.arena(thread, kNormed).reserve_for<float>(size_t(rows) * size_t(columns));
    for (int r = 0; r < rows; r++) {
      norm_row(x + size_t(r) * stride, norm.weight, columns, norm.eps, normed + size_t(r) * size_t(columns));
    }
    a.floats = normed;
    a.stride = size_t(columns);
    return a;
  }
  a = reserve_codes(threads.arena(thread, kCodes), weight, rows, num_tiles(rows));
  float* normed = threads.arena(thread, kNormed).reserve_for<float>(size_t(columns));
  for (int r = 0; r < rows; r++) {
    const float* row = x + size_t(r) * stride;
    if (norm.weight != nullptr) {
      norm_row(row, norm.weight, columns, norm.eps, normed);
      row = normed;
    }
    quantize_row(row, columns, weight.format, a, r);
  }
  gather_tiles(a, rows);
  return a;
}

static inline void multiply_panels(ThreadPool& threads, int thread, const Weight& weight, const Activations& a, int rows,
                                   int first, int last, const Output& out) {
  uint8_t* scratch = threads.arena(thread, kExpanded).reserve_for<uint8_t>(scratch_bytes(weight));
  if (rows <= kStreamedRows) {
    multiply_few(weight, a, rows, first, last, out, scratch);
  } else {
    multiply_block(weight, a, rows, first, last, out, scratch);
  }
}

// The outputs of few rows, shared out in equal stretches that are long enough for all streams.
static inline void share_outputs(ThreadPool& threads, const Weight& weight, const Activations& a, int rows,
                                 const Output& out) {
  const int panels = weight.num_panels() / (out.epilogue == Epilogue::kGated ? 2 : 1);
  const int each = std::clamp(panels / (threads.size() * kPanelsPerItem), 1, kItemsPerThread);
  const int items = std::min(panels, threads.size() == 1 ? 1 : threads.size() * each);
  threads.parallel(items, [&](int item, int thread) {
    const int first = int(int64_t(panels) * item / items), last = int(int64_t(panels) * (item + 1) / items);
    multiply_panels(threads, thread, weight, a, rows, first, last, out);
  });
}

static void linear(ThreadPool& threads, const LinearArgs& args) {
  const Weight& weight = *args.weight;
  const Output out{args.accumulate ? Epilogue::kAdd : Epilogue::kStore, args.bias, args.out, args.out_stride,
                   weight.num_outputs};
  if (args.rows < kRowsPerThread * threads.size()) {
    const Activations a = prepare(threads, 0, weight, args.norm, args.x, args.x_stride, args.rows);
    return share_outputs(threads, weight, a, args.rows, out);
  }
  const int each = block_rows(args.rows, threads.size());
  threads.parallel((args.rows + each - 1) / each, [&](int block, int thread) {
    const int first = block * each, rows = std::min(each, args.rows - first);
    const float* x = args.x + size_t(first) * args.x_stride;
    const Activations a = prepare(threads, thread, weight, args.norm, x, args.x_stride, rows);
    Output mine = out;
    mine.data += size_t(first) * out.stride;
    multiply_panels(threads, thread, weight, a, rows, 0, weight.num_panels(), mine);
  });
}

// x += down(silu(gate(norm(x))) * up(norm(x)))
static void gated_mlp(ThreadPool& threads, const MlpArgs& args) {
  const Weight &gate_up = *args.gate_up, &down = *args.down;
  const int width = down.num_inputs;
  const size_t hidden_stride = size_t(width + kPanel - 1) / kPanel * kPanel;
  auto gated = [&](float* hidden) {
    return Output{Epilogue::kGated, args.gate_up_bias, hidden, hidden_stride, width};
  };
  auto added = [&](int row) {
    return Output{args.accumulate ? Epilogue::kAdd : Epilogue::kStore, args.down_bias,
                  args.out + size_t(row) * args.out_stride, args.out_stride, down.num_outputs};
  };
  if (args.rows < kRowsPerThread * threads.size()) {
    float* hidden = threads.arena(0, kHidden).reserve_for<float>(size_t(args.rows) * hidden_stride);
    Activations a = prepare(threads, 0, gate_up, args.norm, args.x, args.x_stride, args.rows);
    share_outputs(threads, gate_up, a, args.rows, gated(hidden));
    a = prepare(threads, 0, down, RowNorm{}, hidden, hidden_stride, args.rows);
    return share_outputs(threads, down, a, args.rows, added(0));
  }
  const int each = block_rows(args.rows, threads.size());
  threads.parallel((args.rows + each - 1) / each, [&](int block, int thread) {
    const int first = block * each, rows = std::min(each, args.rows - first);
    float* hidden = threads.arena(thread, kHidden).reserve_for<float>(size_t(rows) * hidden_stride);
    const float* x = args.x + size_t(first) * args.x_stride;
    Activations a = prepare(threads, thread, gate_up, args.norm, x, args.x_stride, rows);
    multiply_panels(threads, thread, gate_up, a, rows, 0, gate_up.num_panels() / 2, gated(hidden));
    a = prepare(threads, thread, down, RowNorm{}, hidden, hidden_stride, rows);
    multiply_panels(threads, thread, down, a, rows, 0, down.num_panels(), added(first));
  });
}

}  // namespace HS_ISA
}  // namespace headstart

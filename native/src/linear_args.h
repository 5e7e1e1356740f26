// What the linear operations take: plain pointers, no torch. Strides count elements.
#pragma once

#include <cstddef>

#include "weight.h"

namespace headstart {

constexpr int kItemsPerThread = 8;
constexpr int kPanelsPerItem = 8;

// RMS norm of each row before it is multiplied; no weight: none.
struct RowNorm {
  const float* weight = nullptr;
  float eps = 0;
};

// out = weight * norm(x) + bias, or out += that. `bias` is padded to whole panels, or null.
struct LinearArgs {
  const Weight* weight;
  const float* bias;
  RowNorm norm;
  const float* x;
  size_t x_stride;
  int rows;
  float* out;
  size_t out_stride;
  bool accumulate;
};

// out (+)= down(silu(gate(norm(x))) * up(norm(x))). Gate and up panels lie in turns; their biases as well.
struct MlpArgs {
  const Weight* gate_up;
  const float* gate_up_bias;
  const Weight* down;
  const float* down_bias;
  RowNorm norm;
  const float* x;
  size_t x_stride;
  int rows;
  float* out;
  size_t out_stride;
  bool accumulate;
};

}  // namespace headstart

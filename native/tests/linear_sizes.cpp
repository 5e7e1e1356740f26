// Runs the linear layers over odd sizes in memory that ends exactly where it should: for builds with sanitizers.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "dispatch.h"
#include "operations.h"

using namespace headstart;

namespace {

uint32_t state = 1;

float next_float() {
  state = state * 1664525u + 1013904223u;
  return float(int(state >> 9 & 0xffff) - 32768) / 16384;
}

std::vector<float> floats(size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = next_float();
  values.shrink_to_fit();
  return values;
}

void fill(PackedWeight& packed, Runtime& runtime, Format format, int rows, int columns, Placement placement) {
  const size_t groups = size_t(columns + kGroup - 1) / kGroup, count = size_t(rows);
  std::vector<uint16_t> scales(count * groups, 0x2c00), minimums(count * groups, 0xb000);
  if (is_grouped(format)) {
    const std::vector<uint8_t> codes(count * groups * size_t(is_nibbles(format) ? kGroup / 2 : kGroup), 0x5a);
    packed.pack_groups(runtime, codes.data(), scales.data(), minimums.data(), rows, 0, placement);
  } else if (format == Format::kFp8) {
    const std::vector<uint8_t> codes(count * size_t(columns), 0x3c);
    const std::vector<float> row_scales(count, 0.5f);
    packed.pack_fp8(runtime, codes.data(), row_scales.data(), rows, 0, placement);
  } else {
    packed.pack_floats(runtime, floats(count * size_t(columns)).data(), rows, 0, placement);
  }
}

void run(Runtime& runtime, Format format, int outputs, int inputs, int rows) {
  const auto linear = std::make_shared<PackedWeight>(format, outputs, inputs);
  fill(*linear, runtime, format, outputs, inputs, Placement::kPlain);
  const std::vector<float> bias = floats(size_t(outputs)), norm = floats(size_t(inputs));
  const std::vector<float> x = floats(size_t(rows) * size_t(inputs));
  std::vector<float> out(size_t(rows) * size_t(outputs));
  LinearLayer(linear, bias.data(), norm.data(), 1e-5f)
      .run(runtime, x.data(), size_t(inputs), rows, out.data(), size_t(outputs), true);

  const int padded = (outputs + kPanelOutputs - 1) / kPanelOutputs * kPanelOutputs;
  const auto gate_up = std::make_shared<PackedWeight>(format, 2 * padded, inputs);
  fill(*gate_up, runtime, format, outputs, inputs, Placement::kGate);
  fill(*gate_up, runtime, format, outputs, inputs, Placement::kUp);
  const auto down = std::make_shared<PackedWeight>(format, inputs, outputs);
  fill(*down, runtime, format, inputs, outputs, Placement::kPlain);
  std::vector<float> hidden = x;
  GatedMlpLayer(gate_up, bias.data(), bias.data(), down, norm.data(), norm.data(), 1e-5f)
      .run(runtime, hidden.data(), size_t(inputs), rows, hidden.data(), size_t(inputs), true);

  std::vector<int64_t> ids(size_t(rows), outputs - 1);
  std::vector<float> embedded(size_t(rows) * size_t(inputs));
  linear->unpack(runtime, ids.data(), rows, embedded.data());
}

}  // namespace

int main() {
  int count = 0;
  for (const std::string& set : Runtime::instruction_sets()) {
    for (int threads : {1, 3}) {
      Runtime runtime(threads, {}, set);
      for (Format format : {Format::kFloat32, Format::kBfloat16, Format::kFp8, Format::kQ8_0, Format::kQ4_0, Format::kQ4_1}) {
        for (int outputs : {1, 16, 37, 80}) {
          for (int inputs : {1, 7, 32, 33, 95, 290}) {
            for (int rows : {1, 2, 3, 5, 17, 50, 131}) {
              run(runtime, format, outputs, inputs, rows);
              count++;
            }
          }
        }
      }
    }
  }
  std::printf("%d sizes\n", count);
  return 0;
}

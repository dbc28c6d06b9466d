// Rows of the CPU's tiles: those that a filter reaches beyond a tile are packed with it, for each tile again.
// Usage: tiling CALLS

#include "cpu/tiling.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cpu/conv_source.h"

using namespace fusedconv;

namespace {

std::mt19937_64 engine(0);

int64_t draw(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(engine);
}

Tensor tensor(void* data, int64_t channels, int64_t height, int64_t width) {
  return {data,
          DType::kFloat32,
          {1, channels, height, width},
          {channels * height * width, height * width, width, 1}};
}

// Whether a channel's packs have no more rows than if each tile had those that the filter reaches; tiles are
// made alike, which may add a row to each.
bool packs_few_rows() {
  static float memory[64 * 7 * 7];
  const int64_t kernel = draw(1, 7), dilation = draw(1, 60), stride = draw(1, 3);
  const int64_t reach = (kernel - 1) * dilation / stride;
  const int64_t height = draw(1, 300), padding = draw(1, 400), channels = draw(1, 64);
  if (height + 2 * padding <= (kernel - 1) * dilation) return true;

  const Tensor input = tensor(memory, 1, height, height);
  const Conv conv{tensor(memory, 1, kernel, kernel),
                  {nullptr, DType::kFloat32},
                  {stride, stride},
                  {padding, padding},
                  {dilation, dilation},
                  false};
  const ConvSource<float> source(input, conv);
  const int64_t tile_rows = rows_of_tile(source, channels, draw(1, 4), 1);
  const int64_t tiles = ceil_div(source.rows, tile_rows);
  const int64_t least = larger(1, smaller(reach, source.rows));
  const bool few = tiles * (tile_rows + reach) <= ceil_div(source.rows, least) * (least + reach) + tiles;
  if (!few) {
    std::printf("height %ld, kernel %ld, dilation %ld, stride %ld, padding %ld: %ld tiles of %ld rows\n",
                long(height), long(kernel), long(dilation), long(stride), long(padding), long(tiles),
                long(tile_rows));
  }
  return few;
}

}  // namespace

int main(int, char** arguments) {
  bool right = true;
  for (int call = std::atoi(arguments[1]); call > 0; --call) right &= packs_few_rows();
  return right ? 0 : 1;
}

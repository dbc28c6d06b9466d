// What must hold of csrc/plan/gradient_plan.h, over random convs, batches and cards: a program that says what
// does not. test_plans.py compiles it, with checks of undefined behaviour, and runs it.
#include "plan/gradient_plan.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cards.h"

using namespace fusedconv;
using namespace fusedconv::cuda;

namespace {

std::mt19937 random_bits(1);

int one_of(std::initializer_list<int> values) { return values.begin()[random_bits() % values.size()]; }

int side() {
  return one_of({1, 2, 3, 7, 16, 31, 32, 33, 63, 64, 65, 66, 126, 127, 128, 129, 254, 255, 1000});
}
int channels() { return one_of({1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 200}); }

struct Call {
  ConvShape shape{channels(), channels()};
  int64_t samples = one_of({1, 2, 7, 128, 100000});
  int parts = one_of({1, 2});
  Card card = kCards[1 + random_bits() % (std::size(kCards) - 1)];

  Call() {
    for (int d = 0; d < 2; ++d) {
      shape.kernel[d] = one_of({1, 2, 3, 3, 3, 4, 7});
      shape.windows[d] = count_of_pieces(shape.kernel[d], kTaps);
      shape.padding[d] = one_of({0, 1, 3});
      shape.out_size[d] = side();
      shape.in_size[d] = std::max(shape.out_size[d] + shape.kernel[d] - 1 - 2 * shape.padding[d], 1);
    }
  }
};

// Pieces one after the other, each with something that none before it has.
bool cover(int pieces, int64_t of_piece, int size, int shared = 0) {
  const int64_t step = of_piece - shared;
  return pieces == 1 ? of_piece >= size
                     : step > 0 && (pieces - 1) * step + shared < size && pieces * step + shared >= size;
}
bool cover(const Slabs& slabs, const int (&size)[2]) {
  return cover(slabs.down, slabs.rows, size[0]) && cover(slabs.across, slabs.cols, size[1]);
}

bool share_out(int blocks, int64_t pieces) { return blocks >= 1 && blocks <= pieces; }

const char* fault_of_weight(const Call& call) {
  const WeightGradientPlan plan = plan_weight_gradient(call.shape, call.parts, call.samples, call.card);
  if (!cover(plan.slabs, call.shape.out_size)) return "weight: slabs do not cover the map";
  if (plan.slabs.cols > kMostSlabCols || plan.slabs.cols % kStepPixels != 0)
    return "weight: columns of a slab";
  if (!share_out(plan.blocks, plan.slabs.of_samples(call.samples))) return "weight: blocks";
  if (kWeightWarps % plan.channel_warps != 0) return "weight: warps";
  if (plan.out_blocks > 1 && plan.channel_warps < kWeightWarps) return "weight: channels without a warp";
  if (plan.channel_warps * kTileChannels * plan.out_blocks < call.shape.out_channels)
    return "weight: channels are left out";
  if (plan.slots * plan.channel_warps != plan.blocks * kWeightWarps) return "weight: slots";
  return nullptr;
}

const char* fault_of_input(const Call& call) {
  const InputGradientPlan plan = plan_input_gradient(call.shape, call.parts, call.samples, call.card);
  if (!cover(plan.slabs, call.shape.in_size)) return "input: slabs do not cover the map";
  if (kInputWarps % plan.slab_warps != 0) return "input: warps";
  if (!share_out(plan.blocks, plan.slabs.of_samples(call.samples))) return "input: blocks";
  if (plan.stages * kStageChunks * kUnitChannels < call.shape.out_channels)
    return "input: channels are left out";
  if (plan.shared_bytes != InputLayout(plan, call.parts).bytes) return "input: shared memory";
  return nullptr;
}

const char* fault_of_strips(const Call& call) {
  if (!fits_strips(call.shape, call.samples, call.card)) return nullptr;
  const StripPlan plan = cut_strips(call.shape, call.samples, call.card);
  if (!cover(plan.strips, kStripPixels, call.shape.out_size[1], kHalo)) return "strips do not cover the map";
  if (!cover(plan.segments, plan.segment_rows, call.shape.out_size[0], kHalo))
    return "segments do not cover a strip";
  if (!share_out(plan.blocks, call.samples * plan.strips * plan.segments) ||
      plan.blocks > call.card.multiprocessors)
    return "strips: blocks";
  return plan.out_tiles * kTileChannels >= call.shape.out_channels ? nullptr
                                                                   : "strips: channels are left out";
}

}  // namespace

int main(int, char** arguments) {
  int faults = 0;
  for (int i = 0; i < std::atoi(arguments[1]) && faults < 10; ++i) {
    const Call call;
    for (const char* fault : {fault_of_weight(call), fault_of_input(call), fault_of_strips(call)}) {
      if (fault == nullptr) continue;
      const ConvShape& s = call.shape;
      std::printf("%s: %d to %d channels, kernel %dx%d, output %dx%d, %ld samples, sm_%d\n", fault,
                  s.in_channels, s.out_channels, s.kernel[0], s.kernel[1], s.out_size[0], s.out_size[1],
                  long(call.samples), call.card.capability);
      ++faults;
    }
  }
  return faults == 0 ? 0 : 1;
}

// What must hold of csrc/plan/given_plan.h, over random shapes and cards, the largest that there may be
// among them: a program that says what does not. test_plans.py compiles it, with checks of undefined
// behaviour, and runs it.
#include "plan/given_plan.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cards.h"

using namespace fusedconv;
using namespace fusedconv::cuda;

namespace {

struct Kind {
  const char* name;
  bool has_norm, pools, reduces_channels;
};

constexpr Kind kKinds[] = {{"norm", true, false, false},
                           {"norm, pool", true, true, false},
                           {"norm, logsumexp", true, false, true},
                           {"no norm", false, false, false}};
std::mt19937 random_bits(1);

int64_t one_of(std::initializer_list<int64_t> values) {
  return values.begin()[random_bits() % values.size()];
}

// Channels of a group, groups, and sides: small, odd, and around the widths of vectors and pieces; or
// extreme.
int64_t group_channels(bool extreme) {
  return extreme ? one_of({1, 3, 999983, 1 << 20, 2147483647, int64_t(1) << 40})
                 : one_of({1, 1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 64, 100, 512, 514, 1030, 4096});
}
int64_t groups(bool extreme) {
  return extreme ? one_of({1, 2, 999983, 1 << 20, 2147483647})
                 : one_of({1, 1, 2, 3, 4, 5, 8, 16, 33, 47, 61, 128, 512});
}
int64_t side(bool extreme) {
  return extreme ? one_of({1, 7, 65537, 1 << 24, 2147483647, (int64_t(1) << 32) + 8})
                 : one_of({1, 1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 33, 56, 112, 200, 256});
}

struct Call {
  Kind kind;
  Card card;
  GivenTraits traits;
  GivenShape shape;
  int width;

  explicit Call(bool extreme)
      : kind(kKinds[random_bits() % std::size(kKinds)]), card(kCards[random_bits() % std::size(kCards)]) {
    const int element = int(one_of({2, 4, 8}));
    traits = {kind.has_norm, kind.reduces_channels, element, element == 8 ? 8 : 4, 16 / element};
    const int64_t of_norm = groups(extreme);
    const int64_t rows = side(extreme);
    const int64_t cols = side(extreme);
    const int64_t window = kind.pools ? std::min(one_of({1, 2, 3, 4, extreme ? rows : 8}), rows) : 0;
    shape = {2,
             (Checked(of_norm) * group_channels(extreme)).value(),
             (Checked(rows) * cols).value(),
             random_bits() % 2 == 0 && rows * cols > 1,
             kind.has_norm ? of_norm : 1,
             kind.pools ? window * cols : 1};
    width = random_bits() % 4 == 0 ? 1 : widest_load(traits, shape);
  }

  std::string text() const {
    char text[256];
    std::snprintf(text, sizeof(text),
                  "%s, sm_%d, %d bytes, %ld channels in %ld groups, %ld pixels%s, width %d", kind.name,
                  card.capability, traits.element_bytes, long(shape.channels), long(shape.groups),
                  long(shape.pixels), shape.channels_last ? ", channels last" : "", width);
    return text;
  }
};

bool is_power_of_lanes(int lanes) { return lanes >= 1 && lanes <= kWarpLanes && (lanes & (lanes - 1)) == 0; }

// How often the threads of a block come to each value of a whole piece, as ThreadShare and GivenTile have
// it.
std::vector<int> visits(const GivenPlan& plan, const GivenShape& shape) {
  const bool wide_channels = shape.channels_last && plan.width > 1;
  const int of_channels = wide_channels ? plan.width : 1;
  const int of_pixels = wide_channels ? 1 : plan.width;
  std::vector<int> count(size_t(plan.unit_channels) * plan.slice_pixels);
  for (int thread = 0; thread < plan.threads; ++thread) {
    const int line = thread / plan.lanes / plan.channel_threads;
    const int channel_thread = thread / plan.lanes % plan.channel_threads;
    const int pixel_thread = line * plan.lanes + thread % plan.lanes;
    if (pixel_thread >= plan.pixel_threads) continue;
    for (int run = channel_thread / plan.run_threads; run * plan.run_channels < plan.unit_channels;
         run += plan.runs_at_once) {
      const int end = std::min((run + 1) * plan.run_channels, plan.unit_channels);
      int c = run * plan.run_channels + channel_thread % plan.run_threads * of_channels;
      for (; c < end; c += plan.run_threads * of_channels)
        for (int p = pixel_thread * of_pixels; p < plan.slice_pixels; p += plan.pixel_threads * of_pixels)
          for (int k = 0; k < plan.width; ++k)
            ++count[size_t(c + (wide_channels ? k : 0)) * plan.slice_pixels + p + (wide_channels ? 0 : k)];
    }
  }
  return count;
}

// What is wrong with the plan; null if nothing.
const char* fault_of(const Call& call) {
  constexpr double kMostSeconds = 2;
  const std::clock_t start = std::clock();
  const GivenPlan plan = plan_given(call.traits, call.shape, call.width, call.card);
  if (double(std::clock() - start) / CLOCKS_PER_SEC > kMostSeconds) return "it takes long to plan";
  const GivenShape& shape = call.shape;
  if (plan.shared_bytes > call.card.shared_bytes) return "more shared memory than the card has";
  if (plan.threads > kMostThreads || plan.threads % kWarpLanes != 0) return "threads";
  if (!is_power_of_lanes(plan.lanes) || !is_power_of_lanes(plan.group_lanes) ||
      !is_power_of_lanes(plan.reducing_lanes))
    return "lanes";
  if (plan.resident && plan.slices > (call.card.capability >= 90 ? 8 : 1)) return "blocks of a cluster";
  if (plan.resident && plan.units_per_group > 1) return "a group is cut";
  if (plan.units * plan.unit_channels < shape.channels || plan.slices * plan.slice_pixels < shape.pixels)
    return "values are left out";
  if (plan.slices > 1 && plan.resident && plan.slice_pixels % shape.window_pixels != 0)
    return "a window is cut";
  const int row = shape.channels_last ? plan.unit_channels : plan.slice_pixels;
  if (plan.width > 1 && row % plan.width != 0) return "loads cross the end of a row";
  if (plan.tile_at % 16 != 0 || plan.parts_at % 32 != 0 || plan.moments_at % 32 != 0) return "alignment";
  if (Checked(plan.unit_channels) * plan.slice_pixels > 4000000) return nullptr;
  for (const int count : visits(plan, shape))
    if (count != 1) return "a value is not read once";
  return nullptr;
}

// A random call; none where its sample has more bytes than can be counted.
std::optional<Call> random_call(bool extreme) {
  try {
    const Call call(extreme);
    const Checked bytes = Checked(call.shape.channels) * call.shape.pixels * call.traits.element_bytes;
    return extreme || bytes <= 32000000 ? std::optional<Call>(call) : std::nullopt;
  } catch (const std::overflow_error&) {
    return std::nullopt;
  }
}

}  // namespace

int main(int, char** arguments) {
  int faults = 0;
  for (int i = 0; i < std::atoi(arguments[1]) && faults < 10; ++i) {
    const std::optional<Call> call = random_call(i % 8 == 0);
    const char* const fault = call ? fault_of(*call) : nullptr;
    if (fault == nullptr) continue;
    std::printf("%s: %s\n", fault, call->text().c_str());
    ++faults;
  }
  return faults == 0 ? 0 : 1;
}

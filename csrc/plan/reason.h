// Why a call takes its path, and what there is to say of how it runs: an enum whose words stand here, in one
// table. Braces in them name the numbers that come with it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

namespace fusedconv {

// X(enumerator, name, words)
#define FUSEDCONV_FOR_EACH_REASON(X)                                                                     \
  /* PyTorch's operators, everywhere. */                                                                 \
  X(kGroups, "groups", "groups")                                                                         \
  X(kFloat64, "float64", "float64")                                                                      \
  X(kBFloat16, "bfloat16", "bfloat16")                                                                   \
  X(kFloat16, "float16", "float16")                                                                      \
  X(kStride, "stride", "stride")                                                                         \
  X(kAsked, "asked", "as asked for")                                                                     \
  X(kGradDtype, "grad_dtype", "a gradient of another dtype")                                             \
  X(kInfiniteBounds, "infinite_bounds", "infinite bounds")                                               \
  /* On the CPU. */                                                                                      \
  X(kProducts, "products", "{products} products for a value")                                            \
  X(kInputChannels, "input_channels", "{in_channels} input channels")                                    \
  X(kChannels, "channels", "{in_channels} to {out_channels} channels")                                   \
  X(kChannelsLast, "channels_last", "{in_channels} to {out_channels} channels in channels_last")         \
  X(kIdleLanes, "idle_lanes", "{samples} samples, {computed} pixels to compute for {pixels}")            \
  X(kComputed, "computed", "{computed} pixels to compute for {pixels}")                                  \
  X(kPacked, "packed", "{packed} values to pack for {values}")                                           \
  X(kWidth, "width", "{in_channels} input channels, {products} products for a value")                    \
  X(kInstructions, "instructions", "no faster with this instruction set")                                \
  X(kBlocks, "blocks", "{channels} channels, {columns} columns")                                         \
  X(kFewPixels, "few_pixels", "{pixels} pixels")                                                         \
  X(kLargeSide, "large_side", "a side of 2^24 or more")                                                  \
  X(kReduction, "reduction", "a reduction")                                                              \
  /* On CUDA. */                                                                                         \
  X(kNoKernels, "no_kernels", "no kernels of a conv for this card")                                      \
  X(kTooLarge, "too_large", "a size is too large")                                                       \
  X(kLargeKernel, "large_kernel", "kernel larger than 7")                                                \
  X(kLargeHalfKernel, "large_half_kernel", "kernel larger than 3 in half precision")                     \
  X(kManyOutputChannels, "many_output_channels", "more than 256 output channels")                        \
  X(kManyInputChannels, "many_input_channels", "more than 8192 input channels")                          \
  X(kDilation, "dilation", "dilation")                                                                   \
  X(kPadding, "padding", "padding")                                                                      \
  X(kLargeSamples, "large_samples", "samples of more than 2^30 elements")                                \
  X(kManyProducts, "many_products", "many channels or products for a value")                             \
  X(kSharedMemory, "shared_memory", "shared memory")                                                     \
  X(kTapsInChunks, "taps_in_chunks", "a large kernel")                                                   \
  X(kManyTiles, "many_tiles", "more than 2^31 tiles")                                                    \
  X(kSmallMap, "small_map", "a small map")                                                               \
  X(kLargeBand, "large_band", "a band of too many rows")                                                 \
  X(kPackedMemory, "packed_memory", "memory for the packed input")                                       \
  X(kLargeWindow, "large_window", "a window of more than 2^31 values")                                   \
  /* How our conv runs. */                                                                               \
  X(kTiles, "tiles",                                                                                     \
    "tiles of {rows} x {cols} pixels, {stack} rows stacked, {chunks} chunks of {channels} channels and " \
    "{kernel_rows} rows of taps, {stages} stages, {shared_bytes} bytes of shared memory")                \
  X(kResident, "resident", "samples stay there")                                                         \
  X(kStrips, "strips", "strips of {strip_pixels} pixels")                                                \
  X(kSteps, "steps", "steps of {step_samples} samples")                                                  \
  X(kConvGradients, "conv_gradients", "with the conv's gradients")

enum class Reason {
#define FUSEDCONV_ENUMERATOR(enumerator, name, words) enumerator,
  FUSEDCONV_FOR_EACH_REASON(FUSEDCONV_ENUMERATOR)
#undef FUSEDCONV_ENUMERATOR
};

// With its numbers, in the order of its words.
struct Remark {
  Reason reason;
  std::array<int64_t, 8> numbers{};
};

inline bool operator==(const Remark& a, const Remark& b) {
  return a.reason == b.reason && a.numbers == b.numbers;
}

const char* name_of(Reason reason);
std::string words_of(const Remark& remark);
std::map<std::string, int64_t> numbers_of(const Remark& remark);

}  // namespace fusedconv

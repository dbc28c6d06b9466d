// The algebra of every chain: y = Final(Reduce(Post(Norm(Pre(v)), v))), v the conv's output.
#pragma once

#include <type_traits>

#include "moments.h"
#include "parameter.h"
#include "pointwise.h"
#include "problem.h"
#include "reduce.h"
#include "target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// What the vjp of a GroupNorm takes besides the channel's parameters. The last two are means over the group,
// of the gradient of normed = (x - mean) / deviation and of its product with normed, both over the deviation.
template <class T>
struct NormGradient {
  T inverse_deviation;
  T normed_shift;  // (x - channel.mean) * inverse_deviation lacks the part of the mean that T cannot hold
  T mean;
  T mean_product;
};

struct NoNorm {
  static constexpr bool kNeedsStatistics = false;

  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, const Channel<T, P>&) {
    return x;
  }

  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X, const Channel<T>&, const NormGradient<T>&) {
    return grad;
  }
};

struct GroupNorm {
  static constexpr bool kNeedsStatistics = true;

  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, const Channel<T, P>& channel) {
    return (x - channel.mean) * channel.norm_scale + channel.norm_shift;
  }

  // The value without weight and bias.
  template <class X, class T>
  static FUSEDCONV_INLINE X normed(X x, const Channel<T>& channel, const NormGradient<T>& of_group) {
    return (x - channel.mean) * of_group.inverse_deviation + of_group.normed_shift;
  }

  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X x, const Channel<T>& channel, const NormGradient<T>& of_group) {
    return grad * channel.norm_scale - (normed(x, channel, of_group) * of_group.mean_product + of_group.mean);
  }
};

template <class PreStages, class NormStage, class PostStages, class ReduceStage, class FinalStages>
struct Chain {
  using Pre = PreStages;
  using Norm = NormStage;
  using Post = PostStages;
  using Reduce = ReduceStage;
  using Final = FinalStages;

  static_assert(!Final::kReadsConv, "after a reduction there is no conv's output of the same place");

  static constexpr bool kNeedsStatistics = Norm::kNeedsStatistics;
  // Of the parameters that are not the norm's.
  static constexpr bool kReadsChannel = Pre::kReadsChannel || Post::kReadsChannel || Final::kReadsChannel;
  // Between the statistics and the rest, Pre(v) is kept; but v itself where Post wants it back, or where Pre
  // changes nothing. Without statistics there is no rest: Pre is applied with all the others.
  static constexpr bool kKeepsConv = Post::kReadsConv || std::is_same_v<Pre, Sequence<>> || !kNeedsStatistics;

  // The affine stages that it starts with, and the chain that is left then. None where Post wants v back.
  using Start = AffineStart<std::conditional_t<Post::kReadsConv, Sequence<>, Pre>>;
  using Left =
      Chain<std::conditional_t<Post::kReadsConv, Pre, typename Start::Rest>, Norm, Post, Reduce, Final>;

  // Pre(v) from what was kept.
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X before_norm(X kept, const Channel<T, P>& channel) {
    return kKeepsConv ? Pre::value(kept, kept, channel) : kept;
  }

  // Everything up to the reduction, from the conv's output.
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X v, const Channel<T, P>& channel) {
    return Post::value(Norm::value(Pre::value(v, v, channel), channel), v, channel);
  }

  // The same from what was kept.
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X pointwise(X kept, const Channel<T, P>& channel) {
    return Post::value(Norm::value(before_norm(kept, channel), channel), kept, channel);
  }
};

template <class T>
FUSEDCONV_INLINE Channel<T> make_channel(const Arguments& arguments, int64_t c) {
  Channel<T> channel{};
  unroll<kStageParameters>(
      [&](auto k) { channel.of[k.value] = value_of<T>(arguments.parameters[k.value], c); });
  channel.clamp_min = static_cast<T>(arguments.clamp_min);
  channel.clamp_max = static_cast<T>(arguments.clamp_max);
  return channel;
}

// The part of the mean that T cannot hold goes into the shift.
template <class T>
FUSEDCONV_INLINE void set_norm(Channel<T>& channel, double weight, double bias,
                               const GroupStatistics& statistics) {
  const double scale = weight * statistics.inverse_deviation;
  channel.mean = static_cast<T>(statistics.mean);
  channel.norm_scale = static_cast<T>(scale);
  channel.norm_shift = static_cast<T>(bias - (statistics.mean - double(channel.mean)) * scale);
}

template <class T>
FUSEDCONV_INLINE void set_norm(Channel<T>& channel, const Arguments& arguments, int64_t c,
                               const GroupStatistics& statistics) {
  set_norm(channel, value_of<double>(arguments.parameters[kNormWeight], c, 1.0),
           value_of<double>(arguments.parameters[kNormBias], c), statistics);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Pointwise stages. Each is a functor `value(x, v, channel)`: x is what the previous stage gave, v the conv's
// output at the same place, channel the parameters of its channel. X is the target's value type (see math.h).
// Beside it stands its vector-Jacobian product `vjp(grad, x, v, channel, gradients)`: from the gradient of
// the value it gives that of x, and adds to `gradients` what the stage reads besides. Kinks are PyTorch's on
// the CPU.
#pragma once

#include <type_traits>

#include "channel_parameters.h"
#include "math.h"
#include "target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// The parameters of one channel, in the compute type T; or, where P is a vector, of one channel a lane.
template <class T, class P = T>
struct Channel {
  P of[kStageParameters];
  P mean;        // GroupNorm is (x - mean) * norm_scale + norm_shift: the subtraction comes first, so that
  P norm_scale;  // a mean much larger than the deviation costs no digits
  P norm_shift;
  P clamp_min;
  P clamp_max;
};

// Gradients at one place of what stages read besides x.
template <class X>
struct Gradients {
  X of[kStageParameters];
  X v;
};

// What a stage reads besides x; schedules follow from it.
struct Stage {
  static constexpr bool kReadsChannel = false;
  static constexpr bool kReadsConv = false;
  static constexpr bool kIsAffine = false;  // x * factor + offset; then it has compose(), see AffineStart
};

struct ChannelStage : Stage {
  static constexpr bool kReadsChannel = true;
};

struct AddBias : ChannelStage {
  static constexpr bool kIsAffine = true;

  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X, const Channel<T, P>& channel) {
    return x + channel.of[kBias];
  }

  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X, X, const Channel<T>&, Gradients<X>& gradients) {
    gradients.of[kBias] += grad;
    return grad;
  }

  template <class T>
  static FUSEDCONV_INLINE void compose(T&, T& offset, const Channel<T>& channel) {
    offset += channel.of[kBias];
  }
};

struct MultiplyScale : ChannelStage {
  static constexpr bool kIsAffine = true;

  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X, const Channel<T, P>& channel) {
    return x * channel.of[kScale];
  }

  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X x, X, const Channel<T>& channel, Gradients<X>& gradients) {
    gradients.of[kScale] += grad * x;
    return grad * channel.of[kScale];
  }

  template <class T>
  static FUSEDCONV_INLINE void compose(T& factor, T& offset, const Channel<T>& channel) {
    factor *= channel.of[kScale];
    offset *= channel.of[kScale];
  }
};

struct Relu : Stage {
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X, const Channel<T, P>&) {
    return relu<T>(x);
  }

  // NaN lets the gradient through.
  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X x, X, const Channel<T>&, Gradients<X>&) {
    return select(x <= T(0), X{}, grad);
  }
};

// x * relu6(x + 3) / 6; in this order it does not overflow.
struct Hardswish : Stage {
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X, const Channel<T, P>&) {
    return x * hardsigmoid<T>(x);
  }

  // Both bounds of relu6 belong to the inside.
  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X x, X, const Channel<T>&, Gradients<X>&) {
    const X gate = x + T(3);
    const X slope = select((gate < T(0)) | (gate > T(6)), X{}, x * T(1.0 / 6.0));  // keeps NaN
    return grad * (hardsigmoid<T>(x) + slope);
  }
};

// Hardswish where |x| <= 3 is known, as after tanh: neither bound of relu6 is ever met.
struct HardswishInside : Stage {
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X, const Channel<T, P>&) {
    return x * (x * T(1.0 / 6.0) + T(0.5));
  }

  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X x, X, const Channel<T>&, Gradients<X>&) {
    return grad * (x * T(1.0 / 3.0) + T(0.5));
  }
};

// sigmoid(x) = 1 / (1 + 2^(-log2(e) x)), in two stages: the first one is affine.
struct ScaleToSigmoid : Stage {
  static constexpr bool kIsAffine = true;

  template <class T>
  static FUSEDCONV_INLINE void compose(T& factor, T& offset, const Channel<T>&) {
    constexpr T kMinusLog2E = T(-1.4426950408889634);
    factor *= kMinusLog2E;
    offset *= kMinusLog2E;
  }
};

struct ScaledSigmoid : Stage {
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X, const Channel<T, P>&) {
    return reciprocal(X(1) + exp2(x));
  }
};

struct Sigmoid : Stage {
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X, const Channel<T, P>&) {
    return sigmoid(x);
  }

  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X x, X, const Channel<T>&, Gradients<X>&) {
    const X y = sigmoid(x);
    return grad * (y * (T(1) - y));
  }
};

// x * sigmoid(x)
struct Silu : Stage {
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X, const Channel<T, P>&) {
    return x * sigmoid(x);
  }

  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X x, X, const Channel<T>&, Gradients<X>&) {
    const X gate = sigmoid(x);
    return grad * (gate * (T(1) + x * (T(1) - gate)));
  }
};

struct Tanh : Stage {
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X, const Channel<T, P>&) {
    return tanh(x);
  }

  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X x, X, const Channel<T>&, Gradients<X>&) {
    const X y = tanh(x);
    return grad * (T(1) - y * y);
  }
};

// The residual: adds the conv's output.
struct AddConv : Stage {
  static constexpr bool kReadsConv = true;

  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X v, const Channel<T, P>&) {
    return x + v;
  }

  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X, X, const Channel<T>&, Gradients<X>& gradients) {
    gradients.v += grad;
    return grad;
  }
};

// torch.clamp: the upper bound wins where the bounds cross, NaN stays, and a NaN bound makes everything NaN.
struct Clamp : ChannelStage {
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X, const Channel<T, P>& channel) {
    const X low = X{} + channel.clamp_min;
    const X high = X{} + channel.clamp_max;
    const X raised = select(x >= low, x, low);
    const X clamped = select(raised <= high, raised, high);
    return select(x != x || low != low, x + low, clamped);
  }

  // Both bounds belong to the inside, NaN does not; but without bounds there is no clamp.
  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X x, X, const Channel<T>& channel, Gradients<X>&) {
    const T infinity = T(__builtin_inf());
    const bool is_absent = channel.clamp_min == -infinity && channel.clamp_max == infinity;
    if (is_absent) return grad;
    return select((x >= channel.clamp_min) & (x <= channel.clamp_max), grad, X{});
  }
};

// Stages one after the other; no stage at all is the identity.
template <class... Stages>
struct Sequence;

template <>
struct Sequence<> : Stage {
  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X, const Channel<T, P>&) {
    return x;
  }

  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X, X, const Channel<T>&, Gradients<X>&) {
    return grad;
  }
};

template <class First, class... Rest>
struct Sequence<First, Rest...> {
  static constexpr bool kReadsChannel = First::kReadsChannel || Sequence<Rest...>::kReadsChannel;
  static constexpr bool kReadsConv = First::kReadsConv || Sequence<Rest...>::kReadsConv;

  template <class X, class T, class P>
  static FUSEDCONV_INLINE X value(X x, X v, const Channel<T, P>& channel) {
    return Sequence<Rest...>::value(First::value(x, v, channel), v, channel);
  }

  template <class X, class T>
  static FUSEDCONV_INLINE X vjp(X grad, X x, X v, const Channel<T>& channel, Gradients<X>& gradients) {
    const X y = First::value(x, v, channel);
    return First::vjp(Sequence<Rest...>::vjp(grad, y, v, channel, gradients), x, v, channel, gradients);
  }
};

// A stage that is not affine may start with one that is.
template <class Whole>
struct SplitStage {
  using Start = Sequence<>;
  using Rest = Whole;
};

template <>
struct SplitStage<Sigmoid> {
  using Start = ScaleToSigmoid;
  using Rest = ScaledSigmoid;
};

// The affine stages that a sequence starts with, as one: compose() takes them into x * factor + offset, for a
// schedule that multiplies and adds anyhow. Rest is what comes after them.
template <class Stages>
struct AffineStart {
  using Rest = Stages;

  template <class T>
  static FUSEDCONV_INLINE void compose(T&, T&, const Channel<T>&) {}
};

template <class First, class... More>
struct AffineStart<Sequence<First, More...>> {
  using Split = SplitStage<First>;
  using Next = AffineStart<Sequence<More...>>;
  using Rest =
      std::conditional_t<First::kIsAffine, typename Next::Rest, Sequence<typename Split::Rest, More...>>;

  template <class T>
  static FUSEDCONV_INLINE void compose(T& factor, T& offset, const Channel<T>& channel) {
    if constexpr (First::kIsAffine) {
      First::compose(factor, offset, channel);
      Next::compose(factor, offset, channel);
    } else if constexpr (!std::is_same_v<typename Split::Start, Sequence<>>) {
      Split::Start::compose(factor, offset, channel);
    }
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The images that this build has.
#pragma once

#include "image.h"

namespace fusedconv {

#ifdef FUSEDCONV_HAS_SM90A
namespace cuda_sm90a {
extern const cuda::Image image;
}
#endif
#ifdef FUSEDCONV_HAS_SM80
namespace cuda_sm80 {
extern const cuda::Image image;
}
#endif
#ifdef FUSEDCONV_HAS_SM75
namespace cuda_sm75 {
extern const cuda::Image image;
}
#endif

namespace cuda {

// The best ones first.
constexpr const Image* kImages[] = {
#ifdef FUSEDCONV_HAS_SM90A
    &cuda_sm90a::image,
#endif
#ifdef FUSEDCONV_HAS_SM80
    &cuda_sm80::image,
#endif
#ifdef FUSEDCONV_HAS_SM75
    &cuda_sm75::image,
#endif
};

}  // namespace cuda
}  // namespace fusedconv

// v as a tensor in memory, of any dtype and strides.
#pragma once

#include "convert.h"
#include "source.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class T>
class TensorSource final : public Source<T> {
 public:
  explicit TensorSource(const Tensor& v)
      : Source<T>(v.size[0], v.size[1], v.size[2], v.size[3],
                  round_up(Checked(v.size[3]), kLanes<T>).value()),
        v_(v) {}

  int64_t prepare(int64_t) override { return 0; }
  bool is_cheap() const override { return true; }
  int64_t least_rows() const override { return 1; }
  int64_t channels_for_pack() const override { return 1; }
  int64_t cost() const override { return 32; }

  void pack(const Place&, T*) const override {}

  void load(const Place& place, const Tile<T>& tile, const T*) const override {
    visit_dtype<T>(v_.dtype, [&](auto* element) {
      using Element = Pointee<decltype(element)>;
      const Element* corner = static_cast<const Element*>(v_.data) + place.sample * v_.stride[0] +
                              place.channel * v_.stride[1] + place.row * v_.stride[2];
      for (int64_t r = 0; r < place.rows; ++r) {
        T* row = tile.data + r * tile.pitch;
        clear_last_vectors(row, tile, place.channels);
        load_block(corner + r * v_.stride[2], v_.stride[1], v_.stride[3], row, tile.plane, place.channels,
                   this->cols);
      }
    });
  }

 private:
  // Of a row that ends within a vector, in each channel.
  void clear_last_vectors(T* row, const Tile<T>& tile, int64_t channels) const {
    if (this->cols == tile.pitch) return;
    for (int64_t c = 0; c < channels; ++c) store(row + c * tile.plane + tile.pitch - kLanes<T>, Vector<T>{});
  }

  const Tensor& v_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

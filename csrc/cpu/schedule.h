// How a chain runs over a whole problem: what is one unit of work, what is kept, and which thread does what.
//
// A tile is some rows of some channels of one sample. A unit is what the statistics (or a reduction over
// channels) need together: a few groups of one sample, or all of its channels. Tiles, and the order in which
// their moments are combined, follow from the shape of one sample only: so neither the batch nor the number
// of threads changes a bit.
#pragma once

#include "buffer.h"
#include "core/chain.h"
#include "parallel_for.h"
#include "reduce_tile.h"
#include "source.h"
#include "statistics.h"
#include "tiling.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int64_t kKeepBytes = 16 * 1024 * 1024;     // a unit larger than this is computed twice, not kept
constexpr int64_t kAllKeepBytes = 64 * 1024 * 1024;  // of all units that are kept at a time, one a thread
constexpr int64_t kMostPartBlocks = 16;              // of channels: their parameters stay in L1 with a part
constexpr int64_t kStreamBytes = 16 * 1024 * 1024;   // an output that no cache would hold until it is read

// Whether the output is written past the caches. Not into fresh pages: the system clears them first, through
// the cache, and a streamed store to a line in the cache costs more than any other.
template <class T>
bool streams_to(const Tensor& output) {
  const int64_t elements = element_count(output);
  return elements * int64_t(sizeof(T)) >= kStreamBytes &&
         is_resident(static_cast<const T*>(output.data) + elements / 2);
}

template <class Chain, class T>
class Schedule {
 public:
  Schedule(Source<T>& source, const Problem& problem, int threads)
      : source_(source),
        problem_(problem),
        tiling_(make_tiling<Chain, T>(source, problem.arguments, problem.output, threads)),
        plane_(source.plane(tiling_.tile_rows)),
        // The last row is read in whole vectors.
        tile_elements_((Checked(tiling_.unit_channels) * plane_ + kLanes<T>).value()),
        row_elements_(row_buffer_elements<T>(source.cols)),
        scratch_elements_(
            (Checked(row_elements_) + round_up(Checked(source.prepare(tiling_.tile_rows)), kLanes<T>))
                .value()),
        unit_bytes_((Checked(tiling_.tiles_per_unit) * tile_elements_ * int64_t(sizeof(T))).value()),
        keeps_(Chain::kNeedsStatistics && !source.is_cheap() && unit_bytes_ <= kKeepBytes),
        writes_runs_(is_run_of_rows<T>(problem.output)),
        streams_(writes_runs_ && streams_to<T>(problem.output)),
        part_channels_(kBlockChannels * larger(1, smaller(kMostPartBlocks, kTilePixels / plane_))),
        joins_channels_(source.rows == 1 && std::is_same_v<typename Chain::Pre, Sequence<>>),
        channels_(source.channels) {
    for (int64_t c = 0; c < source.channels; ++c) channels_[c] = make_channel<T>(problem.arguments, c);
  }

  void run() const {
    const int64_t units = source_.samples * tiling_.units_per_sample;
    const int64_t threads = tiling_.threads;
    if constexpr (!Chain::kNeedsStatistics) {
      run_in_one_pass(units);
    } else if ((units % threads == 0 || units >= 4 * threads) &&
               (!keeps_ || threads * unit_bytes_ <= kAllKeepBytes)) {
      run_unit_by_thread(units);
    } else {
      run_unit_by_all_threads(units);
    }
  }

 private:
  // A unit's memory between its statistics and the rest.
  struct Unit {
    int64_t sample;
    int64_t channel;
    int64_t channels;
    Moments* moments;        // [tile][group]
    Channel<T>* parameters;  // [channel]
  };

  int64_t groups(int64_t channels) const { return channels / tiling_.group_channels; }

  Unit unit(int64_t index, Moments* moments, Channel<T>* parameters) const {
    const int64_t channel = index % tiling_.units_per_sample * tiling_.unit_channels;
    return {index / tiling_.units_per_sample, channel,
            smaller(tiling_.unit_channels, source_.channels - channel), moments, parameters};
  }

  Place place(const Unit& unit, int64_t tile) const {
    const int64_t row = tile * tiling_.tile_rows;
    return {unit.sample, unit.channel, unit.channels, row, smaller(tiling_.tile_rows, source_.rows - row)};
  }

  Tile<T> tile_at(T* tiles, int64_t index) const {
    return {tiles + (keeps_ ? index * tile_elements_ : 0), plane_, source_.pitch};
  }

  // Calls visit(part, c) for some channels of a tile from c on. They are still in L1 when the next step of
  // the chain meets them.
  template <class Visit>
  void for_each_part(const Place& where, const Visit& visit) const {
    for (int64_t c = 0; c < where.channels; c += part_channels_) {
      visit({where.sample, where.channel + c, smaller(part_channels_, where.channels - c), where.row,
             where.rows},
            c);
    }
  }

  Tile<T> from_channel(const Tile<T>& tile, int64_t c) const {
    return {tile.data + c * plane_, plane_, tile.pitch};
  }

  // A vector behind the last row of each channel, which whoever takes rows as one run reads: see Tile. Behind
  // a whole plane the next channel's stands, but for the last one's.
  void clear_ends(const Place& part, const Tile<T>& tile) const {
    const int64_t end = round_up(part.rows * tile.pitch, kLanes<T>);
    for (int64_t c = end < tile.plane ? 0 : part.channels - 1; c < part.channels; ++c) {
      store(tile.data + c * tile.plane + end, Vector<T>{});
    }
  }

  // Leaves in the tile what is kept: v, or Pre(v).
  void fill(const Place& part, const Tile<T>& tile, const T* scratch) const {
    source_.load(part, tile, scratch + row_elements_);
    clear_ends(part, tile);
    if constexpr (!Chain::kKeepsConv) {
      for (int64_t c = 0; c < part.channels; ++c) {
        const Channel<T> channel = channels_[part.channel + c];
        transform(tile.data + c * plane_, part.rows * source_.pitch,
                  [&](Vector<T> x) { return Chain::Pre::value(x, x, channel); });
      }
    }
  }

  // Fills the tile, and leaves the moments of Pre(v).
  void measure(const Unit& unit, int64_t index, const Tile<T>& tile, T* scratch) const {
    const Place where = place(unit, index);
    source_.pack(where, scratch + row_elements_);
    Moments* moments = unit.moments + index * groups(unit.channels);
    for_each_part(where, [&](const Place& part, int64_t first) {
      fill(part, from_channel(tile, first), scratch);
      for (int64_t c = first, run; c < first + part.channels; c += run) {
        const Channel<T> channel = channels_[unit.channel + c];
        const auto stage = [&](Vector<T> x) { return Chain::before_norm(x, channel); };
        const int64_t in_group = tiling_.group_channels - c % tiling_.group_channels;
        run = joins_channels_ ? smaller(in_group, first + part.channels - c) : 1;
        const T* plane = tile.data + c * plane_;
        const Moments found = joins_channels_
                                  ? moments_of(plane, plane_, run, source_.cols, stage)
                                  : moments_of(plane, source_.pitch, where.rows, source_.cols, stage);
        Moments& of_group = moments[c / tiling_.group_channels];
        of_group = c % tiling_.group_channels == 0 ? found : combine(of_group, found);
      }
    });
  }

  void set_norms(const Unit& unit) const {
    const int64_t group_count = groups(unit.channels);
    for (int64_t g = 0; g < group_count; ++g) {
      Moments all = unit.moments[g];
      for (int64_t t = 1; t < tiling_.tiles_per_unit; ++t)
        all = combine(all, unit.moments[t * group_count + g]);
      const GroupStatistics found = statistics_of(all, problem_.arguments.eps);
      if (problem_.statistics != nullptr) {
        const int64_t first = unit.sample * problem_.arguments.num_groups;
        problem_.statistics[first + unit.channel / tiling_.group_channels + g] = found;
      }
      for (int64_t c = g * tiling_.group_channels; c < (g + 1) * tiling_.group_channels; ++c) {
        unit.parameters[c] = channels_[unit.channel + c];
        set_norm(unit.parameters[c], problem_.arguments, unit.channel + c, found);
      }
    }
  }

  void finish(const Unit& unit, int64_t index, const Tile<T>& tile, T* scratch) const {
    const Place where = place(unit, index);
    if (!keeps_) source_.pack(where, scratch + row_elements_);
    if (Chain::Reduce::kReducesChannels || problem_.output.stride[3] != 1) {
      if (!keeps_) fill(where, tile, scratch);
      put(where, tile, unit.parameters, scratch);
      return;
    }
    for_each_part(where, [&](const Place& part, int64_t c) {
      const Tile<T> part_tile = from_channel(tile, keeps_ ? c : 0);
      if (!keeps_) fill(part, part_tile, scratch);
      put(part, part_tile, unit.parameters + c, scratch);
    });
    if (streams_) stream_fence();  // only runs are streamed, and they go by parts
  }

  void put(const Place& part, const Tile<T>& tile, const Channel<T>* parameters, T* scratch) const {
    if constexpr (Chain::Reduce::kStores) {
      if (writes_runs_) return write_tile<Chain>(part, tile, parameters, problem_.output, streams_);
    }
    const Place to = reduce_tile<Chain>(typename Chain::Reduce{}, part, tile, parameters, problem_.arguments,
                                        source_.cols, scratch);
    store_tile(to, tile, problem_.output);
  }

  void run_in_one_pass(int64_t units) const {
    const Buffer<T> memory(Checked(scratch_elements_) + tile_elements_, tiling_.threads);
    parallel_for(units * tiling_.tiles_per_unit, tiling_.threads, [&](int64_t i, int worker) {
      T* scratch = memory.data() + worker * (scratch_elements_ + tile_elements_);
      const Unit of_tile = unit(i / tiling_.tiles_per_unit, nullptr, nullptr);
      finish({of_tile.sample, of_tile.channel, of_tile.channels, nullptr, channels_.data() + of_tile.channel},
             i % tiling_.tiles_per_unit, tile_at(scratch + scratch_elements_, 0), scratch);
    });
  }

  // Many units: each thread takes whole ones, and what is kept stays in its own cache.
  void run_unit_by_thread(int64_t units) const {
    const int64_t tiles = keeps_ ? tiling_.tiles_per_unit : 1;
    const int64_t elements = (Checked(tiles) * tile_elements_ + scratch_elements_).value();
    const int64_t moments_count = tiling_.tiles_per_unit * groups(tiling_.unit_channels);
    const Buffer<T> memory(elements, tiling_.threads);
    const Buffer<Moments> moments(moments_count, tiling_.threads);
    const Buffer<Channel<T>> parameters(tiling_.unit_channels, tiling_.threads);
    parallel_for(units, tiling_.threads, [&](int64_t i, int worker) {
      const Unit mine = unit(i, moments.data() + worker * moments_count,
                             parameters.data() + worker * tiling_.unit_channels);
      T* scratch = memory.data() + worker * elements;
      T* kept = scratch + scratch_elements_;
      for (int64_t t = 0; t < tiling_.tiles_per_unit; ++t) measure(mine, t, tile_at(kept, t), scratch);
      set_norms(mine);
      for (int64_t t = 0; t < tiling_.tiles_per_unit; ++t) finish(mine, t, tile_at(kept, t), scratch);
    });
  }

  // Few units: all threads share the tiles of one.
  void run_unit_by_all_threads(int64_t units) const {
    const int64_t own_elements = (Checked(scratch_elements_) + (keeps_ ? 0 : tile_elements_)).value();
    const Buffer<T> own(own_elements, tiling_.threads);
    const Buffer<T> kept(keeps_ ? tiling_.tiles_per_unit : 0, tile_elements_);
    const Buffer<Moments> moments(tiling_.tiles_per_unit, groups(tiling_.unit_channels));
    const Buffer<Channel<T>> parameters(tiling_.unit_channels);
    for (int64_t i = 0; i < units; ++i) {
      const Unit shared = unit(i, moments.data(), parameters.data());
      const auto for_each_tile = [&](auto step) {
        parallel_for(tiling_.tiles_per_unit, tiling_.threads, [&](int64_t t, int worker) {
          T* scratch = own.data() + worker * own_elements;
          step(t, tile_at(keeps_ ? kept.data() : scratch + scratch_elements_, t), scratch);
        });
      };
      for_each_tile([&](int64_t t, const Tile<T>& tile, T* scratch) { measure(shared, t, tile, scratch); });
      set_norms(shared);
      for_each_tile([&](int64_t t, const Tile<T>& tile, T* scratch) { finish(shared, t, tile, scratch); });
    }
  }

  Source<T>& source_;
  const Problem& problem_;
  const Tiling tiling_;
  const int64_t plane_;
  const int64_t tile_elements_;
  const int64_t row_elements_;
  const int64_t scratch_elements_;  // a row buffer, then what the source needs
  const int64_t unit_bytes_;
  const bool keeps_;
  const bool writes_runs_;
  const bool streams_;
  const int64_t part_channels_;  // that are taken through a step together, and stay in L1
  const bool joins_channels_;    // to moments, a channel of one row is a row of its group
  const Buffer<Channel<T>> channels_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

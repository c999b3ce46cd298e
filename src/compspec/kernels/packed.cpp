// A linear layer over packed weights: out[m, n] = dot(x[m], w[n]) + bias[n].
//
// Weights lie in blocks of COLUMNS output features, and in a block in groups of GROUP input features, in the order in
// which they are read, so that a product is one sequential read of memory. Three formats:
//   bf16  [GROUP / 2][16 columns][2] twice, for each half of the columns: what tile and dot product instructions take
//   int8  a scale per column (fp16), then [GROUP / 4][16][4] bytes twice; weight = scale * (byte - 128)
//   int4  a scale and a minimum per column (fp16), then [GROUP / 8][16][4] bytes twice, the first half of the
//         group in their low four bits and the second in the high ones; weight = scale * bits + minimum
// For int8 and int4 each group of a row of x is rounded to 8 bits with a scale of its own; products of integers are
// summed exactly, and groups are added in rising order in fp32.
//
// Every output is one chain of sums in an order that depends on the number of input features alone. Tiles, blocks and
// threads only choose which outputs are worked on at the same time, so a row's bits depend neither on the number of
// rows in the call nor on where the row sits.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "team.h"
#include "tiles.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#if defined(__AVX512VNNI__)
#define VNNI
#endif
#if defined(__AVX512BF16__)
#define BF16
#endif
#endif

#define INLINE inline __attribute__((always_inline))

namespace {
using bf16 = std::uint16_t;
using fp16 = std::uint16_t;
using compspec::Team;
using i64 = std::int64_t;

constexpr int HALF = 16;         // columns of a vector
constexpr int COLUMNS = 32;      // of a block
constexpr int GROUP = 32;        // input features
constexpr int TILE_ROWS = 16;
constexpr i64 LINE = 64;         // bytes
constexpr i64 AHEAD = 8192;      // bytes that are asked for before they are read
constexpr i64 ALONE = 1 << 15;   // bytes of weights below which a second thread costs more than it saves

enum Format { FORMAT_BF16, FORMAT_INT8, FORMAT_INT4 };
enum Path { PATH_PLAIN, PATH_BF16, PATH_AMX };

constexpr i64 group_bytes(int format) {
  return format == FORMAT_BF16 ? COLUMNS * GROUP * 2
       : format == FORMAT_INT8 ? COLUMNS * 2 + COLUMNS * GROUP
                               : COLUMNS * 4 + COLUMNS * GROUP / 2;
}

INLINE float widen(bf16 x) {
  const std::uint32_t bits = std::uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
INLINE float widen(float x) { return x; }

INLINE void narrow(float x, float* to) { *to = x; }
INLINE void narrow(float x, bf16* to) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  *to = std::isnan(x) ? 0x7FC0 : bf16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// ---- 8 bit activations -------------------------------------------------------------------------------------------

// One row of x: bytes [groups][GROUP], and per group the scale, the sum of the bytes, and what that sum is worth.
struct Row {
  const std::int8_t* bytes;
  const float* scale;
  const std::int32_t* sum;
  const float* offset;
};

// Below this a group counts as zero: the inverse of its scale would overflow.
constexpr float SMALLEST = 1e-30f;

#if defined(VNNI)
INLINE __m512 load(const float* x) { return _mm512_loadu_ps(x); }
INLINE __m512 load(const bf16* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

template <typename T>
void quantise_group(const T* x, std::int8_t* bytes, float* scale, std::int32_t* sum, float* offset) {
  const __m512 x0 = load(x), x1 = load(x + HALF);
  // By their bits absolute values are ordered as integers, and NaN is the largest.
  const __m512i sign = _mm512_set1_epi32(0x7FFFFFFF);
  const __m512i a0 = _mm512_and_si512(_mm512_castps_si512(x0), sign), a1 = _mm512_and_si512(_mm512_castps_si512(x1), sign);
  const std::uint32_t largest = _mm512_reduce_max_epu32(_mm512_max_epu32(a0, a1));
  float most;
  std::memcpy(&most, &largest, 4);
  *scale = most / 127.0f;
  const __m512 inverse = _mm512_set1_ps(127.0f / most);
  __m512i q0 = _mm512_setzero_si512(), q1 = q0;
  if (most >= SMALLEST && std::isfinite(most)) {
    q0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, inverse));
    q1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, inverse));
  }
  _mm_storeu_si128((__m128i*)bytes, _mm512_cvtsepi32_epi8(q0));
  _mm_storeu_si128((__m128i*)(bytes + HALF), _mm512_cvtsepi32_epi8(q1));
  *sum = _mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1));
  *offset = *scale * float(*sum);
}
#else
template <typename T>
void quantise_group(const T* x, std::int8_t* bytes, float* scale, std::int32_t* sum, float* offset) {
  std::uint32_t largest = 0;
  for (int i = 0; i < GROUP; ++i) {
    const float value = widen(x[i]);
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    largest = std::max(largest, bits & 0x7FFFFFFF);
  }
  float most;
  std::memcpy(&most, &largest, 4);
  *scale = most / 127.0f;
  const bool counts = most >= SMALLEST && std::isfinite(most);
  std::int32_t total = 0;
  for (int i = 0; i < GROUP; ++i) {
    bytes[i] = counts ? std::int8_t(std::nearbyint(widen(x[i]) * (127.0f / most))) : 0;
    total += bytes[i];
  }
  *sum = total;
  *offset = *scale * float(total);
}
#endif

#if defined(VNNI)
INLINE __m512 widen_halves(const std::uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

// `rows` rows times `halves` halves of a block.
template <int FORMAT, int ROWS, int HALVES>
INLINE void multiply_quantised(const Row* rows, const std::uint8_t* block, int first, i64 groups, float* sums) {
  __m512 acc[HALVES][ROWS];
  for (int h = 0; h < HALVES; ++h) for (int r = 0; r < ROWS; ++r) acc[h][r] = _mm512_setzero_ps();
  const __m512i low = _mm512_set1_epi8(15);
  for (i64 g = 0; g < groups; ++g, block += group_bytes(FORMAT)) {
    for (i64 at = 0; at < group_bytes(FORMAT); at += LINE) __builtin_prefetch(block + AHEAD + at, 0, 3);
    for (int h = 0; h < HALVES; ++h) {
      const int half = first + h;
      __m512i dots[ROWS];
      const __m512 scale = widen_halves(block + half * HALF * 2);
      if constexpr (FORMAT == FORMAT_INT8) {
        const std::uint8_t* data = block + COLUMNS * 2 + half * HALF * GROUP;
        for (int r = 0; r < ROWS; ++r) dots[r] = _mm512_set1_epi32(-128 * rows[r].sum[g]);
        for (int q = 0; q < GROUP / 4; ++q) {
          const __m512i w = _mm512_loadu_si512(data + q * LINE);
          for (int r = 0; r < ROWS; ++r) {
            std::int32_t four;
            std::memcpy(&four, rows[r].bytes + g * GROUP + q * 4, 4);
            dots[r] = _mm512_dpbusd_epi32(dots[r], w, _mm512_set1_epi32(four));
          }
        }
      } else {
        const std::uint8_t* data = block + COLUMNS * 4 + half * HALF * GROUP / 2;
        for (int r = 0; r < ROWS; ++r) dots[r] = _mm512_setzero_si512();
        for (int q = 0; q < GROUP / 8; ++q) {
          const __m512i both = _mm512_loadu_si512(data + q * LINE);
          const __m512i w0 = _mm512_and_si512(both, low), w1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
          for (int r = 0; r < ROWS; ++r) {
            std::int32_t four[2];
            std::memcpy(four, rows[r].bytes + g * GROUP + q * 4, 4);
            std::memcpy(four + 1, rows[r].bytes + g * GROUP + GROUP / 2 + q * 4, 4);
            dots[r] = _mm512_dpbusd_epi32(dots[r], w0, _mm512_set1_epi32(four[0]));
            dots[r] = _mm512_dpbusd_epi32(dots[r], w1, _mm512_set1_epi32(four[1]));
          }
        }
      }
      for (int r = 0; r < ROWS; ++r) {
        const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(rows[r].scale[g]));
        acc[h][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), factor, acc[h][r]);
      }
      if constexpr (FORMAT == FORMAT_INT4) {
        const __m512 minimum = widen_halves(block + COLUMNS * 2 + half * HALF * 2);
        for (int r = 0; r < ROWS; ++r) {
          acc[h][r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(rows[r].offset[g]), acc[h][r]);
        }
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int h = 0; h < HALVES; ++h) _mm512_storeu_ps(sums + r * COLUMNS + (first + h) * HALF, acc[h][r]);
  }
}

template <int FORMAT, int ROWS>
void multiply_rows(const Row* rows, const std::uint8_t* block, i64 groups, float* sums) {
  if constexpr (ROWS <= 4) {
    multiply_quantised<FORMAT, ROWS, 2>(rows, block, 0, groups, sums);
  } else {
    multiply_quantised<FORMAT, ROWS, 1>(rows, block, 0, groups, sums);
    multiply_quantised<FORMAT, ROWS, 1>(rows, block, 1, groups, sums);
  }
}
#else
INLINE float widen_half(const std::uint8_t* p) {
  fp16 half;
  std::memcpy(&half, p, 2);
  // Exponent and mantissa in a float's places are too small by 2^112, also where they are subnormal.
  const std::uint32_t rest = half & 0x7FFF, bits = rest << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  x = rest >= 0x7C00 ? x * INFINITY : x * 0x1p112f;
  return half & 0x8000 ? -x : x;
}

template <int FORMAT, int ROWS>
void multiply_rows(const Row* rows, const std::uint8_t* block, i64 groups, float* sums) {
  std::fill_n(sums, ROWS * COLUMNS, 0.0f);
  for (i64 g = 0; g < groups; ++g, block += group_bytes(FORMAT)) {
    for (int half = 0; half < 2; ++half) {
      std::uint8_t w[GROUP / 4][HALF][4];
      if constexpr (FORMAT == FORMAT_INT8) {
        std::memcpy(w, block + COLUMNS * 2 + half * HALF * GROUP, sizeof w);
      } else {
        const std::uint8_t* data = block + COLUMNS * 4 + half * HALF * GROUP / 2;
        std::uint8_t* flat = &w[0][0][0];
        constexpr int BYTES = HALF * GROUP / 2;
        for (int i = 0; i < BYTES; ++i) flat[i] = data[i] & 15, flat[BYTES + i] = data[i] >> 4;
      }
      for (int r = 0; r < ROWS; ++r) {
        std::int32_t dots[HALF];
        std::fill_n(dots, HALF, FORMAT == FORMAT_INT8 ? -128 * rows[r].sum[g] : 0);
        for (int q = 0; q < GROUP / 4; ++q) {
          const std::int8_t* x = rows[r].bytes + g * GROUP + q * 4;
          for (int c = 0; c < HALF; ++c) for (int i = 0; i < 4; ++i) dots[c] += int(w[q][c][i]) * int(x[i]);
        }
        for (int c = 0; c < HALF; ++c) {
          const int column = half * HALF + c;
          float& sum = sums[r * COLUMNS + column];
          sum = std::fma(float(dots[c]), widen_half(block + column * 2) * rows[r].scale[g], sum);
          if (FORMAT == FORMAT_INT4) sum = std::fma(widen_half(block + (COLUMNS + column) * 2), rows[r].offset[g], sum);
        }
      }
    }
  }
}
#endif

using MultiplyRows = void (*)(const Row*, const std::uint8_t*, i64, float*);
constexpr int TOGETHER = 8;
template <int FORMAT>
constexpr MultiplyRows MULTIPLY[TOGETHER + 1] = {
    nullptr, multiply_rows<FORMAT, 1>, multiply_rows<FORMAT, 2>, multiply_rows<FORMAT, 3>, multiply_rows<FORMAT, 4>,
    multiply_rows<FORMAT, 5>, multiply_rows<FORMAT, 6>, multiply_rows<FORMAT, 7>, multiply_rows<FORMAT, 8>};

// ---- bf16 --------------------------------------------------------------------------------------------------------

#if defined(BF16)
// `ROWS` rows of x times a block, without tiles.
template <int ROWS>
void multiply_pairs(const bf16* x, i64 stride, const std::uint8_t* block, i64 groups, float* sums) {
  __m512 acc[ROWS][2];
  for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (i64 g = 0; g < groups; ++g, block += group_bytes(FORMAT_BF16)) {
    for (i64 at = 0; at < group_bytes(FORMAT_BF16); at += LINE) __builtin_prefetch(block + AHEAD + at, 0, 3);
    for (int pair = 0; pair < GROUP / 2; ++pair) {
      const __m512bh w0 = (__m512bh)_mm512_loadu_si512(block + pair * LINE);
      const __m512bh w1 = (__m512bh)_mm512_loadu_si512(block + GROUP / 2 * LINE + pair * LINE);
      for (int r = 0; r < ROWS; ++r) {
        std::int32_t two;
        std::memcpy(&two, x + r * stride + g * GROUP + pair * 2, 4);
        const __m512bh a = (__m512bh)_mm512_set1_epi32(two);
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], a, w0);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], a, w1);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int h = 0; h < 2; ++h) _mm512_storeu_ps(sums + r * COLUMNS + h * HALF, acc[r][h]);
  }
}

using MultiplyPairs = void (*)(const bf16*, i64, const std::uint8_t*, i64, float*);
constexpr MultiplyPairs PAIRS[TOGETHER + 1] = {
    nullptr, multiply_pairs<1>, multiply_pairs<2>, multiply_pairs<3>, multiply_pairs<4>,
    multiply_pairs<5>, multiply_pairs<6>, multiply_pairs<7>, multiply_pairs<8>};
#endif

#if defined(AMX)
// Up to 32 rows of x times a block; sums [rows][COLUMNS].
void multiply_tiles(const bf16* x, i64 stride, const std::uint8_t* block, i64 groups, bool second, float* sums) {
  const i64 row_bytes = stride * 2;
  _tile_zero(0);
  _tile_zero(1);
  if (second) {
    const bf16* below = x + TILE_ROWS * stride;
    _tile_zero(2);
    _tile_zero(3);
    for (i64 g = 0; g < groups; ++g, block += group_bytes(FORMAT_BF16)) {
      _tile_loadd(4, x + g * GROUP, row_bytes);
      _tile_loadd(6, block, LINE);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, block + TILE_ROWS * LINE, LINE);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, below + g * GROUP, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums + TILE_ROWS * COLUMNS, COLUMNS * 4);
    _tile_stored(3, sums + TILE_ROWS * COLUMNS + HALF, COLUMNS * 4);
  } else {
    for (i64 g = 0; g < groups; ++g, block += group_bytes(FORMAT_BF16)) {
      for (i64 at = 0; at < group_bytes(FORMAT_BF16); at += LINE) __builtin_prefetch(block + AHEAD + at, 0, 3);
      _tile_loadd(4, x + g * GROUP, row_bytes);
      _tile_loadd(6, block, LINE);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, block + TILE_ROWS * LINE, LINE);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, sums, COLUMNS * 4);
  _tile_stored(1, sums + HALF, COLUMNS * 4);
}
#endif

// ---- one call ----------------------------------------------------------------------------------------------------

template <typename T>
struct Call {
  const T* x;
  i64 stride, rows, groups;  // of x: elements from row to row; rows; input features / GROUP
  const std::uint8_t* packed;
  const float* bias;         // [columns] or null
  T* out;                    // [rows, columns]
  i64 columns;
  int format, path;
};

template <typename T>
void store(const Call<T>& call, i64 first_row, i64 rows, i64 block, const float* sums) {
  const i64 column = block * COLUMNS, count = std::min<i64>(COLUMNS, call.columns - column);
  const float* bias = call.bias ? call.bias + column : nullptr;
  for (i64 r = 0; r < rows; ++r, sums += COLUMNS) {
    T* out = call.out + (first_row + r) * call.columns + column;
    for (i64 c = 0; c < count; ++c) narrow(bias ? sums[c] + bias[c] : sums[c], out + c);
  }
}

// What a thread works on, and with.
template <typename T>
class Worker {
 public:
  Worker(const Call<T>& call, const Row* rows) : call_(call), rows_(rows) {}
  ~Worker() {
#if defined(AMX)
    if (first_ != 0) _tile_release();
#endif
  }

  void multiply(i64 block) {
    packed_ = call_.packed + block * call_.groups * group_bytes(call_.format);
    const i64 most = call_.format == FORMAT_BF16 && call_.path == PATH_AMX ? 2 * TILE_ROWS : TOGETHER;
    for (i64 m = 0; m < call_.rows; m += most) {
      const i64 rows = std::min(most, call_.rows - m);
      if (call_.format == FORMAT_INT8) MULTIPLY<FORMAT_INT8>[rows](rows_ + m, packed_, call_.groups, sums_);
      if (call_.format == FORMAT_INT4) MULTIPLY<FORMAT_INT4>[rows](rows_ + m, packed_, call_.groups, sums_);
      if (call_.format == FORMAT_BF16) multiply_bf16(call_.x + m * call_.stride, rows);
      store(call_, m, rows, block, sums_);
    }
  }

 private:
  void multiply_bf16([[maybe_unused]] const bf16* x, [[maybe_unused]] i64 rows) {
#if defined(AMX)
    if (call_.path == PATH_AMX) {
      const int first = int(std::min<i64>(rows, TILE_ROWS)), second = int(rows) - first;
      if (first != first_ || second != second_) compspec::configure_tiles(first_ = first, second_ = second);
      return multiply_tiles(x, call_.stride, packed_, call_.groups, second > 0, sums_);
    }
#endif
#if defined(BF16)
    PAIRS[rows](x, call_.stride, packed_, call_.groups, sums_);
#endif
  }
  void multiply_bf16(const float*, i64) {}

  const Call<T>& call_;
  const Row* rows_;
  const std::uint8_t* packed_ = nullptr;
  alignas(LINE) float sums_[2 * TILE_ROWS * COLUMNS];
  int first_ = 0, second_ = 0;  // rows that the tiles are configured for
};

// x in 8 bits, in memory of `size` bytes.
class Quantised {
 public:
  static i64 size(i64 rows, i64 groups) {
    return rows * groups * (GROUP + 12) + rows * i64(sizeof(Row)) + 2 * LINE;
  }

  Quantised(void* memory, i64 rows, i64 groups) : groups_(groups) {
    const i64 cells = rows * groups;
    rows_ = static_cast<Row*>(memory);
    scale_ = reinterpret_cast<float*>(rows_ + rows);
    offset_ = scale_ + cells;
    sum_ = reinterpret_cast<std::int32_t*>(offset_ + cells);
    bytes_ = reinterpret_cast<std::int8_t*>(sum_ + cells);
  }

  template <typename T>
  void fill(const Call<T>& call, i64 cell) const {
    const i64 row = cell / groups_, group = cell % groups_, first = row * groups_;
    if (group == 0) rows_[row] = {bytes_ + first * GROUP, scale_ + first, sum_ + first, offset_ + first};
    const T* x = call.x + row * call.stride + group * GROUP;
    quantise_group(x, bytes_ + cell * GROUP, scale_ + cell, sum_ + cell, offset_ + cell);
  }

  const Row* rows() const { return rows_; }

 private:
  i64 groups_;
  Row* rows_;
  float *scale_, *offset_;
  std::int32_t* sum_;
  std::int8_t* bytes_;
};

// One thread's part. `memory` is for x in 8 bits.
template <typename T>
void work(const Call<T>& call, void* memory, const Team& team) {
  const Quantised x(memory, call.rows, call.groups);
  if (call.format != FORMAT_BF16) {
    const i64 cells = call.rows * call.groups;
    for (i64 cell = team.begin(cells); cell < team.end(cells); ++cell) x.fill(call, cell);
    team.wait();
  }
  const i64 blocks = (call.columns + COLUMNS - 1) / COLUMNS;
  Worker<T> worker(call, x.rows());
  for (i64 block = team.begin(blocks); block < team.end(blocks); ++block) worker.multiply(block);
}

// Kept between calls; null if there is not enough.
void* scratch(i64 bytes) {
  static thread_local std::unique_ptr<void, decltype(&std::free)> kept{nullptr, &std::free};
  static thread_local i64 kept_bytes = 0;
  if (bytes > kept_bytes) {
    kept.reset(std::aligned_alloc(LINE, bytes / LINE * LINE + LINE));
    kept_bytes = kept ? bytes : 0;
  }
  return kept.get();
}

template <typename T>
int linear(const Call<T>& call, int threads) {
  const bool quantised = call.format != FORMAT_BF16;
  void* memory = quantised ? scratch(Quantised::size(call.rows, call.groups)) : nullptr;
  if (quantised && memory == nullptr) return 1;
  const i64 blocks = (call.columns + COLUMNS - 1) / COLUMNS;
  if (blocks * call.groups * group_bytes(call.format) * call.rows < ALONE) threads = 1;
  compspec::in_team(threads, [&](const Team& team) { work(call, memory, team); });
  return 0;
}

// The arguments of a call in a program, beside a Call of its type.
template <typename T>
struct Recorded {
  Call<T> call;
  void* memory;  // compspec_packed_scratch bytes for int8 and int4
};

template <typename T>
int work_recorded(void* arguments, const Team* team) {
  const auto* recorded = static_cast<const Recorded<T>*>(arguments);
  work(recorded->call, recorded->memory, *team);
  return 0;
}

}  // namespace

// How products of bf16 are computed here: 2 with tiles, 1 with dot product instructions, 0 not at all.
extern "C" int compspec_packed_best_path() {
#if defined(AMX)
  if (compspec::may_use_tiles()) return PATH_AMX;
#endif
#if defined(BF16)
  return PATH_BF16;
#endif
  return PATH_PLAIN;
}

// Arrays as in Call; fp32 has no bf16 weights. Returns 0, or 1 when there is no memory for x in 8 bits.
#define COMPSPEC_PACKED_LINEAR(NAME, T)                                                                             \
  extern "C" int NAME(const T* x, i64 stride, i64 rows, i64 groups, const std::uint8_t* packed, const float* bias,  \
                      T* out, i64 columns, int format, int path, int threads) {                                     \
    return linear<T>({x, stride, rows, groups, packed, bias, out, columns, format, path}, threads);                 \
  }
COMPSPEC_PACKED_LINEAR(compspec_packed_linear_bf16, bf16)
COMPSPEC_PACKED_LINEAR(compspec_packed_linear_fp32, float)

// For programs: bytes of scratch, and what all threads of a team call with a Recorded.
extern "C" i64 compspec_packed_scratch(i64 rows, i64 groups) { return Quantised::size(rows, groups); }
extern "C" int compspec_packed_work_bf16(void* arguments, const Team* team) {
  return work_recorded<bf16>(arguments, team);
}
extern "C" int compspec_packed_work_fp32(void* arguments, const Team* team) {
  return work_recorded<float>(arguments, team);
}

// Row independent linear layer for bfloat16: out[m, n] = dot(x[m], weight[n]) + bias[n].
//
// Every output is one chain of fused multiply-adds in one vector accumulator. Of each STEP wide block of
// k, lane l takes element 2l and then element 2l + 1; blocks go in rising k, the last one is padded with
// zeros, and the lanes are summed in a fixed tree. That order depends on K alone. Tiles, blocks and
// threads only choose which outputs are worked on at the same time, so a row's bits depend neither on the
// number of rows in the call nor on where the row sits.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#if defined(__AVX512F__) && defined(__FMA__)
#define AVX512
#endif
#if defined(__AVX2__) && defined(__FMA__)
#define AVX2
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of bfloat16 are split assuming little endian words"
#endif

#define INLINE inline __attribute__((always_inline))

namespace {
using bf16 = std::uint16_t;
using i64 = std::int64_t;

#if defined(AVX512)
constexpr int VECTOR_BYTES = 64;
#elif defined(AVX2)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

typedef float Vec __attribute__((vector_size(VECTOR_BYTES)));
typedef std::uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef float Four __attribute__((vector_size(16)));
typedef std::uint32_t FourWords __attribute__((vector_size(16)));
typedef float VecAt __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef std::uint32_t WordsAt __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));

constexpr int LANES = VECTOR_BYTES / 4;
constexpr i64 LINE = 64;         // bytes
constexpr int STEP = 2 * LANES;  // one vector of 32 bit words holds this many bfloat16

// sum += a * b. Written out on x86: compilers fold a load of x into each, and load ports become the limit.
INLINE void multiply_add(Vec& sum, Vec a, Vec b) {
#if defined(AVX512)
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(AVX2)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#elif defined(__aarch64__)
  sum = (Vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  sum = a * b + sum;  // -ffp-contract=off keeps this unfused in every tile alike
#endif
}

// A bfloat16 is the upper half of a float: a word of two gives the first by a shift, the second by a mask.
INLINE Vec first_of_pairs(Words pairs) { return (Vec)(pairs << 16); }
INLINE Vec second_of_pairs(Words pairs, Words mask) { return (Vec)(pairs & mask); }

// Volatile, so read anew in each step: kept in a register, it would push an accumulator out.
const volatile Words SECOND_MASK = Words{} + 0xFFFF0000u;

INLINE Words load_pairs(const bf16* p) { return *reinterpret_cast<const WordsAt*>(p); }
INLINE Vec load(const float* p) { return *reinterpret_cast<const VecAt*>(p); }
INLINE void store(float* p, Vec v) { *reinterpret_cast<VecAt*>(p) = v; }

// The sums of the lanes of four vectors, each by the same tree: neighbours, then pairs.
INLINE Four sum_lanes(Vec a, Vec b, Vec c, Vec d) {
#if defined(AVX2)
#if defined(AVX512)
  const auto fold = [](Vec v) {
    __m256 half[2];
    std::memcpy(half, &v, sizeof half);
    return _mm256_add_ps(half[0], half[1]);
  };
#else
  const auto fold = [](Vec v) { return (__m256)v; };
#endif
  const __m256 pairs = _mm256_hadd_ps(fold(a), fold(b));
  const __m256 fours = _mm256_hadd_ps(pairs, _mm256_hadd_ps(fold(c), fold(d)));
  return (Four)_mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1));
#else
  const auto sum = [](Vec v) { return (v[0] + v[1]) + (v[2] + v[3]); };
  return Four{sum(a), sum(b), sum(c), sum(d)};
#endif
}

INLINE float to_float(bf16 value) { return __builtin_bit_cast(float, std::uint32_t{value} << 16); }

// Round to nearest, ties to even; every NaN becomes the quiet one. Leaves 16 bits per word.
INLINE FourWords to_bf16(Four value) {
  const FourWords bits = (FourWords)value;
  const FourWords rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return value != value ? FourWords{} + 0x7FC0u : rounded;
}

struct Job {
  const float* x;  // widened rows, see widen_row
  i64 x_stride;
  const bf16* weight;
  const bf16* bias;  // may be null
  bf16* out;
  i64 n;
  i64 k;
};

// Bytes of weights to ask for while a tile runs, `pace` of them per step.
struct Ahead {
  const char* bytes;
  i64 pace;
};

template <int ROWS, int COLUMNS>
struct Tile {
  static constexpr int COUNT = ROWS * COLUMNS;
  Vec sum[(COUNT + 3) / 4 * 4] = {};  // [ROWS, COLUMNS] and padding to whole fours

  INLINE void step(const float* x, i64 x_stride, const bf16* w, i64 w_stride) {
    Vec wide[COLUMNS];
#pragma GCC unroll 16
    for (int c = 0; c < COLUMNS; ++c) wide[c] = first_of_pairs(load_pairs(w + c * w_stride));
    accumulate(x, x_stride, wide);
    const Words mask = SECOND_MASK;
#pragma GCC unroll 16
    for (int c = 0; c < COLUMNS; ++c) wide[c] = second_of_pairs(load_pairs(w + c * w_stride), mask);
    accumulate(x + LANES, x_stride, wide);
  }

  INLINE void accumulate(const float* x, i64 x_stride, const Vec (&wide)[COLUMNS]) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Vec value = load(x + r * x_stride);
#pragma GCC unroll 16
      for (int c = 0; c < COLUMNS; ++c) multiply_add(sum[r * COLUMNS + c], value, wide[c]);
    }
  }

  // Adds the bias (null for none) and rounds.
  INLINE void finish(const bf16* bias, bf16* out, i64 out_stride) {
    FourWords words[(COUNT + 3) / 4];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i += 4) {
      Four total = sum_lanes(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
      if (bias != nullptr) {
        total += Four{to_float(bias[i % COLUMNS]), to_float(bias[(i + 1) % COLUMNS]),
                      to_float(bias[(i + 2) % COLUMNS]), to_float(bias[(i + 3) % COLUMNS])};
      }
      words[i / 4] = to_bf16(total);
    }
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) {
      out[i / COLUMNS * out_stride + i % COLUMNS] = static_cast<bf16>(words[i / 4][i % 4]);
    }
  }
};

template <int ROWS, int COLUMNS>
__attribute__((noinline)) void run_tile(const Job& job, i64 row, i64 column, Ahead& ahead) {
  constexpr int LINES = (COLUMNS * STEP * 2 + LINE - 1) / LINE;
  const float* x = job.x + row * job.x_stride;
  const bf16* w = job.weight + column * job.k;
  const i64 body = job.k - job.k % STEP;
  const char* next = ahead.bytes;
  ahead.bytes += body / STEP * ahead.pace;
  Tile<ROWS, COLUMNS> tile;
  for (i64 k = 0; k < body; k += STEP) {
    for (int line = 0; line < LINES; ++line) __builtin_prefetch(next + line * LINE, 0, 2);
    next += ahead.pace;
    tile.step(x + k, job.x_stride, w + k, job.k);
  }
  if (body < job.k) {
    bf16 last[COLUMNS][STEP] = {};
    for (int c = 0; c < COLUMNS; ++c) {
      std::memcpy(last[c], w + c * job.k + body, (job.k - body) * sizeof(bf16));
    }
    tile.step(x + body, job.x_stride, last[0], STEP);
  }
  tile.finish(job.bias ? job.bias + column : nullptr, job.out + row * job.n + column, job.n);
}

// Each of the strips of a block also asks for its share of the weights of the block to come.
template <int ROWS, int COLUMNS>
void strip(const Job& job, i64 row, i64 column, i64 end, Ahead ahead, i64 strips) {
  ahead.pace = COLUMNS * STEP * 2 / strips;
  for (; column + COLUMNS <= end; column += COLUMNS) run_tile<ROWS, COLUMNS>(job, row, column, ahead);
  for (; column < end; ++column) run_tile<ROWS, 1>(job, row, column, ahead);
}

// By rows. Accumulators and operands fill the register file but do not overflow it; fewer rows take more
// columns, so that there are enough chains to hide the latency of an addition.
using Strip = void (*)(const Job&, i64, i64, i64, Ahead, i64);
#if defined(AVX512) || defined(__aarch64__)
constexpr Strip STRIPS[] = {nullptr,     strip<1, 12>, strip<2, 8>, strip<3, 6>,
                            strip<4, 6>, strip<5, 4>,  strip<6, 4>};
#else
constexpr Strip STRIPS[] = {nullptr,     strip<1, 8>, strip<2, 4>, strip<3, 3>,
                            strip<4, 3>, strip<5, 2>, strip<6, 2>};
#endif

// Rows go by fours; one or two left over join the last four, to share the widening of weights.
void block(const Job& job, i64 row, i64 row_end, i64 column, i64 column_end) {
  const i64 strips = std::max<i64>(1, (row_end - row + 1) / 4);
  const i64 bytes = (column_end - column) * job.k * 2;
  Ahead ahead = {reinterpret_cast<const char*>(job.weight) + column_end * job.k * 2, 0};
  while (row < row_end) {
    const i64 rows = row_end - row <= 6 ? row_end - row : 4;
    STRIPS[rows](job, row, column, column_end, ahead, strips);
    row += rows;
    ahead.bytes += bytes / strips;
  }
}

// Rows are widened once per call, in the order the weights come apart, padded with zeros.
void widen_row(const bf16* x, i64 k, float* wide) {
  const i64 body = k - k % STEP;
  const Words mask = SECOND_MASK;
  for (i64 i = 0; i < body; i += STEP) {
    const Words pairs = load_pairs(x + i);
    store(wide + i, first_of_pairs(pairs));
    store(wide + i + LANES, second_of_pairs(pairs, mask));
  }
  if (body < k) {
    bf16 last[STEP] = {};
    std::memcpy(last, x + body, (k - body) * sizeof(bf16));
    store(wide + body, first_of_pairs(load_pairs(last)));
    store(wide + body + LANES, second_of_pairs(load_pairs(last), mask));
  }
}

// Memory for the widened rows, kept between calls; null if there is not enough.
float* scratch(i64 floats) {
  static thread_local std::unique_ptr<void, decltype(&std::free)> kept{nullptr, &std::free};
  static thread_local i64 kept_floats = 0;
  if (floats > kept_floats) {
    kept.reset(std::aligned_alloc(LINE, floats * 4 / LINE * LINE + LINE));
    kept_floats = kept ? floats : 0;
  }
  return static_cast<float*>(kept.get());
}

i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

constexpr i64 PANEL_ROWS = 256;       // widened at a time, bounds the scratch
constexpr i64 WIDEN_ALONE = 1 << 14;  // elements below which a team of threads costs more
constexpr i64 WORK_ALONE = 1 << 16;   // multiply-adds, likewise
constexpr i64 BLOCK_ROWS = 64;
constexpr i64 BLOCK_BYTES = 1 << 15;  // weights of a block, to stay in the second level cache
constexpr i64 COLUMN_UNIT = 24;       // a multiple of the columns of every tile

// Columns per block: few enough for the cache, and for each thread to get a few blocks.
i64 columns_per_block(i64 n, i64 k, int threads) {
  const i64 fit = BLOCK_BYTES / (2 * std::max<i64>(k, 1)) / COLUMN_UNIT;
  const i64 share = divide_up(n, COLUMN_UNIT * 2 * threads);
  return COLUMN_UNIT * std::max<i64>(1, std::min(fit, share));
}

}  // namespace

// x [m, k] with rows x_stride apart, and contiguous weight [n, k], bias [n] or null, out [m, n].
// Returns 0, or 1 when there is no memory for the scratch.
extern "C" int compspec_linear_bf16(const bf16* x, i64 x_stride, const bf16* weight, const bf16* bias,
                                    bf16* out, i64 m, i64 n, i64 k, int threads) {
  // The extra line keeps the rows of a tile out of each other's cache sets.
  const i64 wide_stride = divide_up(k, STEP) * STEP + LINE / 4;
  float* wide = scratch(std::min(m, PANEL_ROWS) * wide_stride);
  if (wide == nullptr) return 1;
  if (m * n * k < WORK_ALONE) threads = 1;
  const i64 columns = columns_per_block(n, k, threads);
  const i64 column_blocks = divide_up(n, columns);
  for (i64 panel = 0; panel < m; panel += PANEL_ROWS) {
    const i64 rows = std::min(PANEL_ROWS, m - panel);
    const i64 row_blocks = divide_up(rows, BLOCK_ROWS);
    const Job job = {wide, wide_stride, weight, bias, out + panel * n, n, k};
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * k > WIDEN_ALONE)
    for (i64 row = 0; row < rows; ++row) {
      widen_row(x + (panel + row) * x_stride, k, wide + row * wide_stride);
    }
    const i64 blocks = column_blocks * row_blocks;
    // Few rows: a thread's blocks follow each other, so that each one brings in the next.
    const i64 chunk = row_blocks > 1 ? 1 : divide_up(blocks, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
    for (i64 index = 0; index < blocks; ++index) {
      const i64 row = index % row_blocks * BLOCK_ROWS;
      const i64 column = index / row_blocks * columns;
      block(job, row, std::min(row + BLOCK_ROWS, rows), column, std::min(column + columns, n));
    }
  }
  return 0;
}

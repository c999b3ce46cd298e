// Paged attention that reads keys and values where they lie.
//
// A row is one query of one head. Its keys come in runs of KEYS tokens that start at multiples of KEYS of
// the absolute position; a run is one step of the online softmax. Within a run a score is one chain of
// fused multiply-adds in rising head dim, an output one chain in rising token, and the sum of probabilities
// one fixed tree over the run. So the arithmetic of a row is a function of its position and window alone.
// Tiles, threads and pages only choose which rows are worked on at the same time. A key that a row does not
// see enters neither its maximum nor its sum, and its value is not multiplied at all: it may be NaN.
//
// Legend: R requests, Q queries per request, Hq and Hkv heads, G = Hq / Hkv, D head dim, S slots.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "team.h"

#if defined(__AVX2__) && defined(__FMA__)
#define AVX2
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of bfloat16 are split assuming little endian words"
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

namespace {
using bf16 = std::uint16_t;
using compspec::Team;
using i64 = std::int64_t;

typedef float Vec __attribute__((vector_size(32)));
typedef std::int32_t Ints __attribute__((vector_size(32)));
typedef std::uint32_t Words __attribute__((vector_size(32)));
typedef std::uint16_t Halves __attribute__((vector_size(16)));
typedef float VecAt __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::uint32_t WordsAt __attribute__((vector_size(32), aligned(2), may_alias));
typedef std::uint16_t HalvesAt __attribute__((vector_size(16), aligned(2), may_alias));

constexpr int LANES = 8;
constexpr int KEYS = 64;             // tokens per run
constexpr int TOGETHER = 3;          // rows whose sums are in registers at the same time
constexpr i64 TILE_ROWS = 48;        // rows that share one widening of keys and values
constexpr i64 FEWEST_ROWS = 12;      // of a tile that is made small to give every thread some
constexpr i64 PAD = 16;              // head dims are padded to multiples of this
constexpr i64 LINE = 64;             // bytes
constexpr i64 WORK_ALONE = 1 << 22;  // multiply-adds below which a team of threads costs more
constexpr float INFINITE = std::numeric_limits<float>::infinity();

i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

// a * b + c. Written out on x86: compilers fold a load into each, and load ports become the limit.
INLINE Vec fused(Vec a, Vec b, Vec c) {
#if defined(AVX2)
  asm("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  return c;
#else
  return a * b + c;  // -ffp-contract=off keeps this unfused everywhere alike
#endif
}

INLINE Vec all(float x) { return Vec{x, x, x, x, x, x, x, x}; }
INLINE Vec load(const float* p) { return *reinterpret_cast<const VecAt*>(p); }
INLINE void store(float* p, Vec v) { *reinterpret_cast<VecAt*>(p) = v; }

// Eight elements of a cache or of q, widened.
INLINE Vec widen(const float* p) { return load(p); }
INLINE Vec widen(const bf16* p) {
  return (Vec)(__builtin_convertvector(*reinterpret_cast<const HalvesAt*>(p), Words) << 16);
}

// The other way: to nearest, ties to even; every NaN becomes the quiet one.
INLINE void narrow(Vec v, float* p) { store(p, v); }
INLINE void narrow(Vec v, bf16* p) {
  const Words bits = (Words)v;
  const Words rounded = v != v ? Words{} + 0x7FC0u : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  *reinterpret_cast<HalvesAt*>(p) = __builtin_convertvector(rounded, Halves);
}

// exp(x) = power * (1 + tail) for -87.3 < x <= 0; tail is NaN where x is. The polynomial is Cephes' expf.
struct Exp {
  Vec power, tail;
};

INLINE Exp split_exp(Vec x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Vec shifted = fused(x, all(1.44269504f), all(magic));
  const Vec n = shifted - magic;
  const Vec r = fused(n, all(2.12194440e-4f), fused(n, all(-0.693359375f), x));
  Vec p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = fused(p, r, all(c));
  }
  return {(Vec)(((Words)shifted << 23) + 0x3F800000u), fused(r * r, p, r)};
}

// For x <= 0; results that would be denormal are zero.
INLINE Vec exp(Vec x) {
  const Exp e = split_exp(x);
  return x < all(-87.3f) ? Vec{} : fused(e.power, e.tail, e.power);
}

// -expm1(-2 |x|) / (expm1(-2 |x|) + 2), with the sign of x.
INLINE Vec tanh(Vec x) {
  const Vec twice = (Vec)((Words)x | 0x80000000u) * 2.0f;
  const Exp e = split_exp(twice < all(-40.0f) ? all(-40.0f) : twice);
  const Vec minus = fused(e.power, e.tail, e.power - 1.0f);
  return (Vec)(((Words)(minus / (minus + 2.0f)) & 0x7FFFFFFFu) | ((Words)x & 0x80000000u));
}

// Columns of eight rows of eight words become rows.
INLINE void transpose(Words (&w)[LANES]) {
#if defined(AVX2)
  __m256 a[LANES], b[LANES];
  UNROLL for (int i = 0; i < LANES; i += 2) {
    a[i] = _mm256_unpacklo_ps((__m256)w[i], (__m256)w[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps((__m256)w[i], (__m256)w[i + 1]);
  }
  UNROLL for (int i = 0; i < LANES; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    w[i] = (Words)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    w[i + 4] = (Words)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
#else
  std::uint32_t t[LANES][LANES];
  for (int i = 0; i < LANES * LANES; ++i) t[i % LANES][i / LANES] = w[i / LANES][i % LANES];
  std::memcpy(w, t, sizeof t);
#endif
}

// Eight words of eight keys, from element d on, widened to [dims of the words, KEYS].
template <typename T>
INLINE void widen_keys(const T* const* keys, i64 d, float* to) {
  Words w[LANES];
  UNROLL for (int i = 0; i < LANES; ++i) w[i] = *reinterpret_cast<const WordsAt*>(keys[i] + d);
  transpose(w);
  UNROLL for (int i = 0; i < LANES; ++i) {
    if constexpr (sizeof(T) == sizeof(float)) {
      store(to + i * KEYS, (Vec)w[i]);
    } else {
      store(to + 2 * i * KEYS, (Vec)(w[i] << 16));
      store(to + (2 * i + 1) * KEYS, (Vec)(w[i] & 0xFFFF0000u));
    }
  }
}

struct Matrix {
  float* at;
  i64 stride;
};

// c[r, :] += sum of a[r, i] * b[i, :] over begin <= i < end, each output one chain in rising i.
template <int ROWS, int VECS>
INLINE void multiply_columns(Matrix a, Matrix b, Matrix c, i64 begin, i64 end) {
  Vec sum[ROWS][VECS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int v = 0; v < VECS; ++v) sum[r][v] = load(c.at + r * c.stride + v * LANES);
  }
  for (i64 i = begin; i < end; ++i) {
    Vec factor[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) factor[r] = all(a.at[r * a.stride + i]);
    UNROLL for (int v = 0; v < VECS; ++v) {
      const Vec value = load(b.at + i * b.stride + v * LANES);
      UNROLL for (int r = 0; r < ROWS; ++r) sum[r][v] = fused(factor[r], value, sum[r][v]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int v = 0; v < VECS; ++v) store(c.at + r * c.stride + v * LANES, sum[r][v]);
  }
}

// Enough chains to hide the latency of an addition, few enough for sixteen registers.
template <int ROWS>
__attribute__((noinline)) void multiply(Matrix a, Matrix b, Matrix c, i64 columns, i64 begin, i64 end) {
  constexpr int VECS = ROWS == 1 ? 8 : 4, NARROW = PAD / LANES;
  i64 i = 0;
  for (; i + VECS * LANES <= columns; i += VECS * LANES) {
    multiply_columns<ROWS, VECS>(a, {b.at + i, b.stride}, {c.at + i, c.stride}, begin, end);
  }
  for (; i < columns; i += PAD) {
    multiply_columns<ROWS, NARROW>(a, {b.at + i, b.stride}, {c.at + i, c.stride}, begin, end);
  }
}
constexpr decltype(&multiply<1>) MULTIPLY[TOGETHER + 1] = {nullptr, multiply<1>, multiply<2>, multiply<3>};

template <typename T>
struct Call {
  const T* q;                   // [R * Q, Hq, D]
  const T* k_cache;             // [S, Hkv, D]
  const T* v_cache;             // [S, Hkv, D]
  const std::int32_t* table;    // [R, table_width]
  const std::int32_t* lengths;  // [R]
  const i64* positions;         // [R * Q]
  T* out;                       // [R * Q, Hq, D]
  i64 requests, queries, heads, kv_heads, head_dim, table_width, block_size, window;
  float scale, softcap;
};

struct Row {
  i64 begin, end;  // of the tokens it sees
  float maximum, sum;
};

// Softmax of one run: scores become probabilities. Returns the factor on what was accumulated before.
float softmax_run(float* scores, i64 begin, i64 end, float softcap, Row& row) {
  constexpr int VECS = KEYS / LANES;
  Vec s[VECS];
  Ints key = {0, 1, 2, 3, 4, 5, 6, 7};
  const Ints low = Ints{} + static_cast<int>(begin), high = Ints{} + static_cast<int>(end);
  Vec top = all(row.maximum);
  UNROLL for (int v = 0; v < VECS; ++v, key += LANES) {
    s[v] = load(scores + v * LANES);
    if (softcap != 0) s[v] = softcap * tanh(s[v]);
    s[v] = (key >= low) & (key < high) ? s[v] : all(-INFINITE);
    top = top > s[v] ? top : s[v];
  }
  float maximum = top[0];
  for (int i = 1; i < LANES; ++i) maximum = maximum > top[i] ? maximum : top[i];
  UNROLL for (int v = 0; v < VECS; ++v) store(scores + v * LANES, s[v] = exp(s[v] - maximum));
  const Vec sums = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
  const float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  const float factor = exp(all(row.maximum - maximum))[0];
  row.sum = row.sum * factor + sum;
  row.maximum = maximum;
  return factor;
}

// Rows first, first + 1, ... of the Q * G rows of one request and KV head.
template <typename T>
class Tile {
 public:
  static i64 padded(i64 head_dim) { return divide_up(head_dim, PAD) * PAD; }
  static i64 scratch(i64 head_dim) { return 2 * (TILE_ROWS + KEYS) * padded(head_dim) + TILE_ROWS * KEYS; }

  Tile(const Call<T>& call, float* scratch, i64 request, i64 kv_head, i64 first, i64 rows)
      : call_(call), request_(request), kv_head_(kv_head), first_(first), rows_(rows) {
    const i64 dims = padded(call.head_dim);
    scores_ = {scratch, KEYS};
    q_ = {scores_.at + TILE_ROWS * KEYS, dims};
    out_ = {q_.at + TILE_ROWS * dims, dims};
    keys_ = {out_.at + TILE_ROWS * dims, KEYS};
    values_ = {keys_.at + KEYS * dims, dims};
  }

  void compute() {
    i64 begin = std::numeric_limits<i64>::max(), end = 0;
    for (i64 r = 0; r < rows_; ++r) {
      start_row(r);
      begin = std::min(begin, row_[r].begin), end = std::max(end, row_[r].end);
    }
    for (i64 run = begin / KEYS * KEYS; std::max(run, begin) < end; run += KEYS) {
      prefetch(run + KEYS, std::min(run + 2 * KEYS, end));
      widen_run(run, std::max<i64>(begin - run, 0), std::min<i64>(end - run, KEYS));
      for (i64 r = 0; r < rows_; r += TOGETHER) {
        attend(r, std::min<i64>(TOGETHER, rows_ - r), run, divide_up(std::min<i64>(end - run, KEYS), PAD) * PAD);
      }
    }
    for (i64 r = 0; r < rows_; ++r) finish_row(r);
  }

 private:
  i64 query(i64 r) const { return request_ * call_.queries + (first_ + r) * call_.kv_heads / call_.heads; }

  // The first element of a row in q and out.
  i64 offset(i64 r) const {
    const i64 group = call_.heads / call_.kv_heads;
    return (query(r) * call_.heads + kv_head_ * group + (first_ + r) % group) * call_.head_dim;
  }

  void start_row(i64 r) {
    const i64 position = call_.positions[query(r)];
    const i64 begin = call_.window > 0 ? std::max<i64>(position + 1 - call_.window, 0) : 0;
    row_[r] = {begin, std::min<i64>(position + 1, call_.lengths[request_]), -INFINITE, 0.0f};
    const float scale = call_.softcap != 0 ? call_.scale / call_.softcap : call_.scale;
    float* q = q_.at + r * q_.stride;
    copy_widened(call_.q + offset(r), q);
    for (i64 d = 0; d < q_.stride; d += LANES) store(q + d, load(q + d) * scale);
    std::fill_n(out_.at + r * out_.stride, out_.stride, 0.0f);
  }

  void copy_widened(const T* from, float* to) const {
    const i64 body = call_.head_dim / PAD * PAD;
    for (i64 d = 0; d < body; d += LANES) store(to + d, widen(from + d));
    if (body == call_.head_dim) return;
    T last[PAD] = {};
    std::memcpy(last, from + body, (call_.head_dim - body) * sizeof(T));
    for (i64 d = 0; d < PAD; d += LANES) store(to + body + d, widen(last + d));
  }

  // Calls visit(token, its first element in a cache) for tokens [begin, end).
  template <typename Visit>
  INLINE void for_tokens(i64 begin, i64 end, Visit visit) const {
    const std::int32_t* block = call_.table + request_ * call_.table_width + begin / call_.block_size;
    i64 within = begin % call_.block_size;
    for (i64 token = begin; token < end; ++token) {
      visit(token, ((*block * call_.block_size + within) * call_.kv_heads + kv_head_) * call_.head_dim);
      if (++within == call_.block_size) within = 0, ++block;
    }
  }

  void prefetch(i64 begin, i64 end) const {
    for_tokens(begin, end, [&](i64, i64 at) {
      for (i64 d = 0; d < call_.head_dim; d += LINE / sizeof(T)) {
        __builtin_prefetch(call_.k_cache + at + d, 0, 2);
        __builtin_prefetch(call_.v_cache + at + d, 0, 2);
      }
    });
  }

  // Tokens run + [begin, end) to scratch; the rest of the run is not read. Where it is, scratch is undefined.
  void widen_run(i64 run, i64 begin, i64 end) {
    const T* keys[KEYS];
    for_tokens(run + begin, run + end, [&](i64 token, i64 at) {
      keys[token - run] = call_.k_cache + at;
      copy_widened(call_.v_cache + at, values_.at + (token - run) * values_.stride);
    });
    std::fill_n(keys, begin, keys[begin]);
    std::fill_n(keys + end, KEYS - end, keys[begin]);
    constexpr i64 STEP = LANES * sizeof(float) / sizeof(T);
    const i64 body = call_.head_dim / STEP * STEP;
    for (i64 j = begin / LANES * LANES; j < end; j += LANES) {
      for (i64 d = 0; d < body; d += STEP) widen_keys(keys + j, d, keys_.at + d * KEYS + j);
      if (body == call_.head_dim) continue;
      T last[LANES][STEP] = {};
      const T* lasts[LANES];
      for (int i = 0; i < LANES; ++i) {
        std::memcpy(last[i], keys[j + i] + body, (call_.head_dim - body) * sizeof(T));
        lasts[i] = last[i];
      }
      widen_keys(lasts, 0, keys_.at + body * KEYS + j);
    }
  }

  static Matrix below(Matrix m, i64 r) { return {m.at + r * m.stride, m.stride}; }

  // Adds one run to `rows` rows from r on; keys from `columns` on are seen by none of the tile.
  void attend(i64 r, i64 rows, i64 run, i64 columns) {
    i64 begin[TOGETHER], end[TOGETHER], low = 0, high = KEYS, seen = 0;
    for (i64 i = 0; i < rows; ++i) {
      begin[i] = std::clamp<i64>(row_[r + i].begin - run, 0, KEYS);
      end[i] = std::clamp<i64>(row_[r + i].end - run, begin[i], KEYS);
      low = std::max(low, begin[i]), high = std::min(high, end[i]), seen += end[i] - begin[i];
    }
    if (seen == 0) return;
    const Matrix scores = below(scores_, r), out = below(out_, r);
    std::fill_n(scores.at, rows * KEYS, 0.0f);
    MULTIPLY[rows](below(q_, r), keys_, scores, columns, 0, call_.head_dim);
    for (i64 i = 0; i < rows; ++i) {
      if (begin[i] == end[i]) continue;
      const float factor = softmax_run(below(scores, i).at, begin[i], end[i], call_.softcap, row_[r + i]);
      if (factor == 1.0f) continue;
      float* old = below(out, i).at;
      for (i64 d = 0; d < out.stride; d += LANES) store(old + d, load(old + d) * factor);
    }
    // What all rows see goes together, what comes before and after in a row goes alone.
    high = std::max(low, high);
    const auto alone = [&](i64 i, i64 from, i64 to) {
      MULTIPLY[1](below(scores, i), values_, below(out, i), out.stride, std::max(from, begin[i]), std::min(to, end[i]));
    };
    for (i64 i = 0; i < rows; ++i) alone(i, 0, low);
    MULTIPLY[rows](scores, values_, out, out.stride, low, high);
    for (i64 i = 0; i < rows; ++i) alone(i, high, KEYS);
  }

  // A row that sees nothing is zero.
  void finish_row(i64 r) {
    T* to = call_.out + offset(r);
    const float sum = row_[r].begin < row_[r].end ? row_[r].sum : 1.0f;
    for (i64 d = 0; d < call_.head_dim; d += LANES) {
      T eight[LANES];
      narrow(load(out_.at + r * out_.stride + d) / sum, eight);
      std::memcpy(to + d, eight, std::min<i64>(LANES, call_.head_dim - d) * sizeof(T));
    }
  }

  const Call<T>& call_;
  const i64 request_, kv_head_, first_, rows_;
  // Pages are copied here run by run, widened to fp32: keys [D, KEYS], values [KEYS, D], D padded.
  Matrix keys_, values_;
  // A line per row: scaled q, scores or probabilities [KEYS], output not yet divided by their sum.
  Matrix q_, scores_, out_;
  Row row_[TILE_ROWS];
};

// Kept between calls; null if there is not enough.
float* scratch(i64 floats) {
  static thread_local std::unique_ptr<void, decltype(&std::free)> kept{nullptr, &std::free};
  static thread_local i64 kept_floats = 0;
  if (floats > kept_floats) {
    kept.reset(std::aligned_alloc(LINE, floats * 4 / LINE * LINE + LINE));
    kept_floats = kept ? floats : 0;
  }
  return static_cast<float*>(kept.get());
}

// What the threads of a call share.
struct Shared {
  i64 taken = 0;
  int failed = 0;
};

// One thread's part.
template <typename T>
void work(const Call<T>& call, Shared& shared, const Team& team) {
  if (team.thread == 0) shared = {};
  team.wait();
  float* memory = scratch(Tile<T>::scratch(call.head_dim));
  if (memory == nullptr) {
    __atomic_store_n(&shared.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  const i64 rows = call.queries * (call.heads / call.kv_heads), pairs = call.requests * call.kv_heads;
  const i64 fair = std::clamp(rows * pairs / (4 * team.threads), FEWEST_ROWS, TILE_ROWS);
  const i64 share = team.threads == 1 ? TILE_ROWS : fair;
  const i64 tile_rows = divide_up(divide_up(rows, divide_up(rows, share)), TOGETHER) * TOGETHER;
  const i64 tiles = divide_up(rows, tile_rows);
  for (i64 index; (index = __atomic_fetch_add(&shared.taken, 1, __ATOMIC_RELAXED)) < tiles * pairs;) {
    // Later rows see more: the longest work first.
    const i64 first = (tiles - 1 - index / pairs) * tile_rows, count = std::min(tile_rows, rows - first);
    Tile<T>(call, memory, index % pairs / call.kv_heads, index % call.kv_heads, first, count).compute();
  }
}

template <typename T>
int attention(const Call<T>& call, int threads) {
  Shared shared;
  i64 tokens = 0;
  for (i64 r = 0; r < call.requests; ++r) tokens += call.lengths[r];
  if (2 * tokens * call.queries * call.heads * call.head_dim < WORK_ALONE) threads = 1;
  compspec::in_team(threads, [&](const Team& team) { work(call, shared, team); });
  return shared.failed;
}

// The arguments of a call in a program.
template <typename T>
struct Recorded {
  Call<T> call;
  Shared* shared;
};

template <typename T>
int work_recorded(void* arguments, const Team* team) {
  const auto* recorded = static_cast<const Recorded<T>*>(arguments);
  work(recorded->call, *recorded->shared, *team);
  return recorded->shared->failed;
}

}  // namespace

// Arrays as in Call, contiguous. Returns 0, or 1 when there is no memory for the scratch.
#define COMPSPEC_ATTENTION(NAME, T)                                                                                   \
  extern "C" int NAME(const T* q, const T* k, const T* v, const std::int32_t* table, const std::int32_t* lengths,     \
                      const i64* positions, T* out, i64 requests, i64 queries, i64 heads, i64 kv_heads, i64 head_dim, \
                      i64 table_width, i64 block_size, i64 window, float scale, float softcap, int threads) {         \
    return attention<T>({q, k, v, table, lengths, positions, out, requests, queries, heads, kv_heads, head_dim,       \
                         table_width, block_size, window, scale, softcap}, threads);                                  \
  }
COMPSPEC_ATTENTION(compspec_attention_bf16, bf16)
COMPSPEC_ATTENTION(compspec_attention_fp32, float)

// For programs: what the threads of a call share, and what all of them call with a Recorded.
extern "C" void* compspec_attention_shared() { return new (std::nothrow) Shared; }
extern "C" void compspec_attention_forget(void* shared) { delete static_cast<Shared*>(shared); }
extern "C" int compspec_attention_work_bf16(void* arguments, const Team* team) {
  return work_recorded<bf16>(arguments, team);
}
extern "C" int compspec_attention_work_fp32(void* arguments, const Team* team) {
  return work_recorded<float>(arguments, team);
}

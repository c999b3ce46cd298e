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

typedef float Vec __attribute__((vector_size(32)));
typedef std::int32_t Ints __attribute__((vector_size(32)));
typedef std::uint32_t Words __attribute__((vector_size(32)));
typedef std::uint16_t Halves __attribute__((vector_size(16)));
typedef float VecAt __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::uint32_t WordsAt __attribute__((vector_size(32), aligned(2), may_alias));
typedef std::uint16_t HalvesAt __attribute__((vector_size(16), aligned(2), may_alias));

constexpr int LANES = 8;
constexpr int KEYS = 64;       // tokens per run
constexpr int TILE_ROWS = 48;  // rows that share one widening of keys and values
constexpr i64 PAD = 16;        // head dims are padded to multiples of this
constexpr i64 LINE = 64;       // bytes
constexpr i64 WORK_ALONE = 1 << 20;  // multiply-adds below which a team of threads costs more
constexpr float INFINITE = std::numeric_limits<float>::infinity();

i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

// a * b + c
INLINE Vec fused(Vec a, Vec b, Vec c) {
#if defined(AVX2)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  float32x4_t x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof x), std::memcpy(y, &b, sizeof y), std::memcpy(z, &c, sizeof z);
  z[0] = vfmaq_f32(z[0], x[0], y[0]), z[1] = vfmaq_f32(z[1], x[1], y[1]);
  std::memcpy(&c, z, sizeof z);
  return c;
#else
  return a * b + c;  // -ffp-contract=off keeps this unfused everywhere alike
#endif
}

// sum += a * b, the same. Written out on x86: compilers fold a load into each, and load ports become the limit.
INLINE void multiply_add(Vec& sum, Vec a, Vec b) {
#if defined(AVX2)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum = fused(a, b, sum);
#endif
}

INLINE Vec all(float x) { return Vec{x, x, x, x, x, x, x, x}; }
INLINE Vec load(const float* p) { return *reinterpret_cast<const VecAt*>(p); }
INLINE void store(float* p, Vec v) { *reinterpret_cast<VecAt*>(p) = v; }
INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }

template <typename Op>
INLINE float fold(Vec v, Op op) {
  return op(op(op(v[0], v[4]), op(v[2], v[6])), op(op(v[1], v[5]), op(v[3], v[7])));
}

// Eight elements of a cache or of q, widened.
INLINE Vec widen(const float* p) { return load(p); }
INLINE Vec widen(const bf16* p) {
  return (Vec)(__builtin_convertvector(*reinterpret_cast<const HalvesAt*>(p), Words) << 16);
}

// The other way: to nearest, ties to even; every NaN becomes the quiet one.
INLINE void narrow(Vec v, float* p) { store(p, v); }
INLINE void narrow(Vec v, bf16* p) {
  const Words bits = (Words)v;
  const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const Words kept = v != v ? Words{} + 0x7FC0u : rounded;
  *reinterpret_cast<HalvesAt*>(p) = __builtin_convertvector(kept, Halves);
}

// exp(x) = power * (1 + tail) for -87.3 < x < 88; tail is NaN where x is.
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
  const Words sign = (Words)x & 0x80000000u;
  const Vec twice = (Vec)((Words)x | 0x80000000u) * 2.0f;
  const Exp e = split_exp(twice < all(-40.0f) ? all(-40.0f) : twice);
  const Vec minus = fused(e.power, e.tail, e.power - 1.0f);
  return (Vec)(((Words)(minus / (minus + 2.0f)) & 0x7FFFFFFFu) | sign);
}

// Columns of eight rows of eight words become rows.
INLINE void transpose(Words (&w)[LANES]) {
#if defined(AVX2)
  __m256 a[LANES], b[LANES];
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i += 2) {
    a[i] = _mm256_unpacklo_ps((__m256)w[i], (__m256)w[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps((__m256)w[i], (__m256)w[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    w[i] = (Words)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    w[i + 4] = (Words)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
#else
  for (int i = 0; i < LANES; ++i) {
    for (int j = 0; j < i; ++j) {
      const std::uint32_t kept = w[i][j];
      w[i][j] = w[j][i];
      w[j][i] = kept;
    }
  }
#endif
}

// Where an element lies in a transposed column of words, and the column as floats: [dims of the words, keys].
INLINE void store_columns(const Words (&w)[LANES], float*, float* to) {
  for (int i = 0; i < LANES; ++i) store(to + i * KEYS, (Vec)w[i]);
}
INLINE void store_columns(const Words (&w)[LANES], bf16*, float* to) {
  for (int i = 0; i < LANES; ++i) {
    store(to + 2 * i * KEYS, (Vec)(w[i] << 16));
    store(to + (2 * i + 1) * KEYS, (Vec)(w[i] & 0xFFFF0000u));
  }
}

// c[r, :] += sum of a[r, i] * b[i, :] over begin <= i < end, each output one chain in rising i.
struct Product {
  const float* a;
  i64 a_stride;
  const float* b;
  i64 b_stride;
  float* c;
  i64 c_stride;
};

template <int ROWS, int VECS>
INLINE void multiply_part(const Product& job, i64 column, i64 begin, i64 end) {
  float* c = job.c + column;
  Vec sum[ROWS][VECS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) sum[r][v] = load(c + r * job.c_stride + v * LANES);
  }
  const float* b = job.b + begin * job.b_stride + column;
  for (i64 i = begin; i < end; ++i, b += job.b_stride) {
    Vec factor[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) factor[r] = all(job.a[r * job.a_stride + i]);
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) {
      const Vec value = load(b + v * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) multiply_add(sum[r][v], factor[r], value);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) store(c + r * job.c_stride + v * LANES, sum[r][v]);
  }
}

// Enough chains to hide the latency of an addition, few enough for sixteen registers.
template <int ROWS>
__attribute__((noinline)) void multiply(const Product& job, i64 columns, i64 begin, i64 end) {
  constexpr int VECS = ROWS == 1 ? 8 : 4;
  i64 column = 0;
  for (; column + VECS * LANES <= columns; column += VECS * LANES) {
    multiply_part<ROWS, VECS>(job, column, begin, end);
  }
  for (; column < columns; column += PAD) multiply_part<ROWS, PAD / LANES>(job, column, begin, end);
}

void multiply_rows(const Product& job, int rows, i64 columns, i64 begin, i64 end) {
  if (begin >= end) return;
  if (rows == 1) multiply<1>(job, columns, begin, end);
  if (rows == 2) multiply<2>(job, columns, begin, end);
  if (rows == 3) multiply<3>(job, columns, begin, end);
}

template <typename T>
struct Call {
  const T* q;                   // [R * Q, Hq, D]
  const T* k_cache;             // [S, Hkv, D]
  const T* v_cache;             // [S, Hkv, D]
  const std::int32_t* table;    // [R, table_width]
  const std::int32_t* lengths;  // [R]
  const i64* positions;         // [R * Q]
  T* out;                       // [R * Q, Hq, D]
  i64 queries, heads, kv_heads, head_dim, table_width, block_size, window;
  float scale, softcap;
};

// What one thread works in. Pages are copied here run by run, widened to fp32.
struct Scratch {
  float* q;       // [TILE_ROWS, padded], scaled
  float* out;     // [TILE_ROWS, padded], not yet divided by the sum of probabilities
  float* keys;    // [padded, KEYS]
  float* values;  // [KEYS, padded]
  float* scores;  // [TILE_ROWS, KEYS], then probabilities
  float* zeros;   // [padded]

  static i64 floats(i64 padded) { return (2 * TILE_ROWS + 2 * KEYS + 1) * padded + TILE_ROWS * KEYS; }

  // Null pointers if there is no memory. Kept between calls.
  static Scratch get(i64 padded) {
    static thread_local std::unique_ptr<float, decltype(&std::free)> kept{nullptr, &std::free};
    static thread_local i64 kept_floats = 0;
    if (floats(padded) > kept_floats) {
      kept.reset(static_cast<float*>(std::aligned_alloc(LINE, divide_up(floats(padded) * 4, LINE) * LINE)));
      kept_floats = kept ? floats(padded) : 0;
    }
    float* p = kept.get();
    if (p == nullptr) return {};
    Scratch s;
    s.q = p, s.out = s.q + TILE_ROWS * padded, s.keys = s.out + TILE_ROWS * padded;
    s.values = s.keys + KEYS * padded, s.scores = s.values + KEYS * padded;
    s.zeros = s.scores + TILE_ROWS * KEYS;
    std::fill_n(s.zeros, padded, 0.0f);
    return s;
  }
};

struct Row {
  i64 begin, end;  // of the tokens it sees
  float maximum, sum;
};

// Softmax of one run: scores become probabilities. Returns the factor on what was accumulated before.
float softmax_run(float* scores, i64 begin, i64 end, float softcap, Row& row) {
  constexpr int VECS = KEYS / LANES;
  Vec s[VECS];
#pragma GCC unroll 8
  for (int v = 0; v < VECS; ++v) s[v] = load(scores + v * LANES);
  if (softcap != 0) {
    for (int v = 0; v < VECS; ++v) s[v] = softcap * tanh(s[v]);
  }
  if (begin > 0 || end < KEYS) {
    Ints key = {0, 1, 2, 3, 4, 5, 6, 7};
    const Ints low = Ints{} + static_cast<int>(begin), high = Ints{} + static_cast<int>(end);
    for (int v = 0; v < VECS; ++v, key += LANES) s[v] = (key >= low) & (key < high) ? s[v] : all(-INFINITE);
  }
  const auto max_of = [](auto a, auto b) { return a > b ? a : b; };
  const auto add = [](auto a, auto b) { return a + b; };
  Vec top = s[0];
#pragma GCC unroll 8
  for (int v = 1; v < VECS; ++v) top = larger(top, s[v]);
  const float maximum = max_of(row.maximum, fold(top, max_of));
#pragma GCC unroll 8
  for (int v = 0; v < VECS; ++v) {
    s[v] = exp(s[v] - maximum);
    store(scores + v * LANES, s[v]);
  }
  const Vec total = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
  const float factor = exp(all(row.maximum - maximum))[0];
  row.sum = row.sum * factor + fold(total, add);
  row.maximum = maximum;
  return factor;
}

// Rows [first, first + rows) of the Q * G of one request and KV head.
template <typename T>
class Tile {
 public:
  Tile(const Call<T>& call, const Scratch& scratch, i64 request, i64 kv_head, i64 first, int rows)
      : call_(call), s_(scratch), request_(request), kv_head_(kv_head), first_(first), rows_(rows) {
    group_ = call.heads / call.kv_heads;
    padded_ = divide_up(call.head_dim, PAD) * PAD;
  }

  void compute() {
    i64 begin = std::numeric_limits<i64>::max(), end = 0;
    for (int r = 0; r < rows_; ++r) {
      start_row(r);
      begin = std::min(begin, row_[r].begin);
      end = std::max(end, row_[r].end);
    }
    for (i64 run = begin / KEYS * KEYS; run < end; run += KEYS) {
      const i64 keys = std::min<i64>(end - run, KEYS);
      widen_run(run, std::max<i64>(begin - run, 0), keys);
      for (int r = 0; r < rows_; r += 3) attend(r, std::min(3, rows_ - r), run, divide_up(keys, PAD) * PAD);
    }
    for (int r = 0; r < rows_; ++r) finish_row(r);
  }

 private:
  i64 query(int r) const { return request_ * call_.queries + (first_ + r) / group_; }
  i64 offset(int r) const {
    return (query(r) * call_.heads + kv_head_ * group_ + (first_ + r) % group_) * call_.head_dim;
  }

  void start_row(int r) {
    const i64 position = call_.positions[query(r)];
    const i64 end = std::min<i64>(position + 1, call_.lengths[request_]);
    row_[r] = {call_.window > 0 ? std::max<i64>(position + 1 - call_.window, 0) : 0, end, -INFINITE, 0.0f};
    float* q = s_.q + r * padded_;
    std::fill_n(s_.out + r * padded_, padded_, 0.0f);
    const float scale = call_.softcap != 0 ? call_.scale / call_.softcap : call_.scale;
    copy_widened(call_.q + offset(r), q);
    for (i64 d = 0; d < padded_; d += LANES) store(q + d, load(q + d) * scale);
  }

  void copy_widened(const T* from, float* to) const {
    const i64 body = call_.head_dim - call_.head_dim % LANES;
    for (i64 d = 0; d < body; d += LANES) store(to + d, widen(from + d));
    if (body == padded_) return;
    T last[PAD] = {};
    std::memcpy(last, from + body, (call_.head_dim - body) * sizeof(T));
    for (i64 d = body; d < padded_; d += LANES) store(to + d, widen(last + d - body));
  }

  // Tokens run + [begin, end) to scratch; nothing else of the cache is read. Other keys, up to a whole PAD,
  // are zeros, other values are left as they are.
  void widen_run(i64 run, i64 begin, i64 end) {
    const T* keys[KEYS];
    std::fill_n(keys, KEYS, reinterpret_cast<const T*>(s_.zeros));
    const std::int32_t* block = call_.table + request_ * call_.table_width + (run + begin) / call_.block_size;
    i64 within = (run + begin) % call_.block_size;
    for (i64 j = begin; j < end; ++j) {
      const i64 slot = *block * call_.block_size + within;
      const i64 at = (slot * call_.kv_heads + kv_head_) * call_.head_dim;
      keys[j] = call_.k_cache + at;
      copy_widened(call_.v_cache + at, s_.values + j * padded_);
      if (++within == call_.block_size) within = 0, ++block;
    }
    constexpr i64 STEP = LANES * 4 / sizeof(T);
    const i64 body = call_.head_dim - call_.head_dim % STEP;
    for (i64 j = begin / PAD * PAD; j < divide_up(end, PAD) * PAD; j += LANES) {
      for (i64 d = 0; d < body; d += STEP) widen_keys(keys + j, d, s_.keys + d * KEYS + j);
      if (body == call_.head_dim) continue;
      T last[LANES][STEP] = {};
      const T* rows[LANES];
      for (int i = 0; i < LANES; ++i) {
        std::memcpy(last[i], keys[j + i] + body, (call_.head_dim - body) * sizeof(T));
        rows[i] = last[i];
      }
      widen_keys(rows, 0, s_.keys + body * KEYS + j);
    }
  }

  static INLINE void widen_keys(const T* const* rows, i64 d, float* to) {
    Words w[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; ++i) w[i] = *reinterpret_cast<const WordsAt*>(rows[i] + d);
    transpose(w);
    store_columns(w, static_cast<T*>(nullptr), to);
  }

  // Adds one run to `rows` rows from r on.
  void attend(int r, int rows, i64 run, i64 columns) {
    float* scores = s_.scores + r * KEYS;
    i64 begin[3], end[3], low = 0, high = KEYS, seen = 0;
    for (int i = 0; i < rows; ++i) {
      begin[i] = std::clamp<i64>(row_[r + i].begin - run, 0, KEYS);
      end[i] = std::clamp<i64>(row_[r + i].end - run, begin[i], KEYS);
      low = std::max(low, begin[i]), high = std::min(high, end[i]), seen += end[i] - begin[i];
    }
    if (seen == 0) return;
    std::fill_n(scores, rows * KEYS, 0.0f);
    multiply_rows({s_.q + r * padded_, padded_, s_.keys, KEYS, scores, KEYS}, rows, columns, 0, call_.head_dim);
    for (int i = 0; i < rows; ++i) {
      if (begin[i] == end[i]) continue;
      const float factor = softmax_run(scores + i * KEYS, begin[i], end[i], call_.softcap, row_[r + i]);
      float* out = s_.out + (r + i) * padded_;
      if (factor == 1.0f) continue;
      for (i64 d = 0; d < padded_; d += LANES) store(out + d, load(out + d) * factor);
    }
    // What all rows see goes together, what comes before and after in a row goes alone.
    high = std::max(low, high);
    const auto alone = [&](int i, i64 from, i64 to) {
      multiply_rows(values(r + i), 1, padded_, std::max(from, begin[i]), std::min(to, end[i]));
    };
    for (int i = 0; i < rows; ++i) alone(i, 0, low);
    multiply_rows(values(r), rows, padded_, low, high);
    for (int i = 0; i < rows; ++i) alone(i, high, KEYS);
  }

  Product values(int r) const {
    return {s_.scores + r * KEYS, KEYS, s_.values, padded_, s_.out + r * padded_, padded_};
  }

  // A row that sees nothing is zero.
  void finish_row(int r) {
    T* out = call_.out + offset(r);
    T last[LANES];
    const float sum = row_[r].begin < row_[r].end ? row_[r].sum : 1.0f;
    for (i64 d = 0; d < call_.head_dim; d += LANES) {
      const Vec v = load(s_.out + r * padded_ + d) / sum;
      const i64 left = call_.head_dim - d;
      narrow(v, left < LANES ? last : out + d);
      if (left < LANES) std::memcpy(out + d, last, left * sizeof(T));
    }
  }

  const Call<T>& call_;
  const Scratch& s_;
  i64 request_, kv_head_, first_, group_, padded_;
  int rows_;
  Row row_[TILE_ROWS];
};

template <typename T>
int attention(const Call<T>& call, i64 requests, int threads) {
  const i64 rows = call.queries * (call.heads / call.kv_heads);
  i64 tokens = 0;
  for (i64 r = 0; r < requests; ++r) tokens += call.lengths[r];
  if (2 * tokens * call.queries * call.heads * call.head_dim < WORK_ALONE) threads = 1;
  const i64 pairs = requests * call.kv_heads;
  const i64 tile_rows = divide_up(divide_up(rows, divide_up(rows, TILE_ROWS)), 3) * 3;
  const i64 tiles = divide_up(rows, tile_rows);
  int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(| : failed)
  for (i64 index = 0; index < tiles * pairs; ++index) {
    const Scratch scratch = Scratch::get(divide_up(call.head_dim, PAD) * PAD);
    failed |= scratch.q == nullptr;
    if (scratch.q == nullptr) continue;
    // Later rows see more: the longest work first.
    const i64 first = (tiles - 1 - index / pairs) * tile_rows;
    const int count = static_cast<int>(std::min(tile_rows, rows - first));
    Tile<T>(call, scratch, index % pairs / call.kv_heads, index % call.kv_heads, first, count).compute();
  }
  return failed;
}

}  // namespace

// Arrays as in Call, contiguous; `rows` are Q. Returns 0, or 1 when there is no memory for the scratch.
#define COMPSPEC_ATTENTION(NAME, T)                                                                          \
  extern "C" int NAME(const T* q, const T* k_cache, const T* v_cache, const std::int32_t* table,             \
                      const std::int32_t* lengths, const i64* positions, T* out, i64 requests, i64 queries,  \
                      i64 heads, i64 kv_heads, i64 head_dim, i64 table_width, i64 block_size, i64 window,    \
                      float scale, float softcap, int threads) {                                             \
    const Call<T> call = {q,     k_cache,  v_cache,  table,       lengths,    positions, out,   queries,     \
                          heads, kv_heads, head_dim, table_width, block_size, window,    scale, softcap};    \
    return attention(call, requests, threads);                                                               \
  }
COMPSPEC_ATTENTION(compspec_attention_bf16, bf16)
COMPSPEC_ATTENTION(compspec_attention_fp32, float)

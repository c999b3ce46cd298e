// Paged attention in bf16 with AMX tiles, for head dims that are multiples of STEP; attention.cpp does the rest.
//
// A row is one query of one head. Its keys come in runs of KEYS tokens that start at multiples of KEYS of the
// absolute position. A run is a softmax of its own (its maximum, its sum of probabilities, its output), and runs are
// merged in rising order. Within a run a score is one chain of tile products in rising head dim, an output one chain
// in rising token, STEP tokens a product. A tile product computes each of its rows from that row alone, and tokens
// that a row does not see have probability zero there, which adds nothing. So a row's bits follow from its position
// and window, and tiles, blocks of rows, threads and pages only choose what is worked on at the same time.
//
// Zero times a value that is no number is not zero. Values that no row of a block sees are replaced by zeros. Where
// only some see one, the others notice it in their output, and are computed again without the rest of the block.
//
// Legend: R requests, Q queries per request, Hq and Hkv heads, G = Hq / Hkv, D head dim, S slots.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "team.h"
#include "tiles.h"

#if defined(AMX) && (!defined(__AVX512BW__) || !defined(__AVX512DQ__))
#undef AMX
#endif

#if defined(AMX)
#include <immintrin.h>
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {
using bf16 = std::uint16_t;
using compspec::Team;
using i64 = std::int64_t;

constexpr int TILE = 16;                   // rows of a tile; fp32 in one of its rows
constexpr int STEP = 32;                   // bf16 in a row of a tile
constexpr i64 TILE_SIZE = TILE * STEP;     // bf16 in a tile
constexpr i64 LINE = 64;                   // bytes, also of a row of a tile
constexpr int KEYS = 256;                  // tokens per run
constexpr i64 SCORES = KEYS + TILE;        // fp32 from one row of scores to the next
constexpr i64 GROUP_ROWS = 2 * TILE;       // rows that tiles hold at the same time
constexpr i64 BLOCK_ROWS = 8 * GROUP_ROWS; // at most, that share one rearrangement of keys and values
constexpr i64 WORK_ALONE = 1 << 15;        // in tokens times what they cost, below which a team of threads costs more
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504f;

constexpr i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

struct Call {
  const bf16* q;                // [R * Q, Hq, D]
  const bf16* k_cache;          // [S, Hkv, D]
  const bf16* v_cache;          // [S, Hkv, D]
  const std::int32_t* table;    // [R, table_width]
  const std::int32_t* lengths;  // [R]
  const i64* positions;         // [R * Q]
  bf16* out;                    // [R * Q, Hq, D]
  i64 requests, queries, heads, kv_heads, head_dim, table_width, block_size, window;
  float scale, softcap;

  i64 group() const { return heads / kv_heads; }
};

// Tokens [begin, end); none if end is not above begin.
struct Span {
  i64 begin, end;

  bool empty() const { return begin >= end; }
  bool operator==(Span other) const { return begin == other.begin && end == other.end; }
  void add(Span other) {
    if (!other.empty()) begin = std::min(begin, other.begin), end = std::max(end, other.end);
  }
  // The part in a run, counted from its start.
  Span within(i64 run) const { return {std::clamp<i64>(begin - run, 0, KEYS), std::clamp<i64>(end - run, 0, KEYS)}; }
};
constexpr Span NOTHING = {std::numeric_limits<i64>::max(), 0};

Span seen_by(const Call& call, i64 request, i64 query) {
  const i64 position = call.positions[request * call.queries + query];
  const i64 begin = call.window > 0 ? std::max<i64>(position + 1 - call.window, 0) : 0;
  return {begin, std::min<i64>(position + 1, call.lengths[request])};
}

// Rows first, first + 1, ... of the Q * G rows of one request and KV head, and what at least one of them sees.
struct Block {
  i64 request, kv_head, first, rows;
  Span seen;
  float* parts;  // of its runs, rows by rows, where several threads share the block
  i64 pieces;    // that are not yet done

  i64 first_run() const { return seen.begin / KEYS * KEYS; }
  i64 runs() const { return seen.empty() ? 0 : divide_up(seen.end - first_run(), KEYS); }
};

// ---- numbers -----------------------------------------------------------------------------------------------------

// 2^x without the power of two, for _mm512_scalef_ps; exactly 1 for integers. The error is below 2^-22.
INLINE __m512 fraction_exp2(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(0.001867130515165627f);
  for (float c : {0.009017029777169228f, 0.05579991266131401f, 0.24016444385051727f, 0.6931512951850891f, 1.0f}) {
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  }
  return p;
}

// Results that would be denormal are zero, however the processor is set.
INLINE __m512 exp2(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, fraction_exp2(x), x);
}

// What to subtract from scores whose maximum this is. Not an infinity from itself: scores may all be -infinity.
INLINE __m512 base(float maximum) { return _mm512_set1_ps(maximum == -INFINITE ? 0.0f : maximum); }

INLINE __m512 tanh(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), e = exp2(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.0f * LOG2_E)));
  const __m512 size = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
  return _mm512_or_ps(size, sign);
}

// Columns of 16 rows of 16 words become rows.
INLINE void transpose(__m512i (&w)[TILE]) {
  __m512i t[TILE];
  UNROLL for (int i = 0; i < TILE; i += 2) {
    t[i] = _mm512_unpacklo_epi32(w[i], w[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(w[i], w[i + 1]);
  }
  UNROLL for (int i = 0; i < TILE; i += 4) {
    w[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    w[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    w[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    w[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(w[i], w[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(w[i], w[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(w[i + 8], w[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(w[i + 8], w[i + 12], 0xDD);
  }
  UNROLL for (int i = 0; i < 8; ++i) {
    w[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    w[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
  }
}

// Calls visit(step, which of its tokens are seen) for all steps that `seen` reaches into.
template <typename Visit>
INLINE void for_steps(Span seen, Visit visit) {
  if (seen.empty()) return;
  const auto mask = [&](i64 step) {
    const auto below = [&](i64 end) { return (std::uint64_t{1} << std::clamp<i64>(end - step * STEP, 0, STEP)) - 1; };
    return static_cast<__mmask32>(below(seen.end) & ~below(seen.begin));
  };
  const i64 first = seen.begin / STEP, last = (seen.end - 1) / STEP;
  visit(first, mask(first));
  for (i64 step = first + 1; step < last; ++step) visit(step, ~__mmask32{0});
  if (first < last) visit(last, mask(last));
}

INLINE __m512 capped(__m512 score, float scale, float softcap) {
  return _mm512_mul_ps(tanh(_mm512_mul_ps(score, _mm512_set1_ps(scale / softcap))), _mm512_set1_ps(softcap * LOG2_E));
}

// Steps [begin, end) of the scores of one row become probabilities, bf16 from the start of the row on: zero where the
// row does not see a token. Returns the maximum of the scores, and 16 parts of the sum of the probabilities.
INLINE float softmax(float* scores, Span seen, i64 begin, i64 end, float scale, float softcap, float* sums) {
  if (softcap != 0) {
    for_steps(seen, [&](i64 step, __mmask32) {
      for (float* at = scores + step * STEP; at < scores + (step + 1) * STEP; at += TILE) {
        _mm512_store_ps(at, capped(_mm512_load_ps(at), scale, softcap));
      }
    });
  }
  const __m512 factor = _mm512_set1_ps(softcap != 0 ? 1.0f : scale * LOG2_E);
  const auto load = [&](i64 i) INLINE_LAMBDA { return _mm512_mul_ps(_mm512_load_ps(scores + i), factor); };
  __m512 top0 = _mm512_set1_ps(-INFINITE), top1 = top0;
  for_steps(seen, [&](i64 step, __mmask32 mask) INLINE_LAMBDA {
    top0 = _mm512_mask_max_ps(top0, static_cast<__mmask16>(mask), top0, load(step * STEP));
    top1 = _mm512_mask_max_ps(top1, static_cast<__mmask16>(mask >> TILE), top1, load(step * STEP + TILE));
  });
  const float maximum = _mm512_reduce_max_ps(_mm512_max_ps(top0, top1));
  const __m512 top = base(maximum);
  bf16* probabilities = reinterpret_cast<bf16*>(scores);
  // Sums are of rounded probabilities: then an output is an average, however they were rounded.
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
  __m512 sum = _mm512_setzero_ps();
  for_steps(seen, [&](i64 step, __mmask32 mask) INLINE_LAMBDA {
    const __m512 x0 = _mm512_sub_ps(load(step * STEP), top), x1 = _mm512_sub_ps(load(step * STEP + TILE), top);
    const __m512 p0 = _mm512_maskz_scalef_ps(static_cast<__mmask16>(mask), fraction_exp2(x0), x0);
    const __m512 p1 = _mm512_maskz_scalef_ps(static_cast<__mmask16>(mask >> TILE), fraction_exp2(x1), x1);
    const __m512bh both = _mm512_cvtne2ps_pbh(p1, p0);
    sum = _mm512_dpbf16_ps(sum, both, ones);
    _mm512_store_si512(probabilities + step * STEP, (__m512i)both);
  });
  _mm512_store_ps(sums, sum);
  const i64 first = std::min(seen.begin / STEP, end), last = std::max(divide_up(seen.end, STEP), begin);
  for (i64 s = begin; s < first; ++s) _mm512_store_si512(probabilities + s * STEP, _mm512_setzero_si512());
  for (i64 s = last; s < end; ++s) _mm512_store_si512(probabilities + s * STEP, _mm512_setzero_si512());
  return maximum;
}

// ---- one thread --------------------------------------------------------------------------------------------------

// What is known of a row after one run, or several: D outputs, 16 partial sums of probabilities, the maximum.
// Outputs are those of even dims of each STEP dims, then those of odd ones, and not divided by the sum.
constexpr i64 record_size(i64 head_dim) { return head_dim + 2 * TILE; }

class Worker {
 public:
  // Bytes; whole lines.
  static i64 scratch(i64 head_dim) {
    return 2 * (BLOCK_ROWS + 2 * KEYS + 1) * head_dim + 4 * GROUP_ROWS * SCORES +
           4 * (BLOCK_ROWS + GROUP_ROWS) * record_size(head_dim);
  }

  Worker(const Call& call, char* memory) : call_(call), dims_(call.head_dim), record_(record_size(call.head_dim)) {
    const auto take = [&](i64 count, auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory);
      memory += count * sizeof *array;
    };
    take(BLOCK_ROWS * dims_, q_);
    take(KEYS * dims_, keys_);
    take(KEYS * dims_, values_);
    take(dims_, zeros_);
    take(GROUP_ROWS * SCORES, scores_);
    take(GROUP_ROWS * record_, part_);
    take(BLOCK_ROWS * record_, total_);
    std::fill_n(zeros_, dims_, bf16{0});
  }

  ~Worker() {
    if (first_tile_ != 0) _tile_release();
  }

  void compute(const Block& block) {
    start(block);
    clear();
    for (i64 run = block.first_run(); run < block.seen.end; run += KEYS) {
      rearrange(run, block.seen.end);
      for (i64 r = 0; r < block.rows; r += GROUP_ROWS) {
        const i64 rows = std::min(GROUP_ROWS, block.rows - r);
        attend(r, rows, run, part_);
        merge(r, rows, run, part_);
      }
    }
    finish();
  }

  // Runs [run, end) of a block of no more than GROUP_ROWS rows, to its parts.
  void compute_part(const Block& block, i64 run, i64 end) {
    start(block);
    for (; run < end; run += KEYS) {
      rearrange(run, end);
      attend(0, block.rows, run, part_of(block, run));
    }
  }

  // When all parts are there.
  void join(const Block& block) {
    start(block);
    clear();
    for (i64 run = block.first_run(); run < block.seen.end; run += KEYS) merge(0, block.rows, run, part_of(block, run));
    finish();
  }

 private:
  float* part_of(const Block& block, i64 run) const {
    return block.parts + (run - block.first_run()) / KEYS * block.rows * record_;
  }

  void start(const Block& block) {
    block_ = block;
    located_ = -1;
    const i64 group = call_.group();
    i64 query = block.first / group, head = block.first % group;
    for (i64 r = 0; r < block.rows; ++r, ++head) {
      if (head == group) head = 0, ++query;
      seen_[r] = r > 0 && head > 0 ? seen_[r - 1] : seen_by(call_, block.request, query);
      const i64 row = block.request * call_.queries + query;
      at_row_[r] = (row * call_.heads + block.kv_head * group + head) * dims_;
      const bf16* from = call_.q + at_row_[r];
      for (i64 d = 0; d < dims_; d += STEP) {
        _mm512_store_si512(q_ + r * dims_ + d, _mm512_loadu_si512(from + d));
      }
    }
  }

  void clear() {
    std::fill_n(total_, block_.rows * record_, 0.0f);
    for (i64 r = 0; r < block_.rows; ++r) maximum(total_, r) = -INFINITE;
  }

  float& maximum(float* records, i64 r) const { return records[r * record_ + dims_ + TILE]; }

  // Where the tokens of a run lie in the caches; -1 for those that no row sees.
  void locate(i64 run, i64 (&at)[KEYS]) const {
    const Span seen = block_.seen.within(run);
    std::fill_n(at, KEYS, -1);
    const std::int32_t* page = call_.table + block_.request * call_.table_width + (run + seen.begin) / call_.block_size;
    const i64 stride = call_.kv_heads * dims_;
    i64 left = call_.block_size - (run + seen.begin) % call_.block_size;
    for (i64 token = seen.begin; token < seen.end; left = call_.block_size, ++page) {
      i64 first = ((*page + 1) * call_.block_size - left) * stride + block_.kv_head * dims_;
      for (const i64 end = std::min(token + left, seen.end); token < end; ++token, first += stride) at[token] = first;
    }
  }

  // The keys and values of a run to the order that tiles want. Those of the next run are asked for, if it is below
  // `end`: pages lie anywhere, and the processor does not guess where.
  void rearrange(i64 run, i64 end) {
    if (located_ != run) locate(run, at_);
    const Span seen = block_.seen.within(run);
    const i64 first = seen.begin / STEP * STEP, last = divide_up(seen.end, STEP) * STEP;
    for (i64 token = first; token < last; token += TILE) {
      fetch(call_.v_cache, at_ + token);
      rearrange_keys(token);
    }
    i64 next[KEYS];
    located_ = run + KEYS;
    if (located_ < end) locate(located_, next);
    for (i64 token = first; token < last; token += STEP) {
      if (located_ < end) {
        fetch(call_.k_cache, next + token);
        fetch(call_.k_cache, next + token + TILE);
      }
      rearrange_values(token);
    }
    if (located_ < end) std::copy_n(next, KEYS, at_);
  }

  void fetch(const bf16* cache, const i64* at) const {
    for (int i = 0; i < TILE; ++i) {
      if (at[i] < 0) continue;
      for (i64 d = 0; d < dims_; d += STEP) __builtin_prefetch(cache + at[i] + d, 0, 2);
    }
  }

  // To [D / STEP][pair of dims][token][2].
  void rearrange_keys(i64 token) {
    const bf16* from[TILE];
    for (int i = 0; i < TILE; ++i) from[i] = at_[token + i] < 0 ? zeros_ : call_.k_cache + at_[token + i];
    bf16* to = keys_ + token * dims_;
    for (i64 d = 0; d < dims_; d += STEP, to += TILE_SIZE) {
      __m512i w[TILE];
      UNROLL for (int i = 0; i < TILE; ++i) w[i] = _mm512_loadu_si512(from[i] + d);
      transpose(w);
      UNROLL for (int i = 0; i < TILE; ++i) _mm512_store_si512(to + i * STEP, w[i]);
    }
  }

  // To [D / STEP][even dims, odd dims][pair of tokens][dim][2].
  void rearrange_values(i64 token) {
    for (int pair = 0; pair < TILE; ++pair) {
      const i64 at0 = at_[token + 2 * pair], at1 = at_[token + 2 * pair + 1];
      const bf16 *v0 = at0 < 0 ? zeros_ : call_.v_cache + at0, *v1 = at1 < 0 ? zeros_ : call_.v_cache + at1;
      bf16* to = values_ + token * dims_ + pair * STEP;
      for (i64 d = 0; d < dims_; d += STEP, to += 2 * TILE_SIZE) {
        const __m512i a = _mm512_loadu_si512(v0 + d), b = _mm512_loadu_si512(v1 + d);
        _mm512_store_si512(to, _mm512_mask_blend_epi16(0xAAAAAAAA, a, _mm512_slli_epi32(b, 16)));
        _mm512_store_si512(to + TILE_SIZE, _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(a, 16), b));
      }
    }
  }

  void configure_tiles(i64 rows) {
    const int first = static_cast<int>(std::min<i64>(rows, TILE)), second = static_cast<int>(rows) - first;
    if (first == first_tile_ && second == second_tile_) return;
    first_tile_ = first, second_tile_ = second;
    compspec::configure_tiles(first, second);
  }

  // out[rows, 2 tiles] = sum over `count` products of a, stepping STEP, and the pairs of tiles of b.
  void multiply(const bf16* a, i64 a_stride, const bf16* b, i64 b_step, i64 b_second, i64 count, float* out,
                i64 out_stride) const {
    const i64 a_bytes = a_stride * 2, out_bytes = out_stride * 4;
    _tile_zero(0);
    _tile_zero(1);
    if (second_tile_ == 0) {
      for (i64 i = 0; i < count; ++i, a += STEP, b += b_step) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, b, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + b_second, LINE);
        _tile_dpbf16ps(1, 4, 7);
      }
    } else {
      _tile_zero(2);
      _tile_zero(3);
      for (i64 i = 0; i < count; ++i, a += STEP, b += b_step) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, b, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + b_second, LINE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + TILE * a_stride, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(2, out + TILE * out_stride, out_bytes);
      _tile_stored(3, out + TILE * out_stride + TILE, out_bytes);
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + TILE, out_bytes);
  }

  // One run of `rows` rows from r on. What a row that sees nothing of it gets is undefined.
  void attend(i64 r, i64 rows, i64 run, float* part) {
    Span seen = NOTHING;
    for (i64 i = r; i < r + rows; ++i) {
      if (!seen_[i].empty()) seen.add(seen_[i].within(run));
    }
    if (seen.empty()) return;
    configure_tiles(rows);
    const i64 first = seen.begin / STEP, last = divide_up(seen.end, STEP);
    for (i64 s = first; s < last; ++s) {
      multiply(q_ + r * dims_, dims_, keys_ + s * STEP * dims_, TILE_SIZE, TILE * dims_, dims_ / STEP,
               scores_ + s * STEP, SCORES);
    }
    for (i64 i = 0; i < rows; ++i) {
      const Span row = seen_[r + i].empty() ? Span{0, 0} : seen_[r + i].within(run);
      maximum(part, i) = softmax(scores_ + i * SCORES, row, first, last, call_.scale, call_.softcap,
                                 part + i * record_ + dims_);
    }
    const bf16* probabilities = reinterpret_cast<const bf16*>(scores_);
    for (i64 d = 0; d < dims_; d += STEP) {
      multiply(probabilities + first * STEP, 2 * SCORES, values_ + first * STEP * dims_ + 2 * d * TILE, STEP * dims_,
               TILE_SIZE, last - first, part + d, record_);
    }
  }

  // Adds a part to the total of the rows that see something of its run.
  void merge(i64 r, i64 rows, i64 run, float* part) {
    for (i64 i = 0; i < rows; ++i) {
      if (seen_[r + i].empty() || seen_[r + i].within(run).empty()) continue;
      float &old_maximum = maximum(total_, r + i), new_maximum = maximum(part, i);
      const float top = old_maximum > new_maximum ? old_maximum : new_maximum;
      const __m512 old_factor = exp2(_mm512_sub_ps(_mm512_set1_ps(old_maximum), base(top)));
      const __m512 new_factor = exp2(_mm512_sub_ps(_mm512_set1_ps(new_maximum), base(top)));
      old_maximum = top;
      float *to = total_ + (r + i) * record_, *from = part + i * record_;
      for (i64 d = 0; d < dims_ + TILE; d += TILE) {
        const __m512 kept = _mm512_mul_ps(_mm512_load_ps(to + d), old_factor);
        _mm512_store_ps(to + d, _mm512_fmadd_ps(_mm512_load_ps(from + d), new_factor, kept));
      }
    }
  }

  // Divides by the sums and writes; a row that sees nothing is zero. Rows that see the same go again together if one
  // of them met a value that is no number, unless nobody but them was there.
  void finish() {
    struct Rows {
      i64 first, rows;
      Span seen;
    } again[BLOCK_ROWS];
    i64 count = 0;
    for (i64 r = 0, end; r < block_.rows; r = end) {
      bool numbers = true;
      for (end = r; end < block_.rows && seen_[end] == seen_[r]; ++end) numbers &= finish_row(end);
      if (!numbers && end - r < block_.rows) again[count++] = {block_.first + r, end - r, seen_[r]};
    }
    const Block block = block_;
    for (i64 i = 0; i < count; ++i) {
      compute({block.request, block.kv_head, again[i].first, again[i].rows, again[i].seen, nullptr, 1});
    }
  }

  // Returns whether all outputs are finite.
  bool finish_row(i64 r) {
    // Word i is made of the i-th even dim and the i-th odd one.
    alignas(LINE) static constexpr std::uint16_t ORDER[STEP] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,
                                                                21, 6, 22, 7, 23, 8,  24, 9,  25, 10, 26,
                                                                11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(ORDER), sign = _mm512_set1_epi32(0x7FFFFFFF);
    const float* from = total_ + r * record_;
    bf16* to = call_.out + at_row_[r];
    const bool sees = !seen_[r].empty();
    const __m512 inverse = _mm512_set1_ps(sees ? 1.0f / _mm512_reduce_add_ps(_mm512_load_ps(from + dims_)) : 0.0f);
    __m512i most = _mm512_setzero_si512();
    for (i64 d = 0; d < dims_; d += STEP) {
      // Whether a zero is negative may depend on steps of which the row sees nothing.
      const __m512 zero = _mm512_setzero_ps();
      const __m512 even = _mm512_add_ps(_mm512_mul_ps(_mm512_load_ps(from + d), inverse), zero);
      const __m512 odd = _mm512_add_ps(_mm512_mul_ps(_mm512_load_ps(from + d + TILE), inverse), zero);
      most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(even), sign));
      most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(odd), sign));
      _mm512_storeu_si512(to + d, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
    }
    return _mm512_reduce_max_epu32(most) < 0x7F800000u;
  }

  const Call& call_;
  const i64 dims_, record_;
  Block block_;
  i64 located_ = -1;                      // the run whose tokens at_ says, or -1
  int first_tile_ = 0, second_tile_ = 0;  // rows that tiles are configured for
  i64 at_[KEYS];
  i64 at_row_[BLOCK_ROWS];                // in q and out
  Span seen_[BLOCK_ROWS];
  // Kept memory: q [rows, D]; keys and values of a run; scores, then probabilities, of a group; records.
  bf16 *q_, *keys_, *values_, *zeros_;
  float *scores_, *part_, *total_;
};

// ---- one call ----------------------------------------------------------------------------------------------------

// Whole lines, kept between calls; null if there is not enough.
class Memory {
 public:
  char* get(i64 bytes) {
    if (bytes > bytes_) {
      kept_.reset(std::aligned_alloc(LINE, divide_up(bytes, LINE) * LINE));
      bytes_ = kept_ ? bytes : 0;
    }
    return static_cast<char*>(kept_.get());
  }

 private:
  std::unique_ptr<void, decltype(&std::free)> kept_{nullptr, &std::free};
  i64 bytes_ = 0;
};

// Runs [run, end) of a block; all of them where the block is not shared.
struct Piece {
  i64 block, run, end;
};

struct Plan {
  std::vector<Block> blocks;
  std::vector<Piece> pieces;
  i64 part_floats = 0;
};

// Blocks of rows that are enough for all threads, and small ones cut into runs where they are not.
Plan plan(const Call& call, int threads) {
  Plan plan;
  const i64 rows = call.queries * call.group(), pairs = call.requests * call.kv_heads;
  const i64 share = threads == 1 ? BLOCK_ROWS : divide_up(rows * pairs, 8 * threads);
  const i64 block_rows = std::clamp(divide_up(share, GROUP_ROWS) * GROUP_ROWS, GROUP_ROWS, BLOCK_ROWS);
  i64 runs = 0;
  // Later rows see more: the longest work first.
  for (i64 first = (divide_up(rows, block_rows) - 1) * block_rows; first >= 0; first -= block_rows) {
    for (i64 request = 0; request < call.requests; ++request) {
      Block block = {request, 0, first, std::min(block_rows, rows - first), NOTHING, nullptr, 0};
      const i64 last = (first + block.rows - 1) / call.group();
      for (i64 query = first / call.group(); query <= last; ++query) block.seen.add(seen_by(call, request, query));
      for (block.kv_head = 0; block.kv_head < call.kv_heads; ++block.kv_head) plan.blocks.push_back(block);
      runs += call.kv_heads * block.runs();
    }
  }
  const i64 piece = threads == 1 ? runs : std::max<i64>(runs / (8 * threads), 1);
  const i64 count = static_cast<i64>(plan.blocks.size());
  bool more = true;
  for (i64 i = 0; more; ++i) {
    more = false;
    for (i64 b = 0; b < count; ++b) {
      Block& block = plan.blocks[b];
      const bool whole = block.rows > GROUP_ROWS || block.runs() <= piece;
      if (i == 0) block.pieces = whole ? 1 : divide_up(block.runs(), piece);
      if (i >= block.pieces) continue;
      more = true;
      const i64 run = block.first_run() + i * piece * KEYS;
      plan.pieces.push_back({b, run, whole ? block.seen.end : std::min(run + piece * KEYS, block.seen.end)});
      if (i == 0 && !whole) plan.part_floats += block.runs() * block.rows * record_size(call.head_dim);
    }
  }
  return plan;
}

// What the threads of a call share.
struct Shared {
  Plan work;
  Memory parts;
  i64 taken = 0;
  int failed = 0;

  void prepare(const Call& call, int threads) {
    taken = 0, failed = 0;
    try {
      work = plan(call, threads);
    } catch (const std::bad_alloc&) {
      work = {}, failed = 1;
    }
    float* at = reinterpret_cast<float*>(parts.get(work.part_floats * 4));
    if (work.part_floats > 0 && at == nullptr) work = {}, failed = 1;
    for (Block& block : work.blocks) {
      if (block.pieces <= 1) continue;
      block.parts = at;
      at += block.runs() * block.rows * record_size(call.head_dim);
    }
  }
};

// One thread's part.
void work(const Call& call, Shared& shared, const Team& team) {
  static thread_local Memory kept;
  if (team.thread == 0) shared.prepare(call, team.threads);
  team.wait();
  char* memory = kept.get(Worker::scratch(call.head_dim));
  if (memory == nullptr) {
    __atomic_store_n(&shared.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  Worker worker(call, memory);
  const i64 count = static_cast<i64>(shared.work.pieces.size());
  for (i64 i; (i = __atomic_fetch_add(&shared.taken, 1, __ATOMIC_RELAXED)) < count;) {
    const Piece& piece = shared.work.pieces[i];
    Block& block = shared.work.blocks[piece.block];
    if (block.parts == nullptr) {
      worker.compute(block);
    } else {
      worker.compute_part(block, piece.run, piece.end);
      if (__atomic_sub_fetch(&block.pieces, 1, __ATOMIC_ACQ_REL) == 0) worker.join(block);
    }
  }
}

int attention(const Call& call, int threads) {
  static thread_local Shared kept;
  Shared& shared = kept;
  i64 tokens = 0;
  for (i64 r = 0; r < call.requests; ++r) tokens += call.lengths[r];
  // What a token costs: reading it, and every row that may see it.
  if (tokens * call.kv_heads * (call.head_dim + 2 * call.queries * call.group()) < WORK_ALONE) threads = 1;
  compspec::in_team(threads, [&](const Team& team) { work(call, shared, team); });
  return shared.failed;
}

// The arguments of a call in a program.
struct Recorded {
  Call call;
  Shared* shared;
};

}  // namespace

// Arrays as in Call, contiguous; D is a multiple of 32. Returns 0, or 1 when there is no memory for the scratch.
extern "C" int compspec_attention_amx_bf16(const bf16* q, const bf16* k, const bf16* v, const std::int32_t* table,
                                           const std::int32_t* lengths, const i64* positions, bf16* out, i64 requests,
                                           i64 queries, i64 heads, i64 kv_heads, i64 head_dim, i64 table_width,
                                           i64 block_size, i64 window, float scale, float softcap, int threads) {
  return attention({q, k, v, table, lengths, positions, out, requests, queries, heads, kv_heads, head_dim, table_width,
                    block_size, window, scale, softcap}, threads);
}

// For programs: what the threads of a call share, and what all of them call with a Recorded.
extern "C" void* compspec_attention_amx_shared() { return new (std::nothrow) Shared; }
extern "C" void compspec_attention_amx_forget(void* shared) { delete static_cast<Shared*>(shared); }
extern "C" int compspec_attention_amx_work_bf16(void* arguments, const Team* team) {
  const auto* recorded = static_cast<const Recorded*>(arguments);
  work(recorded->call, *recorded->shared, *team);
  return recorded->shared->failed;
}
#endif

// Whether this processor has tiles and the system lets this process use them.
extern "C" int compspec_attention_amx_usable() {
#if defined(AMX)
  return compspec::may_use_tiles();
#else
  return 0;
#endif
}

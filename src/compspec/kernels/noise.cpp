// Gumbel noise: the same words, operations and roundings as sampling/noise.py, so the same bits.
//
// Every product and every sum of float64 is rounded on its own (-ffp-contract=off), as IEEE 754 says, so vectors of
// any width give what torch gives. Each stage goes over a whole tile before the next begins: one token's chain of
// operations is hundreds of cycles long, and a processor looks ahead over many tokens of one stage, but few of all.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "team.h"

#if defined(__AVX512F__)
#define AVX512
#endif
#if defined(__AVX2__)
#define AVX2
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of random words are stored assuming little endian"
#endif

#define INLINE inline __attribute__((always_inline))

namespace {
using compspec::Team;
using i64 = std::int64_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

#if defined(AVX512)
constexpr int VECTOR_BYTES = 64;
#elif defined(AVX2)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
constexpr int LANES = VECTOR_BYTES / 8;

typedef double Doubles __attribute__((vector_size(VECTOR_BYTES)));
typedef u64 Wide __attribute__((vector_size(VECTOR_BYTES)));
typedef u32 Words __attribute__((vector_size(VECTOR_BYTES / 2), may_alias));
typedef float Floats __attribute__((vector_size(VECTOR_BYTES / 2), may_alias));

constexpr int ROUNDS = 10;
constexpr int GROUP = 4;        // tokens of one call of Philox
constexpr int TILE = 256;       // tokens
constexpr i64 ALONE = 1 << 14;  // tokens for which a second thread costs more than it saves
constexpr u64 LOWER_HALF = 0xFFFFFFFF;

constexpr int TABLE_BITS = 7;
constexpr u64 MANTISSA = (u64(1) << 52) - 1;
constexpr u64 ONE = u64(1023) << 52;
// An integer below 2**52 in the mantissa of the double 2**52 (2**53) adds it (twice).
constexpr double SHIFT_52 = 4503599627370496.0, SHIFT_53 = 9007199254740992.0;
constexpr u64 BITS_52 = u64(1023 + 52) << 52, BITS_53 = u64(1023 + 53) << 52;

// What both logarithms read: tables of 2**TABLE_BITS numbers, and log(2).
struct Logarithms {
  const double *inverse, *log;
  double log_2;
};

INLINE Wide multiply_lower_halves(Wide a, u32 b) {
#if defined(AVX512)
  return (Wide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(AVX2)
  return (Wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
  return (a & LOWER_HALF) * b;
#endif
}

INLINE Doubles look_up(const double* table, Wide index) {
#if defined(AVX512)
  return (Doubles)_mm512_i64gather_pd((__m512i)index, table, 8);
#else
  Doubles found = {};
  for (int lane = 0; lane < LANES; ++lane) found[lane] = table[index[lane]];
  return found;
#endif
}

// GumbelNoise._logarithm.
INLINE Doubles logarithm(Doubles x, const Logarithms& by) {
  const Wide bits = (Wide)x;
  const Doubles exponent = (Doubles)(bits >> 52 | BITS_52) - (SHIFT_52 + 1023.0);
  const Wide index = bits >> (52 - TABLE_BITS) & ((1 << TABLE_BITS) - 1);
  const Doubles mantissa = (Doubles)((bits & MANTISSA) | ONE);
  const Doubles r = mantissa * look_up(by.inverse, index) - 1.0;
  const Doubles series =
      r * (1.0 - r * (1.0 / 2 - r * (1.0 / 3 - r * (1.0 / 4 - r * (1.0 / 5 - r * (1.0 / 6))))));
  return exponent * by.log_2 + (look_up(by.log, index) + series);
}

// What the tokens of a row have in common. Words are wide: vectors are filled with them.
struct Row {
  u64 position, salt[2], key[ROUNDS][2];

  Row(u64 seed, u64 position, u64 salt) : position(position), salt{salt & LOWER_HALF, salt >> 32} {
    for (int round = 0; round < ROUNDS; ++round) {
      key[round][0] = u32((seed & LOWER_HALF) + u64(round) * 0x9E3779B9);
      key[round][1] = u32((seed >> 32) + u64(round) * 0xBB67AE85);
    }
  }
};

// Philox4x32-10 of LANES groups of tokens from `group` on: one word per token. Upper halves are not looked at.
INLINE void draw(const Row& row, i64 group, u64* words) {
  Wide w0 = {}, w1 = Wide{} + row.position, w2 = Wide{} + row.salt[0], w3 = Wide{} + row.salt[1];
  for (int lane = 0; lane < LANES; ++lane) w0[lane] = lane;
  w0 += u64(group);
  for (int round = 0; round < ROUNDS; ++round) {
    const Wide product0 = multiply_lower_halves(w0, 0xD2511F53), product1 = multiply_lower_halves(w2, 0xCD9E8D57);
    w0 = (product1 >> 32) ^ w1 ^ row.key[round][0];
    w2 = (product0 >> 32) ^ w3 ^ row.key[round][1];
    w1 = product1;
    w3 = product0;
  }
  const Wide first = (w0 & LOWER_HALF) | w1 << 32, second = (w2 & LOWER_HALF) | w3 << 32;
  for (int lane = 0; lane < LANES; ++lane) {
    words[2 * lane] = first[lane];
    words[2 * lane + 1] = second[lane];
  }
}

// The noise of the tokens [first, first + TILE); `noise` is aligned as a vector.
void fill_tile(const Row& row, i64 first, const Logarithms& by, float* noise) {
  alignas(VECTOR_BYTES) u64 words[TILE / 2];
  Doubles exponential[TILE / LANES];
  for (int at = 0; at < TILE; at += GROUP * LANES) draw(row, (first + at) / GROUP, words + at / 2);
  for (int at = 0; at < TILE / LANES; ++at) {
    const Wide word = __builtin_convertvector(reinterpret_cast<const Words*>(words)[at], Wide);
    const Doubles odd = (Doubles)(word | BITS_53) - (SHIFT_53 - 1.0);  // 2 word + 1
    exponential[at] = 33.0 * by.log_2 - logarithm(odd, by);
  }
  for (int at = 0; at < TILE / LANES; ++at) {
    reinterpret_cast<Floats*>(noise)[at] = -__builtin_convertvector(logarithm(exponential[at], by), Floats);
  }
}

// One thread's part of all tiles of all rows.
void fill(const i64* seeds, const i64* positions, const i64* salts, i64 rows, i64 vocab_size, const Logarithms& by,
          float* out, const Team& team) {
  const i64 tiles = (vocab_size + TILE - 1) / TILE;
  const i64 end = team.end(rows * tiles);
  for (i64 at = team.begin(rows * tiles); at < end;) {
    const i64 n = at / tiles;
    const Row row(seeds[n], positions[n], salts[n]);
    for (const i64 row_end = std::min(end, (n + 1) * tiles); at < row_end; ++at) {
      alignas(VECTOR_BYTES) float noise[TILE];
      const i64 first = (at - n * tiles) * TILE;
      fill_tile(row, first, by, noise);
      std::memcpy(out + n * vocab_size + first, noise, std::min<i64>(vocab_size - first, TILE) * sizeof(float));
    }
  }
}
}  // namespace

// seeds, positions, salts: [rows]; inverse, log: [2**TABLE_BITS]; out: [rows, vocab_size].
extern "C" void compspec_gumbel_noise(const i64* seeds, const i64* positions, const i64* salts, i64 rows,
                                      i64 vocab_size, const double* inverse, const double* log, double log_2,
                                      float* out, int threads) {
  const Logarithms by{inverse, log, log_2};
  compspec::in_team(rows * vocab_size < ALONE ? 1 : threads, [&](const Team& team) {
    fill(seeds, positions, salts, rows, vocab_size, by, out, team);
  });
}

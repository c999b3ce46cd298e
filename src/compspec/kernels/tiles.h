// AMX tiles: whether this process may use them, and the shape in which kernels with 2 x 2 tiles of sums need them.

#pragma once

#if defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define AMX

#include <algorithm>
#include <cstdint>
#include <sys/syscall.h>
#include <unistd.h>

namespace compspec {

inline bool may_use_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool may = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return may;
}

// Results are in tiles 0..3 (first and second rows, each times two tiles), rows in 4 and 5, what they meet in 6 and 7.
inline void configure_tiles(int first_rows, int second_rows) {
  constexpr int ROWS = 16, ROW_BYTES = 64;
  struct __attribute__((packed)) {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = ROW_BYTES, config.rows[tile] = ROWS;
  config.rows[0] = config.rows[1] = config.rows[4] = static_cast<std::uint8_t>(first_rows);
  config.rows[2] = config.rows[3] = config.rows[5] = static_cast<std::uint8_t>(std::max(second_rows, 1));
  // GCC's own intrinsic says that it reads 8 bytes, and the stores of others may be left out.
  asm volatile("ldtilecfg %0" ::"m"(config));
}

}  // namespace compspec
#endif

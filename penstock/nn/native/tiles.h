// Products of tiles (AMX): up to 16 rows of 64 bytes each, in eight registers of their own.
//
// A row of inputs has 16 words, of two bfloat16 or four whole numbers of 8 bits each; a tile of weights has 16 lines
// (gemm.h), one for each word. Sums are of rows by 16 outputs, in float32 or in whole numbers of 32 bits.
//
// Of bfloat16, the first and the second numbers of 16 words are summed up apart, then added, then added to a sum: no other
// instruction does so. Hence all products of bfloat16 are made of the same tiles, however many rows there are. Whole
// numbers are exact.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define PENSTOCK_TILES 1

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "gemm.h"

namespace penstock {

constexpr int TILE_ROWS = 16;
constexpr int64_t TILE_WORDS = 16;

// Up to so many rows, sums of four groups of 16 outputs are in registers; of up to twice as many, those of two groups.
constexpr int tile_groups(int64_t rows) { return rows <= TILE_ROWS ? 4 : 2; }

// While there is one, a thread's registers are for tiles: of so many rows, by so many words of each.
class TileRegisters {
  public:
    ~TileRegisters() {
        if (rows_) _tile_release();
    }
    void shape(int rows, int words = TILE_WORDS) {
        if (rows == rows_ && words == words_) return;
        rows_ = rows;
        words_ = words;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64};
            uint8_t rows[16] = {};
        } all;
        const bool many = rows > TILE_ROWS;
        const uint8_t few = many ? TILE_ROWS : rows, more = many ? rows - TILE_ROWS : rows, lines = words;
        const uint8_t of_registers[8] = {few, few, more, more, few, many ? more : lines, lines, lines};
        std::memcpy(all.rows, of_registers, sizeof of_registers);
        for (int i = 4; i < 8; i++) all.bytes[i] = i == 4 || (i == 5 && many) ? words * 4 : 64;
        _tile_loadconfig(&all);
    }

  private:
    int rows_ = 0, words_ = 0;
};

// Where tiles come from. Rows and lines are `x_stride` bytes and `apart` lines away from one another; in each step of 16
// words `fetch` lines from `ahead` on are asked for.
struct TileInputs {
    const char* x;
    int64_t x_stride;
    const Line* lines;
    int64_t apart, fetch;
    const Line* ahead;
};

// Compilers do not know that tiles come from memory, which what was written before must have reached.
PENSTOCK_INLINE void tiles_are_read() { asm volatile("" ::: "memory"); }

// clang-format off
#define PENSTOCK_TILE_DP(SUM, X, LINES)                          \
    if constexpr (WHOLE) _tile_dpbsud(SUM, X, LINES);            \
    else _tile_dpbf16ps(SUM, X, LINES)
// clang-format on

// G groups by at most 16 rows.
template <bool WHOLE, int G>
void add_few_rows(TileInputs from, int64_t steps) {
    const int64_t bytes = from.apart * sizeof(Line);
    for (int64_t step = 0; step < steps; step++) {
        for (int64_t f = 0; f < from.fetch; f++) __builtin_prefetch(from.ahead + f, 0, 3);
        _tile_loadd(4, from.x, from.x_stride);
        _tile_loadd(5, from.lines, bytes);
        PENSTOCK_TILE_DP(0, 4, 5);
        if constexpr (G > 1) {
            _tile_loadd(6, from.lines + 1, bytes);
            PENSTOCK_TILE_DP(1, 4, 6);
        }
        if constexpr (G > 2) {
            _tile_loadd(7, from.lines + 2, bytes);
            PENSTOCK_TILE_DP(2, 4, 7);
        }
        if constexpr (G > 3) {
            _tile_loadd(5, from.lines + 3, bytes);
            PENSTOCK_TILE_DP(3, 4, 5);
        }
        from.x += TILE_WORDS * 4;
        from.lines += TILE_WORDS * from.apart;
        from.ahead += from.fetch;
    }
}

// G groups by 17 to 32 rows.
template <bool WHOLE, int G>
void add_many_rows(TileInputs from, int64_t steps) {
    const int64_t bytes = from.apart * sizeof(Line);
    const char* more = from.x + TILE_ROWS * from.x_stride;
    for (int64_t step = 0; step < steps; step++) {
        for (int64_t f = 0; f < from.fetch; f++) __builtin_prefetch(from.ahead + f, 0, 2);
        _tile_loadd(6, from.lines, bytes);
        _tile_loadd(4, from.x, from.x_stride);
        PENSTOCK_TILE_DP(0, 4, 6);
        _tile_loadd(5, more, from.x_stride);
        PENSTOCK_TILE_DP(2, 5, 6);
        if constexpr (G > 1) {
            _tile_loadd(7, from.lines + 1, bytes);
            PENSTOCK_TILE_DP(1, 4, 7);
            PENSTOCK_TILE_DP(3, 5, 7);
        }
        from.x += TILE_WORDS * 4;
        more += TILE_WORDS * 4;
        from.lines += TILE_WORDS * from.apart;
        from.ahead += from.fetch;
    }
}
#undef PENSTOCK_TILE_DP

template <bool WHOLE>
void add_tiles(int rows, int groups, const TileInputs& from, int64_t steps) {
    if (rows > TILE_ROWS) return groups > 1 ? add_many_rows<WHOLE, 2>(from, steps) : add_many_rows<WHOLE, 1>(from, steps);
    switch (groups) {
        case 1: return add_few_rows<WHOLE, 1>(from, steps);
        case 2: return add_few_rows<WHOLE, 2>(from, steps);
        case 3: return add_few_rows<WHOLE, 3>(from, steps);
        default: return add_few_rows<WHOLE, 4>(from, steps);
    }
}

// What is left of a row's words fills up a tile with zeros.
template <bool WHOLE>
void add_rest(int rows, int groups, const TileInputs& from, int64_t words) {
    alignas(64) char x[2 * TILE_ROWS][TILE_WORDS * 4] = {};
    alignas(64) Line lines[TILE_WORDS * 4] = {};
    for (int r = 0; r < rows; r++) std::memcpy(x[r], from.x + r * from.x_stride, words * 4);
    for (int64_t w = 0; w < words; w++) std::memcpy(lines + w * groups, from.lines + w * from.apart, groups * sizeof(Line));
    tiles_are_read();
    add_tiles<WHOLE>(rows, groups, {x[0], sizeof x[0], lines, groups, 0, nullptr}, 1);
}

// Sums of up to 32 rows by at most `tile_groups(rows)` groups, whose rows are `width` numbers apart, to the registers.
inline void load_sums(int rows, int groups, const void* sums, int64_t width) {
    const bool many = rows > TILE_ROWS;
    const int64_t stride = width * 4;
    const char *here = static_cast<const char*>(sums), *more = here + (many ? TILE_ROWS * stride : 2 * LANES * 4);
    _tile_loadd(0, here, stride);
    if (groups > 1) _tile_loadd(1, here + LANES * 4, stride);
    if (many || groups > 2) _tile_loadd(2, more, stride);
    if (many ? groups > 1 : groups > 3) _tile_loadd(3, more + LANES * 4, stride);
}
inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}
inline void store_sums(int rows, int groups, void* sums, int64_t width) {
    const bool many = rows > TILE_ROWS;
    const int64_t stride = width * 4;
    char *here = static_cast<char*>(sums), *more = here + (many ? TILE_ROWS * stride : 2 * LANES * 4);
    _tile_stored(0, here, stride);
    if (groups > 1) _tile_stored(1, here + LANES * 4, stride);
    if (many || groups > 2) _tile_stored(2, more, stride);
    if (many ? groups > 1 : groups > 3) _tile_stored(3, more + LANES * 4, stride);
}

// Adds `words` words of these rows by these groups to sums, or begins them.
template <bool WHOLE>
void add_words(TileRegisters& registers, int rows, int groups, TileInputs from, int64_t words, void* sums, int64_t width,
               bool begin) {
    tiles_are_read();
    registers.shape(rows, static_cast<int>(std::min(words, TILE_WORDS)));
    begin ? clear_sums() : load_sums(rows, groups, sums, width);
    const int64_t steps = std::max<int64_t>(1, words / TILE_WORDS), whole = std::min(words, steps * TILE_WORDS);
    add_tiles<WHOLE>(rows, groups, from, steps);
    from.x += whole * 4;
    from.lines += whole * from.apart;
    if (whole < words) add_rest<WHOLE>(rows, groups, from, words - whole);
    store_sums(rows, groups, sums, width);
}

// The other way round: of 64 rows, `stride` bytes apart, products with up to 16 columns, [words][16], to [64][16] sums.
// Their bits are those of `add_words`. Rows are read 16 by 16, and then(count) is called after every 16 words of so many.
template <class Then>
void multiply_columns(TileRegisters& registers, const char* rows, int64_t stride, const Line* columns, int64_t words, float* to,
                      const Then& then) {
    const int64_t whole = words / TILE_WORDS * TILE_WORDS;
    alignas(64) Line lines[TILE_WORDS] = {};
    if (whole < words) std::memcpy(lines, columns + whole, (words - whole) * sizeof(Line));
    tiles_are_read();
    registers.shape(TILE_ROWS);
#pragma GCC unroll 4
    for (int strip = 0; strip < 4; strip++) {
        const char* from = rows + strip * TILE_ROWS * stride;
        _tile_zero(0);
        for (int64_t word = 0; word < whole; word += TILE_WORDS) {
            _tile_loadd(4, from + word * 4, stride);
            _tile_loadd(5, columns + word, sizeof(Line));
            _tile_dpbf16ps(0, 4, 5);
            then();
        }
        if (whole < words) {
            alignas(64) char rest[TILE_ROWS][TILE_WORDS * 4] = {};
            for (int r = 0; r < TILE_ROWS; r++) std::memcpy(rest[r], from + r * stride + whole * 4, (words - whole) * 4);
            tiles_are_read();
            _tile_loadd(4, rest[0], sizeof rest[0]);
            _tile_loadd(5, lines, sizeof(Line));
            _tile_dpbf16ps(0, 4, 5);
            then();
        }
        _tile_stored(0, to + strip * TILE_ROWS * LANES, sizeof(Line));
    }
}

}  // namespace penstock

#endif

// Products of up to 16 queries of a head with some blocks' K and V as these lie in the cache, in tiles.
//
// K of all blocks comes first, and V last: so none of these products waits for weights, which take long to come out of the
// registers and into them again, and V's sums stay there from block to block.
#pragma once

#include "attention_block.h"

#if defined(PENSTOCK_TILES)

namespace penstock {
namespace {

constexpr int BLOCKS_AT_ONCE = 4;
constexpr int64_t LEAD = 128;  // lines that are asked for before they are read
constexpr int WEIGHT_WORDS = BLOCK_TOKENS / Pair::EACH;  // of a query and a block

// Scores of a block's tokens with columns of words, [words][16]. ask(bytes) is called after so many have been read.
template <class Ask>
void multiply_keys_of(TileRegisters& registers, const Source<bf16>& block, const uint32_t* queries, float (*to)[LANES],
                      const Ask& ask) {
    multiply_columns(registers, reinterpret_cast<const char*>(block.keys), block.stride * static_cast<int64_t>(sizeof(bf16)),
                     reinterpret_cast<const Line*>(queries), block.dim / Pair::EACH, to[0], ask);
}

// Adds what a block's V, weighted, comes to. Weights are [rows][words], and sums are `width` apart.
template <class Ask>
void add_values_of(TileRegisters& registers, const Source<bf16>& block, const uint32_t (*weights)[WEIGHT_WORDS], int rows,
                   float* sums, int64_t width, const Ask& ask) {
    constexpr int64_t MOST = 8, AT_ONCE = 4;
    alignas(64) Line lines[WEIGHT_WORDS * MOST];
    registers.shape(rows);
    for (int64_t first = 0; first < width / LANES; first += MOST) {
        const int64_t groups = std::min(MOST, width / LANES - first);
        for (int64_t word = 0; word < WEIGHT_WORDS; word++) {
            block.put_values(word * Pair::EACH, first * LANES, groups, reinterpret_cast<float*>(lines + word * groups));
            ask();
        }
        tiles_are_read();
        for (int64_t g = 0; g < groups; g += AT_ONCE) {
            const int some = static_cast<int>(std::min(AT_ONCE, groups - g));
            float* to = sums + (first + g) * LANES;
            load_sums(rows, some, to, width);
            add_tiles<false>(rows, some, {reinterpret_cast<const char*>(weights), sizeof weights[0], lines + g, groups, 0, nullptr},
                             WEIGHT_WORDS / TILE_WORDS);
            store_sums(rows, some, to, width);
        }
    }
    tiles_are_read();
}

}  // namespace
}  // namespace penstock

#endif

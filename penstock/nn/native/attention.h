// Causal attention of a step's rows over their sequences' cached K and V.
#pragma once

#include <cstdint>

namespace penstock {

constexpr int BLOCK_TOKENS = 64;

// The rows of one sequence: [row, row + rows) of the batch, at positions [start, start + rows) of the sequence, whose
// blocks are `place`, `place` + 1, ... where `place` >= 0, and else ids[-1 - place], ids[-place], ...
struct Span {
    int64_t row, rows, start, place;
};

// The cache [blocks, layers, 2, kv_heads, BLOCK_TOKENS, dim], innermost dimension contiguous. Strides in elements.
struct Cache {
    void* base;
    int64_t block, layer, kind, head, token;
    int64_t kv_heads, dim;
    int64_t is_bf16;  // else float32
};

// A step as all its layers see it.
struct AttentionBatch {
    const Span* spans;
    int64_t count;
    const int64_t* ids;
    Cache cache;
    int64_t heads;
};

// out[rows, heads, dim] = softmax(q k^T * scale) v. A row at position p sees positions (p - window, p] of its own
// sequence, all up to p where `window` is 0. Of q, heads lie together and rows `q_stride` elements apart; out is
// contiguous. Both are of the cache's dtype.
//
// A row's result is the same to the bit whatever else is in the batch: positions are visited in blocks, each with
// arithmetic of its own, and blocks are summed up in splits of the sequence that depend on the position alone.
void attention(const AttentionBatch& batch, int64_t layer, const void* q, int64_t q_stride, void* out, float scale,
               int64_t window);

}  // namespace penstock

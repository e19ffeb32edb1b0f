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

// One layer of the cache, [blocks, 2, kv_heads, BLOCK_TOKENS, dim], innermost dimension contiguous; strides in elements.
// Where the stride from K to V is 0, V is the first `value_dim` of K's values, and there is one head; else it is `dim`.
// Rows are of bfloat16, or else of float32. So are values, unless there are scales, [blocks, 2, kv_heads, BLOCK_TOKENS]
// floats: then they are of 8 bits, and each stands for its product with the scale of its token and head.
struct Cache {
    void* values;
    int64_t block, kind, head, token;
    float* scales;  // or null
    int64_t scale_block, scale_kind, scale_head, scale_token;
    int64_t kv_heads, dim, value_dim;
    int64_t is_bf16;
    int64_t group;  // which of a step's tables is its
};

// A step as all its layers see it.
struct AttentionBatch {
    const Span* spans;
    int64_t count;
    const int64_t* ids;
    int64_t heads;
};

// out[rows, heads, value_dim] = softmax(q k^T * scale) v. A row at position p sees positions (p - window, p] of its own
// sequence, all up to p where `window` is 0. Of q, heads lie together and rows `q_stride` elements apart; out is
// contiguous.
//
// A row's result is the same to the bit whatever else is in the batch: positions are visited in blocks, each with
// arithmetic of its own, and blocks are summed up in splits of the sequence that depend on the position alone.
void attention(const AttentionBatch& batch, const Cache& cache, const void* q, int64_t q_stride, void* out, float scale,
               int64_t window);

}  // namespace penstock

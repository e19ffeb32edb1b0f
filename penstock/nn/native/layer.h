// All layers of a step, one after the other: the functions that ops call one by one, in the same order.
#pragma once

#include "attention.h"

namespace penstock {

// A packed weight (gemm.h), and its bias or null.
struct Projection {
    const void* lines;
    int64_t outs, ins;
    const void* bias;
};

// Of norms, [width] weights; those of q and k are null where heads are not normed.
struct Layer {
    const void* input_norm;
    Projection qkv;
    const void *q_norm, *k_norm;
    Projection o;
    const void* post_norm;
    Projection gate_up, down;
    int64_t window;  // 0 is none
};

struct Decoder {
    const Layer* layers;
    int64_t count;
    const void* embedding;  // [vocab, hidden], or packed
    int64_t vocab, hidden, embedding_is_packed;
    const void* norm;
    float eps, scale;
};

// The rows of a step: [rows] tokens and where their k and v belong, [rows, dim / 2] cos and sin; and which of them are
// wanted, [kept], rising, or null for all.
struct Rows {
    int64_t rows;
    const int64_t *tokens, *blocks, *offsets;
    const void *cos, *sin;
    int64_t kept_count;
    const int64_t* kept;
};

// Elements of scratch that a row needs.
int64_t scratch_width(const Decoder& decoder);

}  // namespace penstock

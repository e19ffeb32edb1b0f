// All layers of a step, one after the other: the functions that ops call one by one, in the same order.
#pragma once

#include "experts.h"
#include "ranks.h"

namespace penstock {

// A packed weight (gemm.h), and its bias or null; or one in few bits, whose bias that is.
struct Projection {
    const void* lines;
    int64_t outs, ins;
    const void* bias;
    const Quantised* quantised;  // or null
};

// Latent attention, as nn/latent.py has it. Keys and values are of each head, packed one after the other: [heads][rank, key]
// and [heads][value, rank].
struct Latent {
    Projection q_a;  // without outputs where q is made of rows themselves
    const void* q_a_norm;
    Projection q, kv_a;
    const void* kv_a_norm;
    const Line *keys, *values;
    int64_t heads, rank, rope, key, value, interleaved;
    float eps;  // of both norms
};

// Routed experts, of whose gates each has so many.
struct Mixture {
    Projection router;  // of float32
    Routing routing;
    Slots gate_up, down;
    int64_t gates;
    int64_t* counts;         // [experts] rows that each has had, to which a step adds its own
    Projection shared_gate;  // of what all rows have besides; without outputs where there is none
};

// Of norms, [width] weights; those of q and k are null where heads are not normed, and post norms where what is computed
// is added as it is. With a mixture, gate_up and down are of what all rows have besides, without outputs where there is
// nothing.
struct Layer {
    const void* mixer_norm;
    const Latent* latent;  // or null, and else there is no qkv
    Projection qkv;
    const void *q_norm, *k_norm;
    Projection o;
    const void *mixer_post_norm, *feed_forward_norm;
    const Mixture* mixture;  // or null
    Projection gate_up, down;
    const void* feed_forward_post_norm;
    int64_t window;    // 0 is none
    int64_t rotation;  // which of the step's
};

// With ranks, what this one has of a model: some heads and gates of every layer, and the embedding of some tokens. What o
// and down make of theirs are summands. Of a pipeline's stages only the first has an embedding, and only the last a norm.
struct Decoder {
    const Layer* layers;
    int64_t count;
    const void* embedding;  // [vocab, hidden], or packed; null where there is none, and no quantised one either
    int64_t vocab, hidden, embedding_is_packed;
    const Quantised* quantised_embedding;  // or null
    const void* norm;    // or null
    int64_t wide_norms;  // all weights of norms are float32
    int64_t activation;  // of gates
    float eps, scale, embedding_scale;
    Ranks* ranks;         // or null
    int64_t first_token;  // of the embedding
};

constexpr int ROTATIONS = 2;

// What a step's rows are to the layers of one group (Cache::group): [rows] blocks and offsets where their k and v belong,
// and their sequences as attention has them.
struct Table {
    const int64_t *blocks, *offsets;
    const Span* spans;
    int64_t count;
    const int64_t* ids;
};

// The rows of a step: [rows] tokens, a table for each group of layers, and how heads are turned; and which of them are
// wanted, [kept], rising, or null for all. Once what `stop` points at is not 0, the step ends; null never stops it, and with
// ranks it must be null, which all have to meet.
struct Rows {
    int64_t rows;
    const int64_t* tokens;
    const Table* tables;
    Rotation rotations[ROTATIONS];
    int64_t kept_count;
    const int64_t* kept;
    const int64_t* stop;
};

constexpr int64_t INTERRUPTED = -3;  // a status besides those of a meeting

// Elements of scratch that a row needs.
int64_t scratch_width(const Decoder& decoder);

}  // namespace penstock

// Mixtures of experts: rows get experts, are grouped by them, are computed, and are summed up again. A row's bits depend on
// that row alone.
#pragma once

#include "quantised.h"
#include "rows.h"

namespace penstock {

// The same projection of several experts, each in a slot: packed (gemm.h), or in few bits as `quantised` says, whose lines
// are those of any slot. All panels of a slot are whole.
struct Slots {
    const void* const* slots;
    int64_t outs, ins, panel_outs, panel_bytes;
    const Quantised* quantised;  // or null
};

// Of logits [rows, count], each row's experts [rows, top_k], rising, and their weights. `correction` [count], or null, is
// added to scores for the choice. Experts are chosen from the best `kept` of `groups`: by their best, or with a correction
// by their two best together. Of equals the first is the best.
struct Routing {
    const float* correction;
    int64_t count, top_k, sigmoid, groups, kept, renormalised;
    float scale;
};
void route(const Routing& routing, const float* logits, int64_t rows, int64_t* experts, float* weights);

// Pairs of a row and an expert, by experts and then by rows: which each of them is, where each expert's begin, [count + 1],
// and where each pair is.
void group_experts(const int64_t* experts, int64_t pairs, int64_t count, int64_t* which, int64_t* bounds, int64_t* places);

// What the experts in so many slots make of their pairs' rows, whose number is that of the pair divided by `top_k`: to rows
// of `made`, down.outs elements apart. `width` is that of gates.
template <class T>
void expert_rows(const T* x, int64_t x_stride, const int64_t* pairs, const int64_t* bounds, int64_t slots, int64_t top_k,
                 const Slots& gate_up, const Slots& down, int64_t activation, int64_t width, T* made);

// out[rows, hidden] = the sum over a row's places of weight * made, in float32, in their order.
template <class T>
void combine_experts(const T* made, int64_t stride, const int64_t* places, const float* weights, int64_t rows, int64_t top_k,
                     int64_t hidden, T* out);

// out[rows, hidden] = routed + shared, which is multiplied with the sigmoid of each row's gate before, [rows], where there
// are such; each step rounded. `out` may be either.
template <class T>
void add_shared(const T* routed, const T* shared, const T* gates, int64_t rows, int64_t hidden, T* out);

}  // namespace penstock

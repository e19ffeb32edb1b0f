#include "experts.h"

#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace penstock {
namespace {

constexpr int64_t ELEMENTS = 16384;  // of rows, that a task has at least
constexpr int64_t LEAST_BYTES = 1 << 19;  // of weights, the same
constexpr int64_t TASKS = 16;             // for each thread
constexpr float LEAST = 1e-20f;           // that weights are divided by

// f(row) for all rows of so many elements.
template <class F>
void each_row(int64_t rows, int64_t elements, F&& f) {
    const int64_t together = std::max<int64_t>(1, ELEMENTS / std::max<int64_t>(1, elements));
    parallel_for(static_cast<int>((rows + together - 1) / together), [&](int task) {
        const int64_t end = std::min(rows, (task + 1) * together);
        for (int64_t row = task * together; row < end; row++) f(row);
    });
}

// Up to LANES elements.
template <class T>
f32x16 load_some(const T* from, int64_t count) {
    return count >= LANES ? load(from) : load(from, static_cast<int>(count));
}
template <class T>
void store_some(T* to, f32x16 x, int64_t count) {
    if (count >= LANES)
        store(to, x);
    else
        store(to, x, static_cast<int>(count));
}

// The best `wanted` of `count`, the first of equals, to marks.
void mark_best(const float* scores, int64_t count, int64_t wanted, const uint8_t* barred, uint8_t* marks) {
    std::fill_n(marks, count, 0);
    for (int64_t i = 0; i < wanted; i++) {
        int64_t best = -1;
        for (int64_t c = 0; c < count; c++)
            if (!marks[c] && !(barred && barred[c]) && (best < 0 || scores[c] > scores[best])) best = c;
        if (best >= 0) marks[best] = 1;
    }
}

void score(const Routing& routing, const float* logits, float* scores) {
    const int64_t count = routing.count;
    f32x16 most = splat(-std::numeric_limits<float>::infinity());
    if (!routing.sigmoid)
        for (int64_t c = 0; c < count; c++) most = max(most, splat(logits[c]));
    f32x16 sum{};
    for (int64_t c = 0; c < count; c += LANES) {
        const int rest = static_cast<int>(std::min<int64_t>(LANES, count - c));
        const f32x16 x = rest == LANES ? load(logits + c) : load(logits + c, rest);
        f32x16 value;
        if (routing.sigmoid) {
            value = splat(1.0f) / (splat(1.0f) + exp2(max(splat(-126.0f), max(-x, x) * splat(-LOG2_E))));
            value = where(x < 0.0f, splat(1.0f) - value, value);
        } else {
            value = exp2((x - most) * splat(LOG2_E));
        }
        store(scores + c, value, rest);
        if (rest < LANES) value = load(scores + c, rest);
        sum = sum + value;
    }
    if (routing.sigmoid) return;
    const float total = sum_lanes(sum);
    for (int64_t c = 0; c < count; c++) scores[c] /= total;
}

// Which groups cannot be chosen from.
void bar(const Routing& routing, const float* choice, uint8_t* barred) {
    const int64_t size = routing.count / routing.groups;
    std::vector<float> best(routing.groups);
    std::vector<uint8_t> kept(routing.groups);
    for (int64_t g = 0; g < routing.groups; g++) {
        float first = -std::numeric_limits<float>::infinity(), second = first;
        for (int64_t c = g * size; c < (g + 1) * size; c++) {
            if (choice[c] > first) {
                second = first;
                first = choice[c];
            } else if (choice[c] > second) {
                second = choice[c];
            }
        }
        best[g] = routing.correction ? first + second : first;
    }
    mark_best(best.data(), routing.groups, routing.kept, nullptr, kept.data());
    for (int64_t c = 0; c < routing.count; c++) barred[c] = !kept[c / size];
}

void route_one(const Routing& routing, const float* logits, int64_t* experts, float* weights) {
    const int64_t count = routing.count;
    thread_local std::vector<float> scores, corrected;
    thread_local std::vector<uint8_t> barred, chosen;
    scores.resize(count);
    barred.assign(count, 0);
    chosen.resize(count);
    score(routing, logits, scores.data());
    const float* choice = logits;
    if (routing.correction) {
        corrected.resize(count);
        for (int64_t c = 0; c < count; c++) corrected[c] = scores[c] + routing.correction[c];
        choice = corrected.data();
    }
    if (routing.groups > 1) bar(routing, choice, barred.data());
    mark_best(choice, count, routing.top_k, barred.data(), chosen.data());
    float sum = 0;
    int64_t at = 0;
    for (int64_t c = 0; c < count; c++)
        if (chosen[c]) {
            experts[at] = c;
            weights[at++] = scores[c];
            sum += scores[c];
        }
    for (int64_t i = 0; i < routing.top_k; i++) {
        if (routing.renormalised) weights[i] /= sum + LEAST;
        weights[i] *= routing.scale;
    }
}

// A panel-wise part of a slot's projection, of some rows.
struct Task {
    int64_t slot, first, last;  // panels
};

// `x`: the rows of the task's slot, which begin with row `first` of all.
template <class T>
void project(const Slots& of, const Task& task, const Inputs* inputs, int64_t first, const T* x, int64_t x_stride,
             int64_t rows, T* out) {
    const Line* lines = reinterpret_cast<const Line*>(static_cast<const char*>(of.slots[task.slot]) +
                                                      task.first * of.panel_bytes);
    const int64_t column = task.first * of.panel_outs, outs = (task.last - task.first) * of.panel_outs;
    if (of.quantised) {
        Quantised weight = *of.quantised;
        weight.lines = lines;
        weight.outs = outs;
        linear<T>(weight, *inputs, first, rows, out + column, of.outs);
    } else {
        linear<T, T>(Packed<T>{lines, outs, of.ins}, x, x_stride, rows, nullptr, out + column, of.outs);
    }
}

// All slots' products at once: whole ones where there are many, parts where that shares them better among threads.
template <class T>
void project_all(const Slots& of, const int64_t* bounds, int64_t slots, const T* x, int64_t x_stride, T* out) {
    const int64_t panels = of.outs / of.panel_outs;
    int64_t work = 0;  // in panels read from memory, or the rows that take as long
    const auto cost = [&](int64_t slot) {
        const int64_t rows = bounds[slot + 1] - bounds[slot];
        return rows ? panels * std::max<int64_t>(8, rows) : 0;
    };
    for (int64_t slot = 0; slot < slots; slot++) work += cost(slot);
    const int64_t share = std::max<int64_t>(1, work / (TASKS * threads()));
    const int64_t least = std::max<int64_t>(1, LEAST_BYTES / of.panel_bytes);
    std::vector<Task> tasks;
    for (int64_t slot = 0; slot < slots; slot++) {
        if (bounds[slot] == bounds[slot + 1]) continue;
        const int64_t parts = std::clamp<int64_t>(cost(slot) / share, 1, std::max<int64_t>(1, panels / least));
        for (int64_t p = 0; p < parts; p++) tasks.push_back({slot, panels * p / parts, panels * (p + 1) / parts});
    }
    const Inputs* inputs = of.quantised ? &prepare(*of.quantised, x, x_stride, bounds[slots]) : nullptr;
    parallel_for(static_cast<int>(tasks.size()), [&](int i) {
        const Task& task = tasks[i];
        const int64_t begin = bounds[task.slot], rows = bounds[task.slot + 1] - begin;
        project(of, task, inputs, begin, x + begin * x_stride, x_stride, rows, out + begin * of.outs);
    });
}

}  // namespace

void route(const Routing& routing, const float* logits, int64_t rows, int64_t* experts, float* weights) {
    each_row(rows, routing.count * (routing.top_k + 8), [&](int64_t row) {
        route_one(routing, logits + row * routing.count, experts + row * routing.top_k, weights + row * routing.top_k);
    });
}

void group_experts(const int64_t* experts, int64_t pairs, int64_t count, int64_t* which, int64_t* bounds, int64_t* places) {
    std::fill_n(bounds, count + 1, 0);
    for (int64_t i = 0; i < pairs; i++) bounds[experts[i] + 1]++;
    for (int64_t c = 0; c < count; c++) bounds[c + 1] += bounds[c];
    std::vector<int64_t> next(bounds, bounds + count);
    for (int64_t i = 0; i < pairs; i++) {
        places[i] = next[experts[i]]++;
        which[places[i]] = i;
    }
}

template <class T>
void expert_rows(const T* x, int64_t x_stride, const int64_t* pairs, const int64_t* bounds, int64_t slots, int64_t top_k,
                 const Slots& gate_up, const Slots& down, int64_t activation, int64_t width, T* made) {
    static thread_local std::vector<T> kept;  // whose memory is used again
    std::vector<T>& scratch = kept;           // other threads have their own
    const int64_t count = bounds[slots], in = gate_up.ins;
    if (static_cast<int64_t>(scratch.size()) < count * (in + gate_up.outs + width))
        scratch.resize(count * (in + gate_up.outs + width));
    T *gathered = scratch.data(), *gates = gathered + count * in, *gated = gates + count * gate_up.outs;
    each_row(count, in, [&](int64_t i) { std::memcpy(gathered + i * in, x + pairs[i] / top_k * x_stride, in * sizeof(T)); });
    project_all(gate_up, bounds, slots, gathered, in, gates);
    gate_mul(sizeof(T) == 2, activation, gates, gate_up.outs, gated, count, width);
    project_all(down, bounds, slots, gated, width, made);
}

template void expert_rows(const float*, int64_t, const int64_t*, const int64_t*, int64_t, int64_t, const Slots&, const Slots&,
                          int64_t, int64_t, float*);
template void expert_rows(const bf16*, int64_t, const int64_t*, const int64_t*, int64_t, int64_t, const Slots&, const Slots&,
                          int64_t, int64_t, bf16*);

template <class T>
void combine_experts(const T* made, int64_t stride, const int64_t* places, const float* weights, int64_t rows, int64_t top_k,
                     int64_t hidden, T* out) {
    each_row(rows, hidden * (top_k + 1), [&](int64_t row) {
        const int64_t* own = places + row * top_k;
        const float* by = weights + row * top_k;
        T* to = out + row * hidden;
        for (int64_t d = 0; d < hidden; d += LANES) {
            f32x16 sum{};
            for (int64_t i = 0; i < top_k; i++)
                sum = sum + splat(by[i]) * load_some(made + own[i] * stride + d, hidden - d);
            store_some(to + d, sum, hidden - d);
        }
    });
}

template void combine_experts(const float*, int64_t, const int64_t*, const float*, int64_t, int64_t, int64_t, float*);
template void combine_experts(const bf16*, int64_t, const int64_t*, const float*, int64_t, int64_t, int64_t, bf16*);

template <class T>
void add_shared(const T* routed, const T* shared, const T* gates, int64_t rows, int64_t hidden, T* out) {
    each_row(rows, hidden, [&](int64_t row) {
        T part[LANES];  // rounded
        store(part, splat(gates ? 1.0f / (1.0f + std::exp(-widen(gates[row]))) : 1.0f));
        const f32x16 gate = load(part);
        const int64_t end = (row + 1) * hidden;
        for (int64_t d = row * hidden; d < end; d += LANES) {
            store(part, load_some(shared + d, end - d) * gate);
            store_some(out + d, load_some(routed + d, end - d) + load(part), end - d);
        }
    });
}

template void add_shared(const float*, const float*, const float*, int64_t, int64_t, float*);
template void add_shared(const bf16*, const bf16*, const bf16*, int64_t, int64_t, bf16*);

}  // namespace penstock

extern "C" {

using namespace penstock;

void penstock_route(const float* logits, int64_t rows, const float* correction, int64_t count, int64_t top_k, int64_t sigmoid,
                    int64_t groups, int64_t kept, int64_t renormalised, float scale, int64_t* experts, float* weights) {
    route({correction, count, top_k, sigmoid, groups, kept, renormalised, scale}, logits, rows, experts, weights);
}

void penstock_group_experts(const int64_t* experts, int64_t pairs, int64_t count, int64_t* which, int64_t* bounds,
                            int64_t* places) {
    group_experts(experts, pairs, count, which, bounds, places);
}

#define EXPERT_ROWS(NAME, T)                                                                                              \
    void NAME(const T* x, int64_t x_stride, const int64_t* pairs, const int64_t* bounds, int64_t slots, int64_t top_k,   \
              const Slots* gate_up, const Slots* down, int64_t activation, int64_t width, T* made) {                     \
        expert_rows(x, x_stride, pairs, bounds, slots, top_k, *gate_up, *down, activation, width, made);                 \
    }
EXPERT_ROWS(penstock_expert_rows_f32, float)
EXPERT_ROWS(penstock_expert_rows_bf16, bf16)
#undef EXPERT_ROWS

#define COMBINE(NAME, T)                                                                                                  \
    void NAME(const T* made, int64_t stride, const int64_t* places, const float* weights, int64_t rows, int64_t top_k,   \
              int64_t hidden, T* out) {                                                                                  \
        combine_experts(made, stride, places, weights, rows, top_k, hidden, out);                                        \
    }
COMBINE(penstock_combine_experts_f32, float)
COMBINE(penstock_combine_experts_bf16, bf16)
#undef COMBINE

#define ADD_SHARED(NAME, T)                                                                                               \
    void NAME(const T* routed, const T* shared, const T* gates, int64_t rows, int64_t hidden, T* out) {                  \
        add_shared(routed, shared, gates, rows, hidden, out);                                                            \
    }
ADD_SHARED(penstock_add_shared_f32, float)
ADD_SHARED(penstock_add_shared_bf16, bf16)
#undef ADD_SHARED
}

#include "layer.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace penstock {
namespace {

template <class T>
constexpr bool IS_BF16 = sizeof(T) == 2;

template <class T, class Out>
void project(const Projection& p, const T* x, int64_t rows, Out* out) {
    const T* bias = static_cast<const T*>(p.bias);
    if (p.quantised)
        linear<T, Out>(*p.quantised, x, p.ins, rows, bias, out, p.outs);
    else
        linear<T, Out>(Packed<T>{static_cast<const Line*>(p.lines), p.outs, p.ins}, x, p.ins, rows, bias, out, p.outs);
}

// While threads wait for the end of the next loop, they ask for what they read of this projection, if there is one.
template <class T>
void follows(const Projection& p) {
    if (p.quantised)
        read_next(*p.quantised);
    else if (p.lines)
        read_next(Packed<T>{static_cast<const Line*>(p.lines), p.outs, p.ins});
}

// Of a row, elements of q, of what attention makes of it, and of the scratch that is before that.
int64_t q_width(const Layer& layer) {
    const Latent* latent = layer.latent;
    return latent ? latent->heads * (latent->rank + latent->rope) : layer.qkv.outs;
}
int64_t attended_width(const Layer& layer) { return layer.latent ? layer.latent->heads * layer.latent->rank : layer.o.ins; }
int64_t before_attended(const Layer& layer) {  // for q, and then for values of heads, which are o's inputs
    return layer.latent ? std::max(q_width(layer), layer.o.ins) : layer.qkv.outs;
}

// What is there of a step's rows until they are summed up again; its memory is used again.
template <class T>
struct Routed {
    std::vector<float> logits, weights;                    // [rows, experts], [rows, top_k]
    std::vector<int64_t> experts, pairs, bounds, places;  // as experts.h has them
    std::vector<T> made;                                   // [pairs, outputs of down]

    void take(const Mixture& of, int64_t rows) {
        const int64_t pairs_of_rows = rows * of.routing.top_k;
        const auto reach = [](auto& memory, int64_t size) {
            if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
        };
        reach(logits, rows * of.routing.count);
        reach(weights, pairs_of_rows);
        for (auto* memory : {&experts, &pairs, &places}) reach(*memory, pairs_of_rows);
        reach(bounds, of.routing.count + 1);
        reach(made, pairs_of_rows * of.down.outs);
    }
};

template <class T>
void embed(const Decoder& decoder, const int64_t* tokens, int64_t rows, T* out) {
    const int64_t width = decoder.hidden;
    if (decoder.quantised_embedding)
        gather<T>(*decoder.quantised_embedding, tokens, rows, out);
    else if (decoder.embedding_is_packed)
        gather<T>(Packed<T>{static_cast<const Line*>(decoder.embedding), decoder.vocab, width}, tokens, rows, out);
    else
        for (int64_t r = 0; r < rows; r++)
            std::memcpy(out + r * width, static_cast<const T*>(decoder.embedding) + tokens[r] * width, width * sizeof(T));
    if (decoder.embedding_scale != 1) scale(IS_BF16<T>, out, decoder.embedding_scale, rows, width);
}

// Zeros for tokens that other ranks have.
template <class T>
void embed_own(const Decoder& decoder, const Rows& rows, T* out) {
    std::vector<int64_t> own(rows.tokens, rows.tokens + rows.rows);
    const auto has = [&](int64_t token) { return token >= 0 && token < decoder.vocab; };
    for (int64_t& token : own) token -= decoder.first_token;
    std::vector<int64_t> tokens(own);
    for (int64_t& token : tokens) token = has(token) ? token : 0;
    embed(decoder, tokens.data(), rows.rows, out);
    for (int64_t r = 0; r < rows.rows; r++)
        if (!has(own[r])) std::fill_n(out + r * decoder.hidden, decoder.hidden, T{});
}

// Moves rows to the front.
template <class T>
void keep(const Rows& rows, T* x, int64_t width) {
    for (int64_t i = 0; i < rows.kept_count; i++) std::memmove(x + i * width, x + rows.kept[i] * width, width * sizeof(T));
}

// A step up to where it is. Of scratch, the residual stream comes first; then for a while q, with k and v where there are
// such, and what attention makes of them, or what the gated layer and a mixture have.
template <class T>
struct Progress {
    const Decoder& decoder;
    const Rows& rows;
    T *residual, *x;         // [rows, hidden]
    int64_t status = MET;  // once it is something else nothing more is computed

    Progress(const Decoder& decoder, const Rows& rows, void* scratch, void* out)
        : decoder(decoder), rows(rows), residual(static_cast<T*>(scratch)), x(static_cast<T*>(out)) {}

    T* rest() const { return residual + rows.rows * decoder.hidden; }
    T* attended(const Layer& layer) const { return rest() + rows.rows * before_attended(layer); }

    Norm norm(const void* weight) const { return {weight, decoder.wide_norms}; }

    void normed(const void* weight, int64_t count) const {
        add_rms_norm(IS_BF16<T>, x, residual, norm(weight), decoder.eps, x, residual, count, decoder.hidden);
    }

    void post_normed(const void* weight, int64_t count) const {
        const int64_t width = decoder.hidden;
        if (weight) rms_norm(IS_BF16<T>, x, width, norm(weight), decoder.eps, x, width, count, width);
    }

    // Of what each rank has computed.
    void sum_up(T* of, int64_t count) {
        if (decoder.ranks) status = all_reduce(*decoder.ranks, IS_BF16<T>, of, count * decoder.hidden);
    }

    // Whether to compute no further. What a loop has left out must not reach the cache: it may be no number, and rows of
    // other steps read what is behind them there, with a weight of 0.
    bool over() {
        if (!status && is_set(rows.stop)) status = INTERRUPTED;
        return status;
    }

    void until_attention(int64_t i, const Cache* caches, int64_t query_heads) {
        const Layer& layer = decoder.layers[i];
        if (i == 0 && (decoder.embedding || decoder.quantised_embedding)) {
            if (decoder.ranks)
                embed_own(decoder, rows, x);
            else
                embed(decoder, rows.tokens, rows.rows, x);
            sum_up(x, rows.rows);
            std::fill_n(residual, rows.rows * decoder.hidden, T{});
        }
        if (over()) return;
        normed(layer.mixer_norm, rows.rows);
        const Table& table = rows.tables[caches[i].group];
        const Rotation& rotation = rows.rotations[layer.rotation];
        if (layer.latent) {
            latents_to_cache(*layer.latent, attended(layer), caches[i], table, rotation);
            if (!over()) queries(*layer.latent, attended(layer), rotation);
            return;
        }
        follows<T>(layer.o);
        project(layer.qkv, x, rows.rows, rest());
        if (over()) return;
        qkv_to_cache(caches[i], rest(), layer.qkv.outs, query_heads, norm(layer.q_norm), norm(layer.k_norm), decoder.eps,
                     rotation, table.blocks, table.offsets, rows.rows);
    }

    // `kv`: [rows, rank + rope], and [rows, rope] behind it.
    void latents_to_cache(const Latent& latent, T* kv, const Cache& cache, const Table& table, const Rotation& rotation) {
        const int64_t width = latent.rank + latent.rope, count = rows.rows;
        T* turned = kv + count * width;
        project(latent.kv_a, x, count, kv);
        for (int64_t r = 0; r < count; r++)
            std::memcpy(turned + r * latent.rope, kv + r * width + latent.rank, latent.rope * sizeof(T));
        rotary(IS_BF16<T>, turned, latent.rope, latent.rope, rotation, latent.interleaved, kv + latent.rank, width, width, count,
               1, latent.rope);
        rms_norm(IS_BF16<T>, kv, width, norm(latent.kv_a_norm), latent.eps, kv, width, count, latent.rank);
        if (!over()) store_kv(cache, kv, width, nullptr, 0, table.blocks, table.offsets, count);
    }

    // `narrow`: [rows, q.outs] and [rows, q_a.outs], of which q as it is multiplied with latents becomes what `rest` has.
    void queries(const Latent& latent, T* narrow, const Rotation& rotation) {
        const int64_t width = latent.rank + latent.rope, head = latent.key + latent.rope, count = rows.rows;
        const int64_t stride = latent.heads * width;
        if (latent.q_a.outs) {
            T* first = narrow + count * latent.q.outs;
            project(latent.q_a, x, count, first);
            rms_norm(IS_BF16<T>, first, latent.q_a.outs, norm(latent.q_a_norm), latent.eps, first, latent.q_a.outs, count,
                     latent.q_a.outs);
            project(latent.q, first, count, narrow);
        } else {
            project(latent.q, x, count, narrow);
        }
        head_linear(latent.keys, latent.heads, latent.rank, latent.key, narrow, latent.q.outs, head, count, rest(), stride, width);
        rotary(IS_BF16<T>, narrow + latent.key, latent.q.outs, head, rotation, latent.interleaved, rest() + latent.rank, stride,
               width, count, latent.heads, latent.rope);
    }

    // `attended`: [rows, what attention makes of one], which is overwritten.
    void after_attention(int64_t i, T* attended) {
        const Layer& layer = decoder.layers[i];
        const bool last = i == decoder.count - 1;
        const int64_t count = last && rows.kept ? rows.kept_count : rows.rows;
        if (last && rows.kept) {
            keep(rows, attended, attended_width(layer));
            keep(rows, residual, decoder.hidden);
        }
        if (over()) return;
        if (const Latent* latent = layer.latent) {
            head_linear(latent->values, latent->heads, latent->value, latent->rank, attended, attended_width(layer),
                        latent->rank, count, rest(), layer.o.ins, latent->value);
            attended = rest();
        }
        follows<T>(layer.gate_up);
        project(layer.o, attended, count, x);
        sum_up(x, count);
        if (over()) return;
        post_normed(layer.mixer_post_norm, count);
        normed(layer.feed_forward_norm, count);
        if (layer.mixture)
            mixed(layer, *layer.mixture, count);
        else
            gated(layer, count, rest());
        if (over()) return;
        post_normed(layer.feed_forward_post_norm, count);
        if (last && decoder.norm) normed(decoder.norm, count);
    }

    // In x; `gate_up`: [rows, gate_up.outs] and [rows, down.ins].
    void gated(const Layer& layer, int64_t count, T* gate_up) {
        T* gated = gate_up + count * layer.gate_up.outs;
        follows<T>(layer.down);
        project(layer.gate_up, x, count, gate_up);
        if (over()) return;
        gate_mul(IS_BF16<T>, decoder.activation, gate_up, layer.gate_up.outs, gated, count, layer.down.ins);
        follows<T>(decoder.layers[(&layer - decoder.layers + 1) % decoder.count].qkv);
        project(layer.down, gated, count, x);
        sum_up(x, count);
    }

    // The same of what is routed, and besides of what all rows have.
    void mixed(const Layer& layer, const Mixture& mixture, int64_t count) {
        static thread_local Routed<T> kept;
        Routed<T>& routed = kept;
        const Routing& routing = mixture.routing;
        const int64_t top_k = routing.top_k, hidden = decoder.hidden;
        routed.take(mixture, count);
        project(mixture.router, x, count, routed.logits.data());
        route(routing, routed.logits.data(), count, routed.experts.data(), routed.weights.data());
        if (over()) return;  // what was not routed has no numbers of experts
        int64_t* bounds = routed.bounds.data();
        group_experts(routed.experts.data(), count * top_k, routing.count, routed.pairs.data(), bounds, routed.places.data());
        for (int64_t e = 0; e < routing.count; e++) mixture.counts[e] += bounds[e + 1] - bounds[e];
        expert_rows(x, hidden, routed.pairs.data(), bounds, routing.count, top_k, mixture.gate_up, mixture.down,
                    decoder.activation, mixture.gates, routed.made.data());
        const bool shared = layer.gate_up.outs > 0;
        T* sum = shared ? rest() : x;
        combine_experts(routed.made.data(), mixture.down.outs, routed.places.data(), routed.weights.data(), count, top_k,
                        hidden, sum);
        sum_up(sum, count);
        if (!shared || over()) return;
        T *gate_up = sum + count * hidden, *gates = gate_up + count * (layer.gate_up.outs + layer.down.ins);
        if (mixture.shared_gate.outs) project(mixture.shared_gate, x, count, gates);
        gated(layer, count, gate_up);
        add_shared(sum, x, mixture.shared_gate.outs ? gates : nullptr, count, hidden, x);
    }
};

template <class F>
void with_type(const Cache* caches, F&& f) {
    if (caches->is_bf16)
        f(bf16{});
    else
        f(float{});
}

}  // namespace

int64_t scratch_width(const Decoder& decoder) {
    int64_t widest = 0;
    for (int64_t i = 0; i < decoder.count; i++) {
        const Layer& layer = decoder.layers[i];
        int64_t attended = attended_width(layer);
        if (const Latent* latent = layer.latent) {
            const int64_t kv = latent->rank + 2 * latent->rope, q = latent->q.outs + latent->q_a.outs;
            attended = std::max({attended, kv, q});
        }
        int64_t gated = layer.gate_up.outs + layer.down.ins;
        if (layer.mixture) gated += decoder.hidden + 1;
        widest = std::max({widest, before_attended(layer) + attended, gated});
    }
    return decoder.hidden + widest;
}

}  // namespace penstock

extern "C" {

using namespace penstock;

int64_t penstock_scratch_width(const Decoder* decoder) { return scratch_width(*decoder); }

// A whole step, with a cache for each layer: `out` becomes [rows, hidden], after the last norm; what is wanted comes first,
// and nothing else is of any use. `heads` are those of q. Returns MET, or why ranks have not met, or INTERRUPTED.
// Without an embedding, `out` and the residual stream, which is what scratch begins with, are what the stage before has
// left of them; and without a norm these are what the next one goes on with.
int64_t penstock_step(const Decoder* decoder, const Rows* rows, const Cache* caches, int64_t heads, void* scratch,
                      void* out) {
    int64_t status = MET;
    const Stoppable stoppable(rows->stop);
    with_type(caches, [&](auto type) {
        Progress<decltype(type)> step(*decoder, *rows, scratch, out);
        for (int64_t i = 0; i < decoder->count && !step.status; i++) {
            const Layer& layer = decoder->layers[i];
            step.until_attention(i, caches, heads);
            if (step.status) break;
            const Table& table = rows->tables[caches[i].group];
            const AttentionBatch batch{table.spans, table.count, table.ids, heads};
            attention(batch, caches[i], step.rest(), q_width(layer), step.attended(layer), decoder->scale, layer.window);
            step.after_attention(i, step.attended(layer));
        }
        status = step.status;
    });
    return status;
}

// The same in parts, layer by layer, for who computes attention otherwise: between these two, from the q in scratch
// behind [rows, hidden], as [rows, qkv.outs] with k and v where these are no latents, to `attended`, which is overwritten.
int64_t penstock_until_attention(const Decoder* decoder, const Rows* rows, const Cache* caches, int64_t heads, void* scratch,
                                 void* out, int64_t layer) {
    int64_t status = MET;
    const Stoppable stoppable(rows->stop);
    with_type(caches, [&](auto type) {
        Progress<decltype(type)> step(*decoder, *rows, scratch, out);
        step.until_attention(layer, caches, heads);
        status = step.status;
    });
    return status;
}

int64_t penstock_after_attention(const Decoder* decoder, const Rows* rows, const Cache* caches, void* attended, void* scratch,
                                 void* out, int64_t layer) {
    int64_t status = MET;
    const Stoppable stoppable(rows->stop);
    with_type(caches, [&](auto type) {
        using T = decltype(type);
        Progress<T> step(*decoder, *rows, scratch, out);
        step.after_attention(layer, static_cast<T*>(attended));
        status = step.status;
    });
    return status;
}
}

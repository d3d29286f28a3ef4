// What a decoder layer computes between its products, for float16 and bfloat16.
//
// Compiled at run time by NVRTC for one GPU, behind numbers.cuh, with -D BFLOAT16=0|1, -D
// HIDDEN_SIZE (a multiple of 8, at most 24000: a row in shared memory), -D HEAD_DIM (a multiple of 8, at most 256) and
// -D CODED=0|1: whether the cache holds 8-bit codes with a bfloat16 scale for each token and head.
// Numbers are rounded to the type where transformers' modules do so.

#if HEAD_DIM % 8 != 0 || HEAD_DIM > 256 || HIDDEN_SIZE % 8 != 0 || HIDDEN_SIZE > 24000
#error "HEAD_DIM and HIDDEN_SIZE are multiples of 8, at most 256 and 24000"
#endif

constexpr int THREADS = WARPS * LANES;
constexpr unsigned int NOWHERE = 0xffffffffu;

__device__ __forceinline__ float rounded(float value) {
    const unsigned int bits = to_activation(value);
#if BFLOAT16
    return __uint_as_float(bits << 16);
#else
    float low, high;
    halves_to_floats(bits, low, high);
    return low;
#endif
}

__device__ __forceinline__ void unpack(unsigned int word, float& low, float& high) {
#if BFLOAT16
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
#else
    halves_to_floats(word, low, high);
#endif
}

__device__ __forceinline__ unsigned int pack(float low, float high) {
    return to_activation(low) | static_cast<unsigned int>(to_activation(high)) << 16;
}

__device__ __forceinline__ uint4 pack(const float (&values)[OCTET]) {
    return make_uint4(pack(values[0], values[1]), pack(values[2], values[3]),
                      pack(values[4], values[5]), pack(values[6], values[7]));
}

__device__ __forceinline__ void unpack(const uint4& words, float (&values)[OCTET]) {
    unpack(words.x, values[0], values[1]);
    unpack(words.y, values[2], values[3]);
    unpack(words.z, values[4], values[5]);
    unpack(words.w, values[6], values[7]);
}

__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// The same on all threads; `parts` is used once.
__device__ __forceinline__ float sum_of_block(float value, float (&parts)[WARPS]) {
    value = sum_of_lanes(value);
    if (threadIdx.x % LANES == 0) parts[threadIdx.x / LANES] = value;
    __syncthreads();
    value = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) value += parts[warp];
    return value;
}

// --- Residual sums and norms.

constexpr int ROW_OCTETS = HIDDEN_SIZE / OCTET;

// `weight` and `bias` null: one and zero. `out` null: no norm.
struct Norm {
    const unsigned short *weight, *bias;
    unsigned short* out;
};

__device__ __forceinline__ void write_norm(
    const Norm& norm, const uint4* held, float mean, float scale, bool is_rms) {
    if (norm.out == nullptr) return;
#pragma unroll 2
    for (unsigned int octet = threadIdx.x; octet < ROW_OCTETS; octet += THREADS) {
        float values[OCTET], weights[OCTET], biases[OCTET] = {};
        unpack(held[octet], values);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) weights[i] = 1.0f;
        if (norm.weight != nullptr) load_activations(norm.weight + octet * OCTET, weights);
        if (norm.bias != nullptr) load_activations(norm.bias + octet * OCTET, biases);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) {
            const float normed = (values[i] - mean) * scale;
            values[i] = is_rms ? rounded(normed) * weights[i] : fmaf(normed, weights[i], biases[i]);
        }
        reinterpret_cast<uint4*>(norm.out)[static_cast<size_t>(blockIdx.x) * ROW_OCTETS + octet] =
            pack(values);
    }
}

struct NormForm {
    unsigned int is_rms;
    float eps;
};

// 1-D grid over the rows. `sum` is residual + (added + other), of which those that are null are left
// out; then one or two norms of it, RMSNorm or LayerNorm both.
extern "C" __global__ void __launch_bounds__(WARPS * LANES) add_norm(
    const unsigned short* __restrict__ residual, const unsigned short* __restrict__ added,
    const unsigned short* __restrict__ other, unsigned short* sum, Norm first, Norm second,
    NormForm form) {
    __shared__ uint4 held[ROW_OCTETS];  // each thread's own
    __shared__ float parts[2][WARPS];
    const bool is_rms = form.is_rms != 0;
    const size_t row = static_cast<size_t>(blockIdx.x) * HIDDEN_SIZE;
    float total = 0.0f;
#pragma unroll 2
    for (unsigned int octet = threadIdx.x; octet < ROW_OCTETS; octet += THREADS) {
        const size_t at = row + octet * OCTET;
        float values[OCTET], addends[OCTET], others[OCTET];
        load_activations(residual + at, values);
        if (added != nullptr) {
            load_activations(added + at, addends);
            if (other != nullptr) {
                load_activations(other + at, others);
#pragma unroll
                for (int i = 0; i < OCTET; ++i) addends[i] = rounded(addends[i] + others[i]);
            }
#pragma unroll
            for (int i = 0; i < OCTET; ++i) values[i] = rounded(values[i] + addends[i]);
        }
        held[octet] = pack(values);
        if (sum != nullptr) *reinterpret_cast<uint4*>(sum + at) = held[octet];
#pragma unroll
        for (int i = 0; i < OCTET; ++i) total += is_rms ? values[i] * values[i] : values[i];
    }
    if (first.out == nullptr) return;
    float spread = sum_of_block(total, parts[0]) / HIDDEN_SIZE, mean = 0.0f;
    if (!is_rms) {
        mean = spread;
        total = 0.0f;
        for (unsigned int octet = threadIdx.x; octet < ROW_OCTETS; octet += THREADS) {
            float values[OCTET];
            unpack(held[octet], values);
#pragma unroll
            for (int i = 0; i < OCTET; ++i) total = fmaf(values[i] - mean, values[i] - mean, total);
        }
        spread = sum_of_block(total, parts[1]) / HIDDEN_SIZE;
    }
    const float scale = 1.0f / sqrtf(spread + form.eps);
    write_norm(first, held, mean, scale, is_rms);
    write_norm(second, held, mean, scale, is_rms);
}

// --- Positions, and the write into the cache.

constexpr int HEAD_WORDS = HEAD_DIM / 2;
constexpr int WORDS = (HEAD_WORDS + LANES - 1) / LANES;  // of a lane

// Where heads of queries, keys and values lie, in elements; `slots` are those of a head in the cache.
// `turned_heads`: of queries, which are changed, 0 where none is. `rotary`: the first channels of a
// head that positions turn, an even number. `eps` is that of the norms of heads.
struct Heads {
    unsigned int tokens, group, turned_heads, kv_heads, slots, rotary;
    unsigned int query_token, query_head, key_token, key_head, value_token, value_head;
    float eps;
};

// What a warp holds of a head: neighbouring channels in words, word w of lane w % LANES.
using HeadPart = float[WORDS][2];

__device__ __forceinline__ void load_head(const unsigned int* head, unsigned int lane, HeadPart& part) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        part[w][0] = part[w][1] = 0.0f;
        if (w * LANES + lane < HEAD_WORDS) unpack(head[w * LANES + lane], part[w][0], part[w][1]);
    }
}

__device__ __forceinline__ void store_head(unsigned int* head, unsigned int lane, const HeadPart& part) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
        if (w * LANES + lane < HEAD_WORDS) head[w * LANES + lane] = pack(part[w][0], part[w][1]);
}

__device__ __forceinline__ void norm_head(
    const unsigned short* __restrict__ weight, float eps, unsigned int lane, HeadPart& part) {
    float squares = 0.0f;
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
        squares += part[w][0] * part[w][0] + part[w][1] * part[w][1];
    const float scale = 1.0f / sqrtf(sum_of_lanes(squares) / HEAD_DIM + eps);
    HeadPart weights;
    load_head(reinterpret_cast<const unsigned int*>(weight), lane, weights);
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
        for (int i = 0; i < 2; ++i) part[w][i] = rounded(rounded(part[w][i] * scale) * weights[w][i]);
}

// `whole` is the head before, cosines and sines are those of the token.
__device__ __forceinline__ void turn_head(
    const float (&whole)[HEAD_DIM], const unsigned short* __restrict__ cosines,
    const unsigned short* __restrict__ sines, unsigned int rotary, unsigned int lane, HeadPart& part) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        const unsigned int channel = 2 * (w * LANES + lane);
        if (channel >= rotary) break;
        float cosine[2], sine[2];
        unpack(__ldg(reinterpret_cast<const unsigned int*>(cosines + channel)), cosine[0], cosine[1]);
        unpack(__ldg(reinterpret_cast<const unsigned int*>(sines + channel)), sine[0], sine[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned int own = channel + i, half = rotary / 2;
            const float partner = own < half ? -whole[own + half] : whole[own - half];
            part[w][i] = rounded(rounded(part[w][i] * cosine[i]) + rounded(partner * sine[i]));
        }
    }
}

// Multiplies by the factors of the keys, powers of two, or divides by them.
template <bool MULTIPLIES>
__device__ __forceinline__ void apply_factors(
    const unsigned short* __restrict__ factors, unsigned int lane, HeadPart& part) {
    HeadPart own;
    load_head(reinterpret_cast<const unsigned int*>(factors), lane, own);
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        if (w * LANES + lane >= HEAD_WORDS) break;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            part[w][i] = MULTIPLIES ? part[w][i] * own[w][i] : part[w][i] / own[w][i];
    }
}

// Writes a head of keys or values to its token slot; as codes with the least scale that their rounding
// allows, which is not finite where a number is not.
__device__ __forceinline__ void write_held(
    void* held, unsigned short* scales, size_t slot, unsigned int lane, const HeadPart& part) {
#if CODED
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float size = fabsf(part[w][i]);
            largest = size > largest || size != size ? size : largest;
        }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, largest, distance);
        largest = other > largest || other != other ? other : largest;
    }
    const float least = __uint_as_float(0x0d800000u);  // 2^-100
    const float exact = largest / 127.0f;
    const unsigned short bits = to_bfloat16(exact < least ? least : exact);
    const float scale = __uint_as_float(static_cast<unsigned int>(bits) << 16);
    if (lane == 0) scales[slot] = bits;
    unsigned short* codes = static_cast<unsigned short*>(held) + slot * HEAD_WORDS;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        if (w * LANES + lane >= HEAD_WORDS) break;
        unsigned int pair = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float code = fminf(fmaxf(rintf(part[w][i] / scale), -127.0f), 127.0f);
            pair |= (static_cast<unsigned int>(static_cast<int>(code)) & 0xffu) << 8 * i;
        }
        codes[w * LANES + lane] = static_cast<unsigned short>(pair);
    }
#else
    store_head(static_cast<unsigned int*>(held) + slot * HEAD_WORDS, lane, part);
#endif
}

// 1-D grid; a warp takes one head of queries, keys or values of one token. Queries are turned, scaled
// for keys that were divided by `factors`, and left where they were; keys and values go to the token
// slot that `places` says, turned keys to where they were too. Norms, cosines and factors may be null.
extern "C" __global__ void __launch_bounds__(WARPS * LANES) turn_and_store(
    unsigned short* query, unsigned short* key, const unsigned short* value,
    const unsigned short* __restrict__ cosines, const unsigned short* __restrict__ sines,
    const unsigned short* __restrict__ query_norm, const unsigned short* __restrict__ key_norm,
    const unsigned short* __restrict__ factors, const unsigned int* __restrict__ places, void* keys,
    unsigned short* key_scales, void* values, unsigned short* value_scales, Heads heads) {
    __shared__ float whole[WARPS][HEAD_DIM];
    const unsigned int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned int of_token = heads.turned_heads + 2 * heads.kv_heads;
    const unsigned int index = blockIdx.x * WARPS + warp;
    const unsigned int token = index / of_token, nth = index % of_token;
    const bool works = token < heads.tokens, is_query = nth < heads.turned_heads;
    const bool is_key = !is_query && nth - heads.turned_heads < heads.kv_heads;
    const bool turns = works && (is_query || is_key);
    const unsigned int head = is_query ? nth : (nth - heads.turned_heads) % heads.kv_heads;
    const unsigned short* norm = is_query ? query_norm : key_norm;

    HeadPart part = {};
    unsigned int* source = nullptr;
    if (works) {
        unsigned short* first = is_query ? query : is_key ? key : const_cast<unsigned short*>(value);
        const size_t of = is_query ? heads.query_token : is_key ? heads.key_token : heads.value_token;
        const size_t each = is_query ? heads.query_head : is_key ? heads.key_head : heads.value_head;
        source = reinterpret_cast<unsigned int*>(first + token * of + head * each);
        load_head(source, lane, part);
    }
    if (turns && norm != nullptr) norm_head(norm, heads.eps, lane, part);
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        if (w * LANES + lane >= HEAD_WORDS) break;
        whole[warp][2 * (w * LANES + lane)] = part[w][0];
        whole[warp][2 * (w * LANES + lane) + 1] = part[w][1];
    }
    __syncthreads();
    if (!works) return;
    if (turns && heads.rotary != 0) {
        const size_t at = static_cast<size_t>(token) * heads.rotary;
        turn_head(whole[warp], cosines + at, sines + at, heads.rotary, lane, part);
    }
    if (is_query) {
        const size_t of_head = static_cast<size_t>(head / heads.group) * HEAD_DIM;
        if (factors != nullptr) apply_factors<true>(factors + of_head, lane, part);
        store_head(source, lane, part);
        return;
    }
    if (is_key && (norm != nullptr || heads.rotary != 0)) store_head(source, lane, part);
    if (is_key && factors != nullptr)
        apply_factors<false>(factors + static_cast<size_t>(head) * HEAD_DIM, lane, part);
    const unsigned int place = __ldg(places + token);
    if (place == NOWHERE) return;
    const size_t slot = static_cast<size_t>(head) * heads.slots + place;
    write_held(is_key ? keys : values, is_key ? key_scales : value_scales, slot, lane, part);
}

// --- Activations.

enum Activation : unsigned int { SILU, GELU, GELU_TANH, RELU, QUICK_GELU };

__device__ __forceinline__ float activated(unsigned int kind, float x) {
    if (kind == SILU) return x / (1.0f + expf(-x));
    if (kind == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    if (kind == GELU_TANH)
        return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    if (kind == RELU) return x < 0.0f ? 0.0f : x;
    return x / (1.0f + expf(-1.702f * x));
}

// 1-D grid over octets: the activation of `gate`, multiplied by `up` if that is not null. Rows of
// `columns` octets lie `stride` of them apart in both, and behind each other in `out`, which may be
// one of the two where the stride is no more than that.
extern "C" __global__ void __launch_bounds__(WARPS * LANES) activate(
    const unsigned short* gate, const unsigned short* up, unsigned short* out, unsigned int octets,
    unsigned int kind, unsigned int columns, unsigned int stride) {
    const unsigned int octet = blockIdx.x * THREADS + threadIdx.x;
    if (octet >= octets) return;
    const size_t source = octet + (size_t)(octet / columns) * (stride - columns);
    float values[OCTET], others[OCTET];
    unpack(reinterpret_cast<const uint4*>(gate)[source], values);
#pragma unroll
    for (int i = 0; i < OCTET; ++i) values[i] = activated(kind, values[i]);
    if (up != nullptr) {
        unpack(reinterpret_cast<const uint4*>(up)[source], others);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) values[i] = rounded(values[i]) * others[i];
    }
    reinterpret_cast<uint4*>(out)[octet] = pack(values);
}

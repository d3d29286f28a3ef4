// Attention of new tokens over the ranges of their requests, where keys and values lie in the cache.
//
// Compiled at run time by NVRTC for one GPU, behind numbers.cuh, with -D BFLOAT16=0|1 (the type
// of queries and results), -D HEAD_DIM (a multiple of 8, at most 256) and -D CODED=0|1: whether keys
// and values are 8-bit codes with a bfloat16 scale for each token and head, or numbers of the
// queries' type. Scores, their shares and all sums are in float32.
//
// Of each request the rows (new token, query head) that share a head of keys are in tiles of up to
// 8. A block reads the keys and values of one tile and one head once, 64 tokens at a time, and keeps
// the largest score so far, what its shares add up to, and the weighted sum of values (the online
// softmax). Where there are too few tiles for the GPU, each range is split: blocks leave what they
// have in `partial`, and the last one of a tile and head puts it together.

#if HEAD_DIM % 8 != 0 || HEAD_DIM > 256
#error "HEAD_DIM is a multiple of 8, at most 256"
#endif

constexpr int TILE = 2 * LANES;  // tokens between two looks at the largest score
constexpr int OCTETS = HEAD_DIM / OCTET;
constexpr float LOG2_E = 1.4426950408889634f;

__device__ constexpr int lanes_of_a_token(int lanes) {
    return lanes >= OCTETS ? lanes : lanes_of_a_token(2 * lanes);
}

// A token's octets lie in neighbouring lanes, so that a warp reads whole rows of the cache.
constexpr int ACROSS = lanes_of_a_token(8);
constexpr int AT_ONCE = WARPS * LANES / ACROSS;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// How queries lie in memory, in elements, and what all rows share. `slots` are those of a head in
// the cache; `window` 0 and `soft_cap` 0 mean none.
struct Shape {
    unsigned int heads, kv_heads, slots, splits, window, token_stride, head_stride;
    float scale, soft_cap;
};

// A token's octet of keys or values.
__device__ __forceinline__ void load_held(
    const void* __restrict__ held, size_t octet, float (&numbers)[OCTET]) {
#if CODED
    const uint2 codes = __ldg(static_cast<const uint2*>(held) + octet);
#pragma unroll
    for (int i = 0; i < OCTET; ++i) {
        // As the last bits of 2^23 + code + 128: exact, and without a conversion at a lower rate.
        const unsigned int word = i < 4 ? codes.x : codes.y;
        const unsigned int bits = (word >> 8 * (i % 4) & 0xffu) ^ 0x4b000080u;
        numbers[i] = __uint_as_float(bits) - 8388736.0f;
    }
#else
    load_activations(static_cast<const unsigned short*>(held) + octet * OCTET, numbers);
#endif
}

__device__ __forceinline__ float held_scale(const unsigned short* __restrict__ scales, size_t token) {
    return CODED ? __uint_as_float(static_cast<unsigned int>(__ldg(scales + token)) << 16) : 1.0f;
}

template <bool LARGEST>
__device__ __forceinline__ float over_lanes(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, distance);
        value = LARGEST ? fmaxf(value, other) : value + other;
    }
    return value;
}

// The factor by which a sum shrinks whose scores were taken from `old` and now are from `now`.
__device__ __forceinline__ float shrunk(float old, float now) {
    return old == now ? 1.0f : exp2f(old - now);  // also where both are minus infinity
}

// The rows of a tile: `request` says where its range begins, the position and the row in the batch
// of its first new token, and how many it has.
struct Tile {
    uint4 request;  // begin, start, first token, tokens
    unsigned int first_row, last_row, group;

    __device__ __forceinline__ unsigned int row(unsigned int r) const { return min(first_row + r, last_row); }
    __device__ __forceinline__ unsigned int position(unsigned int r) const {
        return request.y + row(r) / group;
    }
    __device__ __forceinline__ unsigned int token(unsigned int r) const {
        return request.z + row(r) / group;
    }
    __device__ __forceinline__ unsigned int head(unsigned int r, unsigned int kv_head) const {
        return kv_head * group + row(r) % group;
    }
};

// What blocks know of a row: the sum of values, the largest score and the sum of shares.
struct Known {
    float sum, largest, total;
};

__device__ __forceinline__ void write_result(
    const Known& row, const float* __restrict__ sinks, unsigned int head,
    unsigned short* __restrict__ out) {
    const float sink = sinks == nullptr ? minus_infinity() : __ldg(sinks + head) * LOG2_E;
    const float now = fmaxf(row.largest, sink), factor = shrunk(row.largest, now);
    const float total = row.total * factor + (sinks == nullptr ? 0.0f : exp2f(sink - now));
    *out = to_activation(row.sum * factor / total);
}

// 1-D grid, at most 32 splits: all splits of the first head of keys of the first tile, then those of its next head.
// `tiles` are pairs of a request and its first row; a request without new tokens has nothing
// computed. `slopes` (ALiBi) and `sinks` have one number for each head or are null. A sink takes part
// in the softmax as a score does, and has no value. `arrived` has a zero for each tile and head of
// keys where ranges are split.
template <int ROWS>
__device__ __forceinline__ void attend(
    const unsigned short* __restrict__ query, const void* __restrict__ keys,
    const unsigned short* __restrict__ key_scales, const void* __restrict__ values,
    const unsigned short* __restrict__ value_scales, const uint4* __restrict__ requests,
    const uint2* __restrict__ tiles, const float* __restrict__ slopes, const float* __restrict__ sinks,
    unsigned short* __restrict__ out, float* partial, unsigned int* arrived, Shape shape) {
    __shared__ bool ends;
    __shared__ float scores[ROWS][TILE];
    __shared__ float largest[ROWS], total[ROWS], shrinking[ROWS];
    __shared__ float parts[WARPS][ROWS][HEAD_DIM];
    const unsigned int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned int octet = lane % ACROSS, slot = threadIdx.x / ACROSS;
    const bool has_octet = octet < OCTETS;

    const unsigned int split = blockIdx.x % shape.splits;
    const unsigned int kv_head = blockIdx.x / shape.splits % shape.kv_heads;
    const uint2 place = __ldg(tiles + blockIdx.x / shape.splits / shape.kv_heads);
    Tile tile;
    tile.request = __ldg(requests + place.x);
    if (tile.request.w == 0) return;
    tile.group = shape.heads / shape.kv_heads;
    tile.first_row = place.y;
    tile.last_row = min(place.y + ROWS, tile.request.w * tile.group) - 1;

    // What any row of the tile sees, and this block's share of it.
    const unsigned int seen = tile.position(0) + 1;
    const unsigned int first = shape.window != 0 && seen > shape.window ? seen - shape.window : 0;
    const unsigned int end = tile.position(ROWS - 1) + 1;
    const unsigned int each = (end - first + shape.splits - 1) / shape.splits;
    const unsigned int from = min(first + split * each, end), to = min(from + each, end);

    float asked[ROWS][OCTET];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const size_t at = static_cast<size_t>(tile.token(r)) * shape.token_stride +
                          static_cast<size_t>(tile.head(r, kv_head)) * shape.head_stride;
#pragma unroll
        for (int i = 0; i < OCTET; ++i) asked[r][i] = 0.0f;
        if (has_octet) load_activations(query + at + octet * OCTET, asked[r]);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) asked[r][i] *= shape.scale;
    }
    const unsigned int own = octet * ROWS / ACROSS;  // the row whose scores end in this lane
    const unsigned int own_position = tile.position(own);
    const float slope = slopes == nullptr ? 0.0f : __ldg(slopes + tile.head(own, kv_head));
    const size_t held = static_cast<size_t>(kv_head) * shape.slots + tile.request.x;

    if (threadIdx.x < ROWS) {
        largest[threadIdx.x] = minus_infinity();
        total[threadIdx.x] = 0.0f;
    }
    float sums[ROWS * OCTET] = {};
    for (unsigned int begin = from; begin < to; begin += TILE) {
#pragma unroll 4
        for (int pass = 0; pass < TILE / AT_ONCE; ++pass) {
            const unsigned int within = pass * AT_ONCE + slot, token = begin + within;
            float key[OCTET] = {};
            if (token < to && has_octet) load_held(keys, (held + token) * OCTETS + octet, key);
            float dots[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                dots[r] = 0.0f;
#pragma unroll
                for (int i = 0; i < OCTET; ++i) dots[r] = fmaf(asked[r][i], key[i], dots[r]);
            }
            add_lanes<ROWS, ROWS / 2, ACROSS>(dots, lane);
            if (lane % (ACROSS / ROWS) == 0) {
                float score = minus_infinity();
                if (token < to && token <= own_position &&
                    (shape.window == 0 || token + shape.window > own_position)) {
                    score = dots[0] * held_scale(key_scales, held + token);
                    if (shape.soft_cap != 0.0f) score = shape.soft_cap * tanhf(score / shape.soft_cap);
                    score = fmaf(slope, static_cast<float>(token), score) * LOG2_E;
                }
                scores[own][within] = score;
            }
        }
        __syncthreads();
        for (unsigned int r = warp; r < ROWS; r += WARPS) {
            const float low = scores[r][lane], high = scores[r][lane + LANES];
            const float old = largest[r], now = fmaxf(old, over_lanes<true>(fmaxf(low, high)));
            const bool any = now != minus_infinity();
            const float low_share = any ? exp2f(low - now) : 0.0f;
            const float high_share = any ? exp2f(high - now) : 0.0f;
            const float sum = over_lanes<false>(low_share + high_share);
            const size_t at = held + begin + lane;
            const bool has_low = begin + lane < to, has_high = begin + lane + LANES < to;
            scores[r][lane] = has_low ? low_share * held_scale(value_scales, at) : 0.0f;
            scores[r][lane + LANES] = has_high ? high_share * held_scale(value_scales, at + LANES) : 0.0f;
            if (lane == 0) {
                largest[r] = now;
                shrinking[r] = shrunk(old, now);
                total[r] = fmaf(total[r], shrinking[r], sum);
            }
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float factor = shrinking[r];
#pragma unroll
            for (int i = 0; i < OCTET; ++i) sums[r * OCTET + i] *= factor;
        }
#pragma unroll 4
        for (int pass = 0; pass < TILE / AT_ONCE; ++pass) {
            const unsigned int within = pass * AT_ONCE + slot, token = begin + within;
            float value[OCTET] = {};
            if (token < to && has_octet) load_held(values, (held + token) * OCTETS + octet, value);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float share = scores[r][within];
#pragma unroll
                for (int i = 0; i < OCTET; ++i)
                    sums[r * OCTET + i] = fmaf(share, value[i], sums[r * OCTET + i]);
            }
        }
        __syncthreads();  // the scores have been read
    }

    // Lanes that held other tokens' numbers of the same octet, then warps.
#pragma unroll
    for (int distance = ACROSS; distance < LANES; distance *= 2) {
#pragma unroll
        for (int i = 0; i < ROWS * OCTET; ++i)
            sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], distance);
    }
    if (lane < ACROSS && has_octet) {
#pragma unroll
        for (int i = 0; i < ROWS * OCTET; ++i)
            parts[warp][i / OCTET][octet * OCTET + i % OCTET] = sums[i];
    }
    __syncthreads();
    for (unsigned int index = threadIdx.x; index < ROWS * HEAD_DIM; index += WARPS * LANES) {
        const unsigned int r = index / HEAD_DIM, dim = index % HEAD_DIM;
        if (tile.first_row + r > tile.last_row) break;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += parts[w][r][dim];
        const unsigned int head = tile.head(r, kv_head);
        const size_t row = static_cast<size_t>(tile.token(r)) * shape.heads + head;
        if (shape.splits == 1) {
            write_result({sum, largest[r], total[r]}, sinks, head, out + row * HEAD_DIM + dim);
            continue;
        }
        float* left = partial + (row * shape.splits + split) * (HEAD_DIM + 2);
        left[dim] = sum;
        if (dim == 0) {
            left[HEAD_DIM] = largest[r];
            left[HEAD_DIM + 1] = total[r];
        }
    }
    if (shape.splits == 1 || !is_last(arrived + blockIdx.x / shape.splits, shape.splits, ends)) return;

    // In the order of splits, whoever came last. `volatile`, as what others wrote is not in this L1.
    constexpr int LEFT = HEAD_DIM + 2;
    for (unsigned int r = warp; r < ROWS; r += WARPS) {
        if (tile.first_row + r > tile.last_row) break;
        const size_t row = static_cast<size_t>(tile.token(r)) * shape.heads + tile.head(r, kv_head);
        const volatile float* left = partial + (row * shape.splits + lane) * LEFT + HEAD_DIM;
        const float most = lane < shape.splits ? left[0] : minus_infinity();
        const float shares = lane < shape.splits ? left[1] : 0.0f;
        const float now = over_lanes<true>(most), factor = shrunk(most, now);
        const float all = over_lanes<false>(shares * factor);
        scores[r][lane] = factor;
        if (lane == 0) {
            largest[r] = now;
            total[r] = all;
        }
    }
    __syncthreads();
    for (unsigned int index = threadIdx.x; index < ROWS * HEAD_DIM; index += WARPS * LANES) {
        const unsigned int r = index / HEAD_DIM, dim = index % HEAD_DIM;
        if (tile.first_row + r > tile.last_row) break;
        const unsigned int head = tile.head(r, kv_head);
        const size_t row = static_cast<size_t>(tile.token(r)) * shape.heads + head;
        const volatile float* left = partial + row * shape.splits * LEFT + dim;
        float sum = 0.0f;
#pragma unroll 8
        for (unsigned int s = 0; s < shape.splits; ++s) sum = fmaf(left[s * LEFT], scores[r][s], sum);
        write_result({sum, largest[r], total[r]}, sinks, head, out + row * HEAD_DIM + dim);
    }
}

// So many BLOCKS fit into the registers of a multiprocessor at once: the compiler need not spill.
#define ATTEND(NAME, ROWS, BLOCKS)                                                                    \
    extern "C" __global__ void __launch_bounds__(WARPS * LANES, BLOCKS) NAME(                         \
        const unsigned short* query, const void* keys, const unsigned short* key_scales,              \
        const void* values, const unsigned short* value_scales, const uint4* requests,                \
        const uint2* tiles, const float* slopes, const float* sinks, unsigned short* out,             \
        float* partial, unsigned int* arrived, Shape shape) {                                         \
        attend<ROWS>(query, keys, key_scales, values, value_scales, requests, tiles, slopes, sinks,   \
                     out, partial, arrived, shape);                                                   \
    }
ATTEND(attend_1, 1, 8)
ATTEND(attend_2, 2, 6)
ATTEND(attend_4, 4, 4)
ATTEND(attend_8, 8, 2)

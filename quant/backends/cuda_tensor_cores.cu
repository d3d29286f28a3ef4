// Products of a few to a hundred or so tokens with a 3-, 4- or 8-bit weight, on tensor cores.
//
// Stands behind cuda_kernels.cu, whose layout of codes it reads, and cuda_mma.cuh. Weights are the left operand of the
// matrix instructions and tokens the right one, 8 at the least; sums are in float32. A lane reads
// whole chunks of a row, 32 columns (16 at 8 bit), and restores them in registers to the 16-bit
// numbers that `restore` would write: the order of columns in a sum is free, as long as both operands
// have the same.

#ifdef TENSOR_CORES

constexpr int HELD = 4;                            // chunks of the weight that a lane holds
constexpr int CHUNKS = 4;                          // of a stage, columns that a block takes at a time
constexpr int CHUNK_OCTETS = BITS == 8 ? 2 : 4;
constexpr int CHUNK_WORDS = BITS * CHUNK_OCTETS / 4;
constexpr int STAGE_OCTETS = CHUNKS * CHUNK_OCTETS;
constexpr int WARP_ROWS = 32, BLOCK_ROWS = WARPS * WARP_ROWS;
constexpr int TILE = 8;                            // tokens of a matrix instruction
constexpr int TILE_SLOTS = TILE * STAGE_OCTETS;    // of a tile's activations, an octet each
constexpr int TILE_SUMS = WARP_ROWS * TILE / LANES;

// Where what a lane holds belongs: its rows and chunks of the weight, its sums, and the slots of
// activations that it reads. A warp stages slots so that it asks memory for whole sectors and shared
// memory for neighbouring slots.
#if CAPABILITY >= 75
__device__ __forceinline__ unsigned int held_row(unsigned int lane, int h) { return lane / 4 + 8 * h; }
__device__ __forceinline__ unsigned int held_chunk(unsigned int lane, int) { return lane % 4; }
__device__ __forceinline__ unsigned int sum_row(unsigned int lane, int i) {
    return lane / 4 + (i / 4) * 16 + (i / 2 % 2) * 8;
}
__device__ __forceinline__ unsigned int sum_token(unsigned int lane, int i) {
    return lane % 4 * 2 + i % 2;
}
__device__ __forceinline__ unsigned int read_slot(unsigned int lane, int, int octet) {
    return octet * LANES + lane;
}
struct Staged {
    unsigned int token, octet, slot;

    __device__ __forceinline__ explicit Staged(unsigned int index) {
        const unsigned int chunk = index % 4, o = index / 8 % CHUNK_OCTETS;
        token = index / (8 * CHUNK_OCTETS) * 2 + index / 4 % 2;
        octet = chunk * CHUNK_OCTETS + o;
        slot = o * LANES + token * 4 + chunk;
    }
};
#else
__device__ __forceinline__ unsigned int held_row(unsigned int lane, int) {
    return lane / 4 % 4 * 8 + lane % 4 + lane / 16 * 4;
}
__device__ __forceinline__ unsigned int held_chunk(unsigned int, int h) { return h; }
__device__ __forceinline__ unsigned int sum_row(unsigned int lane, int i) {
    return lane / 4 % 4 * 8 + lane % 2 + (i & 2) + lane / 16 * 4;
}
__device__ __forceinline__ unsigned int sum_token(unsigned int lane, int i) {
    return (i & 4) + (lane & 2) + (i & 1);
}
__device__ __forceinline__ unsigned int read_slot(unsigned int lane, int h, int octet) {
    return (h * CHUNK_OCTETS + octet) * TILE + lane % 4 + lane / 16 * 4;
}
struct Staged {
    unsigned int token, octet, slot;

    __device__ __forceinline__ explicit Staged(unsigned int index)
        : token(index % TILE), octet(index / TILE), slot(index) {}
};
#endif

// 16-bit numbers: bits of the mantissa, the exponent of 1, and one in both halves of a word.
constexpr int MANTISSA = BFLOAT16 ? 7 : 10;
constexpr int EXPONENT_OF_1 = BFLOAT16 ? 127 : 15;

__device__ constexpr unsigned int both(unsigned int half) { return half << 16 | half; }

// 2^power, and -(2^power + 1).
__device__ constexpr unsigned int power_of_2(int power) {
    return (EXPONENT_OF_1 + power) << MANTISSA;
}
__device__ constexpr unsigned int below_power(int power) {
    return 0x8000u | power_of_2(power) | 1u << (MANTISSA - power);
}

// Scale and zero of a group in both halves of a word. The scale is that of codes between -1 and 1,
// about the largest weight of the group, which float16 holds wherever it holds the weight.
struct Pairs {
    unsigned int scale, zero;
};

__device__ __forceinline__ Pairs pairs_of(unsigned int affine) {
    if (BITS == 8) return {0, 0};
    const float scale = __uint_as_float(affine << 16) * (1 << (BITS - 1));
#if BFLOAT16
    return {__byte_perm(__float_as_uint(scale), 0, 0x3232), __byte_perm(affine, 0, 0x3232)};
#else
    return {both(to_activation(scale)), both(to_activation(__uint_as_float(affine & 0xffff0000u)))};
#endif
}

// The weights of an octet. At 3 and 4 bit codes i and i + 4 share a word: moved to the same place of
// both its halves they become the mantissa of 2^power + (code * 2^(1 - BITS)), from which the offset
// subtracts exactly. At 8 bit codes 2i and 2i + 1 do, their scale is that of the row.
__device__ __forceinline__ void restore_octet(Octet codes, Pairs pairs, unsigned int (&weights)[4]) {
    if constexpr (BITS == 8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned int word = (i < 2 ? codes.low : codes.high) ^ 0x80808080u;
#if BFLOAT16  // has no room for 8 bits behind the exponent: 2^23 + code as a float, whose upper half
              // has all of a code between -128 and 127
            const float low = __uint_as_float(__byte_perm(word, 0x4b000000u, i % 2 ? 0x7442 : 0x7440));
            const float high = __uint_as_float(__byte_perm(word, 0x4b000000u, i % 2 ? 0x7443 : 0x7441));
            weights[i] = __byte_perm(
                __float_as_uint(low - 8388736.0f), __float_as_uint(high - 8388736.0f), 0x7632);
#else
            const unsigned int biased = __byte_perm(word, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
            weights[i] = fma_halves(biased, both(power_of_2(0)), both(0xe480u));  // - (1024 + 128)
#endif
        }
    } else {
        constexpr int AT_ONCE = MANTISSA / BITS;  // codes of a half that one shift serves
        unsigned int halves = codes.low;
        if (BITS == 3) halves = (halves & 0xfffu) | (halves << 4 & 0x0fff0000u);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int bit = i % AT_ONCE * BITS, power = MANTISSA + 1 - BITS - bit;
            const unsigned int moved = halves >> (i / AT_ONCE * AT_ONCE * BITS);
            const unsigned int biased =
                and_xor(moved, both(((1u << BITS) - 1) << bit), both(power_of_2(power)));
            const unsigned int code =
                fma_halves(biased, both(power_of_2(0)), both(below_power(power)));
            weights[i] = fma_halves(code, pairs.scale, pairs.zero);
        }
    }
}

// Activations in the order of `restore_octet`.
__device__ __forceinline__ uint4 in_order(uint4 x) {
    if (BITS == 8) return x;
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                      __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
}

struct Chunk {
    unsigned int words[4];  // three at 3 bit
    unsigned int affine;

    __device__ __forceinline__ Octet octet(int o) const {
        if (BITS == 8) return {words[2 * o], words[2 * o + 1]};
        if (BITS == 4) return {words[o], 0};
        const int first = 3 * o / 4, next = first < 2 ? first + 1 : first;
        return {__funnelshift_r(words[first], words[next], 24 * o % 32), 0};
    }
};

__device__ __forceinline__ Chunk load_chunk(
    const unsigned int* __restrict__ packed, const void* __restrict__ scales, unsigned int row,
    unsigned int chunk, Width width) {
    const unsigned int chunks = width.octets / CHUNK_OCTETS;
    Chunk loaded;
    if (BITS == 3) {
        const unsigned int* words = packed + static_cast<size_t>(row) * 3 * chunks + chunk;
#pragma unroll
        for (int w = 0; w < 3; ++w) loaded.words[w] = __ldg(words + w * chunks);
        loaded.words[3] = 0;
    } else {
        const size_t index = static_cast<size_t>(row) * chunks + chunk;
        const uint4 words = __ldg(reinterpret_cast<const uint4*>(packed) + index);
        loaded.words[0] = words.x, loaded.words[1] = words.y;
        loaded.words[2] = words.z, loaded.words[3] = words.w;
    }
    loaded.affine = 0;
    if (BITS != 8)
        loaded.affine = __ldg(static_cast<const unsigned int*>(scales) +
                              width.group_of(row, chunk * CHUNK_OCTETS));
    return loaded;
}

// The sums of one octet of what a lane holds, `h` counting it on 7.0, and of all it holds elsewhere.
template <int TILES>
__device__ __forceinline__ void multiply_octet(
    float (&sums)[TILES][TILE_SUMS], const Chunk (&held)[HELD], const Pairs (&pairs)[HELD],
    const uint4* staged, unsigned int lane, int h, int octet) {
#if CAPABILITY >= 75
    unsigned int a[HELD][4];
#pragma unroll
    for (int each = 0; each < HELD; ++each)
        restore_octet(held[each].octet(octet), pairs[each], a[each]);
#else
    unsigned int a[4];
    restore_octet(held[h].octet(octet), pairs[h], a);
#endif
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const uint4 b = staged[t * TILE_SLOTS + read_slot(lane, h, octet)];
#if CAPABILITY >= 80
#pragma unroll
        for (int down = 0; down < 2; ++down) {
            const unsigned int(&upper)[4] = a[2 * down], (&lower)[4] = a[2 * down + 1];
            mma_m16n8k16(sums[t] + 4 * down, {upper[0], lower[0], upper[1], lower[1]}, {b.x, b.y});
            mma_m16n8k16(sums[t] + 4 * down, {upper[2], lower[2], upper[3], lower[3]}, {b.z, b.w});
        }
#elif CAPABILITY >= 75
#pragma unroll
        for (int down = 0; down < 2; ++down) {
            const unsigned int(&upper)[4] = a[2 * down], (&lower)[4] = a[2 * down + 1];
            mma_m16n8k8(sums[t] + 4 * down, {upper[0], lower[0]}, {b.x});
            mma_m16n8k8(sums[t] + 4 * down, {upper[1], lower[1]}, {b.y});
            mma_m16n8k8(sums[t] + 4 * down, {upper[2], lower[2]}, {b.z});
            mma_m16n8k8(sums[t] + 4 * down, {upper[3], lower[3]}, {b.w});
        }
#else
        mma_m8n8k4(sums[t], {a[0], a[1]}, {b.x, b.y});
        mma_m8n8k4(sums[t], {a[2], a[3]}, {b.z, b.w});
#endif
    }
}

// Sums that blocks leave for the last one of those that share rows and tokens, [tile of the output,
// split, 2 * TILES, thread], and how many blocks of each tile of the output have left theirs: 0
// before and after each launch.
struct Splits {
    float4* partial;
    unsigned int* arrived;
    unsigned int count;
};

// Whether this block is the last of the tile: then `sums` are those of all, added in the order of the
// splits.
template <int TILES>
__device__ __forceinline__ bool merge(
    float (&sums)[TILES][TILE_SUMS], Splits splits, unsigned int tile, unsigned int split) {
    constexpr int VECTORS = TILES * TILE_SUMS / 4;
    __shared__ bool ends;
    float4* own = splits.partial + static_cast<size_t>(tile) * splits.count * VECTORS * WARPS * LANES +
                  threadIdx.x;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const float* four = sums[v / 2] + v % 2 * 4;
        own[(split * VECTORS + v) * WARPS * LANES] = {four[0], four[1], four[2], four[3]};
    }
    if (!is_last(splits.arrived + tile, splits.count, ends)) return false;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < TILE_SUMS; ++i) sums[t][i] = 0.0f;
    for (unsigned int other = 0; other < splits.count; ++other) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const float4 four = __ldcg(own + (other * VECTORS + v) * WARPS * LANES);
            float* into = sums[v / 2] + v % 2 * 4;
            into[0] += four.x, into[1] += four.y, into[2] += four.z, into[3] += four.w;
        }
    }
    return true;
}

// 1-D grid: all runs of TILES * 8 tokens of the first split of the first BLOCK_ROWS rows, then of its
// next split. `bias` may be null.
template <int TILES>
__device__ __forceinline__ void on_tensor_cores(
    const unsigned short* __restrict__ x, const unsigned int* __restrict__ packed,
    const void* __restrict__ scales, const unsigned short* __restrict__ bias,
    unsigned short* __restrict__ out, unsigned int tokens, unsigned int rows, Width width,
    Splits splits) {
    constexpr int SLOTS = TILES * TILE_SLOTS;
    constexpr int OWN = (SLOTS + WARPS * LANES - 1) / (WARPS * LANES);  // slots that a thread stages
    __shared__ uint4 staged[2][SLOTS];
    const unsigned int lane = threadIdx.x % LANES;
    const unsigned int runs = (tokens + TILES * TILE - 1) / (TILES * TILE);
    const unsigned int first_token = blockIdx.x % runs * TILES * TILE;
    const unsigned int split = blockIdx.x / runs % splits.count, down = blockIdx.x / runs / splits.count;
    const unsigned int first_row = down * BLOCK_ROWS + threadIdx.x / LANES * WARP_ROWS;
    const unsigned int chunks = width.octets / CHUNK_OCTETS, stages = (chunks + CHUNKS - 1) / CHUNKS;
    const unsigned int begin = stages * split / splits.count, end = stages * (split + 1) / splits.count;

    Chunk held[HELD], next[HELD];
    uint4 activations[OWN];
    const auto load = [&](unsigned int stage) {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {  // beyond the end the last one again, of which no zero is used
            const unsigned int row = min(first_row + held_row(lane, h), rows - 1);
            const unsigned int chunk = min(stage * CHUNKS + held_chunk(lane, h), chunks - 1);
            next[h] = load_chunk(packed, scales, row, chunk, width);
        }
#pragma unroll
        for (int s = 0; s < OWN; ++s) {
            const unsigned int index = s * WARPS * LANES + threadIdx.x;
            const Staged place(index % TILE_SLOTS);
            const unsigned int octet = stage * STAGE_OCTETS + place.octet;
            const unsigned int own = index / TILE_SLOTS * TILE + place.token;
            const unsigned int token = min(first_token + own, tokens - 1);
            activations[s] = make_uint4(0, 0, 0, 0);
            if (octet < width.octets && index < SLOTS)
                activations[s] = __ldg(reinterpret_cast<const uint4*>(x) +
                                       static_cast<size_t>(token) * width.octets + octet);
        }
    };
    const auto take = [&](uint4* into) {
#pragma unroll
        for (int h = 0; h < HELD; ++h) held[h] = next[h];
#pragma unroll
        for (int s = 0; s < OWN; ++s) {
            const unsigned int index = s * WARPS * LANES + threadIdx.x;
            const Staged place(index % TILE_SLOTS);
            if (index < SLOTS)
                into[index / TILE_SLOTS * TILE_SLOTS + place.slot] = in_order(activations[s]);
        }
    };

    float sums[TILES][TILE_SUMS] = {};
    load(begin);
    take(staged[0]);
    __syncthreads();
    for (unsigned int stage = begin; stage < end; ++stage) {
        const bool goes_on = stage + 1 < end;
        if (goes_on) load(stage + 1);
        const uint4* now = staged[(stage - begin) % 2];
        Pairs pairs[HELD];
#pragma unroll
        for (int h = 0; h < HELD; ++h) pairs[h] = pairs_of(held[h].affine);
#pragma unroll
        for (int h = 0; h < (CAPABILITY >= 75 ? 1 : HELD); ++h)
#pragma unroll
            for (int octet = 0; octet < CHUNK_OCTETS; ++octet)
                multiply_octet<TILES>(sums, held, pairs, now, lane, h, octet);
        if (goes_on) take(staged[(stage + 1 - begin) % 2]);
        __syncthreads();
    }
    const unsigned int tile = down * runs + blockIdx.x % runs;
    if (splits.count > 1 && !merge<TILES>(sums, splits, tile, split)) return;
#pragma unroll
    for (int i = 0; i < TILE_SUMS; ++i) {
        const unsigned int row = first_row + sum_row(lane, i);
        if (row >= rows) continue;
        const float scale = BITS == 8 ? __ldg(static_cast<const float*>(scales) + row) : 1.0f;
        const float added = bias_of(bias, row);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const unsigned int token = first_token + t * TILE + sum_token(lane, i);
            if (token >= tokens) continue;
            const float sum = fmaf(sums[t][i], scale, added);
            out[static_cast<size_t>(token) * rows + row] = to_activation(sum);
        }
    }
}

#define ON_TENSOR_CORES(NAME, TILES)                                                                  \
    extern "C" __global__ void __launch_bounds__(WARPS * LANES) NAME(                                 \
        const unsigned short* x, const unsigned int* packed, const void* scales,                      \
        const unsigned short* bias, unsigned short* out, unsigned int tokens, unsigned int rows,      \
        Width width, float4* partial, unsigned int* arrived, unsigned int splits) {                   \
        on_tensor_cores<TILES>(                                                                       \
            x, packed, scales, bias, out, tokens, rows, width, {partial, arrived, splits});           \
    }
ON_TENSOR_CORES(tensor_8, 1)
ON_TENSOR_CORES(tensor_16, 2)
ON_TENSOR_CORES(tensor_32, 4)
ON_TENSOR_CORES(tensor_64, 8)

#endif

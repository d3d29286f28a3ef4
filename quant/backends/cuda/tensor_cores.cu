// Products of a few to a hundred or so tokens with a 3- to 6- or 8-bit weight, on tensor cores.
//
// Stands behind kernels.cu, whose layout of codes it reads, mma.cuh and restoring.cuh.
// Weights are the left operand of the matrix instructions and tokens the right one, 8 at the least;
// sums are in float32. A lane reads whole chunks of a row, 32 columns (16 at 8 bit), and restores them
// to the 16-bit numbers that `restore` would write: the order of columns in a sum is free, as long as
// both operands have the same.

#ifdef TENSOR_CORES

constexpr int HELD = 4;    // chunks of the weight that a lane loads at a time
constexpr int CHUNKS = 4;  // of a stage, columns that a block takes at a time
constexpr int CHUNK_OCTETS = BITS == 8 ? 2 : 4;
constexpr int CHUNK_WORDS = BITS > 4 && BITS < 8 ? BITS : 4;  // at 3 bit the last one is unused
constexpr int SCALE_OCTETS = CHUNK_OCTETS / PARTS;
constexpr int STAGE_OCTETS = CHUNKS * CHUNK_OCTETS;
constexpr int BLOCK_ROWS = 128, OUT_ROWS = BLOCK_ROWS / WARPS;  // that a warp writes
constexpr int TILE = 8;                          // tokens of a matrix instruction
constexpr int TILE_SLOTS = TILE * STAGE_OCTETS;  // of a tile's activations, an octet each
constexpr int OUT_SUMS = OUT_ROWS * TILE / LANES;

// On 7.0 a warp has 64 rows of half of a stage's columns: with 32 rows it would read activations from
// shared memory for longer than matrix units multiply them.
constexpr int ACROSS = CAPABILITY >= 75 ? 1 : 2;
constexpr int WARP_ROWS = OUT_ROWS * ACROSS, WARP_CHUNKS = CHUNKS / ACROSS;
constexpr int TILE_SUMS = OUT_SUMS * ACROSS;
constexpr int BUFFERS = CAPABILITY >= 75 ? 2 : 1;  // of activations

// The row of chunk `h` of those that a lane loads: a warp asks for 32 or 64 bytes of neighbouring rows.
__device__ __forceinline__ unsigned int held_row(unsigned int lane, int h) {
    return lane / WARP_CHUNKS + h * (LANES / WARP_CHUNKS);
}

// Where a lane's sums belong, and the slots of activations that it reads. A warp stages slots so that
// it asks memory for whole sectors and shared memory for neighbouring slots.
#if CAPABILITY >= 75
__device__ __forceinline__ unsigned int sum_row(unsigned int lane, int i) {
    return lane / 4 + (i / 4) * 16 + (i / 2 % 2) * 8;
}
__device__ __forceinline__ unsigned int sum_token(unsigned int lane, int i) {
    return lane % 4 * 2 + i % 2;
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
// Of 32 rows or 8 tokens, that of which a lane gives four columns to `mma_m8n8k4`.
__device__ __forceinline__ unsigned int own_token(unsigned int lane) {
    return lane % 4 + lane / 16 * 4;
}
__device__ __forceinline__ unsigned int own_row(unsigned int lane) {
    return lane / 4 % 4 * 8 + own_token(lane);
}
__device__ __forceinline__ unsigned int sum_row(unsigned int lane, int i) {
    return lane / 4 % 4 * 8 + lane % 2 + (i & 2) + lane / 16 * 4;
}
__device__ __forceinline__ unsigned int sum_token(unsigned int lane, int i) {
    return (i & 4) + (lane & 2) + (i & 1);
}
struct Staged {
    unsigned int token, octet, slot;

    __device__ __forceinline__ explicit Staged(unsigned int index)
        : token(index % TILE), octet(index / TILE), slot(index) {}
};
#endif

struct Chunk {
    unsigned int words[CHUNK_WORDS];
    Scales scales;

    __device__ __forceinline__ Octet octet(int o) const {
        if (BITS == 8) return {words[2 * o], words[2 * o + 1]};
        if (BITS == 4) return {words[o], 0};
        const int first = BITS * o / 4, next = first + 1 < BITS ? first + 1 : first;
        return octet_of(words[first], words[next], 8 * (BITS * o % 4));
    }
};

__device__ __forceinline__ Chunk load_chunk(
    const unsigned int* __restrict__ packed, const void* __restrict__ scales, unsigned int row,
    unsigned int chunk, Width width) {
    const unsigned int chunks = width.octets / CHUNK_OCTETS;
    Chunk loaded;
    if (IN_PLANES) {
        const unsigned int* words = packed + static_cast<size_t>(row) * BITS * chunks + chunk;
#pragma unroll
        for (int w = 0; w < BITS; ++w) loaded.words[w] = __ldg(words + w * chunks);
        if (BITS == 3) loaded.words[3] = 0;
    } else {
        const size_t index = static_cast<size_t>(row) * chunks + chunk;
        const uint4 words = __ldg(reinterpret_cast<const uint4*>(packed) + index);
        loaded.words[0] = words.x, loaded.words[1] = words.y;
        loaded.words[2] = words.z, loaded.words[3] = words.w;
    }
    loaded.scales = {};
    if (BITS != 8) loaded.scales = width.scales_of(scales, row, chunk * CHUNK_OCTETS);
    return loaded;
}

// The chunks of a stage on their way from the lanes that load them to those that multiply them.
#if CAPABILITY >= 75
struct Held {  // the same lanes: a chunk of rows 8 apart
    Chunk chunks[HELD];

    __device__ __forceinline__ void take(const Chunk (&loaded)[HELD], unsigned int) {
#pragma unroll
        for (int h = 0; h < HELD; ++h) chunks[h] = loaded[h];
    }
};
#else
template <int COUNT>
struct alignas(4 * COUNT) Words {
    unsigned int at[COUNT];
};
using More = Words<CHUNK_WORDS == 6 ? 2 : 1>;  // than four

struct Held {  // those of other rows, through shared memory of the warp
    uint4 codes[WARP_ROWS * WARP_CHUNKS];
    More more[CHUNK_WORDS > 4 ? WARP_ROWS * WARP_CHUNKS : 1];
    Scales scales[WARP_ROWS * WARP_CHUNKS];

    // Lanes that read together have rows 0 to 3 and 8 to 11 of 16, or the others.
    static __device__ __forceinline__ unsigned int place(unsigned int row, unsigned int chunk) {
        return row * WARP_CHUNKS + (chunk ^ (row / 8 % 2));
    }

    __device__ __forceinline__ void take(const Chunk (&loaded)[HELD], unsigned int lane) {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            const unsigned int to = place(held_row(lane, h), lane % WARP_CHUNKS);
            const unsigned int(&words)[CHUNK_WORDS] = loaded[h].words;
            codes[to] = make_uint4(words[0], words[1], words[2], words[3]);
            if constexpr (CHUNK_WORDS > 4) {
                More own;
#pragma unroll
                for (int w = 4; w < CHUNK_WORDS; ++w) own.at[w - 4] = words[w];
                more[to] = own;
            }
            scales[to] = loaded[h].scales;
        }
    }

    __device__ __forceinline__ Chunk chunk(unsigned int row, unsigned int chunk) const {
        const unsigned int from = place(row, chunk);
        const uint4 words = codes[from];
        Chunk held = {{words.x, words.y, words.z, words.w}, scales[from]};
        if constexpr (CHUNK_WORDS > 4) {
            const More own = more[from];
#pragma unroll
            for (int w = 4; w < CHUNK_WORDS; ++w) held.words[w] = own.at[w - 4];
        }
        return held;
    }
};
#endif

// Adds the products of the chunks of a stage from `first_chunk` on to the sums.
template <int TILES>
__device__ __forceinline__ void multiply_stage(
    float (&sums)[TILES][TILE_SUMS], const Held& held, const uint4* staged, unsigned int lane,
    unsigned int first_chunk) {
#if CAPABILITY >= 75
    Steps steps[HELD];
#pragma unroll
    for (int octet = 0; octet < CHUNK_OCTETS; ++octet) {
        unsigned int a[HELD][4];
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            if (octet % SCALE_OCTETS == 0) steps[h] = steps_of(held.chunks[h].scales, octet);
            restore_octet(held.chunks[h].octet(octet), steps[h], a[h]);
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const uint4 b = staged[t * TILE_SLOTS + octet * LANES + lane];
#pragma unroll
            for (int down = 0; down < 2; ++down) {
                const unsigned int(&upper)[4] = a[2 * down], (&lower)[4] = a[2 * down + 1];
                float* into = sums[t] + 4 * down;
#if CAPABILITY >= 80
                mma_m16n8k16(into, {upper[0], lower[0], upper[1], lower[1]}, {b.x, b.y});
                mma_m16n8k16(into, {upper[2], lower[2], upper[3], lower[3]}, {b.z, b.w});
#else
                mma_m16n8k8(into, {upper[0], lower[0]}, {b.x});
                mma_m16n8k8(into, {upper[1], lower[1]}, {b.y});
                mma_m16n8k8(into, {upper[2], lower[2]}, {b.z});
                mma_m16n8k8(into, {upper[3], lower[3]}, {b.w});
#endif
            }
        }
    }
#else
    constexpr int DOWN = WARP_ROWS / LANES;
    // registers have no room for the next chunk beside weights in float32 and so many sums
    constexpr int TOGETHER = SUPER_BLOCKS && TILES > 4 ? 1 : WARP_CHUNKS;
#pragma unroll TOGETHER
    for (int chunk = 0; chunk < WARP_CHUNKS; ++chunk) {
        Chunk own[DOWN];
        Steps steps[DOWN];
#pragma unroll
        for (int down = 0; down < DOWN; ++down)
            own[down] = held.chunk(down * LANES + own_row(lane), chunk);
#pragma unroll
        for (int octet = 0; octet < CHUNK_OCTETS; ++octet) {
            unsigned int a[DOWN][4];
#pragma unroll
            for (int down = 0; down < DOWN; ++down) {
                if (octet % SCALE_OCTETS == 0) steps[down] = steps_of(own[down].scales, octet);
                restore_octet(own[down].octet(octet), steps[down], a[down]);
            }
            const unsigned int column = (first_chunk + chunk) * CHUNK_OCTETS + octet;
            const uint4* slots = staged + column * TILE + own_token(lane);
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const uint4 b = slots[t * TILE_SLOTS];
#pragma unroll
                for (int down = 0; down < DOWN; ++down) {
                    mma_m8n8k4(sums[t] + 8 * down, {a[down][0], a[down][1]}, {b.x, b.y});
                    mma_m8n8k4(sums[t] + 8 * down, {a[down][2], a[down][3]}, {b.z, b.w});
                }
            }
        }
    }
#endif
}

// Sums that blocks leave for the last one of those that share rows and tokens, [tile of the output,
// split, vector, thread], and how many blocks of each tile of the output have left theirs: 0
// before and after each launch.
struct Splits {
    float4* partial;
    unsigned int* arrived;
    unsigned int count;
};

// Where two warps share rows, each gets the sums of half of them.
template <int TILES>
__device__ __forceinline__ void add_across(
    const float (&sums)[TILES][TILE_SUMS], float (&out)[TILES][OUT_SUMS], float* given,
    unsigned int half) {
    if constexpr (ACROSS == 1) {
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < OUT_SUMS; ++i) out[t][i] = sums[t][i];
    } else {
        constexpr unsigned int THREADS = WARPS * LANES;
        const unsigned int other = threadIdx.x ^ (THREADS / 2);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
#pragma unroll
            for (int i = 0; i < OUT_SUMS; ++i) {
                out[t][i] = half ? sums[t][i + OUT_SUMS] : sums[t][i];
                given[(t * OUT_SUMS + i) * THREADS + threadIdx.x] =
                    half ? sums[t][i] : sums[t][i + OUT_SUMS];
            }
        }
        __syncthreads();
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < OUT_SUMS; ++i)
                out[t][i] += given[(t * OUT_SUMS + i) * THREADS + other];
    }
}

// Whether this block is the last of the tile: then `sums` are those of all, added in the order of the
// splits.
template <int TILES>
__device__ __forceinline__ bool merge(
    float (&sums)[TILES][OUT_SUMS], Splits splits, unsigned int tile, unsigned int split) {
    constexpr int TILE_VECTORS = OUT_SUMS / 4, VECTORS = TILES * TILE_VECTORS;
    __shared__ bool ends;
    float4* own = splits.partial + static_cast<size_t>(tile) * splits.count * VECTORS * WARPS * LANES +
                  threadIdx.x;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const float* four = sums[v / TILE_VECTORS] + v % TILE_VECTORS * 4;
        own[(split * VECTORS + v) * WARPS * LANES] = {four[0], four[1], four[2], four[3]};
    }
    if (!is_last(splits.arrived + tile, splits.count, ends)) return false;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < OUT_SUMS; ++i) sums[t][i] = 0.0f;
    for (unsigned int other = 0; other < splits.count; ++other) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const float4 four = __ldcg(own + (other * VECTORS + v) * WARPS * LANES);
            float* into = sums[v / TILE_VECTORS] + v % TILE_VECTORS * 4;
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
    constexpr int GIVEN = ACROSS == 1 ? 0 : TILES * OUT_SUMS * WARPS * LANES / 4;
    __shared__ uint4 staged[BUFFERS * SLOTS > GIVEN ? BUFFERS * SLOTS : GIVEN];
    const unsigned int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const unsigned int runs = (tokens + TILES * TILE - 1) / (TILES * TILE);
    const unsigned int first_token = blockIdx.x % runs * TILES * TILE;
    const unsigned int split = blockIdx.x / runs % splits.count, down = blockIdx.x / runs / splits.count;
    const unsigned int half = warp / (WARPS / ACROSS);  // of columns, then of rows
    const unsigned int first_row = down * BLOCK_ROWS + warp % (WARPS / ACROSS) * WARP_ROWS;
    const unsigned int chunks = width.octets / CHUNK_OCTETS, stages = (chunks + CHUNKS - 1) / CHUNKS;
    const unsigned int begin = stages * split / splits.count, end = stages * (split + 1) / splits.count;

#if CAPABILITY >= 75
    Held held;
#else
    __shared__ Held turned[WARPS];
    Held& held = turned[warp];
#endif
    Chunk next[HELD];
    uint4 activations[OWN];
    const auto load_weights = [&](unsigned int stage) {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {  // beyond the end the last one, where activations are zeros
            const unsigned int row = min(first_row + held_row(lane, h), rows - 1);
            const unsigned int chunk = stage * CHUNKS + half * WARP_CHUNKS + lane % WARP_CHUNKS;
            next[h] = load_chunk(packed, scales, row, min(chunk, chunks - 1), width);
        }
    };
    const auto load_activations_of = [&](unsigned int stage, int from, int to) {
#pragma unroll
        for (int s = from; s < to; ++s) {
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
    const auto stage_activations = [&](unsigned int number) {
#pragma unroll
        for (int s = 0; s < OWN; ++s) {
            const unsigned int index = s * WARPS * LANES + threadIdx.x;
            const Staged place(index % TILE_SLOTS);
            const unsigned int slot = index / TILE_SLOTS * TILE_SLOTS + place.slot;
            if (index < SLOTS) staged[number % BUFFERS * SLOTS + slot] = in_order(activations[s]);
        }
    };

    float sums[TILES][TILE_SUMS] = {};
    load_weights(begin);
    load_activations_of(begin, 0, OWN);
    held.take(next, lane);
    stage_activations(0);
    __syncthreads();
    for (unsigned int stage = begin; stage < end; ++stage) {
        // Loaded before the products of the stage before, but for what registers have no room for
        // beside so many sums.
        constexpr bool LITTLE_ROOM = ACROSS > 1 || (CAPABILITY == 75 && BITS == 6);
        constexpr int EARLY = LITTLE_ROOM && TILES > 4 ? 0 : OWN;
        const unsigned int number = stage - begin, first_chunk = half * WARP_CHUNKS;
        const bool goes_on = stage + 1 < end;
        if (goes_on) {
            load_weights(stage + 1);
            load_activations_of(stage + 1, 0, EARLY);
        }
        multiply_stage<TILES>(sums, held, staged + number % BUFFERS * SLOTS, lane, first_chunk);
        if (BUFFERS == 1) __syncthreads();
        if (goes_on) {
            held.take(next, lane);
            load_activations_of(stage + 1, EARLY, OWN);
            stage_activations(number + 1);
        }
        __syncthreads();
    }
    float whole[TILES][OUT_SUMS];
    add_across<TILES>(sums, whole, reinterpret_cast<float*>(staged), half);
    const unsigned int tile = down * runs + blockIdx.x % runs;
    if (splits.count > 1 && !merge<TILES>(whole, splits, tile, split)) return;
#pragma unroll
    for (int i = 0; i < OUT_SUMS; ++i) {
        const unsigned int row = first_row + half * OUT_ROWS + sum_row(lane, i);
        if (row >= rows) continue;
        const float scale = BITS == 8 ? __ldg(static_cast<const float*>(scales) + row) : 1.0f;
        const float added = bias_of(bias, row);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const unsigned int token = first_token + t * TILE + sum_token(lane, i);
            if (token >= tokens) continue;
            const float sum = fmaf(whole[t][i], scale, added);
            out[static_cast<size_t>(token) * rows + row] = to_activation(sum);
        }
    }
}

#define ON_TENSOR_CORES(NAME, TILES)                                                                  \
    extern "C" __global__ void __launch_bounds__(WARPS * LANES, CAPABILITY >= 75 ? 1 : 2) NAME(       \
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

// Products of 8-bit codes with 8-bit codes: activations are rotated and rounded a token at a time, and
// their codes are multiplied with those of the weight in int32.
//
// Compiled at run time by NVRTC for one GPU, behind numbers.cuh, with -D BFLOAT16=0|1 (the type of
// activations) and -D CAPABILITY=61|75|80 ..., from which the instruction that multiplies follows:
// mma.m16n8k32 from 8.0 on, mma.m8n8k16 on 7.5, dp4a below. Rows have a multiple of 64 columns, at most 2^17, so that no sum leaves int32.

#ifdef __CUDACC_RTC__  // elsewhere whoever includes this file defines these

// Fragments as the PTX ISA documents them: lane l has 4 codes of row l / 4 of `a` from column
// 4 * (l % 4) on, 4 of column l / 4 of `b`, and of row l / 4 of `sums` the columns 2 * (l % 4) and the
// next. Of m16n8k32, a[1] and a[3] are 8 rows further down, a[2], a[3] and b[1] 16 columns (rows)
// further on, sums[2] and sums[3] 8 rows further down.
__device__ __forceinline__ void mma_m16n8k32(
    int (&sums)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m8n8k16(int& low, int& high, unsigned int a, unsigned int b) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(low), "+r"(high)
        : "r"(a), "r"(b));
}

#endif

constexpr int MIXED = 64;         // features that the rotation mixes
constexpr int HALF = MIXED / 2;   // of them a lane has
constexpr int COLUMNS = LANES / 2;  // of a warp: the other half of them is in the upper lanes
constexpr float LIMIT = 127.0f;
constexpr float LEAST_MAXIMUM = 1e-30f;  // of a token of zeros, whose codes are then zeros

// The rotated features of one column that a lane keeps: numbers HALF * upper to HALF * upper + 31 of
// the MIXED that are `apart`. Sums are taken in the order of `quant.backends.rotation.rotate`, and no
// product is fused with a sum, so that they have the same bits.
__device__ __forceinline__ void load_rotated(
    const unsigned short* __restrict__ x, const float* __restrict__ factor, unsigned int first,
    unsigned int apart, bool upper, float (&values)[HALF]) {
#pragma unroll
    for (int i = 0; i < HALF; ++i)
        values[i] = __fmul_rn(load_activation(x + first + i * apart), __ldg(factor + first + i * apart));
#pragma unroll
    for (int distance = 1; distance < HALF; distance *= 2) {
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            if (i & distance) continue;
            const float one = values[i], other = values[i + distance];
            values[i] = one + other;
            values[i + distance] = one - other;
        }
    }
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, values[i], COLUMNS);
        values[i] = upper ? other - values[i] : values[i] + other;
    }
}

// Codes [tokens, columns] and scales [tokens] of `x` times `factor` [columns], rotated. A token with a
// number that is not finite has such a scale. Besides, so many `counters` become 0 for the product
// that follows. 1-D grid over tokens.
extern "C" __global__ void __launch_bounds__(WARPS * LANES) round_tokens(
    const unsigned short* __restrict__ x, const float* __restrict__ factor,
    signed char* __restrict__ codes, float* __restrict__ scale, unsigned int columns,
    unsigned int* __restrict__ counters, unsigned int counted) {
    __shared__ unsigned int maxima[WARPS];
    constexpr unsigned int STEP = WARPS * COLUMNS;
    const unsigned int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned int apart = columns / MIXED;
    const bool upper = lane >= COLUMNS;
    const size_t token = blockIdx.x;
    x += token * columns;
    codes += token * columns;
    if (blockIdx.x == 0) {
        for (unsigned int i = threadIdx.x; i < counted; i += WARPS * LANES) counters[i] = 0;
    }

    // Lanes beyond the last column repeat it.
    const unsigned int within = lane % COLUMNS, half = upper * HALF * apart;
    float values[HALF];
    unsigned int largest = 0, column = warp * COLUMNS;
    for (; column < apart; column += STEP) {
        load_rotated(x, factor, half + min(column + within, apart - 1), apart, upper, values);
#pragma unroll
        for (int i = 0; i < HALF; ++i)  // as integers, in which NaN is above infinity
            largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    if (lane == 0) maxima[warp] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = max(largest, maxima[w]);
    float magnitude = __uint_as_float(largest);
    if (magnitude < LEAST_MAXIMUM) magnitude = LEAST_MAXIMUM;
    if (threadIdx.x == 0) scale[token] = magnitude / LIMIT;
    const float steps = LIMIT / magnitude;

    // From the last columns, whose values are still there, to the first.
    for (bool held = true; column >= STEP; held = false) {
        column -= STEP;
        const unsigned int first = half + min(column + within, apart - 1);
        if (!held) load_rotated(x, factor, first, apart, upper, values);
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            const float raised = __fadd_rn(__fmul_rn(values[i], steps), 128.5f);
            codes[first + i * apart] = static_cast<signed char>(__float2int_rz(raised) - 128);
        }
    }
}

// A product of codes `[tokens, columns]` and of a weight's `[rows, columns]`: 64 columns are a run.
struct Shape {
    unsigned int tokens, rows, runs, splits;
};

// Sums of rows l / 4 and 8 further down, for tokens 2 * (l % 4) and the next, over 16 columns of dp4a
// or 64 of a warp's matrix instructions: there each lane has other columns, but the same ones of a
// weight's row and of a token, so that it is no matter which of the fragment's columns they become.
#if CAPABILITY >= 75
constexpr int STEPS = 1, OWN = 1;  // loads for a run; tokens of 8 that a lane loads

__device__ __forceinline__ void multiply_codes(
    int (&sums)[4], const uint4 (&weight)[2], const uint4 (&x)[OWN]) {
#if CAPABILITY >= 80
    mma_m16n8k32(sums, {weight[0].x, weight[1].x, weight[0].y, weight[1].y}, {x[0].x, x[0].y});
    mma_m16n8k32(sums, {weight[0].z, weight[1].z, weight[0].w, weight[1].w}, {x[0].z, x[0].w});
#else
#pragma unroll
    for (int down = 0; down < 2; ++down) {
        mma_m8n8k16(sums[2 * down], sums[2 * down + 1], weight[down].x, x[0].x);
        mma_m8n8k16(sums[2 * down], sums[2 * down + 1], weight[down].y, x[0].y);
        mma_m8n8k16(sums[2 * down], sums[2 * down + 1], weight[down].z, x[0].z);
        mma_m8n8k16(sums[2 * down], sums[2 * down + 1], weight[down].w, x[0].w);
    }
#endif
}
#else
constexpr int STEPS = 4, OWN = 2;

__device__ __forceinline__ int add_word(unsigned int weight, unsigned int x, int sum) {
    return __dp4a(static_cast<int>(weight), static_cast<int>(x), sum);
}

__device__ __forceinline__ void multiply_codes(
    int (&sums)[4], const uint4 (&weight)[2], const uint4 (&x)[OWN]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4& row = weight[i / 2];
        const uint4& token = x[i % 2];
        sums[i] = add_word(row.x, token.x, sums[i]);
        sums[i] = add_word(row.y, token.y, sums[i]);
        sums[i] = add_word(row.z, token.z, sums[i]);
        sums[i] = add_word(row.w, token.w, sums[i]);
    }
}
#endif

__device__ __forceinline__ float scaled(int sum, float row_scale, float token_scale, float bias) {
    return __fadd_rn(__fmul_rn(__fmul_rn(static_cast<float>(sum), row_scale), token_scale), bias);
}

__device__ __forceinline__ float bias_of(const unsigned short* bias, unsigned int row) {
    return bias == nullptr ? 0.0f : load_activation(bias + row);
}

// A block sums 16 * ROW_TILES rows for 8 * TOKEN_TILES tokens; its warps take runs by turns, straight
// from memory, where a warp reads 64 neighbouring bytes of 8 rows at once.
// 1-D grid: the splits of the first tokens of the first rows, then those of the next tokens, and so on.
// Where runs are split over blocks, each leaves its sums in `partial`; the last one by `counters` adds
// them up.
template <int ROW_TILES, int TOKEN_TILES>
__device__ __forceinline__ void multiply(
    const uint4* __restrict__ x, const float* __restrict__ token_scale,
    const uint4* __restrict__ weight, const float* __restrict__ row_scale,
    const unsigned short* __restrict__ bias, unsigned short* __restrict__ out,
    unsigned int* __restrict__ counters, int* partial, Shape shape) {
    constexpr int ROWS = 16 * ROW_TILES, TOKENS = 8 * TOKEN_TILES, SUMS = ROWS * TOKENS;
    constexpr int WIDE = ROWS + 4;  // lanes that add at once then have banks of their own
    __shared__ int total[TOKENS * WIDE];
    __shared__ bool last;
    const unsigned int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned int group = lane / 4, part = lane % 4;
    const unsigned int across = (shape.tokens + TOKENS - 1) / TOKENS;
    const unsigned int split = blockIdx.x % shape.splits, tile = blockIdx.x / shape.splits;
    const unsigned int first_token = tile % across * TOKENS, first_row = tile / across * ROWS;

    // In units of 16 codes, of which no weight has 2^32. Rows and tokens beyond the last repeat it.
    unsigned int rows[ROW_TILES][2], tokens[TOKEN_TILES][OWN];
#pragma unroll
    for (int m = 0; m < 2 * ROW_TILES; ++m) {
        const unsigned int row = min(first_row + 8 * m + group, shape.rows - 1);
        rows[m / 2][m % 2] = row * shape.runs * 4;
    }
#pragma unroll
    for (int t = 0; t < OWN * TOKEN_TILES; ++t) {
        const unsigned int own = OWN == 1 ? group : 2 * part + t % 2;
        const unsigned int token = min(first_token + t / OWN * 8 + own, shape.tokens - 1);
        tokens[t / OWN][t % OWN] = token * shape.runs * 4;
    }
    for (unsigned int i = threadIdx.x; i < TOKENS * WIDE; i += WARPS * LANES) total[i] = 0;

    int sums[ROW_TILES][TOKEN_TILES][4] = {};
    const unsigned int each = (shape.runs + shape.splits - 1) / shape.splits;
    const unsigned int end = min((split + 1) * each, shape.runs);
#pragma unroll STEPS * TOKEN_TILES > 2 ? 1 : 4
    for (unsigned int run = split * each + warp; run < end; run += WARPS) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const unsigned int at = run * 4 + (STEPS == 1 ? part : step);
            uint4 own[ROW_TILES][2];
#pragma unroll
            for (int m = 0; m < 2 * ROW_TILES; ++m)
                own[m / 2][m % 2] = __ldg(weight + (rows[m / 2][m % 2] + at));
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; ++t) {
                uint4 codes[OWN];
#pragma unroll
                for (int i = 0; i < OWN; ++i) codes[i] = __ldg(x + (tokens[t][i] + at));
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m) multiply_codes(sums[m][t], own[m], codes);
            }
        }
    }

    __syncthreads();
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned int row = 16 * m + 8 * (i / 2) + group;
                atomicAdd(&total[(8 * t + 2 * part + i % 2) * WIDE + row], sums[m][t][i]);
            }
        }
    }
    __syncthreads();
    if (shape.splits > 1) {
        int* left = partial + static_cast<size_t>(tile) * shape.splits * SUMS;
        for (unsigned int i = threadIdx.x; i < SUMS; i += WARPS * LANES)
            left[split * SUMS + i] = total[i / ROWS * WIDE + i % ROWS];
        if (!is_last(counters + tile, shape.splits, last)) return;
        for (unsigned int i = threadIdx.x; i < SUMS; i += WARPS * LANES) {
            int sum = 0;
            for (unsigned int s = 0; s < shape.splits; ++s)
                sum += static_cast<const volatile int*>(left)[s * SUMS + i];
            total[i / ROWS * WIDE + i % ROWS] = sum;  // read by this thread alone
        }
    }
    for (unsigned int i = threadIdx.x; i < SUMS; i += WARPS * LANES) {
        const unsigned int token = first_token + i / ROWS, row = first_row + i % ROWS;
        if (token >= shape.tokens || row >= shape.rows) continue;
        const float value = scaled(total[i / ROWS * WIDE + i % ROWS], __ldg(row_scale + row),
                                   __ldg(token_scale + token), bias_of(bias, row));
        out[static_cast<size_t>(token) * shape.rows + row] = to_activation(value);
    }
}

// So many BLOCKS fit into the registers of a multiprocessor at once: the compiler need not spill.
#define MULTIPLY(NAME, ROW_TILES, TOKEN_TILES, BLOCKS)                                                \
    extern "C" __global__ void __launch_bounds__(WARPS * LANES, BLOCKS) NAME(                         \
        const uint4* x, const float* token_scale, const uint4* weight, const float* row_scale,        \
        const unsigned short* bias, unsigned short* out, unsigned int* counters, int* partial,        \
        Shape shape) {                                                                                \
        multiply<ROW_TILES, TOKEN_TILES>(x, token_scale, weight, row_scale, bias, out, counters,      \
                                         partial, shape);                                             \
    }
MULTIPLY(multiply_8, 1, 1, 6)
MULTIPLY(multiply_16, 1, 2, 4)
MULTIPLY(multiply_32, 2, 4, 4)
MULTIPLY(multiply_64, 2, 8, STEPS == 1 ? 3 : 2)

// What a library has summed, `[tokens, rows]`, rows a multiple of 8. A thread takes 8 sums; 1-D grid.
extern "C" __global__ void __launch_bounds__(WARPS * LANES) scale_sums(
    const uint4* __restrict__ sums, const float* __restrict__ token_scale,
    const float* __restrict__ row_scale, const unsigned short* __restrict__ bias,
    uint4* __restrict__ out, Shape shape) {
    const size_t index = static_cast<size_t>(blockIdx.x) * (WARPS * LANES) + threadIdx.x;
    const unsigned int octets = shape.rows / OCTET;
    if (index >= static_cast<size_t>(shape.tokens) * octets) return;
    const unsigned int row = index % octets * OCTET;
    const float own = __ldg(token_scale + index / octets);
    const uint4 low = __ldg(sums + 2 * index), high = __ldg(sums + 2 * index + 1);
    const unsigned int read[OCTET] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    unsigned int words[4];
#pragma unroll
    for (int i = 0; i < OCTET; ++i) {
        const float value = scaled(static_cast<int>(read[i]), __ldg(row_scale + row + i), own,
                                   bias_of(bias, row + i));
        const unsigned int bits = to_activation(value);
        words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
    }
    out[index] = make_uint4(words[0], words[1], words[2], words[3]);
}

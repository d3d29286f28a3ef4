// Products of a few tokens with a 3- to 6- or 8-bit weight, and the weight restored to 16 bit.
//
// Compiled at run time by NVRTC for one GPU, behind numbers.cuh, with -D BITS=3|4|5|6|8,
// -D BFLOAT16=0|1 (the type of activations) and -D SUPER_BLOCKS=1 where scales are those of GGUF's
// K-quants. Sums are in float32.
//
// Eight consecutive columns, an octet, take BITS bytes of a row: code i is at bit BITS * i of that
// little-endian number. At 4 and 8 bit a row is its octets one after another. Else four octets
// make BITS 32-bit words, and a row is all first words, all second, and so on, so that the lanes
// of a warp read neighbouring words.

#if BITS != 8 && (BITS < 3 || BITS > 6)
#error "BITS is 3 to 6 or 8"
#endif
#ifndef SUPER_BLOCKS
#define SUPER_BLOCKS 0
#endif

constexpr bool IN_PLANES = BITS % 4 != 0;

// Codes become floats without a conversion, which would run at a quarter of the rate or less: code
// bits are put into the mantissa of a float whose exponent makes their unit 2^-BITS. A 32-bit
// shift serves as many codes as fit into the mantissa, and `code_class` counts them from the top:
// class k reads as 2^(BITS * k) + code * 2^-BITS. The offset is at most 64 (3 bit) and subtracts
// exactly.
constexpr int CLASSES = BITS == 3 ? 3 : BITS == 4 ? 2 : 1;
constexpr float UNITS = 1 << BITS;

__device__ constexpr int code_class(int i) { return (OCTET - 1 - i) % CLASSES; }

// What a code of the class reads as when it stands for zero: the middle of its range.
__device__ constexpr float code_zero(int k) { return (1 << (BITS * k)) + 0.5f; }

struct Octet {
    unsigned int low, high;  // `high` from code 4 on, only above 4 bit
};

// The octet that begins at bit `shift` of a word, and may reach into the next one.
__device__ __forceinline__ Octet octet_of(unsigned int word, unsigned int next, unsigned int shift) {
    const unsigned int low = __funnelshift_r(word, next, shift);
    return {low, BITS > 4 ? __funnelshift_r(low, next >> shift, 4 * BITS) : 0};
}

__device__ __forceinline__ float biased_code(Octet octet, int i) {
    const int from = BITS > 4 ? BITS * (i % 4) : BITS * i;
    const int to = 23 - BITS - BITS * code_class(i);
    const unsigned int mask = ((1u << BITS) - 1) << to;
    // 8-bit codes are signed: flipping the sign bit adds 128.
    const unsigned int exponent = ((127u + BITS * code_class(i)) << 23) ^ (BITS == 8 ? 1u << 22 : 0);
    const unsigned int word = BITS > 4 && i >= 4 ? octet.high : octet.low;
    const unsigned int moved = to >= from ? word << (to - from) : word >> (from - to);
    return __uint_as_float(and_xor(moved, mask, exponent));
}

// `code_zero` subtracted: (code - 2^(BITS-1)) * 2^-BITS, exactly.
__device__ __forceinline__ float centred_code(Octet octet, int i) {
    return biased_code(octet, i) - code_zero(code_class(i));
}

// weight = centred code * scale + zero. At 8 bit the scale belongs to the row and is multiplied
// into the sum of the row instead.
struct Affine {
    float scale, zero;
};

// A byte less `offset`: 2^23 + byte as a float, from which that subtracts exactly, without a conversion.
__device__ __forceinline__ float byte_number(unsigned int byte, int offset) {
    return __uint_as_float(0x4b000000u | byte) - (8388608.0f + offset);
}

// The part of a scale that zeros are multiples of (`zero_steps` in quant/narrow.py).
constexpr float ZERO_STEP = BITS == 6 ? 0.25f : BITS == 5 ? 0.125f : 0.0625f;

// Of a super-block's 256 columns, the numbers of 16 bit before the groups of 32 of a row, and the scales
// of each group, a byte each.
constexpr int HEADS = BITS == 6 ? 1 : 2;
constexpr int PARTS = SUPER_BLOCKS && BITS == 6 ? 2 : 1;

// What is loaded for a group. Else than in super-blocks scale and zero as bfloat16, the zero in the
// upper half; there d and dmin as float16 in one word and the factors of both in the next, or at 6 bit
// d and the factors of 16 columns each.
struct Scales {
    unsigned int words[SUPER_BLOCKS && BITS < 6 ? 2 : 1];
};

// A row's octets and its groups, each of 2^group_shift octets, four or more; unused at 8 bit.
// `narrow`: a group has two bytes, and a row two before its groups (quant/narrow.py); so it has in
// super-blocks, behind the numbers of all blocks.
struct Width {
    unsigned int octets, groups, group_shift, narrow;

    // Those of an octet's group.
    __device__ __forceinline__ Scales scales_of(
        const void* scales, unsigned int row, unsigned int octet) const {
#if SUPER_BLOCKS
        const unsigned int heads = groups / 8 * HEADS, block = octet / 32;
        const unsigned short* own =
            static_cast<const unsigned short*>(scales) + static_cast<size_t>(row) * (heads + groups);
        const unsigned int bytes = __ldg(own + heads + octet / 4);
#if BITS == 6
        return {__ldg(own + block) | bytes << 16};
#else
        return {__ldg(reinterpret_cast<const unsigned int*>(own) + block), bytes};
#endif
#else
        const unsigned int group = octet >> group_shift;
        if (!narrow)
            return {__ldg(static_cast<const unsigned int*>(scales) +
                          static_cast<size_t>(row) * groups + group)};
        const unsigned short* own = static_cast<const unsigned short*>(scales) +
                                    static_cast<size_t>(row) * (groups + 1);
        const unsigned int exponent = __ldg(own), bytes = __ldg(own + 1 + group);
        const float scale = byte_number(bytes & 0xffu, 0) * __uint_as_float(exponent << 23);
        const float steps = byte_number(bytes >> 8, 128);
        const unsigned int zero = __float_as_uint(steps * ZERO_STEP * scale);
        return {__float_as_uint(scale) >> 16 | (zero & 0xffff0000u)};
#endif
    }

    // Where the scales of a row begin.
    __device__ __forceinline__ const void* scales_from(const void* scales, size_t row) const {
        const unsigned char* bytes = static_cast<const unsigned char*>(scales);
        if (BITS == 8) return bytes + row * 4;
        if (SUPER_BLOCKS) return bytes + row * 2 * (groups + groups / 8 * HEADS);
        return bytes + row * (narrow ? 2 * (groups + 1) : 4 * groups);
    }
};

// Of the octet of a group, as for `centred_code`.
__device__ __forceinline__ Affine affine_of(Scales held, unsigned int octet) {
    if (BITS == 8) return {1.0f, 0.0f};
#if SUPER_BLOCKS
    float d, least;
    halves_to_floats(held.words[0], d, least);
#if BITS == 6  // signed: flipping the sign bit adds 128
    const unsigned int factor = held.words[0] >> (octet & 2 ? 24 : 16) & 0xffu;
    return {d * byte_number(factor ^ 0x80u, 128) * UNITS, 0.0f};
#else
    const float scale = d * byte_number(held.words[1] & 0xffu, 0) * UNITS;
    least *= byte_number(held.words[1] >> 8, 0);
    return {scale, fmaf(0.5f, scale, -least)};
#endif
#else
    const unsigned int both = held.words[0];
    return {__uint_as_float(both << 16) * UNITS, __uint_as_float(both & 0xffff0000u)};  // bfloat16
#endif
}

__device__ __forceinline__ Affine group_affine(
    const void* scales, unsigned int row, unsigned int octet, Width width) {
    if (BITS == 8) return {1.0f, 0.0f};
    return affine_of(width.scales_of(scales, row, octet), octet);
}

__device__ __forceinline__ float row_scale(const void* scales, size_t row) {
    return BITS == 8 ? __ldg(static_cast<const float*>(scales) + row) * UNITS : 1.0f;
}

__device__ __forceinline__ Octet load_octet(
    const unsigned int* __restrict__ packed, unsigned int row, unsigned int octet, unsigned int octets) {
    if (IN_PLANES) {
        const unsigned int runs = octets / 4;
        const unsigned int* words = packed + static_cast<size_t>(row) * BITS * runs + octet / 4;
        const unsigned int begin = BITS * (octet % 4);  // of its bytes among those of the words
        const unsigned int first = __ldg(words + begin / 4 * runs);
        const unsigned int last = __ldg(words + (begin + BITS - 1) / 4 * runs);
        return octet_of(first, last, 8 * (begin % 4));
    }
    const size_t index = static_cast<size_t>(row) * octets + octet;
    if (BITS == 4) return {__ldg(packed + index), 0};
    const uint2 both = __ldg(reinterpret_cast<const uint2*>(packed) + index);
    return {both.x, both.y};
}

// `bias` may be null.
__device__ __forceinline__ float bias_of(const unsigned short* __restrict__ bias, unsigned int row) {
    return bias == nullptr ? 0.0f : load_activation(bias + row);
}

// Adds the sums of all lanes, then those of the `ACROSS` warps that share rows, and writes them.
// `sums[t * ROWS + r]` belongs to token `first_token + t` and row `first_row + r`.
template <int ACROSS, int TOKENS, int ROWS>
__device__ __forceinline__ void write_sums(
    float (&sums)[TOKENS * ROWS], const void* scales, const unsigned short* __restrict__ bias,
    unsigned short* __restrict__ out, unsigned int first_token, unsigned int tokens,
    unsigned int first_row, unsigned int rows) {
    constexpr int SUMS = TOKENS * ROWS;
    __shared__ float partial[WARPS][SUMS];
    __shared__ unsigned int first_rows[WARPS];
    const unsigned int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    add_lanes<SUMS, SUMS / 2>(sums, lane);
    if (lane % (LANES / SUMS) == 0) partial[warp][lane * SUMS / LANES] = sums[0];
    if (lane == 0) first_rows[warp] = first_row;
    __syncthreads();

    constexpr unsigned int WRITTEN = WARPS / ACROSS * SUMS;  // at most one a thread
    if (threadIdx.x >= WRITTEN) return;
    const unsigned int first_warp = threadIdx.x / SUMS * ACROSS, within = threadIdx.x % SUMS;
    const unsigned int row = first_rows[first_warp] + within % ROWS;
    const unsigned int token = first_token + within / ROWS;
    if (token >= tokens) return;
    float sum = 0.0f;
#pragma unroll
    for (int across = 0; across < ACROSS; ++across) sum += partial[first_warp + across][within];
    const float result = fmaf(sum, row_scale(scales, row), bias_of(bias, row));
    out[static_cast<size_t>(token) * rows + row] = to_activation(result);
}

// One token at a time: what counts is the bytes that a thread has in flight and the instructions
// per weight, which bind before the memory of an H200 does. So a thread asks for ROWS loads of 12
// to 24 bytes before it uses one, and neither the offset of the codes nor the zero is applied to
// each weight: with dot = sum of x * biased code and sums of x alone, which all rows share,
//     sum of x * weight = (dot - sum of x * code_zero) * scale + zero * (sum of x).
// Activations are read and converted once for ROWS rows. `x` is that of the token.
__device__ __forceinline__ void multiply_one(
    const unsigned short* __restrict__ x, const unsigned int* __restrict__ packed,
    const void* __restrict__ scales, const unsigned short* __restrict__ bias,
    unsigned short* __restrict__ out, unsigned int token, unsigned int tokens,
    unsigned int first_row, unsigned int rows, Width width) {
    constexpr int ROWS = 8;
    constexpr int OCTETS = BITS == 8 ? 2 : 4;  // of a thread's load
    constexpr int WORDS = BITS * OCTETS / 4;
    const unsigned int runs = width.octets / OCTETS;
    packed += static_cast<size_t>(first_row) * WORDS * runs;

    float sums[ROWS] = {};
    for (unsigned int run = threadIdx.x; run < runs; run += WARPS * LANES) {
        unsigned int words[ROWS][WORDS];
        Affine affine[ROWS][PARTS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (IN_PLANES) {
#pragma unroll
                for (int w = 0; w < WORDS; ++w)
                    words[r][w] = __ldg(packed + (r * WORDS + w) * runs + run);
            } else {
                const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(packed) + r * runs + run);
                words[r][0] = loaded.x, words[r][1] = loaded.y, words[r][2] = loaded.z;
                words[r][WORDS - 1] = loaded.w;
            }
            const Scales held = BITS == 8 ? Scales{} : width.scales_of(scales, first_row + r, run * OCTETS);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                affine[r][part] = affine_of(held, part * OCTETS / PARTS);
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            constexpr int OWN = OCTETS / PARTS;
            float dots[ROWS] = {}, x_sums[CLASSES] = {};
#pragma unroll
            for (int o = part * OWN; o < (part + 1) * OWN; ++o) {
                float values[OCTET];
                load_activations(x + (run * OCTETS + o) * OCTET, values);
#pragma unroll
                for (int i = 0; i < OCTET; ++i) x_sums[code_class(i)] += values[i];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const int first = BITS * o / 4, next = first + 1 < WORDS ? first + 1 : first;
                    Octet octet = {words[r][first], words[r][next]};
                    if (IN_PLANES) octet = octet_of(octet.low, octet.high, 8 * (BITS * o % 4));
#pragma unroll
                    for (int i = 0; i < OCTET; ++i)
                        dots[r] = fmaf(values[i], biased_code(octet, i), dots[r]);
                }
            }
            float x_sum = 0.0f, x_offset = 0.0f;
#pragma unroll
            for (int k = 0; k < CLASSES; ++k) {
                x_sum += x_sums[k];
                x_offset = fmaf(x_sums[k], code_zero(k), x_offset);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Affine own = affine[r][part];
                sums[r] += fmaf(dots[r] - x_offset, own.scale, own.zero * x_sum);
            }
        }
    }
    write_sums<WARPS, 1, ROWS>(sums, scales, bias, out, token, tokens, first_row, rows);
}

constexpr unsigned int ONE_ROWS = 8;  // of `multiply_one`

// 1-D grid: all tokens for the first rows, then for the next. The last block takes the last ones, so
// that it may repeat some of the block before; `rows` is at least ONE_ROWS.
extern "C" __global__ void __launch_bounds__(WARPS * LANES) one_token(
    const unsigned short* __restrict__ x, const unsigned int* __restrict__ packed,
    const void* __restrict__ scales, const unsigned short* __restrict__ bias,
    unsigned short* __restrict__ out, unsigned int tokens, unsigned int rows, Width width) {
    const unsigned int token = blockIdx.x % tokens;
    const unsigned int first_row = min(blockIdx.x / tokens * ONE_ROWS, rows - ONE_ROWS);
    x += static_cast<size_t>(token) * width.octets * OCTET;
    multiply_one(x, packed, scales, bias, out, token, tokens, first_row, rows, width);
}

// The same where each product asks for an expert: `experts` [asked] of the weights, scales and
// biases that lie one after another. Product i is of row i / per_token of `x`. Blocks of products
// that ask for the same expert run beside each other, so that its weight comes from memory once.
extern "C" __global__ void __launch_bounds__(WARPS * LANES) one_expert(
    const unsigned short* __restrict__ x, const unsigned int* __restrict__ packed,
    const void* __restrict__ scales, const unsigned short* __restrict__ bias,
    const long long* __restrict__ experts, unsigned short* __restrict__ out, unsigned int asked,
    unsigned int per_token, unsigned int rows, Width width) {
    const unsigned int product = blockIdx.x % asked;
    const unsigned int first_row = min(blockIdx.x / asked * ONE_ROWS, rows - ONE_ROWS);
    // rows of other experts
    const size_t before = static_cast<unsigned int>(__ldg(experts + product)) * rows;
    x += static_cast<size_t>(product / per_token) * width.octets * OCTET;
    packed += before * width.octets * BITS / 4;
    scales = width.scales_from(scales, before);
    bias = bias == nullptr ? nullptr : bias + before;
    multiply_one(x, packed, scales, bias, out, product, asked, first_row, rows, width);
}

// TOKENS tokens at once, ROWS x TOKENS sums in registers: arithmetic binds, so weights are restored
// once for all tokens. Neighbouring lanes take neighbouring octets, since here the activations are
// most of what is read, and two warps read the same ones for different rows.
// 1-D grid: all runs of TOKENS tokens for the first WARPS / ACROSS * ROWS rows, then for the next.
// As above, the last rows may be computed twice.
template <int TOKENS>
__device__ __forceinline__ void many_tokens(
    const unsigned short* __restrict__ x, const unsigned int* __restrict__ packed,
    const void* __restrict__ scales, const unsigned short* __restrict__ bias,
    unsigned short* __restrict__ out, unsigned int tokens, unsigned int rows, Width width) {
    constexpr int ROWS = 4, ACROSS = 2;  // warps that share rows
    const unsigned int runs = (tokens + TOKENS - 1) / TOKENS;
    const unsigned int first_token = blockIdx.x % runs * TOKENS;
    const unsigned int down = blockIdx.x / runs * (WARPS / ACROSS) + threadIdx.x / (ACROSS * LANES);
    const unsigned int first_row = min(down * ROWS, rows - ROWS);

    float sums[TOKENS * ROWS] = {};
    for (unsigned int octet = threadIdx.x % (ACROSS * LANES); octet < width.octets;
         octet += ACROSS * LANES) {
        Octet codes[ROWS];
        Affine affine[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            codes[r] = load_octet(packed, first_row + r, octet, width.octets);
            affine[r] = group_affine(scales, first_row + r, octet, width);
        }
        float weights[ROWS][OCTET];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int i = 0; i < OCTET; ++i) {
                const float code = centred_code(codes[r], i);
                weights[r][i] = BITS == 8 ? code : fmaf(code, affine[r].scale, affine[r].zero);
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const size_t token = min(first_token + t, tokens - 1);
            float values[OCTET];
            load_activations(x + (token * width.octets + octet) * OCTET, values);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int i = 0; i < OCTET; ++i)
                    sums[t * ROWS + r] = fmaf(values[i], weights[r][i], sums[t * ROWS + r]);
            }
        }
    }
    write_sums<ACROSS, TOKENS, ROWS>(sums, scales, bias, out, first_token, tokens, first_row, rows);
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES) four_tokens(
    const unsigned short* __restrict__ x, const unsigned int* __restrict__ packed,
    const void* __restrict__ scales, const unsigned short* __restrict__ bias,
    unsigned short* __restrict__ out, unsigned int tokens, unsigned int rows, Width width) {
    many_tokens<4>(x, packed, scales, bias, out, tokens, rows, width);
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES) eight_tokens(
    const unsigned short* __restrict__ x, const unsigned int* __restrict__ packed,
    const void* __restrict__ scales, const unsigned short* __restrict__ bias,
    unsigned short* __restrict__ out, unsigned int tokens, unsigned int rows, Width width) {
    many_tokens<8>(x, packed, scales, bias, out, tokens, rows, width);
}

// Rows [first_row, first_row + rows) as activations' type: `out` [rows, columns]. A thread writes
// one octet, 16 bytes. 1-D grid over the octets of these rows.
extern "C" __global__ void __launch_bounds__(WARPS * LANES) restore(
    const unsigned int* __restrict__ packed, const void* __restrict__ scales,
    unsigned short* __restrict__ out, unsigned int first_row, unsigned int rows, Width width) {
    const size_t index = static_cast<size_t>(blockIdx.x) * (WARPS * LANES) + threadIdx.x;
    if (index >= static_cast<size_t>(rows) * width.octets) return;
    const unsigned int row = first_row + index / width.octets, octet = index % width.octets;

    const Octet codes = load_octet(packed, row, octet, width.octets);
    Affine affine = group_affine(scales, row, octet, width);
    if (BITS == 8) affine.scale = row_scale(scales, row);
    unsigned int words[4];
#pragma unroll
    for (int i = 0; i < OCTET; i += 2) {
        const float even = fmaf(centred_code(codes, i), affine.scale, affine.zero);
        const float odd = fmaf(centred_code(codes, i + 1), affine.scale, affine.zero);
        words[i / 2] = to_activation(even) | static_cast<unsigned int>(to_activation(odd)) << 16;
    }
    reinterpret_cast<uint4*>(out)[index] = make_uint4(words[0], words[1], words[2], words[3]);
}

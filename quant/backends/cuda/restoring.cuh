// Codes of 3 to 6 and 8 bit restored to pairs of 16-bit numbers in registers, for tensor cores.

#ifdef TENSOR_CORES

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

#if SUPER_BLOCKS

// Numbers of 16 bit do not hold the scales: weights are computed in float32 and rounded once, in the
// order of `in_order`.
using Steps = Affine;

__device__ __forceinline__ Steps steps_of(Scales held, unsigned int octet) {
    return affine_of(held, octet);
}

__device__ __forceinline__ void restore_octet(Octet codes, Steps steps, unsigned int (&weights)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        weights[i] = rounded_pair(
            fmaf(centred_code(codes, i), steps.scale, steps.zero),
            fmaf(centred_code(codes, i + 4), steps.scale, steps.zero));
}

#else

// Scale and zero of a group in both halves of a word. The scale is that of codes between -1 and 1,
// about the largest weight of the group, which float16 holds wherever it holds the weight.
struct Steps {
    unsigned int scale, zero;
};

__device__ __forceinline__ Steps steps_of(Scales held, unsigned int) {
    if (BITS == 8) return {0, 0};
    const unsigned int affine = held.words[0];
    const float scale = __uint_as_float(affine << 16) * (1 << (BITS - 1));
#if BFLOAT16
    return {__byte_perm(__float_as_uint(scale), 0, 0x3232), __byte_perm(affine, 0, 0x3232)};
#else
    return {both(to_activation(scale)), both(to_activation(__uint_as_float(affine & 0xffff0000u)))};
#endif
}

// The weights of two codes, at the same bit of the halves of a word.
__device__ __forceinline__ unsigned int weight_pair(unsigned int codes, int bit, Steps steps) {
    const int power = MANTISSA + 1 - BITS - bit;
    const unsigned int biased =
        and_xor(codes, both(((1u << BITS) - 1) << bit), both(power_of_2(power)));
    const unsigned int code = fma_halves(biased, both(power_of_2(0)), both(below_power(power)));
    return fma_halves(code, steps.scale, steps.zero);
}

// The weights of an octet. Below 8 bit codes i and i + 4 share a word: moved to the same place of
// both its halves they become the mantissa of 2^power + (code * 2^(1 - BITS)), from which the offset
// subtracts exactly. At 8 bit codes 2i and 2i + 1 do, their scale is that of the row.
__device__ __forceinline__ void restore_octet(Octet codes, Steps steps, unsigned int (&weights)[4]) {
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
    } else if constexpr (BITS > 4) {
        // of codes 0 to 3 and 4 to 7 the two lowest bytes, and the two that follow the first
        const unsigned int lower = __byte_perm(codes.low, codes.high, 0x5410);
        const unsigned int upper = __byte_perm(codes.low, codes.high, 0x6521);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool is_low = BITS * (i + 1) <= 16;
            const int place = BITS * i - (is_low ? 0 : 8), room = MANTISSA - BITS;
            const int down = place > room ? place - room : 0, bit = place - down;
            weights[i] = weight_pair((is_low ? lower : upper) >> down, bit, steps);
        }
    } else {
        constexpr int AT_ONCE = MANTISSA / BITS;  // codes of a half that one shift serves
        unsigned int halves = codes.low;
        if (BITS == 3) halves = (halves & 0xfffu) | (halves << 4 & 0x0fff0000u);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned int moved = halves >> (i / AT_ONCE * AT_ONCE * BITS);
            weights[i] = weight_pair(moved, i % AT_ONCE * BITS, steps);
        }
    }
}

#endif

// Activations in the order of `restore_octet`.
__device__ __forceinline__ uint4 in_order(uint4 x) {
    if (BITS == 8) return x;
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                      __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
}

#endif

// What our CUDA sources share: 16-bit numbers, blocks and their lanes.
//
// It stands before each of them when NVRTC compiles it, with -D BFLOAT16=0|1 for the type of
// activations and -D CAPABILITY=60|70|75|80 ... for the GPU's. No header is included: NVRTC's wheel has
// none.

#ifdef __CUDACC_RTC__  // elsewhere whoever compiles this defines these

// The lower and the upper half of a word.
__device__ __forceinline__ void halves_to_floats(unsigned int word, float& low, float& high) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(low), "=f"(high)
        : "r"(word));
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// (word & mask) ^ other in one instruction, which takes one constant only: NVRTC makes two of it
// rather than keep the other in a register.
__device__ __forceinline__ unsigned int and_xor(
    unsigned int word, unsigned int mask, unsigned int other) {
    unsigned int result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(word), "r"(mask), "r"(other));
    return result;
}

#endif

constexpr int LANES = 32;
constexpr int WARPS = 4;
constexpr int OCTET = 8;

__device__ __forceinline__ unsigned short to_bfloat16(float value) {
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN
    return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ __forceinline__ unsigned short to_activation(float value) {
#if BFLOAT16
    return to_bfloat16(value);
#else
    return float_to_half(value);
#endif
}

__device__ __forceinline__ float load_activation(const unsigned short* __restrict__ x) {
    const unsigned int bits = __ldg(x);
#if BFLOAT16
    return __uint_as_float(bits << 16);
#else
    float value, none;
    halves_to_floats(bits, value, none);
    return value;
#endif
}

// `x` is aligned to 16 bytes, and so is each octet of each token.
__device__ __forceinline__ void load_activations(
    const unsigned short* __restrict__ x, float (&values)[OCTET]) {
    const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(x));
    const unsigned int words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int i = 0; i < OCTET; i += 2) {
#if BFLOAT16
        values[i] = __uint_as_float(words[i / 2] << 16);
        values[i + 1] = __uint_as_float(words[i / 2] & 0xffff0000u);
#else
        halves_to_floats(words[i / 2], values[i], values[i + 1]);
#endif
    }
}

// Adds the sums of WIDTH neighbouring lanes. Each exchange halves the sums that a lane is left with,
// from 2 * LEFT: lane l of them ends with sum l * SUMS / WIDTH of SUMS, a power of two and at most
// WIDTH, in `sums[0]`.
template <int SUMS, int LEFT, int WIDTH = LANES>
__device__ __forceinline__ void add_lanes(float (&sums)[SUMS], unsigned int lane) {
    if constexpr (LEFT > 0) {
        constexpr int DISTANCE = WIDTH * LEFT / SUMS;
        const bool upper = lane & DISTANCE;
#pragma unroll
        for (int i = 0; i < LEFT; ++i) {
            const float given = upper ? sums[i] : sums[i + LEFT];
            const float kept = upper ? sums[i + LEFT] : sums[i];
            sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, DISTANCE);
        }
        add_lanes<SUMS, LEFT / 2, WIDTH>(sums, lane);
    } else {
#pragma unroll
        for (int distance = WIDTH / SUMS / 2; distance > 0; distance /= 2)
            sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], distance);
    }
}

// Whether this block is the last one of those that `arrived` counts, which it then begins anew: all
// that the others have written before can be read.
__device__ __forceinline__ bool is_last(unsigned int* arrived, unsigned int blocks, bool& shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared = atomicAdd(arrived, 1u) == blocks - 1;
        if (shared) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return shared;
}

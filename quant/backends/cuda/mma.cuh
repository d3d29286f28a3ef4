// Products of small matrices of 16-bit numbers, which warps compute together on tensor cores.
//
// -D CAPABILITY=70|75|80 or above chooses the instruction; bfloat16 takes 8.0.

#if CAPABILITY >= 70 && (CAPABILITY >= 80 || !BFLOAT16)

#define TENSOR_CORES

#ifdef __CUDACC_RTC__  // elsewhere whoever includes this file defines these

// a * b + c of both halves.
__device__ __forceinline__ unsigned int fma_halves(unsigned int a, unsigned int b, unsigned int c) {
    unsigned int result;
#if BFLOAT16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
#endif
    return result;
}

// The numbers of the lower and the upper half of a word, rounded.
__device__ __forceinline__ unsigned int rounded_pair(float low, float high) {
    unsigned int result;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(low), "f"(high));
#elif CAPABILITY >= 80
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(low), "f"(high));
#else
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(result)
        : "f"(low), "f"(high));
#endif
    return result;
}

// Fragments as the PTX ISA documents them: of m16n8k8, lane l has columns 2 * (l % 4) and the next of
// rows l / 4 (a[0]) and 8 further down (a[1]), the same rows of column l / 4 of `b`, and columns
// 2 * (l % 4) and the next of the sums in rows l / 4 and 8 further down. Of m16n8k16, a[2], a[3] and
// b[1] are 8 columns (rows) further on.
#if CAPABILITY >= 80
__device__ __forceinline__ void mma_m16n8k16(
    float* sums, const unsigned int (&a)[4], const unsigned int (&b)[2]) {
#if BFLOAT16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#elif CAPABILITY >= 75
__device__ __forceinline__ void mma_m16n8k8(
    float* sums, const unsigned int (&a)[2], const unsigned int (&b)[1]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}
#else
// Four products at once, each by lanes [4q, 4q + 4) and [4q + 16, 4q + 20): a lane has four columns of
// one row of `a`, four rows of one column of `b`, and of the sums those of `sum_row` and `sum_token`.
__device__ __forceinline__ void mma_m8n8k4(
    float* sums, const unsigned int (&a)[2], const unsigned int (&b)[2]) {
    asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),
          "+f"(sums[6]), "+f"(sums[7])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
}
#endif

#endif

#endif

// What CUDA sources find on a GPU, and the blocks and fibers that run them: see cuda_emulator.cpp.

#include <link.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

struct uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct Position {
    unsigned int x;
};

static Position threadIdx, blockIdx;

namespace emulator {

constexpr unsigned int WARP = 32, SECTOR = 32;
constexpr size_t STACK_BYTES = 64 * 1024;
constexpr int SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, TIMEOUT = 702,
              MISALIGNED = 716;

enum class State { fresh, runnable, at_exchange, at_barrier, done };

#ifdef __SANITIZE_ADDRESS__
using Place = ucontext_t;
#else
using Place = jmp_buf;  // whose changes make no system calls, as those of contexts do
#endif

struct Fiber {
    ucontext_t context;  // where it begins
    Place place;
    std::vector<char> stack;
    State state = State::fresh;
    const void* offered;
};

std::vector<Fiber> fibers;
Place scheduler;
unsigned int running;
int error;
std::mt19937 order;
bool shuffled = false;
size_t moved = 0;
std::unordered_set<uintptr_t> sectors;  // of the block that runs
std::vector<std::pair<uintptr_t, uintptr_t>> allowed;  // half-open; empty: all is
void (*kernel)(void**);
void** arguments;

#ifdef __SANITIZE_ADDRESS__

const void* scheduler_stack;
size_t scheduler_bytes;

void switch_to(Place& from, Place& to, const void* stack, size_t bytes) {
    void* own = nullptr;
    __sanitizer_start_switch_fiber(&own, stack, bytes);
    swapcontext(&from, &to);
    __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
}

void resume(Fiber& fiber, bool begins) {
    Place& to = begins ? fiber.context : fiber.place;
    switch_to(scheduler, to, fiber.stack.data(), STACK_BYTES);
}

void leave(Fiber& fiber) { switch_to(fiber.place, scheduler, scheduler_stack, scheduler_bytes); }

#else

void resume(Fiber& fiber, bool begins) {
    if (_setjmp(scheduler) != 0) return;
    if (begins) setcontext(&fiber.context);
    _longjmp(fiber.place, 1);
}

void leave(Fiber& fiber) {
    if (_setjmp(fiber.place) == 0) _longjmp(scheduler, 1);
}

#endif

void wait(State state) {
    fibers[running].state = state;
    leave(fibers[running]);
}

// Runs the kernel block after block.
void fiber_main() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
#endif
    for (;;) {
        kernel(arguments);
        wait(State::done);
    }
}

// What every lane of the warp offers here, `use`d while all of them wait: `use(of)` reads lane l's as
// `of(l)`.
template <class T, class Use>
auto exchange(const T& offered, Use use) {
    const unsigned int first = running / WARP * WARP;
    fibers[running].offered = &offered;
    wait(State::at_exchange);
    const auto result = use([first](unsigned int lane) -> const T& {
        return *static_cast<const T*>(fibers[first + lane].offered);
    });
    wait(State::at_exchange);  // nobody offers anew before all have read
    return result;
}

// A fiber that is not done with the block before, after an error, begins anew.
void start(Fiber& fiber) {
    if (fiber.state == State::done) {
        fiber.state = State::runnable;
        return;
    }
    getcontext(&fiber.context);
    fiber.stack.resize(STACK_BYTES);
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(fiber.stack.data(), STACK_BYTES);
#endif
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    fiber.state = State::fresh;
    makecontext(&fiber.context, fiber_main, 0);
}

// Lets a group go on whose members all wait in `state`, or have ended where that is allowed.
bool release(size_t first, size_t count, State state, bool may_have_ended) {
    bool any = false;
    for (size_t i = first; i < first + count; ++i) {
        const bool waits = fibers[i].state == state;
        if (!waits && !(may_have_ended && fibers[i].state == State::done)) return false;
        any |= waits;
    }
    for (size_t i = first; i < first + count; ++i)
        if (fibers[i].state == state) fibers[i].state = State::runnable;
    return any;
}

std::vector<unsigned int> turns(size_t count) {
    std::vector<unsigned int> found(count);
    std::iota(found.begin(), found.end(), 0u);
    if (shuffled) std::shuffle(found.begin(), found.end(), order);
    return found;
}

void spoil_shared();

void run_block() {
    spoil_shared();
    for (Fiber& fiber : fibers) start(fiber);
    for (bool progress = true; progress;) {
        progress = false;
        for (unsigned int turn : turns(fibers.size())) {
            Fiber& fiber = fibers[turn];
            if (fiber.state != State::fresh && fiber.state != State::runnable) continue;
            running = threadIdx.x = turn;
            resume(fiber, std::exchange(fiber.state, State::runnable) == State::fresh);
            progress = true;
        }
        for (size_t warp = 0; warp < fibers.size(); warp += WARP)
            progress |= release(warp, WARP, State::at_exchange, false);
        progress |= release(0, fibers.size(), State::at_barrier, true);
    }
    for (const Fiber& fiber : fibers)
        if (fiber.state != State::done) error = TIMEOUT;
}

template <class To, class From>
To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace emulator

// --- What the source is written in.

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static thread_local  // nothing else is: spoil_shared finds it by that

using std::fmaf;
using std::max;
using std::min;

static void __syncthreads() { emulator::wait(emulator::State::at_barrier); }

// Blocks run one after another, and the threads of each in turns.
[[maybe_unused]] static void __threadfence() {}
[[maybe_unused]] static unsigned int atomicAdd(unsigned int* address, unsigned int value) {
    return std::exchange(*address, *address + value);
}
[[maybe_unused]] static int atomicAdd(int* address, int value) {
    return std::exchange(*address, *address + value);
}

template <class T>
static T shuffled(unsigned int mask, T value, unsigned int lane) {
    if (mask != 0xffffffffu) emulator::error = emulator::INVALID_VALUE;
    return emulator::exchange(value, [lane](auto of) { return of(lane % emulator::WARP); });
}
template <class T>
static T __shfl_xor_sync(unsigned int mask, T value, int distance) {
    return shuffled(mask, value, emulator::running % emulator::WARP ^ distance);
}
template <class T>
static T __shfl_sync(unsigned int mask, T value, int lane) {
    return shuffled(mask, value, lane);
}

template <class T>
static T __ldg(const T* address) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(address);
    bool legal = emulator::allowed.empty();
    for (const auto& [start, end] : emulator::allowed)
        legal |= first >= start && first + sizeof(T) <= end;
    emulator::sectors.insert(first / emulator::SECTOR);
    if (!legal) emulator::error = emulator::ILLEGAL_ADDRESS;
    if (first % sizeof(T) != 0) emulator::error = emulator::MISALIGNED;
    return emulator::error == emulator::SUCCESS ? *address : T{};
}

static float __uint_as_float(unsigned int bits) { return emulator::bits_as<float>(bits); }
[[maybe_unused]] static unsigned int __float_as_uint(float value) {
    return emulator::bits_as<unsigned int>(value);
}
static uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
    return {x, y, z, w};
}
static unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift) {
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    return static_cast<unsigned int>(both >> (shift % 32));
}
[[maybe_unused]] static int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8)
        sum += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
    return sum;
}
// Of NaN the GPU makes 0, and of numbers beyond int32 its ends.
[[maybe_unused]] static int __float2int_rz(float value) {
    if (std::isnan(value)) return 0;
    return static_cast<int>(std::min(2147483520.0f, std::max(-2147483648.0f, value)));
}
[[maybe_unused]] static float __fmul_rn(float a, float b) { return a * b; }
[[maybe_unused]] static float __fadd_rn(float a, float b) { return a + b; }

namespace emulator {

// A lane's 8-bit codes of both factors, as the PTX ISA documents the fragments of m16n8k32: four a
// word. Code `k` of a row of `a` is in lane 4 * (row % 8) + k % 16 / 4, as is that of a column of `b`.
struct CodeFragments {
    unsigned int a[4], b[2];

    static unsigned int lane(unsigned int row, unsigned int k) { return row % 8 * 4 + k % 16 / 4; }
    static int code(unsigned int word, unsigned int k) {
        return static_cast<signed char>(word >> k % 4 * 8);
    }
};

// What so many codes of row `row` and column `column` add up to.
template <class Of>
int code_product(Of of, unsigned int row, unsigned int column, unsigned int codes) {
    int sum = 0;
    for (unsigned int k = 0; k < codes; ++k) {
        const unsigned int a = of(CodeFragments::lane(row, k)).a[row / 8 + k / 16 * 2];
        const unsigned int b = of(CodeFragments::lane(column, k)).b[k / 16];
        sum += CodeFragments::code(a, k) * CodeFragments::code(b, k);
    }
    return sum;
}

}  // namespace emulator

[[maybe_unused]] static void mma_m16n8k32(
    int (&sums)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    const unsigned int lane = emulator::running % emulator::WARP;
    const emulator::CodeFragments own{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    emulator::exchange(own, [&](auto of) {
        for (unsigned int i = 0; i < 4; ++i)
            sums[i] += emulator::code_product(of, lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2, 32);
        return 0;
    });
}
[[maybe_unused]] static void mma_m8n8k16(int& low, int& high, unsigned int a, unsigned int b) {
    const unsigned int lane = emulator::running % emulator::WARP;
    emulator::exchange(emulator::CodeFragments{{a}, {b}}, [&](auto of) {
        low += emulator::code_product(of, lane / 4, lane % 4 * 2, 16);
        high += emulator::code_product(of, lane / 4, lane % 4 * 2 + 1, 16);
        return 0;
    });
}
static unsigned int and_xor(unsigned int word, unsigned int mask, unsigned int other) {
    return (word & mask) ^ other;
}
[[maybe_unused]] static void halves_to_floats(unsigned int word, float& low, float& high) {
    low = emulator::bits_as<_Float16>(static_cast<unsigned short>(word));
    high = emulator::bits_as<_Float16>(static_cast<unsigned short>(word >> 16));
}
[[maybe_unused]] static unsigned short float_to_half(float value) {
    return emulator::bits_as<unsigned short>(static_cast<_Float16>(value));
}

// Written by another block of the same launch.
template <class T>
static T __ldcg(const T* address) {
    emulator::sectors.insert(reinterpret_cast<uintptr_t>(address) / emulator::SECTOR);
    return *address;
}
[[maybe_unused]] static unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int s) {
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    unsigned int result = 0;
    for (int i = 0; i < 4; ++i)
        result |= static_cast<unsigned int>(both >> (s >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}

// --- 16-bit numbers, in the type of activations, and the instructions of tensor cores.

namespace emulator {

extern const bool is_bfloat16;  // the type of activations, else half precision

double number_of(unsigned short bits) {
    if (is_bfloat16) return bits_as<float>(static_cast<unsigned int>(bits) << 16);
    return bits_as<_Float16>(bits);
}

unsigned short rounded(double value) {
    if (!is_bfloat16) return bits_as<unsigned short>(static_cast<_Float16>(value));
    if (value == 0.0 || !std::isfinite(value))
        return bits_as<unsigned int>(static_cast<float>(value)) >> 16;
    int exponent;
    const double mantissa = std::frexp(value, &exponent);
    const double kept = std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
    return bits_as<unsigned int>(static_cast<float>(kept)) >> 16;
}

template <size_t WORDS>
struct Numbers {
    double at[2 * WORDS];

    explicit Numbers(const unsigned int (&words)[WORDS]) {
        for (size_t i = 0; i < 2 * WORDS; ++i)
            at[i] = number_of(static_cast<unsigned short>(words[i / 2] >> 16 * (i % 2)));
    }
};

// Products of 16 rows, 8 columns and 8 * STEPS in between.
template <size_t STEPS>
void multiply_16_rows(
    float* sums, const unsigned int (&a)[2 * STEPS], const unsigned int (&b)[STEPS]) {
    struct Fragments {
        Numbers<2 * STEPS> a;
        Numbers<STEPS> b;
    };
    const unsigned int lane = running % WARP;
    exchange(Fragments{Numbers(a), Numbers(b)}, [&](auto of) {
        for (unsigned int i = 0; i < 4; ++i) {
            const unsigned int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            double sum = sums[i];
            for (unsigned int k = 0; k < 8 * STEPS; ++k) {
                const unsigned int step = k / 8, holder = k % 8 / 2, half = k % 2;
                sum += of(row % 8 * 4 + holder).a.at[(2 * step + row / 8) * 2 + half] *
                       of(column * 4 + holder).b.at[2 * step + half];
            }
            sums[i] = static_cast<float>(sum);
        }
        return 0;
    });
}

}  // namespace emulator

[[maybe_unused]] static unsigned int fma_halves(unsigned int a, unsigned int b, unsigned int c) {
    unsigned int result = 0;
    for (int at = 0; at < 32; at += 16) {
        const auto number = [at](unsigned int word) {
            return emulator::number_of(static_cast<unsigned short>(word >> at));
        };
        const double exact = std::fma(number(a), number(b), number(c));
        result |= static_cast<unsigned int>(emulator::rounded(exact)) << at;
    }
    return result;
}
[[maybe_unused]] static unsigned int rounded_pair(float low, float high) {
    return emulator::rounded(low) | static_cast<unsigned int>(emulator::rounded(high)) << 16;
}
[[maybe_unused]] static void mma_m16n8k16(
    float* sums, const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    emulator::multiply_16_rows<2>(sums, a, b);
}
[[maybe_unused]] static void mma_m16n8k8(
    float* sums, const unsigned int (&a)[2], const unsigned int (&b)[1]) {
    emulator::multiply_16_rows<1>(sums, a, b);
}
// Four quarters of the warp with a product of 8 rows, 8 columns and 4 in between each.
[[maybe_unused]] static void mma_m8n8k4(
    float* sums, const unsigned int (&a)[2], const unsigned int (&b)[2]) {
    struct Fragments {
        emulator::Numbers<2> a, b;
    };
    const unsigned int lane = emulator::running % emulator::WARP, first = lane % 16 / 4 * 4;
    const auto holder = [first](unsigned int index) { return first + index % 4 + index / 4 * 16; };
    emulator::exchange(Fragments{emulator::Numbers(a), emulator::Numbers(b)}, [&](auto of) {
        for (unsigned int i = 0; i < 8; ++i) {
            const unsigned int row = (lane & 1) + (i & 2) + lane / 16 * 4;
            const unsigned int column = (i & 4) + (lane & 2) + (i & 1);
            double sum = sums[i];
            for (int k = 0; k < 4; ++k) sum += of(holder(row)).a.at[k] * of(holder(column)).b.at[k];
            sums[i] = static_cast<float>(sum);
        }
        return 0;
    });
}

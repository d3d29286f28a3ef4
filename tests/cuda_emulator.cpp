// Runs a CUDA source on the CPU, behind those functions of the CUDA driver that its users call.
//
// Compiled with the options of the GPU's compiler, -D SOURCE="file.cu" and -D KERNELS="KERNEL(name) ...".
// Each thread of a block is a fiber, and blocks run one after another, both in the order that `seed`
// draws. Shared memory begins as NaN. A fiber runs until it meets a barrier or an exchange within its
// warp (a shuffle, a matrix instruction) and goes on when all that have to meet there have come; if some never come, or an address is not aligned to what
// is loaded from it or outside the memory that `allow` named, the launch returns the driver's error code.
// `moved_bytes` counts what blocks have moved since it was asked last: of each block every sector of
// 32 bytes that it loads, once.
//
// `cuda_emulator.h` is included by the compiler's options, as most of the time goes into compiling it.

#if BFLOAT16
const bool emulator::is_bfloat16 = true;
#else
const bool emulator::is_bfloat16 = false;
#endif

#include SOURCE

extern "C" void allow(const void* start, size_t bytes) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(start);
    emulator::allowed.emplace_back(first, first + bytes);
}

extern "C" void allow_everything() { emulator::allowed.clear(); }

extern "C" void seed(unsigned int number) {
    emulator::shuffled = number != 0;
    emulator::order.seed(number);
}

extern "C" size_t moved_bytes() { return std::exchange(emulator::moved, 0); }

void emulator::spoil_shared() {
    dl_iterate_phdr([](dl_phdr_info* info, size_t, void*) {
        const uintptr_t here = reinterpret_cast<uintptr_t>(&spoil_shared);
        bool ours = false;
        size_t bytes = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& part = info->dlpi_phdr[i];
            const uintptr_t first = info->dlpi_addr + part.p_vaddr;
            ours |= part.p_type == PT_LOAD && here >= first && here < first + part.p_memsz;
            if (part.p_type == PT_TLS) bytes = part.p_memsz;
        }
        if (ours && info->dlpi_tls_data != nullptr) std::memset(info->dlpi_tls_data, 0xff, bytes);
        return ours ? 1 : 0;
    }, nullptr);
}

// --- The driver.

namespace emulator {

template <auto F>
struct Caller;

template <class... A, void (*F)(A...)>
struct Caller<F> {
    static void run(void** values) { call(values, std::index_sequence_for<A...>()); }

    template <size_t... I>
    static void call(void** values, std::index_sequence<I...>) {
        F(*static_cast<A*>(values[I])...);
    }
};

struct Kernel {
    std::string_view name;
    void (*run)(void**);
};

#define KERNEL(name) {#name, Caller<name>::run},
Kernel kernels[] = {KERNELS};

}  // namespace emulator

extern "C" int cuModuleLoadData(void** module, const void* image) {
    *module = const_cast<void*>(image);
    return image == nullptr ? emulator::INVALID_VALUE : emulator::SUCCESS;
}

extern "C" int cuModuleGetFunction(void** function, void*, const char* name) {
    for (emulator::Kernel& kernel : emulator::kernels) {
        if (kernel.name == name) {
            *function = &kernel;
            return emulator::SUCCESS;
        }
    }
    return emulator::NOT_FOUND;
}

extern "C" int cuLaunchKernel(
    void* function, unsigned int blocks, unsigned int blocks_y, unsigned int blocks_z,
    unsigned int threads, unsigned int threads_y, unsigned int threads_z, unsigned int, void*,
    void** arguments, void**) {
    using namespace emulator;
    if (blocks == 0 || blocks_y * blocks_z * threads_y * threads_z != 1 || threads % WARP != 0)
        return INVALID_VALUE;
    error = SUCCESS;
    kernel = static_cast<Kernel*>(function)->run;
    emulator::arguments = arguments;
    fibers.resize(threads);
    for (unsigned int turn : turns(blocks)) {
        blockIdx.x = turn;
        if (error == SUCCESS) run_block();
        moved += SECTOR * sectors.size();
        sectors.clear();
    }
    return error;
}

extern "C" int cuGetErrorString(int code, const char** text) {
    *text = code == emulator::MISALIGNED        ? "misaligned address"
            : code == emulator::ILLEGAL_ADDRESS ? "illegal address"
            : code == emulator::TIMEOUT         ? "threads wait for others that never come"
                                                : "invalid value";
    return emulator::SUCCESS;
}

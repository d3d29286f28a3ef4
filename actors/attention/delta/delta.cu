// A decode step of a mixer with the gated delta rule: its causal convolution, the change of each
// request's state, and the gated norm of what its query finds.
//
// Compiled at run time by NVRTC for one GPU, behind numbers.cuh, with -D BFLOAT16=0|1 (the type
// of projections, of the convolution's inputs and of results), -D KEY_DIM and -D VALUE_DIM (multiples
// of 4, at most 128) and -D CONV_WIDTH (2 to 8). States and all sums are in float32.

#if KEY_DIM % 4 != 0 || KEY_DIM > 128 || VALUE_DIM % 4 != 0 || VALUE_DIM > 128
#error "KEY_DIM and VALUE_DIM are multiples of 4, at most 128"
#endif
#if CONV_WIDTH < 2 || CONV_WIDTH > 8
#error "CONV_WIDTH is 2 to 8"
#endif

constexpr int THREADS = WARPS * LANES;
constexpr int ROWS = KEY_DIM / WARPS;  // of a state, that a warp holds
constexpr int QUADS = VALUE_DIM / 4;
constexpr float NORM_EPS = 1e-6f;  // of queries and keys, as in transformers

__device__ __forceinline__ float as_float(unsigned short bits) {
#if BFLOAT16
    return __uint_as_float(static_cast<unsigned int>(bits) << 16);
#else
    float value, none;
    halves_to_floats(bits, value, none);
    return value;
#endif
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// 1-D grid over the rows, and of each the blocks of channels. `held` `[slots, CONV_WIDTH - 1,
// channels]` are the last inputs of each slot, which move on by one; `taps` `[channels, CONV_WIDTH]`.
// A row in slot -1 is nobody's, here and below: it changes nothing, and its results are zeros.
extern "C" __global__ void __launch_bounds__(WARPS * LANES) convolve(
    const unsigned short* __restrict__ mixed, const unsigned short* __restrict__ taps,
    const long long* __restrict__ slots, unsigned short* held, float* __restrict__ out,
    unsigned int channels) {
    const unsigned int parts = (channels + THREADS - 1) / THREADS;
    const unsigned int channel = blockIdx.x % parts * THREADS + threadIdx.x;
    if (channel >= channels) return;
    const size_t row = blockIdx.x / parts;
    const long long slot = __ldg(slots + row);
    if (slot < 0) return;
    unsigned short* own = held + static_cast<size_t>(slot) * (CONV_WIDTH - 1) * channels;
    unsigned short inputs[CONV_WIDTH];
#pragma unroll
    for (int i = 0; i < CONV_WIDTH - 1; ++i) inputs[i] = own[i * static_cast<size_t>(channels) + channel];
    inputs[CONV_WIDTH - 1] = __ldg(mixed + row * channels + channel);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < CONV_WIDTH; ++i)
        sum += as_float(inputs[i]) *
               load_activation(taps + static_cast<size_t>(channel) * CONV_WIDTH + i);
#pragma unroll
    for (int i = 0; i < CONV_WIDTH - 1; ++i)
        own[i * static_cast<size_t>(channels) + channel] = inputs[i + 1];
    out[row * channels + channel] = sum * sigmoid(sum);
}

// Numbers of heads, and the epsilon of the norm behind them.
struct Heads {
    unsigned int keys, values;
    float eps;
};

// The sums of three values over a block, the same on all threads; `parts` is used once.
__device__ __forceinline__ void sums_of_block(float (&values)[3], float (&parts)[3][WARPS]) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        values[i] = sum_of_lanes(values[i]);
        if (threadIdx.x % LANES == 0) parts[i][threadIdx.x / LANES] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        values[i] = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) values[i] += parts[i][warp];
    }
}

// 1-D grid over rows and heads of values. A block reads a head's state `[KEY_DIM, VALUE_DIM]` once,
// keeps it in registers, and writes it once: warp w has the rows w, w + WARPS, ..., a lane four
// neighbouring columns. What the query finds in the changed state is what it finds in the old one, and
// as much more as it is like the key.
extern "C" __global__ void __launch_bounds__(WARPS * LANES) delta_step(
    const float* __restrict__ convolved, const unsigned short* __restrict__ gates,
    const unsigned short* __restrict__ betas, const unsigned short* __restrict__ decays,
    const float* __restrict__ rates, const float* __restrict__ biases,
    const unsigned short* __restrict__ weight, const long long* __restrict__ slots, float* states,
    unsigned short* __restrict__ out, Heads heads) {
    __shared__ float query[KEY_DIM], key[KEY_DIM], parts[2][3][WARPS];
    __shared__ float4 known[WARPS][QUADS], found[WARPS][QUADS], change[QUADS];
    const unsigned int thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
    const unsigned int row = blockIdx.x / heads.values, head = blockIdx.x % heads.values;
    const unsigned int key_head = head / (heads.values / heads.keys);
    const size_t width = static_cast<size_t>(2 * heads.keys * KEY_DIM + heads.values * VALUE_DIM);
    const float* own = convolved + row * width;
    const size_t at = static_cast<size_t>(row) * heads.values + head;
    const long long slot = __ldg(slots + row);
    if (slot < 0) {  // all threads of the block
        if (thread < VALUE_DIM) out[at * VALUE_DIM + thread] = 0;
        return;
    }
    const size_t of_slot = static_cast<size_t>(slot) * heads.values + head;
    float4* state = reinterpret_cast<float4*>(states) + of_slot * KEY_DIM * QUADS + lane;
    const bool has_columns = lane < QUADS;

    float4 held[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        held[r] = has_columns ? state[(r * WARPS + warp) * QUADS] : float4{0.0f, 0.0f, 0.0f, 0.0f};
    float sums[3] = {};
    if (thread < KEY_DIM) {
        const float q = __ldg(own + key_head * KEY_DIM + thread);
        const float k = __ldg(own + (heads.keys + key_head) * KEY_DIM + thread);
        query[thread] = q;
        key[thread] = k;
        sums[0] = q * q;
        sums[1] = k * k;
        sums[2] = q * k;
    }
    sums_of_block(sums, parts[0]);
    const float query_scale = 1.0f / sqrtf((sums[0] + NORM_EPS) * KEY_DIM);
    const float key_scale = 1.0f / sqrtf(sums[1] + NORM_EPS);

    float4 knows = {}, finds = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float q = query[r * WARPS + warp], k = key[r * WARPS + warp];
        knows.x = fmaf(k, held[r].x, knows.x);
        knows.y = fmaf(k, held[r].y, knows.y);
        knows.z = fmaf(k, held[r].z, knows.z);
        knows.w = fmaf(k, held[r].w, knows.w);
        finds.x = fmaf(q, held[r].x, finds.x);
        finds.y = fmaf(q, held[r].y, finds.y);
        finds.z = fmaf(q, held[r].z, finds.z);
        finds.w = fmaf(q, held[r].w, finds.w);
    }
    if (has_columns) {
        known[warp][lane] = knows;
        found[warp][lane] = finds;
    }
    __syncthreads();

    const float decay = expf(
        __ldg(rates + head) * softplus(load_activation(decays + at) + __ldg(biases + head)));
    float result = 0.0f;
    if (thread < VALUE_DIM) {
        float before = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            before += reinterpret_cast<const float*>(known[w])[thread];
            result += reinterpret_cast<const float*>(found[w])[thread];
        }
        const float value = __ldg(own + 2 * heads.keys * KEY_DIM + head * VALUE_DIM + thread);
        const float beta = sigmoid(load_activation(betas + at));
        const float changes = (value - decay * key_scale * before) * beta;
        result = decay * query_scale * result + sums[2] * query_scale * key_scale * changes;
        reinterpret_cast<float*>(change)[thread] = key_scale * changes;
    }
    float squares[3] = {result * result, 0.0f, 0.0f};
    sums_of_block(squares, parts[1]);  // behind which all changes can be read

    if (has_columns) {
        const float4 changes = change[lane];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float k = key[r * WARPS + warp];
            state[(r * WARPS + warp) * QUADS] = float4{
                fmaf(decay, held[r].x, k * changes.x), fmaf(decay, held[r].y, k * changes.y),
                fmaf(decay, held[r].z, k * changes.z), fmaf(decay, held[r].w, k * changes.w)};
        }
    }
    if (thread < VALUE_DIM) {
        const float normed = result / sqrtf(squares[0] / VALUE_DIM + heads.eps);
        const float gate = load_activation(gates + at * VALUE_DIM + thread);
        out[at * VALUE_DIM + thread] =
            to_activation(load_activation(weight + thread) * normed * gate * sigmoid(gate));
    }
}

// Every function that Python calls, once: result, name (without the prefix `optkit_`) and parameters.
//
// Included with the macros FUNCTION and KERNEL defined, as often as needed. dispatch.h declares the functions, so a
// definition with other types does not compile. program.cpp makes the table of kernels for programs, with a caller for
// each kernel made from the parameter types. native.py reads this file for ctypes prototypes, program.py for the order
// and the dtypes of arguments in programs. The library exports the text of its entries (optkit_signature), and native.py
// refuses a library with other entries.
//
// A KERNEL can be a call of a program; its last parameter, `int threads`, is not listed. Rules for programs:
//   - `const float* x` with a parameter `x_stride` or `x_token` may have any distance between rows; without a stride rows
//     are dense. `void*` is a KV pool, float32 or int8. `uint8_t*` is also a packed weight. A pointer may be null.
//   - the result is void, or int: 0, and 1 for an index out of range.
FUNCTION(int, isa, void)
FUNCTION(const char*, isa_name, int number)
FUNCTION(int, isa_measured, int number)
FUNCTION(int, set_isa, int wanted)
FUNCTION(int64_t, w8_bytes, int64_t n, int64_t k, int64_t groups)
FUNCTION(void, pack_w8, const int8_t* weight, uint8_t* blob, int64_t n, int64_t k, int64_t groups, int threads)
FUNCTION(int64_t, w4_bytes, int64_t n, int64_t k, int64_t groups, int half, int levels)
FUNCTION(void, pack_w4, const uint8_t* codes, const void* scale, const void* low, uint8_t* blob, int64_t n, int64_t k,
         int64_t groups, int half, int levels, int threads)
FUNCTION(void, sample, const void* rows, int64_t count, int64_t width, int64_t* tokens, int threads)
FUNCTION(void, likeliest, const float* logits, const int64_t* rows, int64_t count, int64_t width, int64_t most,
         int64_t* tokens, int threads)
FUNCTION(int64_t, run_program, const void* calls, int64_t count, const void* arguments, const int64_t* sizes,
         const int64_t* inputs, const int64_t* arenas, void* block_memory, int64_t block_tokens, int64_t token_bytes,
         int threads)
FUNCTION(int64_t, run_program_recorded, const void* calls, int64_t count, const void* arguments, const int64_t* sizes,
         const int64_t* inputs, const int64_t* arenas, void* block_memory, int64_t block_tokens, int64_t token_bytes,
         int threads, void* records, int64_t capacity, int64_t* used, int64_t first_op)
FUNCTION(int64_t, decode_steps, const void* calls, int64_t count, const void* arguments, const int64_t* sizes,
         const int64_t* inputs, const int64_t* arenas, void* block_memory, int64_t block_tokens, int64_t token_bytes,
         int threads, const void* decode)
FUNCTION(int64_t, ticks, void)
FUNCTION(void, sparse_tiles, int64_t* counts)
FUNCTION(int64_t, region_bytes, int64_t ranks)
FUNCTION(int64_t, join, uint8_t* region, int rank, int size, int64_t spin, int64_t timeout)
FUNCTION(void, leave, int64_t communicator)
FUNCTION(int, has_failed, int64_t communicator)
FUNCTION(void, fail, int64_t communicator)
FUNCTION(int64_t, w8_pieces_bytes, int64_t n, int64_t k)
FUNCTION(void, pack_w8_pieces, const int8_t* weight, uint8_t* blob, int64_t n, int64_t k, int threads)

KERNEL(int, gather_rows, const float* table, const int64_t* index, float* out, int64_t rows, int64_t count,
       int64_t width)
KERNEL(int, gather_w8_rows, const uint8_t* weight, const uint8_t* weight_scale, const int64_t* index, float* out,
       int64_t rows, int64_t count, int64_t width, int64_t groups, int half)
KERNEL(void, rms_norm, const float* x, const float* residual, const float* weight, float* out, float* total,
       int64_t rows, int64_t width, int64_t x_stride, int64_t residual_stride, int64_t parts, float eps, float offset,
       uint8_t* q, float* scale, int64_t group)
KERNEL(void, layer_norm, const float* x, const float* weight, const float* bias, float* out, int64_t rows,
       int64_t width, int64_t x_stride, int64_t parts, float eps, uint8_t* q, float* scale, int64_t group)
KERNEL(void, gated, const float* gate, const float* up, float* out, int64_t rows, int64_t width, int64_t gate_stride,
       int64_t up_stride, int activation, uint8_t* q, float* scale, int64_t group)
KERNEL(void, rope, const float* x, const float* cos, const float* sin, float* out, int64_t rows, int64_t heads,
       int64_t dim, int64_t x_token, int64_t x_head, int64_t cos_stride, int64_t sin_stride)
KERNEL(void, rope_table, const int64_t* positions, const float* inv_freq, float* cos, float* sin, int64_t rows,
       int64_t half, float scale)
KERNEL(void, add, const float* a, const float* b, float* out, int64_t rows, int64_t width, int64_t a_stride,
       int64_t b_stride)
KERNEL(void, multiply, const float* a, const float* b, float* out, int64_t rows, int64_t width, int64_t a_stride,
       int64_t b_stride)
KERNEL(void, softplus, const float* x, const float* bias, float* out, int64_t rows, int64_t width, int64_t x_stride)
KERNEL(void, quantize_per_token, const float* x, int64_t x_stride, uint8_t* q, float* scale, int64_t rows,
       int64_t columns, int64_t group)
KERNEL(void, linear_w8a8, const uint8_t* q, int64_t q_stride, const float* scale, const uint8_t* weight,
       const uint8_t* weight_scale, const float* bias, float* out, int64_t rows, int64_t n, int64_t k, int64_t groups,
       int half)
KERNEL(void, linear_w4a8, const uint8_t* q, int64_t q_stride, const float* scale, const uint8_t* weight,
       const float* bias, float* out, int64_t rows, int64_t n, int64_t k, int64_t groups, int64_t scale_groups,
       int half, int levels)
KERNEL(void, linear_w8a16, const float* x, int64_t x_stride, const int32_t* order, const uint8_t* weight,
       const uint8_t* weight_scale, const float* bias, float* out, int64_t rows, int64_t n, int64_t k, int64_t groups,
       int half, int bf16)
KERNEL(void, gated_mlp_w8a16, const float* x, int64_t x_stride, const uint8_t* gate_up, const uint8_t* gate_up_scale,
       const float* gate_up_bias, int64_t gate_up_groups, int gate_up_half, const uint8_t* down, const uint8_t* down_scale,
       const float* down_bias, int64_t down_groups, int down_half, float* out, int64_t rows, int64_t n, int64_t width,
       int64_t k, int activation)
KERNEL(void, linear_w4a16, const float* x, int64_t x_stride, const int32_t* order, const uint8_t* weight,
       const float* bias, float* out, int64_t rows, int64_t n, int64_t k, int64_t groups, int half, int levels)
KERNEL(int, expert_w8a8, const uint8_t* q, int64_t q_stride, const float* scale, const uint8_t* weight,
       const uint8_t* weight_scale, const float* bias, const int64_t* experts, float* out, int64_t tokens, int64_t each,
       int64_t rows_each, int64_t num_experts, int64_t n, int64_t k, int64_t groups, int half)
KERNEL(int, expert_w4a8, const uint8_t* q, int64_t q_stride, const float* scale, const uint8_t* weight,
       const float* bias, const int64_t* experts, float* out, int64_t tokens, int64_t each, int64_t rows_each,
       int64_t num_experts, int64_t n, int64_t k, int64_t groups, int64_t scale_groups, int half, int levels)
KERNEL(int, expert_w8a16, const float* x, int64_t x_stride, const uint8_t* weight, const uint8_t* weight_scale,
       const float* bias, const int64_t* experts, float* out, int64_t tokens, int64_t each, int64_t rows_each,
       int64_t num_experts, int64_t n, int64_t k, int64_t groups, int half)
KERNEL(int, expert_w4a16, const float* x, int64_t x_stride, const uint8_t* weight, const float* bias,
       const int64_t* experts, float* out, int64_t tokens, int64_t each, int64_t rows_each, int64_t num_experts,
       int64_t n, int64_t k, int64_t groups, int half, int levels)
KERNEL(void, weighted_sum, const float* x, const float* weights, float* out, int64_t rows, int64_t each, int64_t width)
KERNEL(void, short_conv, const float* x, int64_t x_stride, const float* weight, const float* bias, float* pool,
       const int32_t* query_start, const int32_t* seq_lens, const int32_t* state_slots, float* out, int64_t sequences,
       int64_t channels, int64_t taps, int silu)
KERNEL(void, gated_delta_rule, const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v,
       int64_t v_stride, const float* g, int64_t g_stride, const float* beta, int64_t beta_stride, float* pool,
       const int32_t* query_start, const int32_t* seq_lens, const int32_t* state_slots, float* out, int64_t sequences,
       int64_t heads, int64_t key_heads, int64_t dim, int64_t width, float scale, int normalize, int by_channel)
KERNEL(void, ssd_scan, const float* x, int64_t x_stride, const float* dt, int64_t dt_stride, const float* a,
       const float* b, int64_t b_stride, const float* c, int64_t c_stride, const float* d, float* pool,
       const int32_t* query_start, const int32_t* seq_lens, const int32_t* state_slots, float* out, int64_t sequences,
       int64_t heads, int64_t key_heads, int64_t dim, int64_t width)
KERNEL(void, selective_scan, const float* x, int64_t x_stride, const float* dt, int64_t dt_stride, const float* a,
       const float* b, int64_t b_stride, const float* c, int64_t c_stride, const float* d, float* pool,
       const int32_t* query_start, const int32_t* seq_lens, const int32_t* state_slots, float* out, int64_t sequences,
       int64_t channels, int64_t states)
KERNEL(void, head_linear, const float* x, int64_t x_token, const float* weight, float* out, int64_t tokens,
       int64_t heads, int64_t k, int64_t n)
KERNEL(void, absmax_per_token, const float* x, int64_t x_stride, float* most, int64_t rows, int64_t columns)
KERNEL(void, quantize_by, const float* x, int64_t x_stride, const float* most, uint8_t* q, float* scale, int64_t rows,
       int64_t columns)
KERNEL(void, int8_sums, const uint8_t* q, int64_t q_stride, const uint8_t* weight, int32_t* out, int64_t rows, int64_t n,
       int64_t k)
KERNEL(void, dequantize_sums, const int32_t* sums, const float* scale, const float* weight_scale, const float* bias,
       float* out, int64_t rows, int64_t n)
KERNEL(int, all_reduce, int64_t communicator, const float* x, float* out, int64_t rows, int64_t width, int max)
KERNEL(int, all_reduce_int, int64_t communicator, const int32_t* x, int32_t* out, int64_t rows, int64_t width, int max)
KERNEL(int, all_gather, int64_t communicator, const float* x, int64_t x_stride, const int64_t* sizes, float* out,
       int64_t rows, int64_t width)
KERNEL(int, all_gather_codes, int64_t communicator, const uint8_t* x, int64_t x_stride, const int64_t* sizes,
       uint8_t* out, int64_t rows, int64_t width)
KERNEL(int, all_gather_quantized, int64_t communicator, const uint8_t* q, int64_t q_stride, const float* scale,
       const int64_t* sizes, const int64_t* groups, uint8_t* q_out, float* scale_out, int64_t rows, int64_t width,
       int64_t all_groups)
KERNEL(void, attention, const float* q, const float* k, const float* v, void* k_cache, void* v_cache,
       const float* sinks, const float* slopes, float* out, const int64_t* slot_mapping, const int32_t* query_start,
       const int32_t* seq_lens, const int32_t* block_tables, int64_t tokens, int64_t sequences, int64_t table_width,
       int64_t block_size, int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head, int64_t v_token,
       int64_t v_head, int heads, int kv_heads, int dim, int v_dim, int64_t window, int64_t chunk, float scale,
       float softcap, float sparse_cover, int64_t sparse_from, int int8_cache, const int64_t* positions)

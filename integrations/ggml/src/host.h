/**
 * The functions of the ggml that runs this backend. They are looked up when it is loaded and not
 * linked: hosts give ggml's libraries different names, and one that lacks a function is refused
 * with a sentence rather than by the loader.
 */
#pragma once

#include <ggml-backend-impl.h>
#include <ggml.h>

#include <string>

/** The same as in ggml-impl.h, whose other contents need more of ggml's sources. */
extern "C" void ggml_log_internal(enum ggml_log_level level, const char* format, ...);

namespace pariskv::ggml {

#define PARISKV_GGML_FUNCTIONS(F)      \
  F(ggml_version)                      \
  F(ggml_log_internal)                 \
  F(ggml_init)                         \
  F(ggml_free)                         \
  F(ggml_reset)                        \
  F(ggml_new_graph_custom)             \
  F(ggml_graph_add_node)               \
  F(ggml_graph_clear)                  \
  F(ggml_graph_overhead_custom)        \
  F(ggml_graph_n_nodes)                \
  F(ggml_graph_node)                   \
  F(ggml_fp32_to_fp16_row)             \
  F(ggml_op_name)                      \
  F(ggml_row_size)                     \
  F(ggml_backend_cpu_buffer_type)      \
  F(ggml_backend_buft_is_host)         \
  F(ggml_backend_dev_by_type)          \
  F(ggml_backend_dev_init)             \
  F(ggml_backend_dev_backend_reg)      \
  F(ggml_backend_dev_supports_op)      \
  F(ggml_backend_reg_get_proc_address) \
  F(ggml_backend_graph_compute)        \
  F(ggml_backend_free)

struct Host {
#define PARISKV_GGML_POINTER(name) decltype(&::name) name = nullptr;
  PARISKV_GGML_FUNCTIONS(PARISKV_GGML_POINTER)
#undef PARISKV_GGML_POINTER
};

/** What `load_host` found. */
const Host& host();

/**
 * Looks the functions up and the version.
 * @return empty, or why this host cannot be served
 */
std::string load_host();

/** A line in the host's log, which it may show or not. */
void say(ggml_log_level level, const std::string& text);

}  // namespace pariskv::ggml

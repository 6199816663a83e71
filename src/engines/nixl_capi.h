/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NIXL's C interface, libnixl_capi.so, in our own words: what this library
 * calls of it, as functions of one table. NIXL ships no header for C that a
 * program could build against, no version in the soname and no version call,
 * so a library is taken when it has every name of this list.
 *
 * Handles are pointers to C++ objects of the library; only the library makes
 * and frees them. Every call returns an enum nixl_status.
 */
#ifndef KVTI_NIXL_CAPI_H
#define KVTI_NIXL_CAPI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * What a status is worth is told in nixl_xfer.c. NIXL has more codes of its
 * own; what this interface does not name comes as NIXL_BACKEND.
 */
enum nixl_status {
    NIXL_OK = 0,
    NIXL_IN_PROG = 1,
    NIXL_INVALID_PARAM = -1,
    NIXL_BACKEND = -2, /* also: the peer is disconnected */
    NIXL_INVALID_STATE = -3,
    NIXL_EXCEPTION = -4,
    NIXL_NO_TELEMETRY = -5,
    NIXL_NOT_FOUND = -6
};

/* The same numbers as enum kvt_kind for the two that kvt has. */
enum nixl_mem { NIXL_MEM_DRAM = 0, NIXL_MEM_VRAM = 1 };

enum nixl_op { NIXL_READ = 0, NIXL_WRITE = 1 };

enum nixl_sync { NIXL_SYNC_NONE = 0, NIXL_SYNC_STRICT = 1, NIXL_SYNC_RW = 2 };

/* How an agent is made. The library's struct has no size field: `spare` is
 * zeroed room for what a newer one may read after the fields we know. */
struct nixl_agent_config {
    bool enable_prog_thread;
    bool enable_listen_thread;
    int listen_port;
    int thread_sync; /* enum nixl_sync */
    unsigned int num_workers;
    uint64_t pthr_delay_us; /* how long the progress thread sleeps */
    uint64_t lthr_delay_us;
    bool capture_telemetry;
    unsigned char spare[127];
};

struct nixl_agent;
struct nixl_params;
struct nixl_backend;
struct nixl_opt_args;
struct nixl_reg_dlist;
struct nixl_xfer_dlist;
struct nixl_xfer_req;
struct nixl_notif_map;
struct nixl_string_list;

/*
 * Every function that we call.
 *   X(name, arguments)
 */
#define KVTI_NIXL_FUNCTIONS(X)                                                 \
    X(create_configured_agent,                                                 \
      (const char *name, const struct nixl_agent_config *config,               \
       struct nixl_agent **ret))                                               \
    X(destroy_agent, (struct nixl_agent * agent))                              \
    X(get_available_plugins,                                                   \
      (struct nixl_agent * agent, struct nixl_string_list * *ret))             \
    X(string_list_size, (struct nixl_string_list * list, size_t * ret))        \
    X(string_list_get,                                                         \
      (struct nixl_string_list * list, size_t index, const char **ret))        \
    X(destroy_string_list, (struct nixl_string_list * list))                   \
    X(create_params, (struct nixl_params * *ret))                              \
    X(params_add,                                                              \
      (struct nixl_params * params, const char *key, const char *value))       \
    X(destroy_params, (struct nixl_params * params))                           \
    X(create_backend, (struct nixl_agent * agent, const char *plugin,          \
                       struct nixl_params *params, struct nixl_backend **ret)) \
    X(destroy_backend, (struct nixl_backend * backend))                        \
    X(create_opt_args, (struct nixl_opt_args * *ret))                          \
    X(destroy_opt_args, (struct nixl_opt_args * args))                         \
    X(opt_args_set_skip_desc_merge, (struct nixl_opt_args * args, bool skip))  \
    X(create_reg_dlist, (int mem, struct nixl_reg_dlist **ret))                \
    X(destroy_reg_dlist, (struct nixl_reg_dlist * list))                       \
    X(reg_dlist_add_desc,                                                      \
      (struct nixl_reg_dlist * list, uintptr_t addr, size_t length,            \
       uint64_t device, const void *metadata, size_t metadata_length))         \
    X(register_mem, (struct nixl_agent * agent, struct nixl_reg_dlist * list,  \
                     struct nixl_opt_args * args))                             \
    X(deregister_mem,                                                          \
      (struct nixl_agent * agent, struct nixl_reg_dlist * list,                \
       struct nixl_opt_args * args))                                           \
    X(get_local_md,                                                            \
      (struct nixl_agent * agent, void **ret_data, size_t *ret_length))        \
    X(load_remote_md, (struct nixl_agent * agent, const void *data,            \
                       size_t length, char **ret_name))                        \
    X(invalidate_remote_md, (struct nixl_agent * agent, const char *name))     \
    X(create_xfer_dlist, (int mem, struct nixl_xfer_dlist **ret))              \
    X(destroy_xfer_dlist, (struct nixl_xfer_dlist * list))                     \
    X(xfer_dlist_add_desc, (struct nixl_xfer_dlist * list, uintptr_t addr,     \
                            size_t length, uint64_t device))                   \
    X(create_xfer_req,                                                         \
      (struct nixl_agent * agent, int op, struct nixl_xfer_dlist *local,       \
       struct nixl_xfer_dlist *remote, const char *name,                       \
       struct nixl_xfer_req **ret, struct nixl_opt_args *args))                \
    X(post_xfer_req, (struct nixl_agent * agent, struct nixl_xfer_req * req,   \
                      struct nixl_opt_args * args))                            \
    X(get_xfer_status,                                                         \
      (struct nixl_agent * agent, struct nixl_xfer_req * req))                 \
    X(release_xfer_req,                                                        \
      (struct nixl_agent * agent, struct nixl_xfer_req * req))                 \
    X(destroy_xfer_req, (struct nixl_xfer_req * req))                          \
    X(gen_notif,                                                               \
      (struct nixl_agent * agent, const char *name, const void *data,          \
       size_t length, struct nixl_opt_args *args))                             \
    X(create_notif_map, (struct nixl_notif_map * *ret))                        \
    X(destroy_notif_map, (struct nixl_notif_map * map))                        \
    X(get_notifs, (struct nixl_agent * agent, struct nixl_notif_map * map,     \
                   struct nixl_opt_args * args))                               \
    X(notif_map_size, (struct nixl_notif_map * map, size_t * ret))             \
    X(notif_map_get_agent_at,                                                  \
      (struct nixl_notif_map * map, size_t index, const char **ret_name))      \
    X(notif_map_get_notifs_size,                                               \
      (struct nixl_notif_map * map, const char *name, size_t *ret))            \
    X(notif_map_get_notif,                                                     \
      (struct nixl_notif_map * map, const char *name, size_t index,            \
       const void **ret_data, size_t *ret_length))                             \
    X(notif_map_clear, (struct nixl_notif_map * map))

/* Arguments cannot stand in parentheses of their own. */
/* NOLINTBEGIN(bugprone-macro-parentheses) */
struct nixl_api {
    bool (*is_stub)(void);
#define KVTI_NIXL_FIELD(name, arguments) int(*name) arguments;
    KVTI_NIXL_FUNCTIONS(KVTI_NIXL_FIELD)
#undef KVTI_NIXL_FIELD
};
/* NOLINTEND(bugprone-macro-parentheses) */

#endif /* KVTI_NIXL_CAPI_H */
